"""Whether somebody waits for what is being made: work for the stock gives way to all other, until then."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Haste:
    def __init__(self, *, background: bool) -> None:
        self.background = background
        self._told: list[Callable[[], None]] = []

    def hurry(self) -> None:
        """Now somebody waits."""
        if self.background:
            self.background = False
            for tell in list(self._told):
                tell()

    @contextmanager
    def telling(self, tell: Callable[[], None]) -> Iterator[None]:
        """Have it told of hurry, for as long as the context lasts; also if there was one already."""
        if not self.background:
            tell()
        self._told.append(tell)
        try:
            yield
        finally:
            self._told.remove(tell)

"""Priority of a build: background work (refills) yields to other work until a request waits for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Urgency:
    """Whether a build runs in the background. It can leave the background, and never goes back."""

    def __init__(self, *, background: bool) -> None:
        self.background = background
        self._listeners: list[Callable[[], None]] = []

    def escalate(self) -> None:
        """A request waits for this build now: leave the background, and call the listeners."""
        if self.background:
            self.background = False
            for listener in list(self._listeners):
                listener()

    @contextmanager
    def notify(self, listener: Callable[[], None]) -> Iterator[None]:
        """Call ``listener`` on escalation while the context lasts; at once if that has happened already."""
        if not self.background:
            listener()
        self._listeners.append(listener)
        try:
            yield
        finally:
            self._listeners.remove(listener)

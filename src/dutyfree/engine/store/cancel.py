"""How threads that fetch and unpack are told that nobody waits for them any more."""

from __future__ import annotations

import threading


class Stopped(Exception):  # noqa: N818 (the caller asked for it)
    """The caller no longer wants it."""


class Halt:
    """An event that also sets those made from it."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self._inner: list[Halt] = []

    def inner(self) -> Halt:
        """One that can be set without setting this one."""
        made = Halt()
        self._inner.append(made)
        if self._event.is_set():
            made.set()
        return made

    def set(self) -> None:
        self._event.set()
        for inner in self._inner:
            inner.set()

    def is_set(self) -> bool:
        return self._event.is_set()

    def check(self) -> None:
        """Raises Stopped once it is set."""
        if self._event.is_set():
            raise Stopped

    def wait(self, seconds: float) -> None:
        """Wait so long. Raises Stopped as soon as it is set."""
        if self._event.wait(seconds):
            raise Stopped

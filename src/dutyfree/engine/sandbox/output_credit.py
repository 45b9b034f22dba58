"""Output that is streamed without anybody asking for it: how fast, so that printing costs the owner little.

A process prints within its credit, which is given back a while after it was used: to one at most a MiB each
20 ms, and to all together at most ``RATE``, however many sandboxes there are. Who prints little has credit
left meanwhile, and is not held up by those who print without end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

PACE = 0.02
"""Seconds until credit is given back, at the least."""

RATE = float(128 << 20)
"""Bytes a second of all processes of an owner: a sixth of a processor's time."""


class Share:
    """Of time, taken by one after the other."""

    def __init__(self) -> None:
        self._taken = 0.0

    def wait(self, size: int, now: float) -> float:
        """Seconds until so many bytes more are within the rate."""
        begin = max(self._taken, now)
        self._taken = begin + size / RATE
        return begin - now


_everybodys = Share()


class Debt:
    """What one process has printed, and shall be allowed to print again."""

    def __init__(self, give: Callable[[int], None], share: Share = _everybodys) -> None:
        self._give = give
        self._share = share
        self._owed = 0
        self._loop = asyncio.get_running_loop()

    def add(self, size: int) -> None:
        if not self._owed:
            self._loop.call_later(PACE, self._settle)
        self._owed += size

    def _settle(self) -> None:
        size = self._owed
        self._loop.call_later(self._share.wait(size, self._loop.time()), self._pay, size)

    def _pay(self, size: int) -> None:
        self._owed -= size
        self._give(size)
        if self._owed:
            self._loop.call_later(PACE, self._settle)

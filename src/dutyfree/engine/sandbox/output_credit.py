"""Limit how fast processes print, so that reading their output costs the owner little.

A process may print as much as it has credit. It gets used credit back a while later: one process at most a
MiB per 20 ms, and all processes together at most ``RATE``. A process that prints little always has credit
left, so processes that print without end do not slow it down.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

PACE = 0.02
"""Seconds until used credit is given back, at least."""

RATE = float(128 << 20)
"""Bytes per second for all processes of an owner. Reading them takes about a sixth of a CPU."""


class OutputRate:
    """A rate limit that several processes share."""

    def __init__(self, rate: float = RATE) -> None:
        self._rate = rate
        self._taken = 0.0

    def wait(self, size: int, now: float) -> float:
        """Take ``size`` bytes; the seconds until they are within the rate."""
        begin = max(self._taken, now)
        self._taken = begin + size / self._rate
        return begin - now


_owner_rate = OutputRate()


class OutputCredit:
    """The credit that one process has used, and gets back in time."""

    def __init__(self, give: Callable[[int], None], rate: OutputRate = _owner_rate) -> None:
        self._give = give
        self._rate = rate
        self._used = 0
        self._loop = asyncio.get_running_loop()

    def use(self, size: int) -> None:
        if not self._used:
            self._loop.call_later(PACE, self._schedule)
        self._used += size

    def _schedule(self) -> None:
        size = self._used
        self._loop.call_later(self._rate.wait(size, self._loop.time()), self._give_back, size)

    def _give_back(self, size: int) -> None:
        self._used -= size
        self._give(size)
        if self._used:
            self._loop.call_later(PACE, self._schedule)

"""Overload: refuse new actions while the machine cannot keep up, so that those that were begun end in time.

What counts is the time that an action takes beyond its own work: until it is dispatched, spawned, collected
and returned. Long commands do not add to it; a queue does. If even the fastest action of a short while was
late, there is a standing queue (the idea of CoDel), and new actions are refused until it is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from dutyfree.contract import Observation
from dutyfree.contract.errors import Overloaded

TARGET = 0.1
"""Seconds beyond its own work that the fastest action of a window may take."""
WINDOW = 0.5
"""Seconds in which the fastest action is looked for."""
LEAST = 8
"""Actions in a window that are needed to judge it."""
TICK = 0.05
"""Seconds between two measurements of the event loop's own delay."""

NEVER = frozenset(("release", "keep_alive", "process_kill", "process_signal", "forget", "sandboxes"))
"""Calls that are never refused: they end something, or keep it."""


class OverloadDetector:
    """Decides by windows. It has no clock: callers say what time it is."""

    def __init__(self, target: float = TARGET, window: float = WINDOW) -> None:
        self._target = target
        self._window = window
        self._end = 0.0
        self._fastest = float("inf")
        self._count = 0
        self.overloaded = False

    def note(self, delay: float, now: float) -> None:
        """An action took ``delay`` seconds beyond its own work."""
        self._advance(now)
        self._count += 1
        if delay < self._fastest:
            self._fastest = delay

    def refuses(self, now: float) -> bool:
        """Whether new actions are refused."""
        self._advance(now)
        return self.overloaded

    def _advance(self, now: float) -> None:
        if now < self._end:
            return
        self.overloaded = self._count >= LEAST and self._fastest > self._target
        self._end = now + self._window
        self._fastest = float("inf")
        self._count = 0


class Overload:
    """The detector of one server, with its clock."""

    def __init__(self) -> None:
        self._detector = OverloadDetector()
        self.refused = 0
        """Calls that were refused since the start."""

    def refuses(self, call: str) -> bool:
        """Whether the call must wait; counts it then."""
        refused = self._detector.refuses(asyncio.get_running_loop().time()) and call not in NEVER
        self.refused += refused
        return refused

    def check(self, call: str) -> None:
        """Raises Overloaded if the call must wait."""
        if self.refuses(call):
            raise self.error()

    @staticmethod
    def error() -> Overloaded:
        """What a caller that must wait is told."""
        return Overloaded(
            "the machine has more actions to run than it can: they wait too long",
            remedy="try again later, with fewer actions at once; or run fewer sandboxes on this machine",
            retry_after=1.0,
        )

    def note(self, seen: Observation) -> None:
        """Look at what an action cost beyond its own work."""
        delay = sum([span.seconds for span in seen.spans if span.name != "run"])
        self._detector.note(delay, asyncio.get_running_loop().time())

    @contextlib.asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """Also look at how late the event loop itself is."""
        ticking = asyncio.create_task(self._tick())
        try:
            yield
        finally:
            ticking.cancel()

    async def _tick(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + TICK
            await asyncio.sleep(TICK)
            now = loop.time()
            self._detector.note(max(0.0, now - due), now)

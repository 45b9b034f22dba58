"""The refills in progress: a few at once. A late one does not block the others."""

from __future__ import annotations

import heapq

from dutyfree.engine.pool.scheduler.values import Policy

LATE_FACTOR = 10.0
"""A refill is late after this many times its estimate, but not before ``Policy.late`` seconds."""


class Refills:
    """Job numbers of the refills. Up to ``Policy.starting`` late ones do not count against ``refilling``."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._on_time: set[int] = set()
        self._late: set[int] = set()
        self._ends: list[tuple[float, int]] = []

    @property
    def has_room(self) -> bool:
        return len(self._on_time) < self._policy.refilling

    @property
    def next_time(self) -> float | None:
        """When the next refill becomes late."""
        return self._ends[0][0] if self._ends else None

    def begin(self, job: int, seconds: float, now: float) -> None:
        self._on_time.add(job)
        heapq.heappush(self._ends, (now + max(self._policy.late, LATE_FACTOR * seconds), job))

    def end(self, job: int) -> None:
        self._on_time.discard(job)
        self._late.discard(job)

    def expire(self, now: float) -> None:
        while self._ends and self._ends[0][0] <= now:
            _, job = heapq.heappop(self._ends)
            if job in self._on_time and len(self._late) < self._policy.starting:
                self._on_time.discard(job)
                self._late.add(job)

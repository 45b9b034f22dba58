"""Refills under way: few at once, and none that takes far longer than thought keeps others from theirs."""

from __future__ import annotations

import heapq

from dutyfree.engine.pool.scheduler.values import Policy

LATE = 10.0
"""A refill is late after so many times what it was thought to take, and after ``Policy.late`` at least."""


class Refills:
    """By the numbers of their jobs. Of late ones there may be as many beside as of those for requests."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._timely: set[int] = set()
        self._late: set[int] = set()
        self._ends: list[tuple[float, int]] = []

    @property
    def has_room(self) -> bool:
        return len(self._timely) < self._policy.refilling

    @property
    def next_time(self) -> float | None:
        """When one is late."""
        return self._ends[0][0] if self._ends else None

    def begin(self, job: int, seconds: float, now: float) -> None:
        self._timely.add(job)
        heapq.heappush(self._ends, (now + max(self._policy.late, LATE * seconds), job))

    def end(self, job: int) -> None:
        self._timely.discard(job)
        self._late.discard(job)

    def expire(self, now: float) -> None:
        while self._ends and self._ends[0][0] <= now:
            _, job = heapq.heappop(self._ends)
            if job in self._timely and len(self._late) < self._policy.starting:
                self._timely.discard(job)
                self._late.add(job)

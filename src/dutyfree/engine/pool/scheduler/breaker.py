"""Backoff and circuit breaker of one prefix, and so of all recipes that begin with it."""

from __future__ import annotations

from zlib import crc32

from dutyfree.engine.pool.scheduler.values import JobFailure, Policy


class Breaker:
    """Counts the failures in a row of one stage.

    After each failure, refills wait: twice as long each time, with jitter. After ``policy.tolerated``
    failures of the stage itself, the breaker is *open*: it refuses requests that need the stage. When the
    wait is over it is *half open*: one attempt may pass, and its result closes or opens the breaker.
    """

    __slots__ = ("_policy", "failures", "last", "probing", "retry_at")

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.failures = 0
        self.retry_at = 0.0
        self.probing = False
        self.last = JobFailure("")

    def record(self, key: str, failure: JobFailure, now: float) -> None:
        self.failures += 1
        self.probing = False
        self.last = failure
        # A hash instead of a generator, so that the jitter does not depend on failures of other stages.
        jitter = crc32(f"{self._policy.seed} {key} {self.failures}".encode()) / 2**32
        delay = min(self._policy.longest_backoff, self._policy.backoff * 2.0 ** min(self.failures - 1, 60))
        self.retry_at = now + delay * (0.5 + jitter / 2)

    @property
    def exhausted(self) -> bool:
        """Whether it failed ``policy.tolerated`` times in a row, for any reason."""
        return self.failures >= self._policy.tolerated

    @property
    def tripped(self) -> bool:
        """Whether it did so because of the stage itself."""
        return self.last.depth is not None and self.exhausted

    def refuses(self, now: float) -> bool:
        """Whether a request must not attempt the stage now."""
        return self.tripped and (self.probing or now < self.retry_at)

    def delays(self, now: float) -> bool:
        """Whether a refill must not attempt the stage now."""
        return self.probing or now < self.retry_at

"""Backoff and circuit breaker of one stage of one recipe (and so of all recipes that share the prefix)."""

from __future__ import annotations

from zlib import crc32

from dutyfree.engine.pool.scheduler.values import JobFailure, Policy


class Breaker:
    """Counts failures in a row.

    After each, refills wait (twice as long each time, with jitter). After ``policy.tolerated`` failures of
    the stage itself it is *open*: requests that need the stage are refused at once. When the wait is over
    it is *half open*: one try may pass, and its outcome closes or opens it again.
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
        # A hash, not a generator: the jitter of one stage does not depend on the failures of others.
        jitter = crc32(f"{self._policy.seed} {key} {self.failures}".encode()) / 2**32
        delay = min(self._policy.longest_backoff, self._policy.backoff * 2.0 ** min(self.failures - 1, 60))
        self.retry_at = now + delay * (0.5 + jitter / 2)

    @property
    def exhausted(self) -> bool:
        """It failed as often in a row as is borne, for whatever reason."""
        return self.failures >= self._policy.tolerated

    @property
    def tripped(self) -> bool:
        return self.last.depth is not None and self.exhausted

    def refuses(self, now: float) -> bool:
        """Whether a request must not try."""
        return self.tripped and (self.probing or now < self.retry_at)

    def delays(self, now: float) -> bool:
        """Whether a refill must not try."""
        return self.probing or now < self.retry_at

"""What one tenant may hold open at once, apart from sandboxes: channels, calls, and bytes in memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from dutyfree.contract.errors import Exhausted
from dutyfree.server.bodies import ByteBudget, default_budget


class QuotaLimits(msgspec.Struct, frozen=True):
    """For each tenant."""

    channels: int = 256
    calls: int = 16384
    """Calls that run or wait, on all its channels and over HTTP."""


class Quotas:
    """Counts what each tenant holds."""

    def __init__(self, limits: QuotaLimits | None = None, held: ByteBudget | None = None) -> None:
        self.limits = limits or QuotaLimits()
        self.bytes = held or default_budget()
        """Bodies and large arguments, and answers that are large or wait until the client reads."""
        self.calls: Counter[str] = Counter()
        self._channels: Counter[str] = Counter()

    @contextmanager
    def channel(self, tenant: str) -> Iterator[None]:
        """Raises Exhausted."""
        if self._channels[tenant] >= self.limits.channels:
            raise Exhausted(
                f"{tenant} has {self.limits.channels} channels already",
                remedy="use one channel for many calls, and close those that you do not use",
                numbers={"channels": self._channels[tenant], "retry_after": 5.0},
            )
        self._channels[tenant] += 1
        try:
            yield
        finally:
            self._channels[tenant] -= 1

    @contextmanager
    def call(self, tenant: str) -> Iterator[None]:
        """Count a call that has no other counter. Raises Exhausted."""
        self.calls[tenant] += 1
        try:
            self.check_call(tenant)
            yield
        finally:
            self.calls[tenant] -= 1

    def has_room(self, tenant: str) -> bool:
        """Whether the tenant may have one more call."""
        return self.calls[tenant] < self.limits.calls

    def check_call(self, tenant: str) -> None:
        """Raises Exhausted if the tenant has too many calls, this one included."""
        if self.calls[tenant] > self.limits.calls:
            raise Exhausted(
                f"{tenant} has {self.limits.calls} calls already",
                remedy="wait for some of them",
                numbers={"calls": self.calls[tenant], "retry_after": 1.0},
            )

"""What is under way: requests that were accepted, sandboxes in the making, leases."""

from __future__ import annotations

from math import exp, log

from dutyfree.contract.served import ServedKind
from dutyfree.engine.pool.scheduler.stock import Instance, Prefix
from dutyfree.engine.pool.scheduler.values import LeaseRequest


class Claim:
    """A request on its candidate: the sandboxes that are ready for it, and the jobs that make the others."""

    __slots__ = (
        "admitted",
        "arrived",
        "attempts",
        "counted",
        "forkable",
        "forks",
        "jobs",
        "path",
        "ready",
        "request",
        "until",
    )

    def __init__(
        self, request: LeaseRequest, path: tuple[Prefix, ...], arrived: float, forkable: bool
    ) -> None:
        self.request = request
        self.path = path
        self.arrived = arrived
        self.admitted: float | None = None
        """When there was room for it, the first time."""
        self.forkable = forkable
        self.attempts = 0
        self.counted = False
        """As demand, and as the one that was hinted at."""
        self.ready: list[tuple[Instance, ServedKind, int]] = []
        self.jobs: dict[int, Job] = {}
        self.forks: list[Job] = []
        """Jobs that wait for a sibling to be copied from."""
        self.until: float | None = None
        """When its lease ends, once it is leased."""

    @property
    def missing(self) -> int:
        return self.request.count - len(self.ready) - len(self.jobs)


class Job:
    """One sandbox in the making, for a claim or (without one) for the stock."""

    __slots__ = (
        "background",
        "charge",
        "claim",
        "copied",
        "depth",
        "expected",
        "id",
        "kind",
        "on_layer",
        "origin",
        "path",
        "seconds",
        "start",
        "started",
    )

    def __init__(
        self, identity: int, path: tuple[Prefix, ...], start: int, kind: ServedKind, seconds: float
    ) -> None:
        self.id = identity
        self.path = path
        self.start = start
        self.depth = len(path) - 1
        self.kind: ServedKind = kind
        self.seconds = seconds
        self.claim: Claim | None = None
        self.origin: Instance | None = None
        self.copied: Instance | None = None
        self.charge = 0
        self.on_layer: Prefix | None = None
        self.expected = 0.0
        self.started = False
        self.background = False

    @property
    def top(self) -> Prefix:
        return self.path[-1]

    def spared(self, found: int | None, joined: bool, fetched: bool) -> tuple[ServedKind, int]:
        """How its sandbox was made after all, and from what depth on, by what its maker tells."""
        start = self.start if found is None else found
        if fetched and self.kind in ("promoted", "layer", "cold"):
            return "fetched", start
        if joined and self.kind in ("layer", "cold"):
            return "joined", start
        if self.kind == "cold" and start:
            return "layer", start
        return self.kind, start


class Returns:
    """How often sandboxes come back, lately."""

    def __init__(self, half_life: float) -> None:
        self._decay = log(2) / half_life
        self._weight = 0.0
        self._at = 0.0

    def add(self, count: int, now: float) -> None:
        self._weight = self._weight * exp(self._decay * (self._at - now)) + count
        self._at = now

    def seconds_for(self, count: int, now: float) -> float | None:
        """Until so many have come back; None if hardly any do."""
        rate = self._decay * self._weight * exp(self._decay * (self._at - now))
        return count / rate if rate > 1e-9 else None

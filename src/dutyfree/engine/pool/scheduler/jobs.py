"""Work in progress: requests that were accepted, and sandboxes that are being made."""

from __future__ import annotations

from math import exp, log

from dutyfree.contract.served import ServedKind
from dutyfree.engine.pool.scheduler.stock import Instance, Prefix
from dutyfree.engine.pool.scheduler.values import JobResult, LeaseRequest


class Claim:
    """An accepted request, until its lease ends: the sandboxes it has, and the jobs that make the others."""

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
        """When there was room for it the first time."""
        self.forkable = forkable
        self.attempts = 0
        self.counted = False
        """Whether it was counted as demand, and taken off the hints."""
        self.ready: list[tuple[Instance, ServedKind, int]] = []
        """Its sandboxes: how each was served, and from which depth on."""
        self.jobs: dict[int, Job] = {}
        self.forks: list[Job] = []
        """Jobs that wait until another member is ready to be copied."""
        self.until: float | None = None
        """When its lease ends, once it is leased."""

    @property
    def missing(self) -> int:
        return self.request.count - len(self.ready) - len(self.jobs)


class Job:
    """One sandbox that is being made, for a claim, or for the stock."""

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
        """The idle sandbox that it promotes."""
        self.copied: Instance | None = None
        """The sandbox that it copies."""
        self.charge = 0
        self.on_layer: Prefix | None = None
        self.expected = 0.0
        self.started = False
        self.background = False

    @property
    def top(self) -> Prefix:
        return self.path[-1]

    def outcome(self, result: JobResult) -> tuple[ServedKind, int]:
        """How its sandbox was served, and from which depth on, as the source reports it."""
        start = self.start if result.found is None else result.found
        if result.fetched and self.kind in ("promoted", "layer", "cold"):
            return "fetched", start
        if result.joined and self.kind in ("layer", "cold"):
            return "joined", start
        if self.kind == "cold" and start:
            return "layer", start
        return self.kind, start


class ReturnRate:
    """The recent rate at which sandboxes are returned."""

    def __init__(self, half_life: float) -> None:
        self._decay = log(2) / half_life
        self._weight = 0.0
        self._at = 0.0

    def add(self, count: int, now: float) -> None:
        self._weight = self._weight * exp(self._decay * (self._at - now)) + count
        self._at = now

    def seconds_for(self, count: int, now: float) -> float | None:
        """Seconds until ``count`` sandboxes are returned; None if the rate is about 0."""
        rate = self._decay * self._weight * exp(self._decay * (self._at - now))
        return count / rate if rate > 1e-9 else None

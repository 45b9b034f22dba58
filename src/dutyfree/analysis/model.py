"""The types of a summary: everything that a report shows.

All durations are in seconds, all shares are fractions of 1. ``summary.json`` is a Summary as JSON.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import Any, Literal

import msgspec

from dutyfree.analysis.statistics import Estimate, Quantity

SCHEMA = 1

Metric = Literal["first_result", "total", "orchestration_per_action"]

Period = Literal["creation", "first", "action"]
"""A period that spans break down; ``first`` is the first command."""


class CautionKind(enum.StrEnum):
    """The kinds of warnings about a number."""

    TOO_FEW = "too few trials"
    UNSURE_TAIL = "unsure tail"
    UNSTABLE = "unstable"
    DRIFT = "drift"
    FAILURES = "failures"
    UNLIKE_HOSTS = "unlike hosts"
    UNLIKE_SOFTWARE = "unlike software"
    UNLIKE_STORAGE = "unlike storage"
    UNLIKE_LIMITS = "unlike limits"
    UNLIKE_PLANS = "unlike plans"
    FEW_RUNS = "too few runs"
    RUN_ORDER = "order of runs"
    STAND_IN = "stand-in"
    UNDIVIDED = "undivided"
    HIGH_LOAD = "high load"
    RESUMED = "resumed"
    INCOMPLETE = "incomplete"
    LEFT_OUT = "left out"
    CACHE = "cache state"
    NO_BASELINE = "no baseline"


class Caution(msgspec.Struct, frozen=True):
    """A warning, and the cell that it is about. None means all."""

    kind: CautionKind
    text: str
    workload: str | None = None
    substrate: str | None = None
    parallel: int | None = None


class FailureGroup(msgspec.Struct, frozen=True):
    """Failed trials of one cell with the same kind, phase and cause."""

    workload: str
    substrate: str
    parallel: int
    kind: str
    phase: str
    cause: str
    count: int


class Distribution(msgspec.Struct, frozen=True):
    """Sorted values of the successful trials; an even selection if there are very many."""

    first_result: list[float]
    total: list[float]


class SpanBreakdown(msgspec.Struct, frozen=True, kw_only=True):
    """All creations, first commands or actions of a cell, broken down by their spans.

    The quantiles of spans do not add up to those of the whole.
    """

    told: int
    """How many have spans."""
    silent: int
    """How many have none, so nothing is known about their inside."""
    seconds: Quantity | None
    """Wall time of those with spans; ``spans`` and ``unattributed`` refer to them too."""
    spans: dict[str, Quantity]
    """By name; spans with the same name are added up."""
    unattributed: Quantity | None
    """Time outside of all spans."""
    silent_seconds: Quantity | None
    """Wall time of those without spans."""


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """All trials of one workload on one substrate with the same number of parallel rollouts.

    Quantities are over the successful trials.
    """

    workload: str
    substrate: str
    parallel: int
    actions: int
    """Actions of one trial, without its set-up."""
    planned: int | None
    warmups: int
    trials: int
    """Measured, failures included."""
    succeeded: int
    first_result: Quantity | None
    """Time to first command: request → first result."""
    last_result: Quantity | None
    """Request → last result: the total minus the cleanup."""
    total: Quantity | None
    """The whole rollout: request → sandbox removed."""
    components: dict[str, Quantity]
    """Each component by itself; their medians do not add up."""
    composition: dict[str, float]
    """Mean components over the middle half of the trials by total; these add up to its mean total."""
    per_action: Quantity | None
    """The total divided by the number of actions."""
    orchestration_per_action: Quantity | None
    """None if some actions are undivided."""
    stood_in: int
    """Actions of a trial whose time inside comes from the baseline."""
    undivided: int
    """Actions of a trial whose time inside is unknown."""
    stand_in_parallel: int | None
    distribution: Distribution
    inner: dict[Period, SpanBreakdown]

    @property
    def failed(self) -> int:
        return self.trials - self.succeeded

    @property
    def key(self) -> tuple[str, str, int]:
        return (self.workload, self.substrate, self.parallel)

    @property
    def typical_total(self) -> float:
        return sum(self.composition.values())


def least_parallel(cells: Iterable[Cell]) -> list[Cell]:
    """The cells of each workload with the fewest parallel rollouts: usually one."""
    kept = list(cells)
    least: dict[str, int] = {}
    for cell in kept:
        least[cell.workload] = min(cell.parallel, least.get(cell.workload, cell.parallel))
    return [cell for cell in kept if cell.parallel == least[cell.workload]]


class Ratio(msgspec.Struct, frozen=True):
    """p50 of ``substrate`` divided by p50 of ``base``, in one workload."""

    workload: str
    parallel: int
    metric: Metric
    substrate: str
    base: str
    ratio: Estimate | None
    p: float | None
    """Of a Mann-Whitney test, Holm-corrected over all ratios; None if no outcome could be significant."""


class Tax(msgspec.Struct, frozen=True):
    """What a substrate adds to the same workload run bare."""

    workload: str
    substrate: str
    parallel: int
    seconds: Estimate
    rate: Estimate | None
    """The ratio of the medians, minus 1."""
    per_action: Estimate | None
    """The seconds divided by the number of actions."""


class Projection(msgspec.Struct, frozen=True):
    """Worker-hours of a number of rollouts: N·T/3600, where T is the p50 of the total."""

    workload: str
    substrate: str
    actions: int
    rollouts: int
    hours: Estimate


class Price(msgspec.Struct, frozen=True):
    """What a small extra time costs at scale."""

    extra: str
    seconds: float
    """Per rollout or per action."""
    per: Literal["rollout", "action"]
    rollouts: int
    actions: int
    hours: float


class Spread(msgspec.Struct, frozen=True):
    """The slowest and the fastest substrate in one workload."""

    workload: str
    actions: int
    slowest: str
    fastest: str
    slowest_seconds: Estimate
    fastest_seconds: Estimate
    difference: Estimate
    ratio: Estimate | None
    rollouts: int
    """The number of rollouts that ``hours`` refers to."""

    def hours(self, estimate: Estimate) -> Estimate:
        return estimate.scaled(self.rollouts / 3600)


class Throughput(msgspec.Struct, frozen=True):
    """Rollouts per second while rollouts of the cell were running."""

    workload: str
    substrate: str
    parallel: int
    succeeded: int
    busy_seconds: float
    per_second: float
    at_once: float
    """How many rollouts were running at the same time, on average."""


class SubstrateSummary(msgspec.Struct, frozen=True):
    label: str
    use: str
    facts: dict[str, str]
    prepare_seconds: float
    unavailable: str | None


class SessionSummary(msgspec.Struct, frozen=True):
    started: str
    load: float


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    schema: int
    version: str
    """The version of dutyfree that measured."""
    started: str
    plan: dict[str, Any]
    host: dict[str, Any]
    sessions: list[SessionSummary]
    substrates: list[SubstrateSummary]
    """In the order in which the report shows them."""
    workloads: list[str]
    baseline: str | None
    trials: int
    """Measured, failures included."""
    warmups: int
    failed: int
    cells: list[Cell]
    ratios: list[Ratio]
    taxes: list[Tax]
    projections: list[Projection]
    prices: list[Price]
    spreads: list[Spread]
    throughput: list[Throughput]
    failures: list[FailureGroup]
    cautions: list[Caution]

    def lone(self, workload: str) -> list[Cell]:
        """The cells of a workload with the fewest parallel rollouts: those that figures show."""
        return least_parallel(cell for cell in self.cells if cell.workload == workload)

    def lone_cell(self, workload: str, substrate: str) -> Cell | None:
        return next((cell for cell in self.lone(workload) if cell.substrate == substrate), None)

    def cautions_on(
        self, workload: str | None = None, substrate: str | None = None, parallel: int | None = None
    ) -> list[Caution]:
        """The cautions about this cell, and about its workload or substrate; not those about the study."""
        return [
            caution
            for caution in self.cautions
            if caution.workload in (None, workload)
            and caution.substrate in (None, substrate)
            and caution.parallel in (None, parallel)
            and (caution.workload, caution.substrate) != (None, None)
        ]

    @property
    def labels(self) -> list[str]:
        return [substrate.label for substrate in self.substrates]

    @property
    def tiers(self) -> list[str]:
        return [name for name in self.workloads if not name.startswith("trajectory-")]

    @property
    def trajectories(self) -> list[str]:
        return [name for name in self.workloads if name.startswith("trajectory-")]

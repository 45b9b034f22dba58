"""The nouns of a summary: everything that a report shows, and no raw trial.

All durations are seconds, all shares fractions of one. ``summary.json`` is this tree as JSON.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import Any, Literal

import msgspec

from dutyfree.analysis.statistics import Estimate, Quantity

SCHEMA = 1

Metric = Literal["first_result", "total", "orchestration_per_action"]

Stretch = Literal["creation", "first", "action"]
"""What is taken apart by inner spans; ``first`` is the first command."""


class CautionKind(enum.StrEnum):
    """Why a number deserves care."""

    TOO_FEW = "too few trials"
    UNSURE_TAIL = "unsure tail"
    UNSTABLE = "unstable"
    DRIFT = "drift"
    FAILURES = "failures"
    UNLIKE_HOSTS = "unlike hosts"
    UNLIKE_SOFTWARE = "unlike software"
    UNLIKE_STORAGE = "unlike storage"
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
    """A warning, and what it qualifies: None stands for all."""

    kind: CautionKind
    text: str
    workload: str | None = None
    substrate: str | None = None
    parallel: int | None = None


class FailureGroup(msgspec.Struct, frozen=True):
    """Failed trials of one cell that failed alike."""

    workload: str
    substrate: str
    parallel: int
    kind: str
    phase: str
    cause: str
    count: int


class Distribution(msgspec.Struct, frozen=True):
    """Sorted values of the successful trials, thinned evenly where there are very many."""

    first_result: list[float]
    total: list[float]


class Inner(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of stretch, taken apart by the spans within it. Quantiles of parts do not add up."""

    told: int
    """Stretches with any span."""
    silent: int
    """Stretches without: nothing is known of what is inside."""
    seconds: Quantity | None
    """Wall time of the former, to which ``spans`` and ``unattributed`` belong."""
    spans: dict[str, Quantity]
    """By name, added up within a stretch."""
    unattributed: Quantity | None
    """What lies outside of all spans."""
    silent_seconds: Quantity | None
    """Wall time of the latter."""


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """All trials that measured the same thing. Quantities are over the successful ones."""

    workload: str
    substrate: str
    parallel: int
    actions: int
    """Actions of one trial, its set-up apart."""
    planned: int | None
    warmups: int
    trials: int
    """Measured, failures included."""
    succeeded: int
    first_result: Quantity | None
    """Time to first command: request → first result."""
    last_result: Quantity | None
    """Request → last result: the total less the cleanup."""
    total: Quantity | None
    """The whole rollout, its completion time: request → sandbox removed."""
    components: dict[str, Quantity]
    """Each component of the decomposition by itself; their medians do not add up."""
    composition: dict[str, float]
    """Mean components over the middle half of the trials by total; these add up to its mean total."""
    per_action: Quantity | None
    """Total over the number of actions."""
    orchestration_per_action: Quantity | None
    """None where part of the actions is undivided."""
    stood_in: int
    """Actions of a trial whose time inside is the baseline's."""
    undivided: int
    """Actions of a trial whose time inside is unknown."""
    stand_in_parallel: int | None
    distribution: Distribution
    inner: dict[Stretch, Inner]

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
    """Of each workload the cells with the fewest rollouts at once: one, unless the plan had none such."""
    kept = list(cells)
    least: dict[str, int] = {}
    for cell in kept:
        least[cell.workload] = min(cell.parallel, least.get(cell.workload, cell.parallel))
    return [cell for cell in kept if cell.parallel == least[cell.workload]]


class Ratio(msgspec.Struct, frozen=True):
    """p50 of ``substrate`` over p50 of ``base``, in one workload."""

    workload: str
    parallel: int
    metric: Metric
    substrate: str
    base: str
    ratio: Estimate | None
    p: float | None
    """Mann-Whitney, Holm-corrected over all ratios of the summary; None where unattainable."""


class Tax(msgspec.Struct, frozen=True):
    """What a substrate adds to the same workload run bare."""

    workload: str
    substrate: str
    parallel: int
    seconds: Estimate
    rate: Estimate | None
    """The ratio of the medians, less one."""
    per_action: Estimate | None
    """The seconds over the number of actions."""


class Projection(msgspec.Struct, frozen=True):
    """Worker-hours for so many rollouts: N·T/3600 with T the p50 of the total."""

    workload: str
    substrate: str
    actions: int
    rollouts: int
    hours: Estimate


class Price(msgspec.Struct, frozen=True):
    """What a small extra costs at scale."""

    extra: str
    seconds: float
    """Per rollout or per action."""
    per: Literal["rollout", "action"]
    rollouts: int
    actions: int
    hours: float


class Spread(msgspec.Struct, frozen=True):
    """The slowest against the fastest substrate in one workload."""

    workload: str
    actions: int
    slowest: str
    fastest: str
    slowest_seconds: Estimate
    fastest_seconds: Estimate
    difference: Estimate
    ratio: Estimate | None
    rollouts: int
    """For which the hours are meant."""

    def hours(self, estimate: Estimate) -> Estimate:
        return estimate.scaled(self.rollouts / 3600)


class Throughput(msgspec.Struct, frozen=True):
    """Rollouts a second while rollouts of the cell were under way."""

    workload: str
    substrate: str
    parallel: int
    succeeded: int
    busy_seconds: float
    per_second: float
    at_once: float
    """Rollouts that were really under way at once, on average."""


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
    """Of the dutyfree that measured."""
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
        """The workload's cells with the fewest rollouts at once: those that figures show."""
        return least_parallel(cell for cell in self.cells if cell.workload == workload)

    def lone_cell(self, workload: str, substrate: str) -> Cell | None:
        return next((cell for cell in self.lone(workload) if cell.substrate == substrate), None)

    def cautions_on(
        self, workload: str | None = None, substrate: str | None = None, parallel: int | None = None
    ) -> list[Caution]:
        """Those that qualify exactly this cell, beside the general ones."""
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

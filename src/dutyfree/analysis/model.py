"""The types of a summary: everything that a report shows.

All durations are in seconds, all shares are fractions of 1. ``summary.json`` is a Summary as JSON.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import Any, Literal

import msgspec

from dutyfree.analysis.findings import (
    ActionPath,
    FailureGroup,
    Law,
    NoiseFloor,
    Price,
    Projection,
    Ratio,
    Spread,
    Tail,
    Tax,
    Throughput,
)
from dutyfree.analysis.statistics import Quantity

SCHEMA = 1

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
    NOT_ISOLATED = "not isolated"
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
    NO_CONTROL = "no control"
    EXPLORATORY = "exploratory"
    INSEPARABLE = "inseparable"
    POOR_FIT = "poor fit"


class Caution(msgspec.Struct, frozen=True):
    """A warning, and the cell that it is about. None means all."""

    kind: CautionKind
    text: str
    workload: str | None = None
    substrate: str | None = None
    parallel: int | None = None


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


class SubstrateSummary(msgspec.Struct, frozen=True):
    label: str
    use: str
    facts: dict[str, str]
    prepare_seconds: float
    unavailable: str | None
    control_of: str | None = None
    """The label with the same options, if this one is the twin of an A/A pair: a control, not a substrate."""
    baseline: str | None = None
    """The label of the bare substrate that it is compared with."""


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
    laws: list[Law] = []
    action_paths: list[ActionPath] = []
    """One for each archetype that was measured with its own exec and with our init."""
    tails: list[Tail] = []
    noise_floor: list[NoiseFloor] = []
    """One for each metric; empty if the plan has no A/A control."""

    def lone(self, workload: str) -> list[Cell]:
        """The cells that figures show: those with the fewest parallel rollouts, without A/A controls."""
        hidden = self.controls
        return least_parallel(
            cell for cell in self.cells if cell.workload == workload and cell.substrate not in hidden
        )

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
    def controls(self) -> list[str]:
        """The twins of A/A pairs: shown as the noise floor, not as substrates."""
        return [substrate.label for substrate in self.substrates if substrate.control_of is not None]

    def law(self, substrate: str) -> Law | None:
        return next((law for law in self.laws if law.substrate == substrate), None)

    @property
    def tiers(self) -> list[str]:
        return [name for name in self.workloads if name not in self.mixes and name not in self.trajectories]

    @property
    def mixes(self) -> list[str]:
        """Trajectories of another mix of actions, on another repository, or recorded: ``inspect-50``."""
        recorded = self.plan.get("recorded") or {}
        return [
            name
            for name in self.workloads
            if name not in self.trajectories and (name in recorded or name.rpartition("-")[2].isdecimal())
        ]

    @property
    def trajectories(self) -> list[str]:
        return [name for name in self.workloads if name.startswith("trajectory-")]

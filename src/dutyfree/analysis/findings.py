"""The types of what a summary finds between cells: ratios, taxes, the law, tails, worker-hours, failures.

All durations are in seconds, all shares are fractions of 1.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from dutyfree.analysis.statistics import Estimate

Metric = Literal["first_result", "total", "orchestration_per_action"]


class FailureGroup(msgspec.Struct, frozen=True):
    """Failed trials of one cell with the same kind, phase and cause."""

    workload: str
    substrate: str
    parallel: int
    kind: str
    phase: str
    cause: str
    count: int


class Ratio(msgspec.Struct, frozen=True):
    """p50 of ``substrate`` divided by p50 of ``base``, in one workload."""

    workload: str
    parallel: int
    metric: Metric
    substrate: str
    base: str
    ratio: Estimate | None
    p: float | None
    """Of the test that belongs to the interval, Holm-corrected over all ratios; None if there is no test."""
    shown: bool = False
    """Whether the ratio counts as a difference: the interval excludes 1, p ≤ 0.05, and it is beyond the noise
    floor."""
    why: str = ""
    """Why it is not shown although the interval excludes 1: "may be chance" or "below the noise floor"; or
    "too few trials", if there is no interval."""


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
    base: str = ""
    """The label of the bare substrate: the one with the same storage, if there is one."""
    p: float | None = None
    """Holm-corrected over all taxes; None if there is no test."""
    shown: bool = False
    """Whether it may be called a tax: the interval excludes 0, p ≤ 0.05, and the rate is beyond the noise
    floor."""
    why: str = ""
    """Why it is not shown although the interval excludes 0: "may be chance" or "below the noise floor"; or
    "too few trials", if there is no interval."""


class Projection(msgspec.Struct, frozen=True):
    """Worker-hours of a number of rollouts: N·T/3600."""

    workload: str
    substrate: str
    actions: int
    rollouts: int
    hours: Estimate
    """T is the mean of the total."""
    typical_hours: Estimate | None = None
    """T is the p50 of the total."""


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
    slowest_mean: Estimate | None = None
    fastest_mean: Estimate | None = None
    mean_difference: Estimate | None = None
    """For worker-hours: a sum needs means, while the other fields are p50s."""
    shown: bool = False
    """Whether the two differ: see Ratio."""
    why: str = ""

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


class LawPoint(msgspec.Struct, frozen=True, kw_only=True):
    """One workload and the law: measured and predicted."""

    workload: str
    actions: int
    """n: commands and file actions of one trial, with the first command and the set-up."""
    work: float
    """w: the time inside the same actions on the baseline."""
    trials: int
    measured: Estimate
    """Mean total over the middle half of the trials: close to the p50."""
    predicted: Estimate
    error: Estimate
    """predicted ÷ measured, minus 1."""


class Law(msgspec.Struct, frozen=True, kw_only=True):
    """T = a + b·n + c·w: the total of a rollout with n actions whose work takes w on the baseline."""

    substrate: str
    baseline: str
    a: Estimate | None
    """Seconds per rollout: creation, readiness, cleanup. None if the study stopped too early for a law: then
    b, c and the spread are None too, and there are no points."""
    b: Estimate | None
    """Seconds per action."""
    c: Estimate | None
    """Multiplier of the work. None if the workloads are too alike to separate it from b: then it is taken
    as 1, and b contains any slow-down of the work."""
    trials: int
    spread: float | None
    """Root mean square of the errors of ``fitted``: how far the workloads lie from the law."""
    fitted: list[LawPoint]
    """The workloads that the fit used."""
    predictions: list[LawPoint]
    """The workloads that the fit did not use: ``held_out`` of the plan."""


class ActionPath(msgspec.Struct, frozen=True, kw_only=True):
    """One archetype with its own way to run an action, and with our init: all else is the same.

    The differences are own minus init, in the same draws of rounds.
    """

    own: str
    """The label with the archetype's own way: an exec for each action."""
    init: str
    """The label with our init over one kept stream."""
    creation: Estimate
    """Seconds per rollout: a of the one minus a of the other."""
    action: Estimate
    """Seconds per action that are the action path: b of the one minus b of the other."""
    work: Estimate | None
    """c of the one minus c of the other; None if one of them is not known."""
    share: Estimate | None
    """``action`` as a share of b of ``own``; None if that is not positive."""
    workload: str | None = None
    """The longest workload on both and on their baseline."""
    tax: Estimate | None = None
    """Seconds that ``own`` adds to ``workload`` over the baseline."""
    path_of_tax: Estimate | None = None
    """Share of ``tax`` that goes away with our init; None if the tax is not shown to be positive."""


class Wait(msgspec.Struct, frozen=True):
    """The expected time of the slowest of some rollouts: what a synchronous step waits for."""

    rollouts: int
    seconds: Estimate
    at_least: bool
    """Whether there are too few trials for it: then the value is a lower bound, without an interval."""


class Tail(msgspec.Struct, frozen=True):
    """The slow rollouts of one cell."""

    workload: str
    substrate: str
    parallel: int
    n: int
    p99: Estimate
    waits: list[Wait]
    """For 8, 64 and 512 rollouts."""


class ControlRatio(msgspec.Struct, frozen=True):
    """The twin ÷ its original, in one workload."""

    workload: str
    parallel: int
    ratio: Estimate


class NoiseFloor(msgspec.Struct, frozen=True):
    """The A/A control for one metric: how far two equal substrates appear to differ."""

    metric: Metric
    substrate: str
    twin: str
    ratio: Estimate
    """The twin ÷ its original, over all workloads (geometric mean)."""
    share: float
    """How far the widest interval of ``by_workload`` reaches beyond 1, as a share: 0.03 is 3 %."""
    by_workload: list[ControlRatio]

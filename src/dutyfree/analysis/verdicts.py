"""Verdicts of a comparison of A and B, for each cell and metric.

*Slower* and *faster* need both an interval of the ratio that excludes 1, and a test that stays significant
after Holm's correction over all comparisons. *No difference shown* needs an interval that includes 1 and is
narrow enough to show a large difference. Everything else is *cannot tell*, with the reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec
import numpy as np

from dutyfree.analysis.cells import Key, Sample
from dutyfree.analysis.findings import Metric
from dutyfree.analysis.model import Caution, CautionKind
from dutyfree.analysis.statistics import ALPHA, RUN_LEVEL, Estimate, Floats, Judgement, holm
from dutyfree.analysis.units import percent

Verdict = Literal["slower", "faster", "no difference shown", "cannot tell"]
Unit = Literal["round", "run"]

TOO_WIDE = 1.25
"""An interval that reaches beyond this ratio, or its inverse, is too wide to say "no difference shown"."""

REASONS = {
    "not compared": "the plans differ in what this cell does",
    "nothing to divide": "one side has no successful trial, or its time is 0",
    "too few rounds": "with so few, no outcome could be significant; measure more",
    "too few runs": "it is unknown how much runs differ without a change; repeat both sides, in turn",
    "may be chance": "alone it would be significant, but not among so many comparisons; compare less, or "
    "measure more",
    "too noisy": f"the interval could hide a difference of {percent(TOO_WIDE - 1)}; measure more, or on a "
    "quieter machine",
}
"""Reasons for "cannot tell", and what to do."""

UNCOMPARED = Judgement(ratio=None, p=None, least_p=1.0)


class MetricChange(msgspec.Struct, frozen=True, kw_only=True):
    """One metric of one cell, in A and in B."""

    workload: str
    substrate: str
    """Its label. In a comparison by rounds: the label of B."""
    parallel: int
    metric: Metric
    n_a: int
    """Successful trials."""
    n_b: int
    units_a: int
    """Runs with the cell; in a comparison by rounds: rounds in which both succeeded."""
    units_b: int
    a: float | None
    """p50 over the units."""
    b: float | None
    ratio: Estimate | None
    """B ÷ A."""
    p: float | None
    """Holm-corrected; None if no test was possible."""
    verdict: Verdict
    why: str = ""
    """Why the verdict is "cannot tell": one of REASONS."""
    cautions: list[CautionKind] = []
    """Kinds of the cautions about the cell, in any run."""


class FailureChange(msgspec.Struct, frozen=True):
    workload: str
    substrate: str
    parallel: int
    failed_a: int
    trials_a: int
    failed_b: int
    trials_b: int


class Run(msgspec.Struct, frozen=True):
    """One set of records."""

    name: str
    """A; or A1, A2, ... if there are several."""
    started: str
    version: str


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    unit: Unit
    """What counts as one observation: a round of one study, or a run."""
    title_a: str
    title_b: str
    runs_a: list[Run]
    runs_b: list[Run]
    changes: list[MetricChange]
    failures: list[FailureChange]
    """Cells with failed trials, in A or B."""
    only_a: list[Key]
    only_b: list[Key]
    cautions: list[Caution]

    @property
    def slower(self) -> list[MetricChange]:
        return [change for change in self.changes if change.verdict == "slower"]


class TestedMetric(msgspec.Struct, frozen=True):
    """One metric of one cell, before the correction for the number of comparisons."""

    key: Key
    metric: Metric
    a: Floats
    """One value for each run or round."""
    b: Floats
    n_a: int
    n_b: int
    judgement: Judgement
    cautions: list[CautionKind]


def changes(judged: Sequence[TestedMetric], unit: Unit) -> list[MetricChange]:
    """The verdict on each, corrected for the number of comparisons."""
    corrected = holm([one.judgement.p for one in judged])
    tests = sum(p is not None for p in corrected)
    return [_change(one, p, tests, unit) for one, p in zip(judged, corrected, strict=True)]


def _change(one: TestedMetric, p: float | None, tests: int, unit: Unit) -> MetricChange:
    workload, substrate, parallel = one.key
    verdict, why = _verdict(one.judgement, p, tests, unit)
    return MetricChange(
        workload=workload,
        substrate=substrate,
        parallel=parallel,
        metric=one.metric,
        n_a=one.n_a,
        n_b=one.n_b,
        units_a=one.a.size,
        units_b=one.b.size,
        a=_p50(one.a),
        b=_p50(one.b),
        ratio=one.judgement.ratio,
        p=p,
        verdict=verdict,
        why=why,
        cautions=one.cautions,
    )


def _verdict(judgement: Judgement, p: float | None, tests: int, unit: Unit) -> tuple[Verdict, str]:
    ratio = judgement.ratio
    if judgement is UNCOMPARED:
        return "cannot tell", "not compared"
    if ratio is None:
        return "cannot tell", "nothing to divide"
    alpha = ALPHA if unit == "round" else 1 - RUN_LEVEL
    if p is None or ratio.low is None or ratio.high is None or judgement.least_p * tests > alpha:
        return "cannot tell", f"too few {unit}s"
    if ratio.low > 1 or ratio.high < 1:
        if p > alpha:
            return "cannot tell", "may be chance"
        return ("slower" if ratio.low > 1 else "faster"), ""
    if ratio.low < 1 / TOO_WIDE or ratio.high > TOO_WIDE:
        return "cannot tell", "too noisy"
    return "no difference shown", ""


def failures(before: Sequence[Sample], after: Sequence[Sample], key: Key) -> FailureChange:
    return FailureChange(*key, *_failed(before), *_failed(after))


def _failed(samples: Sequence[Sample]) -> tuple[int, int]:
    """The number of failed trials, and of all trials."""
    trials = sum(len(sample.trials) for sample in samples)
    return trials - sum(len(sample.succeeded) for sample in samples), trials


def _p50(values: Floats) -> float | None:
    return float(np.median(values)) if values.size else None

"""The tax of each substrate over bare, and the ratios between substrates."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from itertools import combinations

from dutyfree.analysis.cells import Key, Sample
from dutyfree.analysis.findings import Metric, Ratio, Tax
from dutyfree.analysis.statistics import Estimate, Floats, difference, holm, judge, ratio


def taxes(by_key: Mapping[Key, Sample], baseline: str | None) -> list[Tax]:
    """The tax of every cell over the bare cell with the same workload and number of parallel rollouts."""
    found = []
    for (workload, substrate, parallel), sample in by_key.items():
        bare = by_key.get((workload, baseline, parallel)) if baseline else None
        if bare is None or substrate == baseline:
            continue
        values, base = sample.totals(), bare.totals()
        seconds = difference(values, base)
        if seconds is None:
            continue
        rate = ratio(values, base)
        actions = max((len(trial.actions) for trial in sample.succeeded), default=0)
        found.append(
            Tax(
                workload=workload,
                substrate=substrate,
                parallel=parallel,
                seconds=seconds,
                rate=None if rate is None else _minus_one(rate),
                per_action=seconds.scaled(1 / actions) if actions else None,
            )
        )
    return found


def _minus_one(rate: Estimate) -> Estimate:
    return Estimate(
        rate.value - 1,
        None if rate.low is None else rate.low - 1,
        None if rate.high is None else rate.high - 1,
    )


def ratios(by_key: Mapping[Key, Sample]) -> list[Ratio]:
    """All pairs of substrates in a workload, slower ÷ faster, for the first command and the whole rollout."""
    groups: dict[tuple[str, int], list[Sample]] = defaultdict(list)
    for (workload, _, parallel), sample in by_key.items():
        if sample.succeeded:
            groups[workload, parallel].append(sample)
    rows: list[Ratio] = []
    for (workload, parallel), members in groups.items():
        for metric in ("first_result", "total"):
            for one, other in combinations(members, 2):
                rows.append(_ratio(workload, parallel, metric, one, other))
    corrected = holm([row.p for row in rows])
    return [
        Ratio(row.workload, row.parallel, row.metric, row.substrate, row.base, row.ratio, p)
        for row, p in zip(rows, corrected, strict=True)
    ]


def _ratio(workload: str, parallel: int, metric: Metric, one: Sample, other: Sample) -> Ratio:
    a, b = _values(one, metric), _values(other, metric)
    judgement = judge(a, b)
    if judgement.ratio is not None and judgement.ratio.value < 1:
        one, other = other, one
        judgement = judge(b, a)
    return Ratio(workload, parallel, metric, one.key[1], other.key[1], judgement.ratio, judgement.p)


def _values(sample: Sample, metric: Metric) -> Floats:
    return sample.first_results() if metric == "first_result" else sample.totals()

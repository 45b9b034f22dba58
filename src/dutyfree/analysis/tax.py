"""The tax of each substrate over bare, and the ratios between substrates."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import combinations

import msgspec

from dutyfree.analysis.cells import METRICS, Key, Sample
from dutyfree.analysis.control import Floor
from dutyfree.analysis.findings import Metric, Ratio, Tax
from dutyfree.analysis.rounds import Effect, Rounds
from dutyfree.analysis.statistics import ALPHA, Estimate, holm

MAY_BE_CHANCE = "may be chance"
"""The interval alone excludes "no difference", but not after the correction for the number of comparisons."""
BELOW_FLOOR = "below the noise floor"
TOO_FEW = "too few trials"
"""There is no test, so any difference may be there."""


def taxes(
    by_key: Mapping[Key, Sample], baselines: Mapping[str, str], rounds: Rounds, floor: Floor
) -> list[Tax]:
    """The tax of every cell over its baseline with the same workload and number of parallel rollouts."""
    found = []
    for (workload, substrate, parallel), sample in by_key.items():
        base = baselines.get(substrate)
        bare = by_key.get((workload, base, parallel)) if base else None
        if base is None or bare is None or substrate == base:
            continue
        effect = rounds.effect(sample, bare, sample.totals(), bare.totals(), "total")
        if effect is None:
            continue
        actions = max((len(trial.actions) for trial in sample.succeeded), default=0)
        found.append(
            Tax(
                workload=workload,
                substrate=substrate,
                parallel=parallel,
                seconds=effect.difference,
                rate=None if effect.ratio is None else _minus_one(effect.ratio),
                per_action=effect.difference.scaled(1 / actions) if actions else None,
                base=base,
                p=_both(effect),
            )
        )
    corrected = holm([row.p for row in found])
    return [_judged_tax(row, p, floor) for row, p in zip(found, corrected, strict=True)]


def _both(effect: Effect) -> float | None:
    """The larger p, because a tax is shown in seconds and as a rate. It is small if both exclude 0."""
    if effect.p is None or effect.difference_p is None:
        return None
    return max(effect.p, effect.difference_p)


def _judged_tax(row: Tax, p: float | None, floor: Floor) -> Tax:
    excludes = row.seconds.leaves_out(0) and row.rate is not None and row.rate.leaves_out(0)
    ratio = None if row.rate is None else row.rate.value + 1
    shown, why = _judged(excludes, p, floor, "total", (row.workload, row.parallel), ratio)
    return msgspec.structs.replace(row, p=p, shown=shown, why=why)


def _judged(
    excludes: bool, p: float | None, floor: Floor, metric: Metric, cell: tuple[str, int], ratio: float | None
) -> tuple[bool, str]:
    """Whether a difference is shown; and why not, if there is no test or the interval alone would show it."""
    if p is None or ratio is None:
        return False, TOO_FEW if p is None and ratio is not None else ""
    if not excludes:
        return False, ""
    if p > ALPHA:
        return False, MAY_BE_CHANCE
    if not floor.exceeded(metric, *cell, ratio):
        return False, BELOW_FLOOR
    return True, ""


def _minus_one(rate: Estimate) -> Estimate:
    return Estimate(
        rate.value - 1,
        None if rate.low is None else rate.low - 1,
        None if rate.high is None else rate.high - 1,
    )


def ratios(by_key: Mapping[Key, Sample], rounds: Rounds, floor: Floor) -> list[Ratio]:
    """All pairs of substrates in a workload, slower ÷ faster, for the first command and the whole rollout."""
    groups: dict[tuple[str, int], list[Sample]] = defaultdict(list)
    for (workload, _, parallel), sample in by_key.items():
        if sample.succeeded:
            groups[workload, parallel].append(sample)
    rows = [
        _ratio(one, other, metric, rounds)
        for members in groups.values()
        for metric in PRINTED
        for one, other in combinations(members, 2)
    ]
    corrected = holm([row.p for row in rows])
    return [_judged_ratio(row, p, floor) for row, p in zip(rows, corrected, strict=True)]


PRINTED: Sequence[Metric] = ("first_result", "total")
"""The metrics of the table of ratios: the family that Holm's correction covers."""


def _judged_ratio(row: Ratio, p: float | None, floor: Floor) -> Ratio:
    excludes = row.ratio is not None and row.ratio.leaves_out(1)
    value = None if row.ratio is None else row.ratio.value
    shown, why = _judged(excludes, p, floor, row.metric, (row.workload, row.parallel), value)
    return msgspec.structs.replace(row, p=p, shown=shown, why=why)


def _ratio(one: Sample, other: Sample, metric: Metric, rounds: Rounds) -> Ratio:
    values = METRICS[metric]
    effect = rounds.effect(one, other, values(one), values(other), metric)
    ratio = effect.ratio if effect else None
    if ratio is not None and ratio.value < 1:
        one, other, ratio = other, one, ratio.inverse()
    workload, substrate, parallel = one.key
    return Ratio(workload, parallel, metric, substrate, other.key[1], ratio, effect.p if effect else None)

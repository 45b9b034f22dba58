"""The A/A control: how far two equal substrates of a plan appear to differ, and what is no more than that."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping

import numpy as np

from dutyfree.analysis.cells import METRICS, Key, Sample
from dutyfree.analysis.findings import ControlRatio, Metric, NoiseFloor
from dutyfree.analysis.rounds import LEAST_ROUNDS, Rounds, log_ratios, with_interval
from dutyfree.analysis.statistics import Estimate, ratio_of_logs

Cells = dict[tuple[str, int], float]


class Floor:
    """The noise floor of each workload: a ratio within it is not called a difference."""

    def __init__(self, found: list[NoiseFloor]) -> None:
        self._reach: dict[Metric, Cells] = defaultdict(dict)
        for row in found:
            cells = self._reach[row.metric]
            for one in row.by_workload:
                key = (one.workload, one.parallel)
                cells[key] = max(cells.get(key, 1.0), reach(one.ratio))

    def exceeded(self, metric: Metric, workload: str, parallel: int, ratio: float) -> bool:
        """Whether a ratio is farther from 1 than the interval of the A/A ratio reaches.

        A workload that the control did not run gets the highest floor of the others.
        """
        cells = self._reach[metric]
        floor = cells.get((workload, parallel), max(cells.values(), default=1.0))
        return max(ratio, 1 / ratio) > floor


def reach(ratio: Estimate) -> float:
    """How far the interval reaches from 1, as a factor; the value alone if there is no interval."""
    bounds = (ratio.value,) if ratio.low is None or ratio.high is None else (ratio.low, ratio.high)
    return max(max(bound, 1 / bound) for bound in bounds)


def noise_floor(by_key: Mapping[Key, Sample], twins: Mapping[str, str], rounds: Rounds) -> list[NoiseFloor]:
    """The A/A ratios of each pair and metric."""
    found = []
    for twin, original in twins.items():
        for metric in METRICS:
            rows = _ratios(by_key, twin, original, metric, rounds)
            if rows:
                overall = _overall(by_key, twin, original, metric, rounds, rows)
                share = max(reach(row.ratio) for row in rows) - 1
                found.append(NoiseFloor(metric, original, twin, overall, share, rows))
    return found


def _ratios(
    by_key: Mapping[Key, Sample], twin: str, original: str, metric: Metric, rounds: Rounds
) -> list[ControlRatio]:
    values = METRICS[metric]
    rows = []
    for (workload, substrate, parallel), one in by_key.items():
        base = by_key.get((workload, original, parallel))
        if substrate != twin or base is None:
            continue
        effect = rounds.effect(one, base, values(one), values(base), metric)
        if effect is not None and effect.ratio is not None:
            rows.append(ControlRatio(workload, parallel, effect.ratio))
    return rows


def _overall(
    by_key: Mapping[Key, Sample],
    twin: str,
    original: str,
    metric: Metric,
    rounds: Rounds,
    rows: list[ControlRatio],
) -> Estimate:
    """The geometric mean over the workloads with one rollout at a time, or over all if there are none."""
    least = min(row.parallel for row in rows)
    lone = [row for row in rows if row.parallel == least]
    value = float(np.mean([math.log(row.ratio.value) for row in lone]))
    pairs = [[by_key[row.workload, label, least] for label in (twin, original)] for row in lone]
    count, freedom = rounds.sizes(*(one for pair in pairs for one in pair))
    if count < LEAST_ROUNDS:
        return Estimate(math.exp(value))
    values = METRICS[metric]
    logs = [
        log_ratios(rounds.p50s(one, values(one), metric), rounds.p50s(base, values(base), metric))
        for one, base in pairs
    ]
    means = np.mean(logs, axis=0)
    if np.isnan(means).mean() > 0.5:
        return Estimate(math.exp(value))
    interval, _ = with_interval(value, means, count, freedom)
    assert interval.low is not None
    assert interval.high is not None
    return ratio_of_logs(value, interval.low, interval.high)

"""Compare two configurations that one study measured in the same rounds: ``dutyfree ab``.

Every round runs each workload once on A and once on B, in random order, so a slow minute of the machine
affects both. The unit is the block: the rounds between two starts of the processes (``Plan.renew``). What
counts is B ÷ A in each block, and how much it varies between blocks.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import groupby

import numpy as np

from dutyfree.analysis.cells import METRICS, Key, Sample, samples
from dutyfree.analysis.comparison import concerning, own_cautions
from dutyfree.analysis.decomposition import Decomposer
from dutyfree.analysis.model import Caution
from dutyfree.analysis.statistics import Floats, as_sample, judge_pairs
from dutyfree.analysis.verdicts import Comparison, Run, TestedMetric, changes, failures
from dutyfree.contract.errors import RecordsError
from dutyfree.study.records import Records


def compare_rounds(records: Records) -> Comparison:
    """Compare the second substrate of the study with the first. Raises RecordsError unless there are two."""
    a, b = _labels(records)
    renew = max(1, int(records.study.plan.get("renew", 0)))
    decomposer = Decomposer(records)
    by_key = samples(records, decomposer)
    found = own_cautions(records, by_key, decomposer)
    cells = list(dict.fromkeys((workload, parallel) for workload, _, parallel in by_key))
    pairs = {
        (workload, b, parallel): (by_key[workload, a, parallel], by_key[workload, b, parallel])
        for workload, parallel in cells
        if (workload, a, parallel) in by_key and (workload, b, parallel) in by_key
    }
    common = {key for one, other in pairs.values() for key in (one.key, other.key)}
    run = Run("", records.study.started, records.study.version)
    return Comparison(
        unit="round",
        title_a=a,
        title_b=b,
        runs_a=[run],
        runs_b=[run],
        changes=changes(
            [row for key, pair in pairs.items() for row in _judged(key, *pair, found, renew)], "round"
        ),
        failures=[
            change
            for key, (one, other) in pairs.items()
            if (change := failures([one], [other], key)).failed_a + change.failed_b
        ],
        only_a=[key for key in by_key if key[1] == a and key not in common],
        only_b=[key for key in by_key if key[1] == b and key not in common],
        cautions=found,
    )


def _labels(records: Records) -> tuple[str, str]:
    """A and B, in the order of the plan."""
    planned = records.study.plan.get("substrates")
    labels = planned if isinstance(planned, list) else list(records.substrates)
    if len(labels) != 2:
        raise RecordsError(
            f"the study measured {len(labels)} substrates, not two",
            remedy="measure two configurations side by side with 'dutyfree ab', or name a second directory",
        )
    return labels[0], labels[1]


def _judged(
    key: Key, before: Sample, after: Sample, cautions: list[Caution], renew: int
) -> list[TestedMetric]:
    found = []
    for metric, values in METRICS.items():
        x, y = values(before), values(after)
        if not x.size and not y.size:
            continue
        one, other = _by_round(before, x), _by_round(after, y)
        both = sorted(one.keys() & other.keys())
        blocks = [list(rounds) for _, rounds in groupby(both, key=lambda number: number // renew)]
        a, b = (as_sample([_mean(side, rounds) for rounds in blocks]) for side in (one, other))
        about = concerning([before.key, after.key], metric, cautions)
        found.append(TestedMetric(key, metric, a, b, x.size, y.size, judge_pairs(b, a), about))
    return found


def _mean(values: dict[int, float], rounds: list[int]) -> float:
    """The geometric mean over some rounds, which a slow one does not dominate."""
    found = np.array([values[number] for number in rounds])
    return float(np.exp(np.log(found).mean())) if found.min() > 0 else float(found.min())


def _by_round(sample: Sample, values: Floats) -> dict[int, float]:
    """The value of each round; the p50 of parallel rollouts. Empty if the metric is unknown."""
    rounds: dict[int, list[float]] = defaultdict(list)
    if values.size == len(sample.succeeded):
        for trial, value in zip(sample.succeeded, values, strict=True):
            rounds[trial.index - trial.index % trial.parallel].append(float(value))
    return {number: float(np.median(group)) for number, group in rounds.items()}

"""Cells: the trials of one workload on one substrate, what they measured, and how they failed."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec
import numpy as np

from dutyfree.analysis.baselines import ordered_labels
from dutyfree.analysis.decomposition import (
    COMPONENTS,
    Decomposer,
    TrialComponents,
    trajectory_length,
    workload_order,
)
from dutyfree.analysis.findings import FailureGroup, Metric
from dutyfree.analysis.model import Cell, Distribution
from dutyfree.analysis.spans import breakdowns
from dutyfree.analysis.statistics import Floats, as_sample, quantity
from dutyfree.study.counts import Fewer, bounded, first_seconds
from dutyfree.study.records import Records, Trial

Key = tuple[str, str, int]

DISTRIBUTION_POINTS = 1000
CAUSE_LENGTH = 1000


class Sample(msgspec.Struct, frozen=True):
    """The trials of one cell, in the order in which they ended."""

    key: Key
    warmups: int
    trials: list[Trial]
    succeeded: list[Trial]
    parts: list[TrialComponents]
    """Of the successful trials."""

    def first_results(self) -> Floats:
        return as_sample([trial.first_result for trial in self.succeeded])

    def totals(self) -> Floats:
        return as_sample([trial.total for trial in self.succeeded])

    def orchestration_per_action(self) -> Floats:
        """Empty if there are no actions, or if some are undivided."""
        if any(part.unknown for part in self.parts) or not all(trial.actions for trial in self.succeeded):
            return as_sample([])
        return as_sample(
            [
                part.action_orchestration / len(trial.actions)
                for trial, part in zip(self.succeeded, self.parts, strict=True)
            ]
        )


METRICS: dict[Metric, Callable[[Sample], Floats]] = {
    "first_result": Sample.first_results,
    "total": Sample.totals,
    "orchestration_per_action": Sample.orchestration_per_action,
}


def samples(records: Records, decomposer: Decomposer) -> dict[Key, Sample]:
    """Every cell that has a trial: tiers first, substrates in the order of the plan."""
    grouped: dict[Key, list[Trial]] = defaultdict(list)
    for trial in records.trials:
        grouped[trial.cell].append(trial)
    rank = {label: place for place, label in enumerate(ordered_labels(records))}
    keys = sorted(grouped, key=lambda key: (*workload_order(key[0]), key[2], rank[key[1]]))
    return {key: _sample(key, grouped[key], decomposer) for key in keys}


def _sample(key: Key, trials: Sequence[Trial], decomposer: Decomposer) -> Sample:
    measured = [trial for trial in trials if not trial.warmup]
    succeeded = [trial for trial in measured if trial.ok]
    return Sample(
        key=key,
        warmups=len(trials) - len(measured),
        trials=measured,
        succeeded=succeeded,
        parts=[decomposer(trial) for trial in succeeded],
    )


def describe(sample: Sample, plan: dict[str, Any], decomposer: Decomposer) -> Cell:
    workload, substrate, parallel = sample.key
    totals, firsts = sample.totals(), sample.first_results()
    actions = _actions(sample)
    stood_in = max((part.stood_in for part in sample.parts), default=0)
    return Cell(
        workload=workload,
        substrate=substrate,
        parallel=parallel,
        actions=actions,
        planned=planned_trials(plan, sample),
        warmups=sample.warmups,
        trials=len(sample.trials),
        succeeded=len(sample.succeeded),
        first_result=quantity(firsts),
        last_result=quantity(totals - as_sample([trial.cleanup for trial in sample.succeeded])),
        total=quantity(totals),
        components={
            name: part for name in COMPONENTS if (part := quantity(_column(sample, name))) is not None
        },
        composition=composition(sample.parts, totals),
        per_action=quantity(totals / actions) if actions else None,
        orchestration_per_action=quantity(sample.orchestration_per_action()),
        stood_in=stood_in,
        undivided=max((part.unknown for part in sample.parts), default=0),
        stand_in_parallel=decomposer.stand_in_parallel(workload, substrate, parallel) if stood_in else None,
        distribution=Distribution(first_result=_thinned(firsts), total=_thinned(totals)),
        inner=breakdowns(sample.succeeded),
    )


def planned_trials(plan: dict[str, Any], sample: Sample) -> int | None:
    """The number in the plan, rounded up to whole batches; fewer for a slow cell, if the plan says so."""
    workload, substrate, parallel = sample.key
    workloads = plan.get("workloads")
    trials = workloads.get(workload) if isinstance(workloads, dict) else None
    if not isinstance(trials, int):
        return None
    most = plan.get("most")
    limit = most.get(substrate) if isinstance(most, dict) else None
    wanted = min(trials, limit) if isinstance(limit, int) else trials
    fewer = msgspec.convert(plan.get("fewer") or [], list[Fewer])
    first = first_seconds(sample.trials).get(sample.key)
    return math.ceil(bounded(wanted, fewer, first) / parallel) * parallel


def composition(parts: Sequence[TrialComponents], totals: Floats) -> dict[str, float]:
    """Mean components over the middle half of the trials by total.

    Medians of components do not add up to the total, and one slow trial would distort plain means.
    """
    if not parts:
        return {}
    order = np.argsort(totals, kind="stable")
    quarter = len(order) // 4
    middle = order[quarter : len(order) - quarter]
    return {name: float(np.mean([parts[place].component(name) for place in middle])) for name in COMPONENTS}


def failure_groups(cells: Iterable[Sample]) -> list[FailureGroup]:
    """Failures by cell, kind, phase and cause; the most frequent of a cell first."""
    groups: list[FailureGroup] = []
    for sample in cells:
        counts = Counter(
            (failure.kind, failure.phase, _shortened(failure.cause))
            for trial in sample.trials
            if (failure := trial.failure) is not None
        )
        groups += [FailureGroup(*sample.key, *what, count) for what, count in counts.most_common()]
    return groups


def _shortened(cause: str) -> str:
    """The cause in one line. Cut a very long one in the middle, because the remedy is at its end."""
    line = " ".join(cause.split())
    if len(line) <= CAUSE_LENGTH:
        return line
    half = CAUSE_LENGTH // 2
    return f"{line[:half]} … {line[-half:]}"


def _actions(sample: Sample) -> int:
    length = trajectory_length(sample.key[0])
    if sample.succeeded:
        return max(len(trial.actions) for trial in sample.succeeded)
    return length or 0


def _column(sample: Sample, name: str) -> Floats:
    return as_sample([part.component(name) for part in sample.parts])


def _thinned(values: Floats) -> list[float]:
    ordered = np.sort(values)
    if ordered.size > DISTRIBUTION_POINTS:
        places = np.linspace(0, ordered.size - 1, DISTRIBUTION_POINTS).round().astype(int)
        ordered = ordered[places]
    return [float(value) for value in ordered]

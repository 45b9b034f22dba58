"""Trials, gathered into cells: what each cell measured, and how often it failed."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import numpy as np

from dutyfree.analysis.decomposition import (
    COMPONENTS,
    Decomposer,
    Parts,
    trajectory_length,
    workload_order,
)
from dutyfree.analysis.inner import inner
from dutyfree.analysis.model import Cell, Distribution, FailureGroup
from dutyfree.analysis.statistics import Floats, as_sample, quantity
from dutyfree.study.records import Records, Trial

Key = tuple[str, str, int]

DISTRIBUTION_POINTS = 1000
CAUSE_LENGTH = 1000


class Sample(msgspec.Struct, frozen=True):
    """The trials of one cell in the order of their ends; ``parts`` are those of the successful ones."""

    key: Key
    warmups: int
    trials: list[Trial]
    succeeded: list[Trial]
    parts: list[Parts]

    def first_results(self) -> Floats:
        return as_sample([trial.first_result for trial in self.succeeded])

    def totals(self) -> Floats:
        return as_sample([trial.total for trial in self.succeeded])

    def orchestration_per_action(self) -> Floats:
        """Empty where there are no actions, or some are undivided."""
        if any(part.unknown for part in self.parts):
            return as_sample([])
        return as_sample(
            [
                part.orchestration / len(trial.actions)
                for trial, part in zip(self.succeeded, self.parts, strict=True)
                if trial.actions
            ]
        )


def samples(records: Records, decomposer: Decomposer) -> dict[Key, Sample]:
    """Every cell that has a trial, tiers first, substrates in the order of the plan."""
    grouped: dict[Key, list[Trial]] = defaultdict(list)
    for trial in records.trials:
        grouped[trial.cell].append(trial)
    rank = {label: place for place, label in enumerate(substrate_order(records))}
    keys = sorted(grouped, key=lambda key: (*workload_order(key[0]), key[2], rank[key[1]]))
    return {key: _sample(key, grouped[key], decomposer) for key in keys}


def substrate_order(records: Records) -> list[str]:
    """Bare first, then as the plan and the trials name them."""
    labels = list(dict.fromkeys([*records.substrates, *(trial.substrate for trial in records.trials)]))
    uses = {
        label: records.substrates[label].use if label in records.substrates else label for label in labels
    }
    return sorted(labels, key=lambda label: uses[label] != "bare")


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
        planned=planned_trials(plan, workload, parallel),
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
        stand_in_parallel=decomposer.stand_in_parallel(workload, parallel) if stood_in else None,
        distribution=Distribution(first_result=_thinned(firsts), total=_thinned(totals)),
        inner=inner(sample.succeeded),
    )


def planned_trials(plan: dict[str, Any], workload: str, parallel: int) -> int | None:
    """As the plan says, in whole batches of ``parallel``."""
    workloads = plan.get("workloads")
    trials = workloads.get(workload) if isinstance(workloads, dict) else None
    return math.ceil(trials / parallel) * parallel if isinstance(trials, int) else None


def composition(parts: Sequence[Parts], totals: Floats) -> dict[str, float]:
    """Mean components over the middle half of the trials by total.

    Medians of components do not add up to anything; plain means let one slow trial bend the picture.
    """
    if not parts:
        return {}
    order = np.argsort(totals, kind="stable")
    quarter = len(order) // 4
    middle = order[quarter : len(order) - quarter]
    return {name: float(np.mean([parts[place].component(name) for place in middle])) for name in COMPONENTS}


def failure_groups(cells: Iterable[Sample]) -> list[FailureGroup]:
    """Failures by cell, kind, phase and cause, the most frequent of a cell first."""
    groups: list[FailureGroup] = []
    for sample in cells:
        alike = Counter(
            (failure.kind, failure.phase, _shortened(failure.cause))
            for trial in sample.trials
            if (failure := trial.failure) is not None
        )
        groups += [FailureGroup(*sample.key, *what, count) for what, count in alike.most_common()]
    return groups


def _shortened(cause: str) -> str:
    """In one line. Of a very long one the middle is left out: at its end stands what to do about it."""
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

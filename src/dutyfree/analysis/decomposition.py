"""Decomposition of a rollout: how its time splits into components.

::

    total = creation + readiness + setup + actions + orchestration + undivided + cleanup + unattributed

``actions`` is the time inside the commands, and ``orchestration`` is the rest of the wall time of the
actions. If the substrate does not report the time inside, we use the time of the same action on bare (the
stand-in). If there is no bare run either, the action is ``undivided``.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping

import msgspec
import numpy as np

from dutyfree.study.records import ActionRecord, Records, Trial

COMPONENTS = (
    "creation",
    "readiness",
    "setup",
    "actions",
    "orchestration",
    "undivided",
    "cleanup",
    "unattributed",
)

BASELINE = "bare"

StandIns = Mapping[tuple[int, str], float]
"""(place, label) of an action → its time inside the command, on the baseline."""


class TrialComponents(msgspec.Struct, frozen=True):
    """The components of one trial. The seconds add up to its total."""

    creation: float
    readiness: float
    setup: float
    actions: float
    orchestration: float
    undivided: float
    cleanup: float
    unattributed: float
    stood_in: int = 0
    """Number of actions whose time inside comes from the baseline."""
    unknown: int = 0
    """Number of actions whose time inside is unknown."""

    def component(self, name: str) -> float:
        seconds: float = getattr(self, name)
        return seconds


def baseline(records: Records) -> str | None:
    """The label of the bare substrate, if it was measured."""
    ran = dict.fromkeys(trial.substrate for trial in records.trials)
    labels = [label for label in ran if _use(records, label) == BASELINE]
    return BASELINE if BASELINE in labels else next(iter(labels), None)


def _use(records: Records, label: str) -> str:
    facts = records.substrates.get(label)
    return facts.use if facts else label


def inside_on_baseline(action: ActionRecord) -> float:
    """The time inside an action on bare. A file action there has no orchestration: all of it is inside."""
    return action.seconds if action.inside is None else min(max(action.inside, 0.0), action.seconds)


def stand_ins(trials: Iterable[Trial]) -> dict[tuple[int, str], float]:
    """The p50 of the time inside each action, over successful trials of one workload on the baseline."""
    seen: dict[tuple[int, str], list[float]] = defaultdict(list)
    for trial in trials:
        for place, action in enumerate(trial.actions):
            seen[place, action.label].append(inside_on_baseline(action))
    return {key: float(np.median(values)) for key, values in seen.items()}


def decompose(trial: Trial, *, on_baseline: bool = False, instead: StandIns | None = None) -> TrialComponents:
    """Decompose one trial. ``instead`` has the baseline's times for actions without their own."""
    inside = orchestration = undivided = 0.0
    stood_in = unknown = 0
    for place, action in enumerate(trial.actions):
        seconds = action.seconds
        if on_baseline:
            own: float | None = inside_on_baseline(action)
        elif action.inside is not None:
            own = min(max(action.inside, 0.0), seconds)
        else:
            own = instead.get((place, action.label)) if instead else None
            if own is None:
                undivided += seconds
                unknown += 1
                continue
            own = min(own, seconds)
            stood_in += 1
        assert own is not None
        inside += own
        orchestration += seconds - own
    setup = sum(action.seconds for action in trial.setup)
    known = trial.creation + trial.readiness + setup + inside + orchestration + undivided + trial.cleanup
    return TrialComponents(
        creation=trial.creation,
        readiness=trial.readiness,
        setup=setup,
        actions=inside,
        orchestration=orchestration,
        undivided=undivided,
        cleanup=trial.cleanup,
        unattributed=trial.total - known,
        stood_in=stood_in,
        unknown=unknown,
    )


class Decomposer:
    """Decomposes the trials of one set of records, with the times of its baseline as stand-ins."""

    def __init__(self, records: Records) -> None:
        self.baseline = baseline(records)
        ran = dict.fromkeys(trial.substrate for trial in records.trials)
        self._on_bare = {label for label in ran if _use(records, label) == BASELINE}
        bare: dict[tuple[str, int], list[Trial]] = defaultdict(list)
        for trial in records.measured:
            if trial.substrate == self.baseline and trial.ok:
                bare[trial.workload, trial.parallel].append(trial)
        self._bare = bare
        self._instead: dict[tuple[str, int], StandIns] = {}

    def stand_in_parallel(self, workload: str, parallel: int) -> int | None:
        """Parallel rollouts of the baseline cell used as stand-in: the same number, else the nearest."""
        levels = [level for name, level in self._bare if name == workload]
        return min(levels, key=lambda level: (abs(level - parallel), level), default=None)

    def __call__(self, trial: Trial) -> TrialComponents:
        return decompose(
            trial,
            on_baseline=trial.substrate in self._on_bare,
            instead=self._instead_for(trial.workload, trial.parallel),
        )

    def _instead_for(self, workload: str, parallel: int) -> StandIns:
        key = (workload, parallel)
        if key not in self._instead:
            level = self.stand_in_parallel(workload, parallel)
            self._instead[key] = {} if level is None else stand_ins(self._bare[workload, level])
        return self._instead[key]


_NAME = re.compile(r"(T|trajectory-)(\d+)\Z")


def trajectory_length(workload: str) -> int | None:
    """The number of actions of a ``trajectory-N``; None for any other workload."""
    match = _NAME.match(workload)
    return int(match[2]) if match and match[1] != "T" else None


def workload_order(workload: str) -> tuple[int, int, str]:
    """Tiers first, then other workloads, then trajectories by length."""
    match = _NAME.match(workload)
    if not match:
        return (1, 0, workload)
    return (0 if match[1] == "T" else 2, int(match[2]), workload)

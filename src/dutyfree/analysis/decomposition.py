"""Decomposition of a rollout: how its time splits into components.

::

    total = creation + readiness + setup + actions + orchestration + undivided + cleanup + unattributed

The wall time of every action splits into the time inside the command and the rest, the orchestration. This is
the same on every substrate, and for the first command, the set-up commands and the actions. ``setup`` and
``actions`` are the times inside. The rest of the first command is ``readiness``, that of the others is
``orchestration``.

If the substrate does not report the time inside, we use the time of the same action on its baseline in the
same round (the stand-in). If there is no bare run either, an action is ``undivided``.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping

import msgspec
import numpy as np

from dutyfree.analysis.baselines import BARE, baseline, baselines, use
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

Place = tuple[str, int, str]
"""Section (first, setup or action), place and label of an action: the same in every trial of a workload."""
StandIns = Mapping[Place, float]
"""The time inside an action, on the baseline."""


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
    action_orchestration: float = 0.0
    """Orchestration of the actions alone. Below 0 if stand-ins are longer than the wall time."""
    stood_in: int = 0
    """Number of actions whose time inside comes from the baseline."""
    unknown: int = 0
    """Number of actions whose time inside is unknown."""

    def component(self, name: str) -> float:
        seconds: float = getattr(self, name)
        return seconds


def placed_actions(trial: Trial) -> Iterator[tuple[Place, ActionRecord]]:
    """Every action of a trial: the first command, the set-up, the actions."""
    if trial.first is not None:
        yield ("first", 0, trial.first.label), trial.first
    seen: Counter[str] = Counter()
    for action in trial.setup:
        # A warm substrate skips set-up commands, so their places differ. Their labels do not.
        yield ("setup", seen[action.label], action.label), action
        seen[action.label] += 1
    for place, action in enumerate(trial.actions):
        yield ("action", place, action.label), action


def inside_on_baseline(action: ActionRecord) -> float:
    """The time inside an action on bare. A file action there has no orchestration: all of it is inside."""
    return action.seconds if action.inside is None else min(max(action.inside, 0.0), action.seconds)


def stand_ins(trials: Iterable[Trial]) -> dict[Place, float]:
    """The p50 of the time inside each action, over successful trials of one workload on the baseline."""
    seen: dict[Place, list[float]] = defaultdict(list)
    for trial in trials:
        for place, action in placed_actions(trial):
            seen[place].append(inside_on_baseline(action))
    return {key: float(np.median(values)) for key, values in seen.items()}


class _Section:
    """The sums over one section of a trial."""

    def __init__(self) -> None:
        self.seconds = self.inside = self.unknown_seconds = 0.0
        self.stood_in = self.unknown = 0

    @property
    def orchestration(self) -> float:
        return self.seconds - self.unknown_seconds - self.inside

    @property
    def shown_orchestration(self) -> float:
        """Never below 0: a component of a rollout is not negative."""
        return max(0.0, self.orchestration)

    @property
    def shown_inside(self) -> float:
        return self.seconds - self.unknown_seconds - self.shown_orchestration


def decompose(trial: Trial, *, on_baseline: bool = False, instead: StandIns | None = None) -> TrialComponents:
    """Decompose one trial. ``instead`` has the baseline's times for actions without their own."""
    sections: dict[str, _Section] = defaultdict(_Section)
    for place, action in placed_actions(trial):
        section = sections[place[0]]
        section.seconds += action.seconds
        if on_baseline:
            section.inside += inside_on_baseline(action)
        elif action.inside is not None:
            section.inside += min(max(action.inside, 0.0), action.seconds)
        elif instead and place in instead:
            section.inside += instead[place]
            section.stood_in += 1
        else:
            section.unknown_seconds += action.seconds
            section.unknown += 1
    first, setup, actions = sections["first"], sections["setup"], sections["action"]
    own = min(first.shown_inside, trial.readiness)
    known = trial.creation + trial.readiness + setup.seconds + actions.seconds + trial.cleanup
    return TrialComponents(
        creation=trial.creation,
        readiness=trial.readiness - own,
        setup=setup.shown_inside + setup.unknown_seconds,
        actions=own + actions.shown_inside,
        orchestration=setup.shown_orchestration + actions.shown_orchestration,
        undivided=actions.unknown_seconds,
        cleanup=trial.cleanup,
        unattributed=trial.total - known,
        action_orchestration=actions.orchestration,
        stood_in=actions.stood_in,
        unknown=actions.unknown,
    )


class Decomposer:
    """Decomposes the trials of one set of records, with the times of their baselines as stand-ins."""

    def __init__(self, records: Records) -> None:
        self.baseline = baseline(records)
        self.baselines = baselines(records)
        ran = dict.fromkeys(trial.substrate for trial in records.trials)
        self._on_bare = {label for label in ran if use(records, label) == BARE}
        bare: dict[tuple[str, str, int], dict[int, Trial]] = defaultdict(dict)
        for trial in records.measured:
            if trial.ok and self.baselines.get(trial.substrate) == trial.substrate:
                bare[trial.cell][trial.index] = trial
        self._bare = bare
        self._p50s: dict[tuple[str, str, int], StandIns] = {}

    def stand_in_parallel(self, workload: str, substrate: str, parallel: int) -> int | None:
        """Parallel rollouts of the baseline cell used as stand-in: the same number, else the nearest."""
        wanted = (workload, self.baselines.get(substrate))
        levels = [level for name, label, level in self._bare if (name, label) == wanted]
        return min(levels, key=lambda level: (abs(level - parallel), level), default=None)

    def __call__(self, trial: Trial) -> TrialComponents:
        on_bare = trial.substrate in self._on_bare
        return decompose(trial, on_baseline=on_bare, instead=None if on_bare else self._instead(trial))

    def _instead(self, trial: Trial) -> StandIns:
        level = self.stand_in_parallel(trial.workload, trial.substrate, trial.parallel)
        if level is None:
            return {}
        cell = (trial.workload, self.baselines[trial.substrate], level)
        same_round = self._bare[cell].get(trial.index) if level == trial.parallel else None
        if same_round is not None:
            return {place: inside_on_baseline(action) for place, action in placed_actions(same_round)}
        if cell not in self._p50s:
            self._p50s[cell] = stand_ins(self._bare[cell].values())
        return self._p50s[cell]


_NAME = re.compile(r"(T|[a-z]+-)(\d+)\Z")


def trajectory_length(workload: str) -> int | None:
    """The number of actions of a ``trajectory-N`` or another mix such as ``edit-N``; None for any other."""
    match = _NAME.match(workload)
    return int(match[2]) if match and match[1] != "T" else None


def workload_order(workload: str) -> tuple[int, str, int]:
    """Tiers first, then other workloads, then trajectories by length."""
    match = _NAME.match(workload)
    if not match:
        return (1, workload, 0)
    rank = {"T": 0, "trajectory-": 2}.get(match[1], 1)
    return (rank, match[1], int(match[2]))

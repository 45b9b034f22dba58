"""How many trials a cell has, and in which rounds they run.

The study asks for every round, and the analysis asks afterwards. Both get the same answer, because it depends
on the plan and on the records only.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

import msgspec
from msgspec import Meta

from dutyfree.study.records import Trial

Cell = tuple[str, str, int]
"""Workload, label of the substrate, parallel rollouts."""


class Fewer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A cell whose first measured trial takes so long has at most so many trials."""

    seconds: Annotated[float, Meta(description="a number of seconds")]
    trials: Annotated[int, Meta(description="a number of trials")]


def first_seconds(trials: Iterable[Trial]) -> dict[Cell, float]:
    """Cell → seconds of its first measured trial, which also ended if it failed."""
    return {one.cell: one.total for one in trials if not one.warmup and one.index == 0}


def bounded(wanted: int, fewer: Iterable[Fewer], first: float | None) -> int:
    """The number of trials of a cell whose first one took ``first`` seconds; None if it did not run yet."""
    if first is None:
        return wanted
    return min([wanted, *(rule.trials for rule in fewer if first >= rule.seconds)])


def runs_in(number: int, trials: int, rounds: int) -> bool:
    """Whether a cell runs in this round: its trials are spread evenly over all rounds, from the first."""
    return number * trials % rounds < trials

"""Tails: p99, and the expected time of the slowest of several rollouts.

A synchronous training step waits for the slowest rollout of its group. Its expected time comes from the
distribution of the trials: the i-th smallest of n trials is the largest of G draws with probability
(i/n)^G - ((i-1)/n)^G. If n is not much larger than G, the slowest trial was probably not slow enough.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from dutyfree.analysis.cells import Sample
from dutyfree.analysis.findings import Tail, Wait
from dutyfree.analysis.model import Caution, CautionKind
from dutyfree.analysis.rounds import LEAST_ROUNDS, Rounds, round_of
from dutyfree.analysis.statistics import LEVEL, Estimate, Floats, quantile
from dutyfree.analysis.units import enumeration

GROUPS = (8, 64, 512)
TRIALS_PER_ROLLOUT = 4
"""The expected maximum of G rollouts needs 4·G trials. With fewer it is a lower bound."""


def tail(sample: Sample, rounds: Rounds) -> Tail | None:
    """The tail of one cell; None if no trial succeeded."""
    totals = sample.totals()
    if not totals.size:
        return None
    return Tail(
        *sample.key,
        n=int(totals.size),
        p99=quantile(totals, 0.99),
        waits=[_wait(sample, totals, group, rounds) for group in GROUPS],
    )


def cautions(found: Iterable[Tail]) -> Iterator[Caution]:
    short = sorted({wait.rollouts for one in found for wait in one.waits if wait.at_least})
    if short:
        yield Caution(
            CautionKind.UNSURE_TAIL,
            f"the expected slowest of {enumeration([str(group) for group in short])} rollouts is a lower "
            f"bound where a cell has fewer than {TRIALS_PER_ROLLOUT} times as many trials: its slowest "
            "rollouts were probably not measured",
        )


def _wait(sample: Sample, totals: Floats, group: int, rounds: Rounds) -> Wait:
    order = np.argsort(totals, kind="stable")
    ordered = totals[order]
    value = float(_expected_maximum(ordered, np.ones((1, totals.size)), group)[0])
    blocks = len({round_of(trial) for trial in sample.succeeded})
    if totals.size < TRIALS_PER_ROLLOUT * group or blocks < LEAST_ROUNDS:
        return Wait(group, Estimate(value), at_least=True)
    draws = _expected_maximum(ordered, rounds.counts(sample)[:, order].astype(np.float64), group)
    low, high = np.nanquantile(draws, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Wait(group, Estimate(value, float(low), float(high)), at_least=False)


def _expected_maximum(ordered: Floats, counts: Floats, group: int) -> Floats:
    """In each row of counts; the values are sorted."""
    with np.errstate(invalid="ignore"):
        below = np.cumsum(counts, axis=1) / counts.sum(axis=1, keepdims=True)
    steps = np.diff(below**group, axis=1, prepend=0.0)
    found: Floats = steps @ ordered
    return found

"""The law of a substrate: T = a + b·n + c·w.

n is the number of actions of a rollout, with the first command and the set-up commands. w is the work: the
time inside the same actions on the substrate's baseline. All times are means over the middle half of the
trials by total, because means add up, and one slow trial does not distort them.

b and c come from the single actions, where they are easy to separate: an action that takes w on the baseline
takes b + c·w on the substrate. s is its wall time on the substrate, w₀ the median of w.

1. c is the slope of the line with the least sum of abs(s - b - c·w) / (w + w₀). Neither the many short
   actions nor the few long ones dominate, and odd actions count little.
2. b is the weighted mean of s - c·w, with weights 1 / (w + w₀)²: what the short actions cost beyond their
   work, on average. (A median would leave out the actions that need two round trips.)
3. a has the least sum of abs(T - a - b·n - c·w) / T over the workloads.

In 1 and 2 every workload has the same weight, so long trajectories do not dominate.

A study that stopped early has cells with fewer trials than planned. The fit leaves out the workloads of such
cells that have less than LEAST_ROUNDS rounds. If then fewer than LEAST_LENGTHS lengths are left, there is no
law.

Intervals come from draws of rounds (``rounds``), together with draws of the actions of each workload. So they
also cover that other actions might have been in the workloads.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

import msgspec
import numpy as np

from dutyfree.analysis.cells import Key, Sample
from dutyfree.analysis.decomposition import Place, inside_on_baseline, placed_actions
from dutyfree.analysis.findings import Law, LawPoint
from dutyfree.analysis.model import Caution, CautionKind
from dutyfree.analysis.rounds import LEAST_ROUNDS, Rounds, round_of
from dutyfree.analysis.statistics import LEVEL, SEED, Estimate, Floats
from dutyfree.analysis.units import enumeration, percent

DRAWS = 500
ITERATIONS = 30
WIDEST_C = 0.5
"""If the interval of c is wider, b and c cannot be separated."""
TINY = 1e-9
"""Seconds; instead of 0 in a divisor."""
LEAST_LENGTHS = 3
"""With fewer lengths, a and b fit whatever was measured."""
POOR = 0.1
"""An error that a caution names."""


class _Workload(msgspec.Struct, frozen=True):
    """One workload on a substrate and on its baseline. Row 0 is as observed, the others are draws."""

    name: str
    actions: int
    trials: int
    rounds: int
    total: Floats
    """By row."""
    work: Floats
    """By row: w of the whole rollout."""
    wall: Floats
    """By row and action, for the actions that the baseline ran too."""
    inside: Floats
    """By row and action: w of the action."""


class _Fit(msgspec.Struct, frozen=True):
    """The parameters, by row."""

    a: Floats
    b: Floats
    c: Floats

    def total(self, workload: _Workload) -> Floats:
        found: Floats = self.a + self.b * workload.actions + self.c * workload.work
        return found


class LawDraws(msgspec.Struct, frozen=True):
    """A law with its rows: as observed, then the draws. Row n of two laws is from the same rounds."""

    law: Law
    a: Floats
    b: Floats
    c: Floats
    totals: dict[str, Floats]
    """Workload → its mean total over the middle half."""
    known: bool
    """Whether there are enough rounds for intervals."""
    left_out: list[str]
    """Workloads with too few rounds for the fit."""


def laws(
    by_key: Mapping[Key, Sample],
    baselines: Mapping[str, str],
    rounds: Rounds,
    held_out: Collection[str] = (),
    incomplete: Collection[Key] = (),
) -> list[LawDraws]:
    """The law of every substrate with a baseline, from its workloads that run one rollout at a time.

    ``incomplete``: the cells with fewer trials than planned.
    """
    found = []
    for substrate in dict.fromkeys(key[1] for key in by_key):
        base = baselines.get(substrate)
        if base is None:
            continue
        workloads = [
            one
            for (name, label, parallel), sample in by_key.items()
            if (label, parallel) == (substrate, 1)
            and (bare := by_key.get((name, base, 1))) is not None
            and (one := _workload(sample, bare, rounds)) is not None
        ]
        fitted = [one for one in workloads if one.name not in held_out]
        if any(one.wall.shape[1] for one in fitted):
            rest = [one for one in workloads if one.name in held_out]
            open_workloads = {name for name, label, _ in incomplete if label in (substrate, base)}
            found.append(_supported_law(substrate, base, fitted, rest, open_workloads))
    return found


def cautions(found: Sequence[LawDraws]) -> Iterator[Caution]:
    for one in found:
        law = one.law
        if law.a is None:
            yield Caution(
                CautionKind.TOO_FEW,
                f"the study stopped too early for a law: it needs workloads of {LEAST_LENGTHS} different "
                f"lengths with successful trials in {LEAST_ROUNDS} rounds, here and on {law.baseline}",
                substrate=law.substrate,
            )
            continue
        if one.left_out:
            yield Caution(
                CautionKind.TOO_FEW,
                f"the study stopped early: the law is fitted without {enumeration(one.left_out)}, for which "
                f"there are successful trials in fewer than {LEAST_ROUNDS} rounds",
                substrate=law.substrate,
            )
        if law.c is None:
            yield Caution(
                CautionKind.INSEPARABLE,
                "the actions are too alike, or the times too noisy, to separate the time per action (b) from "
                "the multiplier of the work (c): c is taken as 1",
                substrate=law.substrate,
            )
        points = (*law.fitted, *law.predictions)
        missed = [point.workload for point in points if abs(point.error.value) > POOR]
        if missed:
            yield Caution(
                CautionKind.POOR_FIT,
                f"the law misses {enumeration(missed)} by more than {percent(POOR)}: do not use it to "
                "predict such workloads",
                substrate=law.substrate,
            )


def _workload(sample: Sample, bare: Sample, rounds: Rounds) -> _Workload | None:
    """None if a side has no successful trial."""
    if not sample.succeeded or not bare.succeeded:
        return None
    ours, theirs = _shares(sample, rounds), _shares(bare, rounds)
    wall, inside = _walls(sample), _insides(bare)
    both = [place for place in wall if place in inside]
    # A stage that ran during the creation has another label than the command on bare, but the same kind.
    kinds = {_kind(place) for place in wall if place[0] == "setup"}
    work = [place for place in inside if place in wall or (place[0] == "setup" and _kind(place) in kinds)]
    return _Workload(
        name=sample.key[0],
        actions=len(wall),
        trials=len(sample.succeeded),
        rounds=min(len({round_of(trial) for trial in one.succeeded}) for one in (sample, bare)),
        total=ours @ sample.totals(),
        work=theirs @ _matrix(inside, work, len(bare.succeeded)).sum(axis=1),
        wall=ours @ _matrix(wall, both, len(sample.succeeded)),
        inside=theirs @ _matrix(inside, both, len(bare.succeeded)),
    )


def _kind(place: Place) -> str:
    return place[2].rpartition("-")[0]


def _walls(sample: Sample) -> dict[Place, list[float]]:
    return _columns([{place: one.seconds for place, one in placed_actions(t)} for t in sample.succeeded])


def _insides(bare: Sample) -> dict[Place, list[float]]:
    return _columns(
        [{place: inside_on_baseline(one) for place, one in placed_actions(t)} for t in bare.succeeded]
    )


def _columns(rows: Sequence[Mapping[Place, float]]) -> dict[Place, list[float]]:
    """Place → its seconds in every trial, for the places that all trials have."""
    common = [place for place in rows[0] if all(place in row for row in rows)]
    return {place: [row[place] for row in rows] for place in common}


def _matrix(columns: Mapping[Place, list[float]], places: Sequence[Place], trials: int) -> Floats:
    """Trials by places."""
    if not places:
        return np.zeros((trials, 0))
    return np.array([columns[place] for place in places], dtype=np.float64).T


def _shares(sample: Sample, rounds: Rounds) -> Floats:
    """The share of each trial in the mean over the middle half by total, in each row."""
    order = np.argsort(sample.totals(), kind="stable")
    observed = np.ones((1, order.size), dtype=np.int64)
    counts = np.concatenate([observed, rounds.counts(sample)[:DRAWS]])[:, order]
    # A draw without any trial of the cell counts as observed.
    counts[counts.sum(axis=1) == 0] = 1
    after = np.cumsum(counts, axis=1)
    drawn = after[:, -1:]
    kept = np.clip(after, drawn / 4, drawn * 3 / 4) - np.clip(after - counts, drawn / 4, drawn * 3 / 4)
    shares = np.empty(kept.shape)
    shares[:, order] = kept / kept.sum(axis=1, keepdims=True)
    return shares


def _supported_law(
    substrate: str,
    base: str,
    fitted: Sequence[_Workload],
    rest: Sequence[_Workload],
    open_workloads: Collection[str],
) -> LawDraws:
    """The law, or one without numbers if the study stopped too early for it."""
    left_out = [one.name for one in fitted if one.name in open_workloads and one.rounds < LEAST_ROUNDS]
    kept = [one for one in fitted if one.name not in left_out]
    if not open_workloads or len({one.actions for one in kept}) >= LEAST_LENGTHS:
        return _law(substrate, base, kept, rest, left_out)
    trials = sum(one.trials for one in fitted)
    law = Law(
        substrate=substrate,
        baseline=base,
        a=None,
        b=None,
        c=None,
        trials=trials,
        spread=None,
        fitted=[],
        predictions=[],
    )
    none = np.zeros(0)
    return LawDraws(law, none, none, none, {}, False, left_out)


def _law(
    substrate: str,
    base: str,
    fitted: Sequence[_Workload],
    rest: Sequence[_Workload],
    left_out: list[str],
) -> LawDraws:
    known = min(one.rounds for one in fitted) >= LEAST_ROUNDS
    fit = _fit(fitted, separate=True)
    separable = sum(one.wall.shape[1] for one in fitted) > 2 and _width(fit.c) <= WIDEST_C
    if not separable:
        fit = _fit(fitted, separate=False)
    points = [_point(one, fit) for one in fitted]
    law = Law(
        substrate=substrate,
        baseline=base,
        a=estimate_of(fit.a, known),
        b=estimate_of(fit.b, known),
        c=estimate_of(fit.c, known) if separable else None,
        trials=sum(one.trials for one in fitted),
        spread=float(np.sqrt(np.mean([point.error.value**2 for point in points]))),
        fitted=points,
        predictions=[_point(one, fit) for one in rest],
    )
    totals = {one.name: one.total for one in (*fitted, *rest)}
    return LawDraws(law, fit.a, fit.b, fit.c, totals, known, left_out)


def _fit(workloads: Sequence[_Workload], *, separate: bool) -> _Fit:
    """Fit all rows at once. Without ``separate``, c is 1."""
    wall, inside = (np.concatenate([getattr(one, name) for one in workloads], axis=1) for name in _FIELDS)
    scale = np.maximum(inside + np.median(inside[0]), TINY)
    weights = np.concatenate([_drawn_actions(one) for one in workloads], axis=1) / scale
    c = _least_absolute_slope(inside, wall, weights, scale) if separate else np.ones(wall.shape[0])
    short = weights / scale
    b = (short * (wall - c[:, None] * inside)).sum(axis=1) / short.sum(axis=1)
    totals = np.stack([one.total for one in workloads], axis=1)
    left = [one.total - b * one.actions - c * one.work for one in workloads]
    return _Fit(_weighted_medians(np.stack(left, axis=1), 1 / np.maximum(totals, TINY)), b, c)


_FIELDS = ("wall", "inside")


def _drawn_actions(workload: _Workload) -> Floats:
    """The weight of each action, by row: all alike in row 0, drawn with replacement in the others."""
    rows, actions = workload.wall.shape
    if not actions:
        return np.zeros((rows, 0))
    random = np.random.default_rng([SEED, actions, len(workload.name)])
    drawn = random.multinomial(actions, [1 / actions] * actions, rows).astype(np.float64)
    drawn[0] = 1.0
    found: Floats = drawn / actions
    return found


def _least_absolute_slope(x: Floats, y: Floats, weights: Floats, scale: Floats) -> Floats:
    """The slope of the line with the least weighted absolute deviations, in each row.

    By iteratively reweighted least squares: a residual r gets the weight 1 / r.
    """
    current = weights / scale
    for _ in range(ITERATIONS):
        mass = current.sum(axis=1)
        x_mean, y_mean = ((current * one).sum(axis=1) / mass for one in (x, y))
        spread = (current * (x - x_mean[:, None]) ** 2).sum(axis=1)
        along = (current * (x - x_mean[:, None]) * (y - y_mean[:, None])).sum(axis=1)
        slope = np.divide(along, spread, out=np.ones_like(along), where=spread > 0)
        intercept = y_mean - slope * x_mean
        residuals = np.abs(y - intercept[:, None] - slope[:, None] * x)
        current = weights / np.maximum(residuals, 1e-5 * scale)
    found: Floats = slope
    return found


def _weighted_medians(values: Floats, weights: Floats) -> Floats:
    """The value in each row that minimises the weighted sum of absolute deviations."""
    order = np.argsort(values, axis=1, kind="stable")
    reached = np.cumsum(np.take_along_axis(weights, order, axis=1), axis=1)
    place = np.argmax(reached >= reached[:, -1:] / 2, axis=1)
    found: Floats = np.take_along_axis(values, np.take_along_axis(order, place[:, None], 1), 1)[:, 0]
    return found


def _point(workload: _Workload, fit: _Fit) -> LawPoint:
    known = workload.rounds >= LEAST_ROUNDS
    predicted = fit.total(workload)
    return LawPoint(
        workload=workload.name,
        actions=workload.actions,
        work=float(workload.work[0]),
        trials=workload.trials,
        measured=estimate_of(workload.total, known),
        predicted=estimate_of(predicted, known),
        error=estimate_of(predicted / np.maximum(workload.total, TINY) - 1, known),
    )


def _width(rows: Floats) -> float:
    low, high = _bounds(rows)
    return high - low


def _bounds(rows: Floats) -> tuple[float, float]:
    low, high = np.quantile(rows[1:], [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def estimate_of(rows: Floats, known: bool) -> Estimate:
    """The observed value, and the interval of the draws if it is ``known``."""
    return Estimate(float(rows[0]), *_bounds(rows)) if known else Estimate(float(rows[0]))

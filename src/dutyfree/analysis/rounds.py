"""Rounds are blocks: intervals and tests that resample whole rounds of a study.

Every cell runs once in a round, so a slow minute of the machine affects all substrates of that round. We draw
rounds with replacement, with all their trials, and compute each number again from the drawn rounds. What
affects both sides of a difference or a ratio then cancels out.

The standard error is the standard deviation over the draws. Interval and p both come from it and from
Student's t with (rounds - strata) degrees of freedom, so they always agree: p ≤ 0.05 exactly if the interval
excludes "no difference". Percentiles of the draws would give no p below 1 / draws, which is too coarse to
correct for many comparisons.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable

import msgspec
import numpy as np
import numpy.typing as npt

from dutyfree.analysis.cells import Key, Sample
from dutyfree.analysis.statistics import SEED, Estimate, Floats, t_quantile
from dutyfree.study.records import Trial

DRAWS = 2000
LEAST_ROUNDS = 6
"""With fewer there is no interval and no test."""

Counts = npt.NDArray[np.int64]


class Effect(msgspec.Struct, frozen=True):
    """One sample compared with another, by their p50s."""

    difference: Estimate
    ratio: Estimate | None
    """None if a p50 is not positive."""
    p: float | None
    """Two-sided, of the ratio. None if there is no test."""
    difference_p: float | None


def round_of(trial: Trial) -> int:
    return trial.index // trial.parallel


class Rounds:
    """Draws of the rounds of one study, the same for all of its cells.

    Rounds are drawn within strata: the rounds before the first workload ends, from there to the end of the
    next, and so on. So a workload with few trials keeps about their number in each draw. A stratum with few
    rounds joins its neighbour.
    """

    def __init__(self, cells: Iterable[Sample]) -> None:
        ends: dict[int, dict[str, int]] = defaultdict(dict)
        for sample in cells:
            workload, _, parallel = sample.key
            last = max((round_of(trial) for trial in sample.trials), default=-1)
            ends[parallel][workload] = max(last + 1, ends[parallel].get(workload, 0))
        self._ends = {parallel: _strata(sorted(set(each.values()))) for parallel, each in ends.items()}
        self._counts = {parallel: _drawn(found) for parallel, found in self._ends.items()}
        self._p50s: dict[tuple[Key, str], Floats] = {}

    def counts(self, sample: Sample) -> Counts:
        """How often each successful trial of the cell is in each draw."""
        places = [round_of(trial) for trial in sample.succeeded]
        return self._counts[sample.key[2]][:, places]

    def sizes(self, *samples: Sample) -> tuple[int, int]:
        """The least number of rounds with a success in one of the samples, and the degrees of freedom."""
        rounds = [{round_of(trial) for trial in sample.succeeded} for sample in samples]
        last = max((max(found, default=0) for found in rounds), default=0)
        begins = [0, *self._ends[samples[0].key[2]][:-1]]
        least = min(len(found) for found in rounds)
        return least, max(1, least - sum(begin <= last for begin in begins))

    def p50s(self, sample: Sample, values: Floats, name: str) -> Floats:
        """The p50 in each draw; NaN if a draw has no trial. ``name`` is that of the metric."""
        key = (sample.key, name)
        if key not in self._p50s:
            self._p50s[key] = weighted_p50s(values, self.counts(sample))
        return self._p50s[key]

    def effect(self, one: Sample, base: Sample, values: Floats, others: Floats, name: str) -> Effect | None:
        """Compare the p50 of ``values`` with that of ``others``; None if one of them is empty.

        Swapping the two sides negates the difference and inverts the ratio.
        """
        if not values.size or not others.size:
            return None
        top, bottom = float(np.median(values)), float(np.median(others))
        ratio = top / bottom if top > 0 and bottom > 0 else None
        rounds, freedom = self.sizes(one, base)
        if rounds < LEAST_ROUNDS:
            return Effect(Estimate(top - bottom), None if ratio is None else Estimate(ratio), None, None)
        tops, bottoms = self.p50s(one, values, name), self.p50s(base, others, name)
        difference, difference_p = with_interval(top - bottom, tops - bottoms, rounds, freedom)
        if ratio is None:
            return Effect(difference, None, None, difference_p)
        logs = log_ratios(tops, bottoms)
        if np.isnan(logs).mean() > 0.5:
            return Effect(difference, Estimate(ratio), None, difference_p)
        log, p = with_interval(math.log(top) - math.log(bottom), logs, rounds, freedom)
        assert log.low is not None
        assert log.high is not None
        return Effect(difference, Estimate(ratio, math.exp(log.low), math.exp(log.high)), p, difference_p)

    def mean_difference(self, one: Sample, base: Sample, values: Floats, others: Floats) -> Estimate:
        """The mean of ``values`` minus the mean of ``others``; neither may be empty."""
        value = float(values.mean() - others.mean())
        rounds, freedom = self.sizes(one, base)
        if rounds < LEAST_ROUNDS:
            return Estimate(value)
        draws = _means(values, self.counts(one)) - _means(others, self.counts(base))
        return with_interval(value, draws, rounds, freedom)[0]


def log_ratios(tops: Floats, bottoms: Floats) -> Floats:
    """The logarithm of each ratio; NaN where one of the two is not positive."""
    usable = (tops > 0) & (bottoms > 0)
    found = np.full(tops.shape, np.nan)
    found[usable] = np.log(tops[usable]) - np.log(bottoms[usable])
    return found


def _means(values: Floats, counts: Counts) -> Floats:
    drawn = counts.sum(axis=1)
    found: Floats = np.divide(counts @ values, drawn, out=np.full(drawn.shape, np.nan), where=drawn > 0)
    return found


def with_interval(value: float, draws: Floats, rounds: int, freedom: int) -> tuple[Estimate, float]:
    """The interval, and p of the hypothesis that the true value is 0. See ``Rounds.sizes``."""
    # Resampling n rounds of a stratum understates the variance by (n - 1) / n.
    error = float(np.nanstd(draws)) * math.sqrt(rounds / freedom)
    reach = t_quantile(freedom) * error
    return Estimate(value, value - reach, value + reach), _p(value, error, freedom)


def _p(value: float, error: float, freedom: int) -> float:
    if error == 0:
        return 1.0 if value == 0 else 0.0
    from scipy import special

    return 2 * float(special.stdtr(freedom, -abs(value) / error))


def weighted_p50s(values: Floats, counts: Counts) -> Floats:
    """The p50 of the values in each row of counts, with linear interpolation; NaN for an empty row."""
    order = np.argsort(values, kind="stable")
    ordered = values[order]
    reached = np.cumsum(counts[:, order], axis=1)
    drawn = reached[:, -1]
    places = [np.maximum(drawn - 1, 0) // 2, drawn // 2]
    low, high = (ordered[np.argmax(reached > place[:, None], axis=1)] for place in places)
    middle: Floats = (low + high) / 2
    return np.where(drawn > 0, middle, np.nan)


def _strata(ends: list[int]) -> list[int]:
    """The ends of strata with at least LEAST_ROUNDS rounds; of one stratum if there are not so many."""
    found: list[int] = []
    for end in ends:
        if end - (found[-1] if found else 0) >= LEAST_ROUNDS:
            found.append(end)
    if ends and found[-1:] != ends[-1:]:
        found[-1:] = ends[-1:]
    return found


def _drawn(ends: list[int]) -> Counts:
    """How often each round is in each draw. ``ends`` are the ends of the strata."""
    random = np.random.default_rng([SEED, *ends])
    strata = []
    begin = 0
    for end in ends:
        size = end - begin
        strata.append(random.multinomial(size, [1 / size] * size, DRAWS) if size else np.zeros((DRAWS, 0)))
        begin = end
    return np.concatenate(strata, axis=1).astype(np.int64) if strata else np.zeros((DRAWS, 0), np.int64)

"""Quantiles with bootstrap intervals, their ratios and differences, and significance tests.

The percentile bootstrap of a quantile does not need to resample values: the k-th smallest of n draws with
replacement from n sorted values is the value at rank ⌊n·U⌋, where U is the k-th smallest of n uniform
numbers, which has a Beta distribution. So a resample costs the same for ten trials and for ten thousand. The
seed is fixed: the same input gives the same output everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

LEVEL = 0.95
ALPHA = 0.05
RUN_LEVEL = 0.99
"""For comparisons of runs. They serve as alarms, and one that is wrong once in twenty times is ignored."""
RESAMPLES = 4000
SEED = 0x7A11
LARGEST_LOG = 700.0
"""Ends of intervals of ratios are cut here: a few runs that differ widely give more than a float can hold."""
MOST_PAIRS = 1000
"""More pairs are joined into blocks of neighbours: Walsh averages grow with the square."""


class Estimate(msgspec.Struct, frozen=True):
    """A value, and its 95 % interval if the sample is large enough for one."""

    value: float
    low: float | None = None
    high: float | None = None

    @property
    def known(self) -> bool:
        return self.low is not None and self.high is not None

    def leaves_out(self, value: float) -> bool:
        """Whether the interval excludes ``value``: 1 for a ratio, 0 for a difference."""
        return self.low is not None and self.high is not None and not self.low <= value <= self.high

    def inverse(self) -> Estimate:
        """The inverse of a ratio; all numbers must be positive."""
        return Estimate(
            1 / self.value,
            None if self.high is None else 1 / self.high,
            None if self.low is None else 1 / self.low,
        )

    def scaled(self, factor: float) -> Estimate:
        """The estimate in another unit; ``factor`` must be positive."""
        return Estimate(
            self.value * factor,
            None if self.low is None else self.low * factor,
            None if self.high is None else self.high * factor,
        )


class Quantity(msgspec.Struct, frozen=True):
    """Quantiles, mean and standard deviation of n measurements."""

    n: int
    p50: Estimate
    p95: Estimate
    mean: Estimate
    sd: float | None = None
    """None for a single measurement."""


class Judgement(msgspec.Struct, frozen=True):
    """The comparison of two samples: their ratio, and the p-value of a test."""

    ratio: Estimate | None
    """None if a value is not positive, or a sample is empty."""
    p: float | None
    """Of the two-sided test; None if no outcome could be significant."""
    least_p: float
    """The smallest p that samples of these sizes can give."""


def ratio_of_logs(value: float, low: float, high: float) -> Estimate:
    """The estimate of a ratio from that of its logarithm."""
    return Estimate(
        math.exp(value), *(math.exp(min(max(end, -LARGEST_LOG), LARGEST_LOG)) for end in (low, high))
    )


def as_sample(values: Sequence[float] | Floats) -> Floats:
    return np.asarray(values, dtype=np.float64)


def quantity(values: Sequence[float] | Floats) -> Quantity | None:
    sample = np.sort(as_sample(values))
    if not sample.size:
        return None
    return Quantity(
        int(sample.size), _estimate(sample, 0.5), _estimate(sample, 0.95), mean(sample), _sd(sample)
    )


def mean(values: Sequence[float] | Floats) -> Estimate:
    """The mean of independent values, with the interval of Student's t."""
    sample = as_sample(values)
    value = float(sample.mean())
    if sample.size < 2:
        return Estimate(value)
    reach = t_quantile(sample.size - 1) * float(sample.std(ddof=1)) / math.sqrt(sample.size)
    return Estimate(value, value - reach, value + reach)


@lru_cache(maxsize=512)
def t_quantile(freedom: float) -> float:
    """How many standard errors an interval reaches on each side."""
    from scipy import special

    return float(special.stdtrit(freedom, (1 + LEVEL) / 2))


def _sd(sample: Floats) -> float | None:
    return float(sample.std(ddof=1)) if sample.size > 1 else None


def point(values: Sequence[float] | Floats) -> Quantity | None:
    """The same without intervals, for values that are not independent."""
    sample = as_sample(values)
    if not sample.size:
        return None
    middle, tail = np.quantile(sample, [0.5, 0.95])
    return Quantity(
        int(sample.size),
        Estimate(float(middle)),
        Estimate(float(tail)),
        Estimate(float(sample.mean())),
        _sd(sample),
    )


def quantile(values: Sequence[float] | Floats, q: float) -> Estimate:
    """Any quantile of a sample that is not empty."""
    return _estimate(np.sort(as_sample(values)), q)


def p50(values: Sequence[float] | Floats) -> Estimate | None:
    sample = np.sort(as_sample(values))
    return _estimate(sample, 0.5) if sample.size else None


def judge_pairs(values: Sequence[float] | Floats, base: Sequence[float] | Floats) -> Judgement:
    """Compare values with base, where ``values[i]`` and ``base[i]`` were measured in the same round.

    The ratio is the Hodges-Lehmann estimate over the logarithms of the pairs. Interval and p come from
    Wilcoxon's signed-rank test, so they agree with each other. Anything that slows both halves of a pair
    cancels out. If there is no difference, the test is wrong in at most 5 % of cases, for any distribution
    of the noise, because the order within a pair is random. Swapping the two sides inverts the result.
    """
    a, b = as_sample(values), as_sample(base)
    if not a.size or min(a.min(), b.min()) <= 0:
        return Judgement(None, None, 1.0)
    logs = np.log(a) - np.log(b)
    if logs.size > MOST_PAIRS:
        logs = as_sample([float(np.median(block)) for block in np.array_split(logs, MOST_PAIRS)])
    count = logs.size
    least = min(1.0, 2.0 ** (1 - count))
    first, second = np.triu_indices(count)
    walsh = np.sort((logs[first] + logs[second]) / 2)
    value = math.exp(np.median(walsh))
    below = _signed_rank(count)
    outside = int(np.searchsorted(below, (1 - LEVEL) / 2, side="right"))
    if not outside:
        return Judgement(Estimate(value), None, least)
    # The rank sum of one sign is the number of Walsh averages of that sign. Zeros count on both sides.
    rarer = min(int(np.sum(walsh >= 0)), int(np.sum(walsh <= 0)))
    p = min(1.0, 2 * float(below[min(rarer, below.size - 1)]))
    interval = Estimate(value, math.exp(walsh[outside - 1]), math.exp(walsh[-outside]))
    return Judgement(interval, p, least)


@lru_cache(maxsize=64)
def _signed_rank(count: int) -> Floats:
    """P(W ≤ w) of Wilcoxon's signed-rank sum over ``count`` pairs, for w = 0, 1, 2, ..."""
    shares = np.ones(1)
    for rank in range(1, count + 1):
        shares = (np.pad(shares, (0, rank)) + np.pad(shares, (rank, 0))) / 2
    return np.cumsum(shares)


def judge_runs(values: Sequence[float] | Floats, base: Sequence[float] | Floats) -> Judgement:
    """Compare values with base, where each value is the p50 of one run.

    Welch's t-test over the logarithms, with an interval of RUN_LEVEL. Only the variation between the runs
    counts, not the number of trials in each. The variation of a single run is unknown, so there is no
    interval then. A bootstrap over so few runs would give intervals that are much too narrow.
    """
    a, b = as_sample(values), as_sample(base)
    if not a.size or not b.size or min(a.min(), b.min()) <= 0:
        return Judgement(None, None, 1.0)
    x, y = np.log(a), np.log(b)
    shift = float(x.mean() - y.mean())
    parts = [float(one.var(ddof=1)) / one.size if one.size > 1 else 0.0 for one in (x, y)]
    if min(a.size, b.size) < 2 or not sum(parts):
        return Judgement(Estimate(math.exp(shift)), None, 1.0)
    from scipy import stats

    error = math.sqrt(sum(parts))
    freedom = sum(parts) ** 2 / (parts[0] ** 2 / (a.size - 1) + parts[1] ** 2 / (b.size - 1))
    reach = error * float(stats.t.ppf((1 + RUN_LEVEL) / 2, freedom))
    p = 2 * float(stats.t.sf(abs(shift) / error, freedom))
    return Judgement(ratio_of_logs(shift, shift - reach, shift + reach), p, 0.0)


def holm(ps: Sequence[float | None]) -> list[float | None]:
    """Holm's step-down correction over all tests; None stays None."""
    made = sorted((p, place) for place, p in enumerate(ps) if p is not None)
    corrected: list[float | None] = [None] * len(ps)
    floor = 0.0
    for rank, (p, place) in enumerate(made):
        floor = max(floor, min(1.0, p * (len(made) - rank)))
        corrected[place] = floor
    return corrected


def drift(values: Sequence[float] | Floats) -> tuple[float, float]:
    """Spearman's correlation between the values and their order, and its p."""
    from scipy import stats

    sample = as_sample(values)
    if sample.size < 3 or np.all(sample == sample[0]):
        return 0.0, 1.0
    test: Any = stats.spearmanr(np.arange(sample.size), sample)
    return float(test.statistic), float(test.pvalue)


def dispersion(values: Sequence[float] | Floats) -> float:
    """The interquartile range divided by the median."""
    low, middle, high = np.quantile(as_sample(values), [0.25, 0.5, 0.75])
    return float((high - low) / middle) if middle > 0 else 0.0


def _estimate(sample: Floats, q: float) -> Estimate:
    value = float(np.quantile(sample, q))
    return _with_interval(value, _replicates(sample, q, 0)) if sample.size > 1 else Estimate(value)


def _with_interval(value: float, replicates: Floats) -> Estimate:
    tail = (1 - LEVEL) / 2
    low, high = np.quantile(replicates, [tail, 1 - tail])
    return Estimate(value, float(low), float(high))


def _replicates(ordered: Floats, q: float, stream: int) -> Floats:
    """The quantile in each of RESAMPLES resamples of a sorted sample."""
    below, above, weight = _ranks(ordered.size, q, stream)
    low: Floats = ordered[below]
    return low + weight * (ordered[above] - low)


@lru_cache(maxsize=512)
def _ranks(n: int, q: float, stream: int) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp], float]:
    """Ranks in the sample of the two order statistics around the quantile, in each resample."""
    place = (n - 1) * q
    k = math.floor(place)
    random = np.random.default_rng([SEED, n, round(q * 1000), stream])
    lower = random.beta(k + 1, n - k, RESAMPLES)
    # Given the (k+1)-th smallest uniform number, the next is the smallest of the n-k-1 numbers above it.
    upper = lower + (1 - lower) * random.beta(1, n - k - 1, RESAMPLES) if k + 1 < n else lower
    ranks = [np.minimum((u * n).astype(np.intp), n - 1) for u in (lower, upper)]
    for rank in ranks:
        rank.setflags(write=False)
    return ranks[0], ranks[1], place - k

"""Quantiles, intervals, ratios and tests, against numpy, brute force and arithmetic."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy import stats

from dutyfree.analysis import statistics
from dutyfree.analysis.statistics import drift, holm, judge_pairs, judge_runs, quantity


def bounds(estimate: statistics.Estimate) -> tuple[float, float]:
    assert estimate.low is not None
    assert estimate.high is not None
    return estimate.low, estimate.high


positive = st.floats(1e-6, 1e4, allow_nan=False)
samples = st.lists(positive, min_size=1, max_size=60)


@given(samples)
def test_quantiles_are_those_of_numpy_and_lie_within_their_intervals(values):
    found = quantity(values)
    assert found is not None
    assert found.n == len(values)
    for estimate, q in ((found.p50, 0.5), (found.p95, 0.95)):
        assert estimate.value == pytest.approx(np.quantile(values, q))
        if len(values) > 1:
            low, high = bounds(estimate)
            assert min(values) * (1 - 1e-12) <= low <= high <= max(values) * (1 + 1e-12)


@given(samples)
def test_the_same_values_in_any_order_give_the_same_intervals(values):
    assert quantity(values) == quantity(list(reversed(values)))


def test_one_value_has_no_interval_and_none_has_no_quantity():
    found = quantity([2.0])
    assert found is not None
    assert not found.p50.known
    assert quantity([]) is None


@pytest.mark.parametrize("n", [2, 3, 5, 20, 101])
@pytest.mark.parametrize("q", [0.5, 0.95])
def test_replicates_are_distributed_like_those_of_plain_resampling(n, q):
    values = np.sort(np.random.default_rng(n).lognormal(0, 1, n))
    quick = statistics._replicates(values, q, 0)
    random = np.random.default_rng(7)
    plain = np.quantile(values[random.integers(0, n, (20_000, n))], q, axis=1)
    for share in (0.025, 0.25, 0.5, 0.75, 0.975):
        # Compared as ranks: a quantile of few values jumps.
        within = np.quantile(plain, [max(0.0, share - 0.03), min(1.0, share + 0.03)])
        assert within[0] - 1e-9 <= np.quantile(quick, share) <= within[1] + 1e-9


def test_intervals_cover_the_true_median_about_as_often_as_they_say():
    random = np.random.default_rng(3)
    found = [quantity(random.exponential(1.0, 40)) for _ in range(400)]
    covered = sum(one.p50.low <= np.log(2) <= one.p50.high for one in found if one)
    assert 0.90 <= covered / 400 <= 0.99


@given(samples, positive)
def test_scaling_scales_the_interval(values, factor):
    plain, scaled = quantity(values), quantity([value * factor for value in values])
    assert plain is not None
    assert scaled is not None
    assert scaled.p50.value == pytest.approx(plain.p50.scaled(factor).value)
    if plain.p50.known:
        assert scaled.p50.low == pytest.approx(plain.p50.scaled(factor).low)


@given(st.lists(st.one_of(st.none(), st.floats(0, 1)), max_size=12))
def test_holm_only_raises_and_keeps_the_order(ps):
    corrected = holm(ps)
    pairs = [(p, c) for p, c in zip(ps, corrected, strict=True) if p is not None and c is not None]
    assert [c is None for c in corrected] == [p is None for p in ps]
    assert all(p <= c <= 1 for p, c in pairs)
    assert [c for _, c in sorted(pairs)] == sorted(c for _, c in pairs)


def test_holm_by_hand():
    assert holm([0.01, None, 0.04, 0.03]) == pytest.approx([0.03, None, 0.06, 0.06])


def test_drift_sees_a_trend_and_no_trend():
    assert drift(list(range(20)))[0] == pytest.approx(1)
    assert drift([1.0] * 20) == (0.0, 1.0)


@given(st.lists(st.tuples(positive, positive), min_size=1, max_size=30))
def test_the_judgement_of_pairs_is_that_of_the_signed_rank_test(pairs):
    a, b = zip(*pairs, strict=True)
    found, back = judge_pairs(a, b), judge_pairs(b, a)
    assert found.ratio is not None
    assert back.ratio is not None
    assert found.ratio.value * back.ratio.value == pytest.approx(1)
    assert (found.p is None) == (len(pairs) < 6)
    logs = np.log(a) - np.log(b)
    if found.p is not None:
        assert found.p == pytest.approx(back.p)
        low, high = bounds(found.ratio)
        assert low <= found.ratio.value <= high
        assert found.p > 0.05 or low > 1 or high < 1
        if np.unique(np.round(np.abs(logs), 9)).size == logs.size and logs.all():
            assert found.p == pytest.approx(stats.wilcoxon(logs, method="exact").pvalue)


def test_very_many_pairs_are_judged_in_blocks():
    random = np.random.default_rng(7)
    shared = random.lognormal(0, 1, 5000)
    ours, theirs = (shared * random.lognormal(0, 0.05, 5000) for _ in range(2))
    found = judge_pairs(1.01 * ours, theirs)
    assert found.ratio is not None
    low, high = bounds(found.ratio)
    assert 1 < low < 1.01 < high < 1.02


@given(st.lists(positive, min_size=2, max_size=8), st.lists(positive, min_size=2, max_size=8))
def test_the_judgement_of_runs_is_that_of_welch(a, b):
    assume(min(np.std(np.log(a)), np.std(np.log(b))) > 1e-3)
    found = judge_runs(a, b)
    wanted = stats.ttest_ind(np.log(a), np.log(b), equal_var=False)
    assert found.ratio is not None
    assert found.p == pytest.approx(wanted.pvalue, abs=1e-9)
    low, high = bounds(found.ratio)
    interval = np.clip(wanted.confidence_interval(statistics.RUN_LEVEL), -700, 700)  # what a float can hold
    assert (np.log(low), np.log(high)) == pytest.approx(tuple(interval), abs=1e-6)


@pytest.mark.parametrize(("a", "b"), [([1.0], [2.0]), ([1.0], [2.0, 3.0]), ([1.0, 1.0], [2.0, 2.0])])
def test_runs_without_scatter_have_a_ratio_and_no_interval(a, b):
    found = judge_runs(a, b)
    assert found.ratio is not None
    assert not found.ratio.known
    assert found.p is None


@pytest.mark.parametrize("judgement", [judge_pairs, judge_runs])
def test_what_is_not_positive_has_no_ratio(judgement):
    assert judgement([0.0, 1.0], [1.0, 1.0]).ratio is None
    assert judgement([], []).ratio is None

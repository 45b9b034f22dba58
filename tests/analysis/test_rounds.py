"""Rounds as blocks, the A/A control, and what may be called a difference."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dutyfree.analysis.cells import samples
from dutyfree.analysis.decomposition import Decomposer
from dutyfree.analysis.model import CautionKind
from dutyfree.analysis.rounds import Effect, Rounds, weighted_p50s
from dutyfree.analysis.summary import decode, encode, summarise
from dutyfree.analysis.tails import GROUPS
from dutyfree.study.records import Records
from tests.analysis.synthetic import action, cold, facts, records, study, trial

positive = st.floats(1e-3, 1e3)
times = st.lists(positive, min_size=1, max_size=25)


def effect(a: list[float], b: list[float]) -> Effect:
    """A compared with b, round by round."""
    content = records(*cold("bare", b), *cold("docker", a))
    by_key = samples(content, Decomposer(content))
    one, base = by_key["T0", "docker", 1], by_key["T0", "bare", 1]
    found = Rounds(by_key.values()).effect(one, base, one.totals(), base.totals(), "total")
    assert found is not None
    return found


@settings(max_examples=25)
@given(times, times)
def test_swapping_the_sides_inverts_the_effect(a, b):
    there, back = effect(a, b), effect(b, a)
    assert there.ratio is not None
    assert back.ratio is not None
    assert there.difference.value == pytest.approx(-back.difference.value)
    assert there.ratio.value * back.ratio.value == pytest.approx(1)
    assert there.p == pytest.approx(back.p)
    if there.ratio.low is not None and back.ratio.high is not None:
        assert there.ratio.low * back.ratio.high == pytest.approx(1)


@settings(max_examples=25)
@given(times, times)
def test_the_test_agrees_with_the_interval(a, b):
    found = effect(a, b)
    assert found.ratio is not None
    assert (found.p is None) == (min(len(a), len(b)) < 6) == (not found.ratio.known)
    if found.p is not None and found.difference_p is not None and abs(found.ratio.value - 1) > 1e-9:
        assert (found.p < 0.05) == found.ratio.leaves_out(1)
        assert (found.difference_p < 0.05) == found.difference.leaves_out(0)


@given(st.lists(positive, min_size=1, max_size=9), st.data())
def test_the_p50_of_a_draw_is_that_of_its_values(values, data):
    counts = data.draw(st.lists(st.integers(0, 3), min_size=len(values), max_size=len(values)))
    drawn = [value for value, count in zip(values, counts, strict=True) for _ in range(count)]
    (found,) = weighted_p50s(np.array(values), np.array([counts]))
    assert found == pytest.approx(np.median(drawn)) if drawn else np.isnan(found)


def test_intervals_cover_the_truth_and_pairing_narrows_them():
    random = np.random.default_rng(5)
    covered, narrower = 0, 0
    for _ in range(40):
        shared = random.lognormal(0, 0.3, 20)
        a, b = (shared * random.lognormal(0, 0.02, 20) for _ in range(2))
        paired, apart = effect(list(1.1 * a), list(b)), effect(list(1.1 * a), list(random.permutation(b)))
        assert paired.ratio is not None
        assert apart.ratio is not None
        covered += not paired.ratio.leaves_out(1.1)
        assert paired.ratio.high is not None
        assert apart.ratio.high is not None
        narrower += paired.ratio.high < apart.ratio.high
    assert covered >= 36
    assert narrower >= 36


def test_intervals_do_not_narrow_because_other_workloads_end_earlier():
    """Their ends divide the rounds into strata."""
    random = np.random.default_rng(11)
    covered = 0
    for _ in range(100):
        a, b = ([float(x) for x in random.lognormal(0, 0.1, 12)] for _ in range(2))
        others = [one for n in (6, 8, 10) for one in cold("bare", [1.0] * n, f"trajectory-{n}")]
        content = records(*cold("bare", b), *cold("docker", a), *others)
        by_key = samples(content, Decomposer(content))
        one, base = by_key["T0", "docker", 1], by_key["T0", "bare", 1]
        assert Rounds(by_key.values()).sizes(one, base) == (12, 10)
        found = Rounds(by_key.values()).mean_difference(one, base, one.totals(), base.totals())
        covered += not found.leaves_out(0)
    assert covered >= 90


def test_two_trials_show_nothing_whatever_they_are():
    made = summarise(records(*cold("bare", [1.0, 1.01]), *cold("docker", [1.9, 1.95])))
    (tax,), (spread,) = made.taxes, made.spreads
    assert not tax.shown
    assert not tax.seconds.known
    assert not spread.shown
    assert spread.ratio is not None
    assert not spread.ratio.known
    assert all(not row.shown and row.p is None for row in made.ratios)


def test_parallel_rollouts_of_a_round_are_one_block():
    """Eight at once that share the noise of their batch are no more than one observation."""
    random = np.random.default_rng(2)

    def batches() -> list[float]:
        return [float(x) for x in np.repeat(random.lognormal(0, 0.2, 4), 8)]

    content = records(*cold("bare", batches(), parallel=8), *cold("docker", batches(), parallel=8))
    (tax,) = summarise(content).taxes
    assert not tax.seconds.known  # 32 trials, but 4 rounds


def controlled(difference: float, noise: float = 1.0, rounds: int = 30, seed: int = 3) -> Records:
    """bare, its twin that is ``noise`` times as slow, and docker."""
    random = np.random.default_rng(seed)
    labels = {"bare": 1.0, "again": noise, "docker": difference}
    return records(
        *(
            one
            for label, factor in labels.items()
            for one in cold(label, [float(x) for x in factor * random.lognormal(0, 0.01, rounds)])
        ),
        study=study(plan={"substrates": list(labels), "options": {"again": {"use": "bare"}}}),
        substrates={label: facts(label, use="docker" if label == "docker" else "bare") for label in labels},
    )


def test_the_twin_is_a_control_and_not_a_substrate():
    made = summarise(controlled(2.0))
    assert made.controls == ["again"]
    assert [cell.substrate for cell in made.lone("T0")] == ["bare", "docker"]
    assert {row.substrate for row in made.taxes} == {"docker"}
    assert {row.substrate for row in made.projections} == {row.substrate for row in made.tails}
    assert "again" not in {row.substrate for row in made.projections}
    assert {(row.substrate, row.base) for row in made.ratios} == {("docker", "bare")}
    floor = next(row for row in made.noise_floor if row.metric == "total")
    assert (floor.substrate, floor.twin) == ("bare", "again")
    assert floor.ratio.value == pytest.approx(1, abs=0.02)
    assert 0 < floor.share < 0.03
    assert CautionKind.NO_CONTROL not in {one.kind for one in made.cautions}
    assert decode(encode(made)) == made


def test_no_difference_within_the_noise_floor_is_called_one():
    quiet, noisy = summarise(controlled(1.05)), summarise(controlled(1.05, noise=1.1))
    (shown,), (hidden,) = quiet.taxes, noisy.taxes
    assert shown.shown
    assert shown.why == ""
    assert hidden.seconds.leaves_out(0)
    assert (hidden.shown, hidden.why) == (False, "below the noise floor")
    assert not any(row.shown for row in noisy.ratios)
    assert not any(row.shown for row in noisy.spreads)
    assert summarise(controlled(1.5, noise=1.1)).taxes[0].shown


def test_orchestration_around_0_has_no_ratio_that_breaks():
    """Stand-ins can be longer than the wall time, so the orchestration of a round can be below 0."""
    random = np.random.default_rng(6)
    labels = ["bare", "box", "again"]

    def rollout(label: str, index: int):
        wall = float(random.lognormal(0, 0.1))
        return trial("T1", label, index, actions=(action("x", wall),))

    content = records(
        *(rollout(label, index) for index in range(12) for label in labels),
        study=study(plan={"substrates": labels, "options": {"again": {"use": "docker"}}}),
        substrates={label: facts(label, use="bare" if label == "bare" else "docker") for label in labels},
    )
    made = summarise(content)
    assert made.controls == ["again"]
    (cell,) = [one for one in made.cells if one.substrate == "box"]
    assert cell.orchestration_per_action is not None
    assert not cell.orchestration_per_action.p50.leaves_out(0)


def test_the_expected_maximum_is_that_of_a_group():
    random = np.random.default_rng(4)
    values = [float(x) for x in random.exponential(1.0, 400)]
    made = summarise(records(*cold("bare", values)))
    (tail,) = made.tails
    assert tail.p99.value == pytest.approx(np.quantile(values, 0.99))
    groups = random.choice(values, (4000, 8)).max(axis=1)
    eight, many, most = tail.waits
    assert [wait.rollouts for wait in tail.waits] == list(GROUPS)
    assert eight.seconds.value == pytest.approx(groups.mean(), rel=0.03)
    # The expected maximum of 8 is 1 + 1/2 + ... + 1/8.
    assert not eight.seconds.leaves_out(sum(1 / n for n in range(1, 9)))
    assert (eight.at_least, many.at_least, most.at_least) == (False, False, True)
    assert not most.seconds.known
    bound = [one.text for one in made.cautions if one.kind == CautionKind.UNSURE_TAIL]
    assert bound == [
        "the expected slowest of 512 rollouts is a lower bound where a cell has fewer than 4 times "
        "as many trials: its slowest rollouts were probably not measured"
    ]
    assert most.seconds.value <= max(values)

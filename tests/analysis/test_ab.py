"""``dutyfree ab``: verdicts on synthetic rounds with a known difference."""

from __future__ import annotations

import numpy as np
import pytest

from dutyfree.analysis.ab import compare_rounds
from dutyfree.analysis.comparison import as_markdown
from dutyfree.analysis.model import CautionKind
from dutyfree.contract.errors import RecordsError
from dutyfree.study.records import Records, TrialFailure
from tests.analysis.synthetic import action, cold, facts, records, study, trial

LABELS = ["one", "two"]


def measured(*trials, labels=LABELS, **more) -> Records:
    return records(*trials, study=study(plan={"substrates": labels}), **more)


def sides(random: np.random.Generator, rounds: int, shift: float) -> Records:
    """What slows both wanders by far more than the trials of a round differ, and jumps at times."""
    shared = np.exp(np.cumsum(random.normal(0, 0.1, rounds)) + 0.7 * (random.random(rounds) < 0.1))
    ours, theirs = (shared * random.lognormal(0, 0.03, rounds) for _ in range(2))
    return measured(*cold("one", list(ours)), *cold("two", list(shift * theirs)))


def verdicts(made: Records) -> dict[str, str]:
    return {change.metric: change.verdict for change in compare_rounds(made).changes}


def test_the_same_thing_twice_is_not_told_apart():
    random = np.random.default_rng(1)
    for rounds in (8, 20, 40):
        found = [verdicts(sides(random, rounds, 1.0)) for _ in range(60)]
        wrong = sum(bool({"slower", "faster"} & set(one.values())) for one in found)
        assert wrong <= 7, f"{wrong} of 60 with {rounds} rounds"


def test_a_shift_of_a_twentieth_is_found_within_weather_that_doubles_the_times():
    random = np.random.default_rng(2)
    for shift, wanted in ((1.05, "slower"), (1 / 1.05, "faster")):
        found = [verdicts(sides(random, 40, shift))["total"] for _ in range(30)]
        assert found.count(wanted) >= 28
        assert not {"slower", "faster"} - {wanted} & set(found)


def test_the_ratio_and_its_interval_are_those_of_the_truth():
    random = np.random.default_rng(3)
    within = 0
    for _ in range(60):
        (total,) = (one for one in compare_rounds(sides(random, 20, 1.3)).changes if one.metric == "total")
        assert total.ratio is not None
        assert total.ratio.low is not None
        assert total.ratio.high is not None
        assert total.ratio.value == pytest.approx(1.3, rel=0.1)
        within += total.ratio.low <= 1.3 <= total.ratio.high
    assert within >= 52


def test_few_rounds_and_much_noise_cannot_tell():
    few = compare_rounds(measured(*cold("one", [1.0, 1.1, 1.2]), *cold("two", [9.0, 9.1, 9.2])))
    assert {(change.verdict, change.why) for change in few.changes} == {("cannot tell", "too few rounds")}
    random = np.random.default_rng(4)
    ours, theirs = (list(random.lognormal(0, 1.0, 20)) for _ in range(2))
    noisy = compare_rounds(measured(*cold("one", ours), *cold("two", theirs)))
    assert {(change.verdict, change.why) for change in noisy.changes} == {("cannot tell", "too noisy")}
    assert "T0: cannot tell, too noisy: B ÷ A is" in as_markdown(noisy)
    assert "the interval could hide a difference" in as_markdown(noisy)


def test_equal_times_show_no_difference():
    found = compare_rounds(measured(*cold("one", [1.0] * 12), *cold("two", [1.0] * 12)))
    assert {change.verdict for change in found.changes} == {"no difference shown"}
    assert {change.p for change in found.changes} == {1.0}


def test_rounds_are_matched_by_their_number_and_failures_leave_theirs_out():
    """B failed in every second round, in which A was a hundred times slower: those must not be used."""
    slow = [1.0 if number % 2 else 100.0 for number in range(24)]
    broken = TrialFailure("task", "exec", "no")
    theirs = [
        trial("T0", "two", number, creation=0.6, readiness=0.3, cleanup=0.1, total=1.0)
        if number % 2
        else trial("T0", "two", number, failure=broken)
        for number in range(24)
    ]
    found = compare_rounds(measured(*cold("one", slow), *reversed(theirs)))
    for change in found.changes:
        assert (change.units_a, change.units_b) == (12, 12)
        assert (change.n_a, change.n_b) == (24, 12)
        assert change.verdict == "no difference shown"
    assert [(one.failed_a, one.failed_b) for one in found.failures] == [(0, 12)]


def test_rollouts_at_once_count_as_one_round():
    random = np.random.default_rng(5)
    trials = [one for label in LABELS for one in cold(label, list(random.lognormal(0, 0.05, 32)), parallel=4)]
    assert {change.units_b for change in compare_rounds(measured(*trials)).changes} == {8}


def test_bare_twice_is_taken_apart_alike():
    """A file action on bare has no environment around it, whatever the label of bare."""
    random = np.random.default_rng(6)
    trials = [
        trial(
            "T1",
            label,
            number,
            creation=0.01,
            actions=(
                action("write", float(random.lognormal(0, 0.1)), kind="modify"),
                action("true", 1.0, inside=0.9 * float(random.uniform(0.99, 1.0))),
            ),
        )
        for number in range(20)
        for label in LABELS
    ]
    both = {label: facts(label, use="bare") for label in LABELS}
    found = verdicts(measured(*trials, substrates=both))
    assert found["orchestration_per_action"] == "no difference shown"


def test_cautions_of_the_cells_stand_beside_the_numbers_and_those_of_a_tax_are_left_out():
    scattered = [1.0, 9.0] * 10
    found = compare_rounds(measured(*cold("one", [1.0] * 20), *cold("two", scattered)))
    assert all(CautionKind.UNSTABLE in change.cautions for change in found.changes)
    assert not {CautionKind.NO_BASELINE, CautionKind.CACHE} & {one.kind for one in found.cautions}


def test_times_that_stood_in_qualify_the_orchestration_alone():
    inside = [
        trial("T1", label, number, creation=0.1, actions=(action(seconds=0.2, inside=own),))
        for label, own in (("bare", 0.1), ("two", None))
        for number in range(20)
    ]
    found = compare_rounds(measured(*inside, labels=["bare", "two"]))
    stood_in = {one.metric for one in found.changes if CautionKind.STAND_IN in one.cautions}
    assert stood_in == {"orchestration_per_action"}


def test_a_study_without_an_a_and_a_b_is_refused():
    with pytest.raises(RecordsError, match="3 substrates"):
        compare_rounds(measured(*cold("one", [1.0]), labels=["one", "two", "three"]))


def test_what_was_measured_on_one_side_only_is_told():
    both = (*cold("one", [1.0] * 8), *cold("two", [1.0] * 8))
    found = compare_rounds(measured(*both, *cold("one", [1.0] * 8, "T1")))
    assert found.only_a == [("T1", "one", 1)]
    assert found.only_b == []
    assert "only in A: T1 on one" in as_markdown(found)

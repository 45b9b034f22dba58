"""``dutyfree compare``: verdicts on synthetic runs with a known difference."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dutyfree.analysis.comparison import as_markdown, compare
from dutyfree.analysis.model import CautionKind
from dutyfree.contract.errors import RecordsError
from dutyfree.study.records import Records, Session, TrialFailure
from tests.analysis.synthetic import cold, facts, plausible, records, study, trial


def verdicts(comparison):
    return {(one.workload, one.substrate, one.metric): one.verdict for one in comparison.changes}


def at(minute: int, made: Records) -> Records:
    """The same, begun at another time."""
    begun = f"2026-01-02T03:{minute:02}:00+00:00"
    return msgspec.structs.replace(made, study=msgspec.structs.replace(made.study, started=begun))


def in_turn(before: list[Records], after: list[Records]) -> tuple[list[Records], list[Records]]:
    """As if the runs had been taken in turn: A, B, A, B, ..."""
    ours = [at(2 * number, made) for number, made in enumerate(before)]
    return ours, [at(2 * number + 1, made) for number, made in enumerate(after)]


def drifting(random: np.random.Generator, runs: int, shift: float = 1.0) -> list[Records]:
    """Runs of T0 that differ by a tenth from one another, each of 30 trials that scatter by a fiftieth."""
    return [
        records(*cold("bare", list(shift * random.lognormal(0, 0.1) * random.lognormal(0, 0.02, 30))))
        for _ in range(runs)
    ]


def rough(verdict: str) -> bool:
    return verdict in ("slower", "faster")


def test_a_slower_substrate_is_called_slower_and_the_like_is_not():
    def runs(*seeds, slower=1.0):
        return [plausible(lengths=(10,), tiers=("T0",), trials=30, slower=slower, seed=n) for n in seeds]

    before, after = in_turn(runs(1, 2, 3), runs(4, 5, 6, slower=1.5))
    found = verdicts(compare(before, after))
    assert found["T0", "docker", "total"] == "slower"
    assert found["trajectory-10", "docker", "orchestration_per_action"] == "slower"
    assert verdicts(compare(after, before))["T0", "docker", "total"] == "faster"
    again = compare(*in_turn(runs(1, 2, 3), runs(7, 8, 9)))
    assert not {"slower", "faster"} & set(verdicts(again).values())
    assert verdicts(again)["trajectory-10", "docker", "total"] == "no difference shown"


def test_runs_of_the_same_thing_that_differ_do_not_cry_wolf():
    """Their trials alone would tell every two of them apart. One verdict in twenty may be wrong."""
    random = np.random.default_rng(3)
    for runs in (2, 3, 5):
        found = [compare(drifting(random, runs), drifting(random, runs)) for _ in range(40)]
        wrong = sum(any(rough(change.verdict) for change in one.changes) for one in found)
        assert wrong <= 6, f"{wrong} of 40 with {runs} runs a side"


def test_a_difference_larger_than_runs_differ_is_found():
    random = np.random.default_rng(4)
    found = [compare(drifting(random, 5), drifting(random, 5, shift=1.6)) for _ in range(20)]
    assert sum(verdicts(one)["T0", "bare", "total"] == "slower" for one in found) >= 18


@pytest.mark.parametrize(("before", "after"), [(1, 1), (1, 4), (4, 1)])
def test_one_run_on_a_side_cannot_tell_whatever_it_shows(before, after):
    random = np.random.default_rng(5)
    found = compare(drifting(random, before), drifting(random, after, shift=100.0))
    for change in found.changes:
        assert (change.verdict, change.why, change.p) == ("cannot tell", "too few runs", None)
        assert change.ratio is not None
        assert change.ratio.value == pytest.approx(100, rel=0.6)
        assert not change.ratio.known
        assert CautionKind.FEW_RUNS in change.cautions
    assert "dutyfree ab" in as_markdown(found)


def test_noisy_runs_cannot_tell_rather_than_show_no_difference():
    before = [records(*cold("bare", [value] * 9)) for value in (1.0, 2.0, 3.0)]
    after = [records(*cold("bare", [value] * 9)) for value in (1.1, 2.1, 3.1)]
    for change in compare(before, after).changes:
        assert (change.verdict, change.why) == ("cannot tell", "too noisy")


def test_the_correction_counts_all_that_was_compared():
    def runs(*values):
        labels = [f"s{number}" for number in range(12)]
        return [records(*(one for label in labels for one in cold(label, [value] * 9))) for value in values]

    found = compare(runs(1.0, 1.01, 1.02), runs(1.06, 1.07, 1.08))
    for change in found.changes:
        assert change.ratio is not None
        assert change.ratio.low is not None
        assert change.ratio.low > 1
        assert change.p is not None
        assert change.p > 0.01
        assert (change.verdict, change.why) == ("cannot tell", "may be chance")


values = st.lists(st.floats(0.001, 100), min_size=1, max_size=4, unique=True)


@settings(max_examples=40, deadline=None)
@given(values, values)
def test_comparison_is_antisymmetric_and_its_verdicts_agree_with_its_intervals(a, b):
    one = [at(number, records(*cold("bare", [value] * 3))) for number, value in enumerate(a)]
    other = [at(30 + number, records(*cold("bare", [value] * 3))) for number, value in enumerate(b)]
    opposite = {"slower": "faster", "faster": "slower"}
    for there, back in zip(compare(one, other).changes, compare(other, one).changes, strict=True):
        assert there.ratio is not None
        assert back.ratio is not None
        assert there.ratio.value * back.ratio.value == pytest.approx(1)
        assert back.p == there.p or back.p == pytest.approx(there.p)
        assert back.verdict == opposite.get(there.verdict, there.verdict)
        if rough(there.verdict):
            assert there.ratio.low is not None
            assert there.ratio.high is not None
            assert there.ratio.low > 1 or there.ratio.high < 1


def test_a_run_counts_once():
    one, other = (at(minute, records(*cold("bare", [1.0] * 5))) for minute in (1, 2))
    for before, after in (([one], [one]), ([one, one], [other]), ([other], [one, other])):
        with pytest.raises(RecordsError, match="named twice"):
            compare(before, after)


def test_cautions_of_the_runs_stand_beside_the_numbers():
    busy = (Session(started="2026-01-02T03:04:05+00:00", load=3.0),)
    steady = [1.0, 1.01] * 10
    before = [records(*cold("bare", steady)), records(*cold("bare", steady), sessions=busy)]
    after = [records(*cold("bare", [1.0, 9.0] * 10)), records(*cold("bare", steady))]
    found = compare(*in_turn(before, after))
    assert {tuple(change.cautions) for change in found.changes} == {("high load", "unstable")}
    told = [caution.text for caution in found.cautions]
    assert any("the machine was busy" in text and text.endswith("(in A2)") for text in told)
    assert any("the trials vary" in text and text.endswith("(in B1)") for text in told)
    assert "| high load, unstable |" in as_markdown(found)


def test_runs_that_were_not_taken_in_turn_get_a_caution():
    random = np.random.default_rng(6)
    before, after = drifting(random, 3), drifting(random, 3)
    kinds = {caution.kind for caution in compare(*in_turn(before, after)).cautions}
    assert CautionKind.RUN_ORDER not in kinds
    early = [at(number, made) for number, made in enumerate(before)]
    late = [at(30 + number, made) for number, made in enumerate(after)]
    for one, other in ((early, late), (late, early)):
        assert CautionKind.RUN_ORDER in {caution.kind for caution in compare(one, other).cautions}


def only(comparison, *kinds):
    return [caution for caution in comparison.cautions if caution.kind in kinds]


def test_unlike_hosts_are_refused_unless_insisted():
    a = records(*cold("bare", [1.0] * 5))
    b = records(*cold("bare", [2.0] * 5), study=study(host={"host_key": "other", "cpu": "B"}))
    for before, after in (([a], [b]), ([a, b], [at(1, a)]), ([a], [at(1, a), b])):
        with pytest.raises(RecordsError, match=r"different hosts.*cpu"):
            compare(before, after)
    assert only(compare([a], [b], across_hosts=True), CautionKind.UNLIKE_HOSTS)


def test_the_load_of_the_moment_makes_no_host_unlike():
    a = records(*cold("bare", [1.0] * 5), study=study(host={"host_key": "a", "load": 1, "cpu": "A"}))
    b = records(*cold("bare", [2.0] * 5), study=study(host={"host_key": "b", "load": 9, "cpu": "B"}))
    with pytest.raises(RecordsError, match=r"different hosts \(cpu: A and B\)"):
        compare([a], [b])


def test_changed_software_is_told():
    a = records(*cold("bare", [1.0] * 5))
    b = records(*cold("bare", [1.0] * 5), substrates={"bare": facts("bare", facts={"python": "3.13"})})
    assert {caution.text for caution in only(compare([a], [at(1, b)]), CautionKind.UNLIKE_SOFTWARE)} == {
        "python is 3.11.7 in A and 3.13 in B",
        "git is 2.39.5 in A and unknown in B",
    }


def planned(plan, *workloads):
    trials = [one for name in workloads for one in cold("bare", [1.0 + n / 9 for n in range(9)], name)]
    return records(*trials, study=study(plan=plan))


def test_cells_that_did_different_things_are_not_compared():
    names = ("T0", "T1", "T2", "trajectory-10")
    a = planned({"full_tests": False, "remote": None}, *names)
    b = planned({"full_tests": True, "remote": "https://example.org/attrs"}, *names)
    found = compare([a], [b])
    for change in found.changes:
        assert (change.ratio is None) == (change.workload not in ("T0", "T1"))
        assert change.why == ("not compared" if change.ratio is None else "too few runs")
    told = {caution.workload: caution.text for caution in only(found, CautionKind.UNLIKE_PLANS)}
    assert set(told) == {"T2", "trajectory-10"}
    assert "full_tests (off in A, on in B)" in told["T2"]
    assert "full_tests" not in told["trajectory-10"]
    assert "T2: not compared: the plans differ in full" in as_markdown(found)


def test_plans_that_leave_nothing_to_compare_are_refused():
    with pytest.raises(RecordsError, match=r"drop_caches \(off in A, on in B\)") as refused:
        compare([planned({}, "T0", "T2")], [planned({"drop_caches": True}, "T0", "T2")])
    assert "measure one of the two again" in str(refused.value.remedy)


def test_other_differences_between_plans_are_told():
    a = planned({"warmups": 1, "options": {"docker": {"network": True, "use": "docker"}}}, "T0")
    b = planned({"warmups": 3, "options": {"docker": {"network": False, "use": "docker"}}}, "T0")
    assert [(one.substrate, one.text) for one in only(compare([a], [b]), CautionKind.UNLIKE_PLANS)] == [
        (None, "the plans differ in warmups (1 in A, 3 in B)"),
        ("docker", "the options differ in network (on in A, off in B)"),
    ]
    for one, other in ((a, at(1, a)), (planned({}, "T0"), planned({"remote": None}, "T0"))):
        assert not only(compare([one], [other]), CautionKind.UNLIKE_PLANS)
    within = compare([a, at(1, b)], [at(2, a)])
    assert "(1 in A1, 3 in A2)" in only(within, CautionKind.UNLIKE_PLANS)[0].text


def test_failures_and_lone_cells_are_told():
    a = records(*cold("bare", [1.0] * 5), *cold("docker", [1.0] * 5))
    b = records(*cold("bare", [1.0] * 5), trial(index=9, failure=TrialFailure("task", "exec", "no")))
    found = compare([a], [b])
    assert (found.failures[0].failed_a, found.failures[0].failed_b, found.failures[0].trials_b) == (0, 1, 6)
    assert found.only_a == [("T0", "docker", 1)]
    text = as_markdown(found)
    assert "only in A: T0 on docker" in text
    assert "0 of 5 trials failed in A, 1 of 6 in B" in text


def test_markdown_has_one_row_a_change_and_escapes_labels():
    name = "a|b<script>"
    found = compare([records(*cold(name, [1.0] * 6))], [records(*cold(name, [2.0] * 6))])
    text = as_markdown(found)
    rows = [line for line in text.splitlines() if line.startswith("| T0")]
    assert len(rows) == len(found.changes) == 2
    assert "<script>" not in text
    assert all(row.replace("\\|", "").count("|") == 11 for row in rows)


def test_nothing_in_common():
    assert "nothing to compare" in as_markdown(compare([records()], [records(*cold("bare", [1.0]))]))

"""What became slower, honestly judged."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dutyfree.analysis.comparison import as_markdown, compare
from dutyfree.analysis.model import CautionKind
from dutyfree.errors import RecordsError
from dutyfree.study.records import Failure
from tests.analysis.synthetic import cold, facts, plausible, records, study, trial


def verdicts(comparison):
    return {
        (change.workload, change.substrate, change.metric): change.verdict for change in comparison.changes
    }


def test_a_slower_substrate_is_called_slower_and_the_like_is_not():
    before = plausible(lengths=(10,), tiers=("T0",), trials=30)
    after = plausible(lengths=(10,), tiers=("T0",), trials=30, slower=1.5, seed=2)
    found = verdicts(compare(before, after))
    assert found["T0", "docker", "total"] == "slower"
    assert found["trajectory-10", "docker", "orchestration_per_action"] == "slower"
    assert verdicts(compare(after, before))["T0", "docker", "total"] == "faster"
    again = plausible(lengths=(10,), tiers=("T0",), trials=30, seed=5)
    assert set(verdicts(compare(before, again)).values()) == {"no difference shown"}


def test_too_few_trials_cannot_tell():
    (first, second) = compare(
        records(*cold("bare", [1, 2, 3])), records(*cold("bare", [100, 200, 300]))
    ).changes
    assert {first.verdict, second.verdict} == {"cannot tell"}
    assert first.p is None
    assert second.ratio is not None
    assert second.ratio.value == pytest.approx(100)


def test_many_comparisons_of_few_trials_cannot_tell_either():
    before = records(*(t for n in range(9) for t in cold(f"s{n}", [1.0, 1.1, 1.2, 1.3])))
    after = records(*(t for n in range(9) for t in cold(f"s{n}", [2.0, 2.1, 2.2, 2.3])))
    assert set(verdicts(compare(before, after)).values()) == {"cannot tell"}


totals = st.lists(st.floats(0.001, 100), min_size=1, max_size=12)


@settings(max_examples=40)
@given(totals, totals)
def test_comparison_is_antisymmetric(a, b):
    one, other = records(*cold("bare", a)), records(*cold("bare", b))
    opposite = {"slower": "faster", "faster": "slower"}
    for there, back in zip(compare(one, other).changes, compare(other, one).changes, strict=True):
        assert there.ratio is not None
        assert back.ratio is not None
        assert there.ratio.value * back.ratio.value == pytest.approx(1)
        assert back.p == there.p or back.p == pytest.approx(there.p)
        if sorted(a) != sorted(b):
            assert back.verdict == opposite.get(there.verdict, there.verdict)


def test_unlike_hosts_are_refused_unless_insisted():
    a = records(*cold("bare", [1.0] * 5))
    b = records(*cold("bare", [2.0] * 5), study=study(host={"host_key": "other", "cpu": "B"}))
    with pytest.raises(RecordsError, match=r"unlike hosts.*cpu"):
        compare(a, b)
    found = compare(a, b, across_hosts=True)
    assert [caution.kind for caution in found.cautions] == [CautionKind.UNLIKE_HOSTS]


def test_changed_software_is_told():
    a = records(*cold("bare", [1.0] * 5))
    b = records(*cold("bare", [1.0] * 5), substrates={"bare": facts("bare", facts={"python": "3.13"})})
    assert {caution.text for caution in compare(a, b).cautions} == {
        "python changed from 3.11.7 to 3.13",
        "git changed from 2.39.5 to unknown",
    }


def planned(plan, *workloads):
    trials = [one for name in workloads for one in cold("bare", [1.0 + n / 9 for n in range(9)], name)]
    return records(*trials, study=study(plan=plan))


def test_cells_that_did_different_things_are_not_compared():
    names = ("T0", "T1", "T2", "trajectory-10")
    a = planned({"full_tests": False, "remote": None}, *names)
    b = planned({"full_tests": True, "remote": "https://example.org/attrs"}, *names)
    found = compare(a, b)
    for (workload, _, _), verdict in verdicts(found).items():
        assert verdict == ("no difference shown" if workload in ("T0", "T1") else "cannot tell")
    assert all((change.p is None) == (change.ratio is None) for change in found.changes)
    told = {caution.workload: caution.text for caution in found.cautions}
    assert set(told) == {"T2", "trajectory-10"}
    assert "full_tests (off in A, on in B)" in told["T2"]
    assert "full_tests" not in told["trajectory-10"]
    assert "T2: not compared: the plans differ in full" in as_markdown(found)


def test_plans_that_leave_nothing_to_compare_are_refused():
    with pytest.raises(RecordsError, match=r"drop_caches \(off in A, on in B\)") as refused:
        compare(planned({}, "T0", "T2"), planned({"drop_caches": True}, "T0", "T2"))
    assert "measure one of the two again" in str(refused.value.remedy)


def test_other_differences_between_plans_are_told():
    a = planned({"warmups": 1, "options": {"docker": {"network": True, "use": "docker"}}}, "T0")
    b = planned({"warmups": 3, "options": {"docker": {"network": False, "use": "docker"}}}, "T0")
    cautions = compare(a, b).cautions
    assert {caution.kind for caution in cautions} == {CautionKind.UNLIKE_PLANS}
    assert [(caution.substrate, caution.text) for caution in cautions] == [
        (None, "the plans differ in warmups (1 in A, 3 in B)"),
        ("docker", "its options differ in network (on in A, off in B)"),
    ]
    assert (
        compare(a, a).cautions == compare(planned({}, "T0"), planned({"remote": None}, "T0")).cautions == []
    )


def test_failures_and_lone_cells_are_told():
    a = records(*cold("bare", [1.0] * 5), *cold("docker", [1.0] * 5))
    b = records(*cold("bare", [1.0] * 5), trial(index=9, failure=Failure("task", "exec", "no")))
    found = compare(a, b)
    assert (found.failures[0].failed_a, found.failures[0].failed_b, found.failures[0].trials_b) == (0, 1, 6)
    assert found.only_a == [("T0", "docker", 1)]
    text = as_markdown(found)
    assert "only in A: T0 on docker" in text
    assert "0 of 5 trials failed in A, 1 of 6 in B" in text


def test_markdown_has_one_row_a_change_and_escapes_labels():
    name = "a|b<script>"
    found = compare(records(*cold(name, [1.0] * 6)), records(*cold(name, [2.0] * 6)))
    text = as_markdown(found)
    rows = [line for line in text.splitlines() if line.startswith("| T0")]
    assert len(rows) == len(found.changes) == 2
    assert "<script>" not in text
    assert all(row.replace("\\|", "").count("|") == 10 for row in rows)


def test_nothing_in_common():
    assert "nothing to compare" in as_markdown(compare(records(), records(*cold("bare", [1.0]))))

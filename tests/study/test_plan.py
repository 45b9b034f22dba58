"""Plans are checked before anything runs, and their order is a pure function of them."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dutyfree.errors import PlanError
from dutyfree.study import plan as plans
from dutyfree.study.plan import Adaptive, Plan
from tests.study.test_records import trial

GOOD = """
name = "mine"
substrates = ["bare", "slow"]
[options.slow]
use = "scripted"
create_seconds = 0.5
[workloads]
T0 = 5
trajectory-7 = 2
[parallel]
T0 = [3]
"""


def load(tmp_path, text):
    path = tmp_path / "plan.toml"
    path.write_text(text)
    return plans.load(str(path))


def test_a_good_plan(tmp_path):
    plan = load(tmp_path, GOOD)
    assert plan.use("bare") == ("bare", {})
    assert plan.use("slow") == ("scripted", {"create_seconds": 0.5})


@pytest.mark.parametrize("name", sorted(plans.shipped()))
def test_the_shipped_plans_are_good(name):
    assert plans.load(name).name == name


def test_the_paper_has_a_hundred_trials_of_everything():
    assert set(plans.load("paper").workloads.values()) == {100}


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('name = "mine"', "", "name"),
        ('name = "mine"', "name = 3", "str"),
        ('name = "mine"', "name = ", "not TOML"),
        ('"slow"]', '"slow", "slow"]', "twice"),
        ('["bare", "slow"]', "[]", "names no substrate"),
        ('"bare"', '"bear"', "unknown substrate 'bear'.*bare"),
        ("create_seconds = 0.5", "create_secs = 0.5", "no option 'create_secs'.*create_seconds"),
        ("create_seconds = 0.5", 'create_seconds = "x"', "float"),
        ("T0 = 5", "T9 = 5", "T9.*T0"),
        ("T0 = 5", "trajectory-0 = 5", "trajectory"),
        ("T0 = 5", "T0 = 0", "at least one trial"),
        ("T0 = [3]", "T0 = [1]", "above 1"),
        ("T0 = [3]", "T1 = [3]", "not among the workloads"),
        ("[workloads]", "[optional]", "optional"),
        ('name = "mine"', 'name = "mine"\noptional = ["docker"]', "not among its substrates"),
        ('name = "mine"', 'name = "mine"\ntimeout = 0', "timeout"),
        ('name = "mine"', 'name = "mine"\ntypo = 1', "typo"),
        ('name = "mine"', 'name = "mine"\nadaptive = {width = 2.0}', "width"),
    ],
)
def test_a_bad_plan_is_refused_in_one_sentence(tmp_path, old, new, message):
    assert old in GOOD
    with pytest.raises(PlanError, match=message):
        load(tmp_path, GOOD.replace(old, new, 1))


def test_a_missing_plan_names_the_shipped_ones():
    with pytest.raises(PlanError, match=r"no plan 'nope'.*paper, quick, smoke, tax, warmth"):
        plans.load("nope")


workloads = st.dictionaries(
    st.sampled_from(["T0", "T1", "T2", "trajectory-5"]), st.integers(1, 12), min_size=1
)
labels = st.lists(st.sampled_from(["a", "b", "c"]), min_size=1, unique=True)


@st.composite
def some_plans(draw):
    found = draw(workloads)
    level = st.lists(st.integers(2, 9), unique=True, max_size=2)
    parallel = {name: draw(level) for name in found}
    return Plan(
        name="p", substrates=draw(labels), workloads=found, parallel=parallel, seed=draw(st.integers(0, 9))
    )


@given(some_plans())
def test_every_cell_gets_every_trial_exactly_once(plan):
    ids = Counter(
        batch.trial_id(index)
        for batches in plans.rounds(plan, plan.substrates)
        for batch in batches
        for index in batch.indices
    )
    assert set(ids.values()) == {1}
    cells = plans.cells(plan, plan.substrates)
    assert len(ids) == sum(plans.trials(plan, workload, parallel) for workload, _, parallel in cells)


@given(some_plans())
def test_a_parallel_cell_is_measured_in_whole_batches_only(plan):
    batches = [batch for found in plans.rounds(plan, plan.substrates) for batch in found]
    assert all(len(batch.indices) == batch.parallel for batch in batches)


@given(some_plans())
def test_the_order_depends_on_the_plan_alone(plan):
    assert list(plans.rounds(plan, plan.substrates)) == list(plans.rounds(plan, plan.substrates))


@given(some_plans())
def test_rounds_interleave_the_substrates(plan):
    """At any moment no substrate is more than one trial of a workload ahead of another."""
    for batches in plans.rounds(plan, plan.substrates):
        counts = Counter((batch.workload, batch.parallel) for batch in batches)
        assert set(counts.values()) == {len(plan.substrates)}


@given(some_plans(), st.randoms())
def test_what_is_on_record_is_not_run_again(plan, chance):
    batches = [batch for found in plans.rounds(plan, plan.substrates) for batch in found]
    everything = {batch.trial_id(index) for batch in batches for index in batch.indices}
    done = {identity for identity in everything if chance.random() < 0.5}
    left = {batch.trial_id(index) for batch in plans.remaining(batches, done) for index in batch.indices}
    assert left == everything - done


def test_adaptive_stopping_waits_for_the_interval():
    adaptive = Adaptive(width=0.05, minimum=20)
    steady = [trial(index, total=1.0 + index % 3 * 0.001) for index in range(30)]
    wild = [trial(index, total=1.0 + index % 7) for index in range(30)]
    assert not plans.settled(None, steady)
    assert not plans.settled(adaptive, steady[:19])
    assert plans.settled(adaptive, steady)
    assert not plans.settled(adaptive, wild)

"""Plans: they are checked before anything runs, and the order of trials depends on the plan only."""

from __future__ import annotations

import os
from collections import Counter

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dutyfree.contract import Limits
from dutyfree.contract.errors import PlanError
from dutyfree.study import plan as plans
from dutyfree.study.counts import Cell, Fewer
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


def test_limits_and_recorded_trajectories(tmp_path):
    (tmp_path / "mine.jsonl").touch()
    extra = 'T0 = 5\nmine = 2\n[recorded]\nmine = "mine.jsonl"\n[limits]\nmemory = "2G"\n'
    plan = load(tmp_path, GOOD.replace("T0 = 5\n", extra, 1).replace("trajectory-7 = 2\n", "", 1))
    assert plan.limits == Limits(memory=2 << 30)
    assert plan.recorded == {"mine": str(tmp_path / "mine.jsonl")}


@pytest.mark.parametrize("name", sorted(plans.shipped()))
def test_the_shipped_plans_are_good(name):
    if name == "cold" and not os.access("/proc/sys/vm/drop_caches", os.W_OK):
        pytest.skip("only root can drop page caches")
    plan = plans.load(name)
    assert plan.name == name
    # Every plan has an A/A control, except for the one that only shows that a machine can run a study.
    uses = [repr((plan.use(label), plan.padding(label))) for label in plan.substrates]
    assert len(set(uses)) == len(uses) - (name != "smoke")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('name = "mine"', "", "the key 'name' is missing"),
        ('name = "mine"', "name = 3", "name must be a string, not 3"),
        ('name = "mine"', "name = ", "not TOML"),
        ('"slow"]', '"slow", "slow"]', "twice"),
        ('["bare", "slow"]', "[]", "names no substrate"),
        (
            '["bare", "slow"]',
            '"bare"',
            """substrates must be a list, such as ["bare", "native"], not 'bare'""",
        ),
        ('["bare", "slow"]', '["bare", 1]', "substrates: item 2 of 2 must be a string, not 1"),
        ('"bare"', '"bear"', "unknown substrate 'bear' (did you mean 'bare'? known are: bare, native"),
        ('use = "scripted"', "use = 3", "[options.slow] use must be the name of a substrate, not 3"),
        (
            "create_seconds = 0.5",
            "create_secs = 0.5",
            "[options.slow] substrate 'scripted' has no option 'create_secs' (did you mean 'create_seconds'?",
        ),
        ("create_seconds = 0.5", 'padding = "much"', "[options.slow] padding: 'much' is not a size"),
        ("create_seconds = 0.5", 'create_seconds = "x"', "create_seconds must be a number, not 'x'"),
        ("create_seconds = 0.5", "create_seconds = true", "create_seconds must be a number, not true"),
        ("T0 = 5", "T9 = 5", "there is no workload 'T9' (choose one of T0, T1, T2, trajectory-N, inspect-N"),
        ("T0 = 5", "t0 = 5", "there is no workload 't0' (did you mean 'T0'? choose one of T0, T1"),
        ("T0 = 5", "trajectory-0 = 5", "'trajectory-0' has no valid length (write trajectory-N with N ≥ 1)"),
        ("T0 = 5", "T0 = 0", "[workloads] T0 needs at least one trial, not 0"),
        ("T0 = 5", 'T0 = "three"', "T0 must be a number of trials, not 'three'"),
        ("T0 = 5", "T0 = 1.5", "T0 must be a number of trials, not 1.5"),
        ("T0 = 5", "T0 = 5\ntimeout = 9", "no workload 'timeout' (write timeout above the first [table])"),
        ("T0 = [3]", "T0 = [1]", "[parallel] T0 must have different numbers > 1"),
        ("T0 = [3]", "T0 = 3", "[parallel] T0 must be a list, such as [8, 32], not 3"),
        ("T0 = [3]", 'T0 = ["a"]', "[parallel] T0: item 1 of 1 must be a whole number, not 'a'"),
        ("T0 = [3]", "T1 = [3]", "names 'T1', which is not among the workloads (add T1 to [workloads])"),
        ("[workloads]", "[optional]", 'optional must be a list, such as ["docker"], not a table'),
        ('name = "mine"', 'name = "mine"\noptional = ["slwo"]', "substrates (did you mean 'slow'?)"),
        ('name = "mine"', 'name = "mine"\ntimeout = 0', "timeout must be a number of seconds > 0, not 0"),
        ('name = "mine"', 'name = "mine"\ntimeout = "1h"', "timeout must be a number of seconds, not '1h'"),
        ('name = "mine"', 'name = "mine"\nwarmups = -1', "warmups must be a number of trials ≥ 0, not -1"),
        (
            'name = "mine"',
            'name = "mine"\nwarm_up = ["T9"]',
            "warm_up names 'T9', which is not among the workloads",
        ),
        ('name = "mine"', 'name = "mine"\nseed = 2026-11-16', "seed must be a whole number, not a date"),
        (
            'name = "mine"',
            'name = "mine"\nwarmpus = 1',
            "no key 'warmpus' (did you mean 'warmups'? the keys are",
        ),
        ('name = "mine"', 'name = "mine"\nadaptive = {width = 2.0}', "0 < width < 1"),
        (
            'name = "mine"',
            'name = "mine"\nadaptive = true',
            "adaptive must be a table, such as {width = …, min",
        ),
        (
            'name = "mine"',
            'name = "mine"\nadaptive = {minimum = 9}',
            "in [adaptive] the key 'width' is missing",
        ),
        (
            'name = "mine"',
            'name = "mine"\nadaptive = {with = 1}',
            "in [adaptive] there is no key 'with' (did you",
        ),
        ('name = "mine"', 'name = "mine"\ndrop_caches = 1', "drop_caches must be true or false, not 1"),
        ('name = "mine"', 'name = "mine"\nsettle = -1', "settle must be a number of seconds ≥ 0, not -1"),
        ('name = "mine"', 'name = "mine"\nheld_out = ["T1"]', "held_out names 'T1', which is not among"),
        ('name = "mine"', 'name = "mine"\nmost = {never = 2}', "[most] names 'never', which is not among"),
        ('name = "mine"', 'name = "mine"\nmost = {bare = 0}', "[most] bare needs at least one trial"),
        ('name = "mine"', 'name = "mine"\nfewer = [{seconds = 0, trials = 1}]', "fewer needs seconds > 0"),
        ('name = "mine"', 'name = "mine"\nfewer = [{seconds = 5, trials = 0}]', "and trials ≥ 1, not 0"),
        ('name = "mine"', 'name = "mine"\nfewer = [{seconds = 5, trials = 3}]', "combined with [parallel]"),
        ('name = "mine"', 'name = "mine"\nfewer = [{seconds = 5}]', "the key 'trials' is missing"),
        ('name = "mine"', 'name = "mine"\nlimits = {memory = "much"}', "memory"),
        ('name = "mine"', 'name = "mine"\nlimits = {disk = "1G"}', "[limits] disk cannot be the same"),
        ('name = "mine"', 'name = "mine"\nrecorded = {mine = "x"}', "recorded names 'mine', which is not"),
        ("trajectory-7 = 2", "mine = 1\n[recorded]\nmine = 'no'", "[recorded] mine: cannot read /"),
        (
            "[options.slow]",
            "[options]\nslow = 3\n[options.fast]",
            '[options] slow must be a table, such as {use = "',
        ),
    ],
)
def test_a_bad_plan_is_refused_in_one_sentence(tmp_path, old, new, message):
    assert old in GOOD
    with pytest.raises(PlanError) as refused:
        load(tmp_path, GOOD.replace(old, new, 1))
    assert message in str(refused.value)


def test_a_missing_plan_names_the_shipped_ones():
    with pytest.raises(PlanError, match=r"no plan 'nope'.*paper, quick, .*smoke, .*warmth"):
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


@given(some_plans(), st.integers(1, 12))
def test_a_slow_substrate_gets_fewer_trials(plan, most):
    slow = plan.substrates[0]
    bounded = msgspec.structs.replace(plan, most={slow: most})
    for workload, label, parallel in plans.cells(plan, plan.substrates):
        wanted = plan.workloads[workload]
        bound = min(wanted, most) if label == slow else wanted
        assert plans.trials(bounded, (workload, label, parallel)) == -(-bound // parallel) * parallel
    ran = Counter(batch.cell for found in plans.rounds(bounded, plan.substrates) for batch in found)
    assert all(count * cell[2] == plans.trials(bounded, cell) for cell, count in ran.items())


@given(some_plans(), st.integers(1, 12), st.integers(1, 12))
def test_slow_cells_have_fewer_trials_spread_over_all_rounds(plan, some, few):
    plan = msgspec.structs.replace(
        plan, parallel={}, fewer=[Fewer(seconds=5, trials=some), Fewer(seconds=30, trials=few)]
    )
    slow, *_ = cells = plans.cells(plan, plan.substrates)
    firsts: dict[Cell, float] = {}
    ran: Counter[Cell] = Counter()
    last = max(plan.workloads.values())
    for number, batches in enumerate(plans.rounds(plan, plan.substrates, firsts)):
        for batch in batches:
            firsts.setdefault(batch.cell, 40.0 if batch.cell == slow else 0.1)
            ran[batch.cell] += 1
            assert batch.indices == (number,)
        for cell in cells:  # at any moment each cell has its part
            share = plans.trials(plan, cell, firsts[cell]) * (number + 1) / last
            assert abs(ran[cell] - share) < 1
    assert ran[slow] == plans.trials(plan, slow, 40.0) == min(plan.workloads[slow[0]], some, few)
    assert all(ran[cell] == plan.workloads[cell[0]] for cell in cells if cell != slow)


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
    assert len(ids) == sum(plans.trials(plan, cell) for cell in cells)


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

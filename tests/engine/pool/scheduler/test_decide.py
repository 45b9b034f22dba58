"""Decisions: which sandbox a request gets, what is refilled and evicted, and why a request is refused."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dutyfree.contract.served import Served, ServedKind
from dutyfree.engine.pool.scheduler.decide import place, wake
from dutyfree.engine.pool.scheduler.distance import PRIOR, Costs
from dutyfree.engine.pool.scheduler.ledger import BOUNDS, Histogram, Ledger
from dutyfree.engine.pool.scheduler.priority_queue import PriorityQueue
from dutyfree.engine.pool.scheduler.values import (
    Budget,
    Candidate,
    Deliver,
    Destroy,
    Expire,
    Fork,
    LeaseRequest,
    Make,
    Policy,
    Prioritize,
    Quarantine,
    Shortage,
)
from tests.engine.pool.scheduler.simulation import Simulation, chain

A, AB, AC = chain("a"), chain("a/b"), chain("a/c")
QUIET = Policy(refill=False)


def served(world, request):
    answer = world.answers[request]
    assert isinstance(answer, Deliver)
    return [(member.kind, member.start) for member in answer.members]


# --- Placing ----------------------------------------------------------------------------------------


CANDIDATES = st.builds(
    Candidate,
    st.sampled_from(["warm", "promoted", "layer", "cold"]),
    st.just(1),
    st.floats(0, 100),
    st.booleans(),
)


@given(st.lists(CANDIDATES, min_size=1))
def test_the_least_remaining_cost_wins_whatever_the_order(options):
    chosen = place(options)
    assert chosen.seconds <= min(candidate.seconds for candidate in options) + 0.002
    assert place(reversed(options))[:3] == chosen[:3]


def test_among_equals_what_nobody_was_promised():
    options = (Candidate("promoted", 2, 1.0, promised=True), Candidate("layer", 2, 1.0005))
    assert place(options).kind == "layer"


def test_the_ways_to_serve():
    world = Simulation(policy=Policy(refill=False, deepest_layer=0))
    first = world.granted(AB)
    assert served(world, first) == [("cold", 0)]
    world.stocked(A)
    second = world.granted(AC)
    assert served(world, second) == [("promoted", 2)]
    world.returned(first)
    assert served(world, world.request(AB)) == [("warm", 3)]


def test_a_layer_is_used_where_no_sandbox_is_idle():
    world = Simulation(policy=QUIET)
    world.granted(AB)
    again, beside = world.request(AB), world.request(AC)
    makes = {make.chain.key: make for make in world.makes.values()}
    assert (makes["a/b"].start, makes["a/c"].start) == (3, 2)
    world.settle()
    assert served(world, again) == [("layer", 3)]
    assert served(world, beside) == [("layer", 2)]


def test_a_group_is_delivered_at_once_or_not_at_all():
    world = Simulation(Budget(sandboxes=4), QUIET)
    holder = world.granted(A)
    group, late = world.request(AB, number=4), world.request(A)
    assert world.open() == [group, late]
    assert not world.makes, "nothing is begun that cannot be finished"
    world.returned(holder)
    assert [kind for kind, _ in served(world, group)].count("forked") == 3
    assert world.open() == [late], "and nobody overtakes"


def test_a_group_takes_what_is_warm_and_forks_the_rest():
    world = Simulation(policy=QUIET)
    world.stocked(AB, AB)
    group = world.request(AB, number=5)
    (fork,) = world.forks
    assert isinstance(fork, Fork)
    assert len(fork.jobs) == 3
    world.settle()
    assert sorted(served(world, group)) == [("forked", 3)] * 3 + [("warm", 3)] * 2


# --- Estimates --------------------------------------------------------------------------------------


def test_costs_come_from_the_stage_then_from_its_kind_then_from_the_prior():
    costs = Costs()
    assert costs.seconds("k", "dependencies") == PRIOR["dependencies"]
    costs.learn("other", "dependencies", 7.0)
    assert costs.seconds("k", "dependencies") == pytest.approx(7.0)
    costs.learn("k", "dependencies", 3.0)
    assert costs.seconds("k", "dependencies") == pytest.approx(3.0)


def test_one_outlier_does_not_mislead_and_a_change_is_followed():
    costs = Costs()
    for seconds in (1.0, 1.1, 0.9, 1000.0):
        costs.learn("k", "setup", seconds)
    assert costs.seconds("k", "setup") < 2
    for _ in range(20):
        costs.learn("k", "setup", 10.0)
    assert costs.seconds("k", "setup") == pytest.approx(10, rel=0.1)


@given(st.lists(st.tuples(st.integers(0, 9), st.floats(-5, 5))))
def test_a_priority_queue_gives_the_least_though_scores_rise_unnoticed(changes):
    scores: dict[int, float] = {}
    queue: PriorityQueue[int] = PriorityQueue(lambda item: (scores[item],))
    for item, change in changes:
        before = scores.get(item)
        scores[item] = change if before is None else before + change
        if before is None or change < 0:
            queue.put(item)
        found = queue.least()
        assert found is not None
        assert found[1] == (min(scores.values()),)


# --- Stock ------------------------------------------------------------------------------------------


def test_stock_follows_demand_and_prefers_what_is_shared():
    world = Simulation(policy=Policy(cover=30.0, deepest_layer=0))
    for _ in range(6):
        request = world.request(AB)
        world.pass_time(1.0)
        world.settle()
        world.state.returned(request, world.now)
        del world.leased[request]
        world.pass_time(1.0)
    world.settle()
    assert len(world.state.stock.path(AB)[-1].idle) > 1


def test_hints_are_made_in_order_and_given_to_who_comes():
    world = Simulation(policy=QUIET)
    world.tell("hint", AB, 2, world.now)
    assert [make.background for make in world.makes.values()] == [True], "once cold, then from its layer"
    world.settle()
    assert world.state.stock.idle == 2
    assert served(world, world.request(AB)) == [("warm", 3)]
    world.settle()
    assert world.state.stock.idle == 1


def test_refills_wait_for_requests():
    world = Simulation(Budget(sandboxes=2), QUIET)
    world.request(A)
    world.request(A)
    world.request(AB)
    world.tell("hint", AC, 2, world.now)
    assert not [make for make in world.makes.values() if make.background]


def test_refills_that_never_end_keep_others_from_nothing():
    """The number of late refills is limited, so that requests keep room."""
    world = Simulation(policy=Policy(refill=False, refilling=2, starting=3, late=60.0))
    for number in range(8):
        world.tell("hint", chain(f"never{number}"), 1, world.now)
    assert len(world.makes) == 2
    at = wake(world.state)
    assert at is not None
    assert at >= world.now + 60.0
    world.pass_time(at - world.now)
    assert len(world.makes) == 4
    world.pass_time(400.0)
    world.pass_time(400.0)
    assert len(world.makes) == 5
    request = world.request(A)
    assert len(world.makes) == 6
    for make in [*world.makes.values()]:
        world.finish(make)
    assert served(world, request) == [("cold", 0)]


def test_the_least_valuable_is_evicted_and_never_what_is_leased():
    world = Simulation(Budget(sandboxes=3), QUIET)
    popular, rare = chain("p"), chain("r")
    for _ in range(5):
        world.stocked(popular)
    world.stocked(rare)
    kept = world.granted(chain("k"))
    assert world.state.stock.idle == 2
    evicting = world.request(chain("n"))
    (make,) = world.makes.values()
    assert isinstance(make, Make)
    assert make.after == tuple(world.destroying), "the new one waits until the old one is gone"
    world.settle()
    assert {kept, evicting} <= set(world.leased)
    assert len(world.state.stock.path(popular)[-1].idle) == 1
    assert not world.state.stock.path(rare)[-1].idle


def test_layers_leave_the_disk_by_worth_and_from_the_leaves():
    world = Simulation(Budget(disk=4000, layer_disk=1000), Policy(refill=False, park=False))
    for name in ("a/b", "a/c", "a/d", "a/b", "a/b", "e"):
        world.stocked(chain(name))
        assert world.state.stock.disk <= 4000
        assert "a" not in world.layers or "image" in world.layers
    assert {"image", "e"} <= world.layers


# --- Time -------------------------------------------------------------------------------------------


def test_a_shortage_has_numbers():
    world = Simulation(Budget(sandboxes=1), QUIET)
    world.granted(A, patience=1000)
    waiting = world.request(A, patience=5.0)
    assert wake(world.state) == world.now + 5.0
    world.pass_time(5.0)
    reason = world.answers[waiting].reason
    assert isinstance(reason, Shortage)
    assert (reason.leased, reason.sandboxes, reason.queue, reason.waited) == (1, 1, 1, 5.0)
    assert reason.estimated_wait is None


def test_without_time_only_what_is_ready_is_given():
    world = Simulation(Budget(sandboxes=2), QUIET)
    world.stocked(A)
    twice = world.request(A, number=2, patience=0.0)
    assert isinstance(world.answers[twice].reason, Shortage)
    other = world.request(AB, patience=0.0)
    assert isinstance(world.answers[other].reason, Shortage)
    assert not world.makes
    assert not world.destroying
    assert served(world, world.request(A, patience=0.0)) == [("warm", 2)]


def test_who_had_no_time_has_not_waited_however_long_the_decision_took():
    world = Simulation(policy=QUIET)
    request = world.waiting[1] = LeaseRequest(1, A, world.now)
    world.state.arrive(request, world.now)
    world.pass_time(0.001)
    assert world.answers[1].reason.waited == 0


def test_what_is_ready_overtakes_nobody_who_waits():
    world = Simulation(Budget(sandboxes=3), QUIET)
    world.stocked(A)
    world.granted(AB)
    first = world.request(AB, number=3)
    late = world.request(A, patience=0.0)
    assert isinstance(world.answers[late].reason, Shortage)
    assert first in world.open()


def test_several_that_came_before_a_decision_get_what_is_ready():
    world = Simulation(policy=QUIET)
    world.stocked(A, A)
    for number, patience in ((101, 50.0), (102, 0.0), (103, 0.0)):
        world.waiting[number] = LeaseRequest(number, A, world.now + patience)
        world.state.arrive(world.waiting[number], world.now)
    world.decide()
    assert served(world, 101) == served(world, 102) == [("warm", 2)]
    assert isinstance(world.answers[103].reason, Shortage)


def test_what_was_prepared_too_late_becomes_stock():
    world = Simulation(policy=QUIET)
    late = world.request(AB, patience=1.0)
    world.pass_time(1.0)
    assert world.answers[late].reason.preparing == "dependencies"
    world.settle()
    assert served(world, world.request(AB)) == [("warm", 3)]


def test_a_lease_ends_by_itself_and_its_sandbox_with_it():
    world = Simulation(policy=QUIET)
    world.granted(A, lease=10.0)
    (sandbox,) = world.existing
    expired, destroyed = world.pass_time(10.0)
    assert (expired, destroyed) == (Expire(1), Destroy(sandbox, "expired"))


def test_what_was_kept_alive_or_given_back_leaves_no_timer():
    """Keep-alives every second for hours, and answered requests, leave nothing in memory."""
    world = Simulation(policy=Policy(refill=False, idle_seconds=1e6))
    leases = [world.request(A, patience=1e6, lease=3600.0) for _ in range(3)]
    world.settle()
    for beat in range(2000):
        world.state.keep_alive(leases[beat % 2], world.now + 3600.0 + beat)
    world.give_back(leases[2])
    for _ in range(500):
        world.settle()
        world.give_back(world.request(A, patience=1e6, lease=1e6))
    world.settle()
    state = world.state
    for timers, few in ((state.deadlines, 0), (state.lease_ends, 2), (state.parked, 1)):
        assert len(timers) == few
        assert len(timers._heap) < 200
    world.tell("keep_alive", leases[1], world.now + 5.0)  # earlier than before
    assert wake(world.state) == world.now + 5.0


def test_who_joins_a_refill_has_it_hurried():
    world = Simulation(policy=QUIET)
    world.tell("hint", A, 1, world.now)
    (make,) = world.makes.values()
    assert make.background
    world.request(A)
    assert Prioritize(make.job) in world.seen[-2]


def test_a_breaker_opens_lets_one_try_pass_and_closes():
    world = Simulation(policy=Policy(refill=False, tolerated=2, backoff=10.0))
    for _ in range(2):
        world.request(AB)
        world.fail(next(iter(world.makes.values())), depth=3)
    refused = world.answers[world.request(AB)].reason
    assert isinstance(refused, Quarantine)
    assert (refused.stage, refused.failures) == ("dependencies", 2)
    assert (refused.failure.command, refused.failure.output) == ("make", "broken")
    world.request(AC)
    world.settle()  # another recipe with the same repository is served
    world.pass_time(refused.retry_in)
    probe, beside = world.request(AB), world.request(AB)
    assert isinstance(world.answers[beside].reason, Quarantine)
    world.settle()
    assert served(world, probe)[0][0] == "layer"
    closed = [world.request(AB), world.request(AB)]
    world.settle()
    assert set(closed) <= set(world.leased)


def test_jitter_comes_from_the_seed():
    def retry(seed):
        world = Simulation(policy=Policy(refill=False, tolerated=1, backoff=10.0, seed=seed))
        world.request(AB)
        world.fail(next(iter(world.makes.values())), depth=3)
        return world.answers[world.request(AB)].reason.retry_in

    assert retry(1) == retry(1) != retry(2)
    assert 5 <= retry(1) <= 10


# --- Numbers ----------------------------------------------------------------------------------------


def test_the_ledger_counts_by_kind_and_stage():
    ledger = Ledger()
    hand_outs: list[tuple[ServedKind, str, float]]
    hand_outs = [("warm", "setup", 0.0), ("warm", "setup", 1e-4), ("cold", "none", 3.0)]
    for kind, stage, seconds in hand_outs:
        ledger.record(Served(kind, stage, seconds, 3.5, "s", "r"))
    assert ledger.shares() == {
        ("warm", "setup"): pytest.approx(2 / 3),
        ("cold", "none"): pytest.approx(1 / 3),
    }
    assert ledger.saved_seconds == pytest.approx(3 * 3.5 - 3.0001)
    assert ledger.seconds["warm", "setup"].count == 2


def test_who_waits_for_room_is_told_so_and_the_saving_is_without_it():
    world = Simulation(Budget(sandboxes=1), QUIET)
    first = world.granted(A)
    second = world.request(A)
    world.pass_time(7)
    world.returned(first)
    world.pass_time(2)
    assert [world.answers[one].waited for one in (first, second)] == [0.0, 7.0]
    ledger = Ledger()
    ledger.record(Served("warm", "setup", 7.5, 2.0, "s", "r", waited=7.0))
    assert (ledger.saved_seconds, ledger.waited_seconds) == (1.5, 7.0)
    assert "7.0 s waited for room" in str(ledger)
    assert ledger.figures()["waited_seconds"] == 7.0
    assert "dutyfree_pool_waited_seconds_total 7\n" in ledger.prometheus()


def test_the_ledger_is_told_to_people_and_to_programs():
    ledger = Ledger()
    ledger.record(Served("warm", "setup", 0.001, 2.0, "s", "r"))
    ledger.record(Served("forked", "setup", 0.003, 2.0, "s", "r"))
    ledger.events["layers forgotten"] += 2
    assert repr(ledger) == "<Ledger: 2 served, 4.0 s saved>"
    assert [line.split() for line in str(ledger).splitlines()[1:3]] == [
        ["forked", "setup", "1", "50.0%", "3.0", "ms"],
        ["warm", "setup", "1", "50.0%", "1.0", "ms"],
    ]
    figures = ledger.figures()
    assert figures["served/warm/setup"] == 1
    assert figures["seconds/forked/setup"] == pytest.approx(0.003)
    assert figures["saved_seconds"] == pytest.approx(3.996)
    assert figures["events/layers forgotten"] == 2
    told = ledger.prometheus()
    samples = dict(re.findall(r"^([a-z_]+(?:\{[^}]*\})?) (\S+)$", told, re.MULTILINE))
    assert len(samples) == sum(not line.startswith("#") for line in told.splitlines())
    of = 'kind="warm",stage="setup"'
    assert samples[f'dutyfree_pool_served_seconds_bucket{{{of},le="0.0005"}}'] == "0"
    assert samples[f'dutyfree_pool_served_seconds_bucket{{{of},le="0.001"}}'] == "1"
    assert samples[f'dutyfree_pool_served_seconds_bucket{{{of},le="+Inf"}}'] == "1"
    assert samples[f"dutyfree_pool_served_seconds_count{{{of}}}"] == "1"
    assert samples['dutyfree_pool_events_total{event="layers forgotten"}'] == "2"


def test_nothing_served_is_told_too():
    assert "0.0 s saved" in str(Ledger())
    assert Ledger().figures() == {"served": 0, "saved_seconds": 0.0, "waited_seconds": 0.0}


@given(st.lists(st.floats(0, 1000)))
def test_a_histogram_is_cumulative(values):
    histogram = Histogram()
    for value in values:
        histogram.add(value)
    for bound, seen in histogram.cumulative():
        assert seen == sum(value <= bound for value in values)
    assert len(histogram.counts) == len(BOUNDS) + 1

"""The exact numbers behind decisions: estimates, sizes, worth, counts."""

from __future__ import annotations

from math import log

import pytest

from dutyfree.engine.pool.scheduler.breaker import Breaker
from dutyfree.engine.pool.scheduler.decide import candidates, wake
from dutyfree.engine.pool.scheduler.distance import PRIOR, Costs
from dutyfree.engine.pool.scheduler.jobs import ReturnRate
from dutyfree.engine.pool.scheduler.priority_queue import PriorityQueue
from dutyfree.engine.pool.scheduler.values import (
    Budget,
    Candidate,
    Deliver,
    Fork,
    JobFailure,
    JobResult,
    Make,
    Policy,
    Refuse,
    Shortage,
)
from tests.engine.pool.scheduler.simulation import Simulation, chain

A, AB, AC, ABC = chain("a"), chain("a/b"), chain("a/c"), chain("a/b/c")
QUIET = Policy(refill=False)
BARE = Policy(refill=False, deepest_layer=0)
"""Without layers, only idle sandboxes save work."""


def options(world, wanted):
    found = candidates(world.state, world.state.stock.path(wanted), world.now)
    return {one.kind: (one.depth, pytest.approx(one.seconds, abs=1e-9)) for one in found}


def make(world):
    (found,) = world.makes.values()
    assert isinstance(found, Make)
    return found


def idle(world, wanted):
    return len(world.state.stock.path(wanted)[-1].idle)


def served(world, request):
    answer = world.answers[request]
    assert isinstance(answer, Deliver), answer
    return [member.kind for member in answer.members]


# --- Distances --------------------------------------------------------------------------------------


def test_every_missing_stage_counts():
    world = Simulation(policy=QUIET)
    create = PRIOR["create"]
    image, repository, dependencies = PRIOR["image"], PRIOR["repository"], PRIOR["dependencies"]
    assert options(world, AB) == {"cold": (0, create + image + repository + dependencies)}
    world.request(A)
    world.finish(make(world), stage_seconds=[4.0, 3.0], create_seconds=0.5, layers={1: 10, 2: 10})
    assert options(world, AB) == {"layer": (2, 0.5 + dependencies)}
    world.returned(1)
    assert options(world, AB) == {"promoted": (2, dependencies), "layer": (2, 0.5 + dependencies)}
    assert options(world, A) == {"warm": (2, 0.0), "layer": (2, 0.5)}
    assert world.state.costs.cold(A) == pytest.approx(0.5 + 4.0 + 3.0)
    answer = world.answers[world.request(A)]
    assert isinstance(answer, Deliver)
    assert answer.cold_seconds == pytest.approx(7.5)


def test_a_refill_under_way_is_as_far_as_it_still_takes():
    world = Simulation(policy=QUIET)
    world.tell("hint", A, 1, world.now)
    expected = PRIOR["create"] + PRIOR["image"] + PRIOR["repository"]
    assert options(world, A)["joined"] == (2, expected)
    world.pass_time(0.2)
    assert options(world, A)["joined"] == (2, expected - 0.2)
    world.pass_time(100)
    assert options(world, A)["joined"] == (2, 0.0)


def test_what_is_restricted_is_no_way():
    for policy, missing in (
        (Policy(refill=False, partial=False, deepest_layer=0), {"promoted", "layer"}),
        (Policy(refill=False, join=False), {"joined"}),
        (Policy(refill=False, deepest_layer=1), {"joined"}),
    ):
        world = Simulation(policy=policy)
        world.stocked(A)
        assert not missing & set(options(world, AB))
    assert options(world, chain("f"))["layer"][0] == 1, "of an image that is kept"
    assert options(world, AB)["layer"][0] == 1, "and of no longer prefix"


def test_copies_and_creations_are_learnt_apart():
    world = Simulation(policy=QUIET)
    world.request(A, number=3)
    world.finish(make(world), create_seconds=0.25)
    (fork,) = world.forks
    world.forks.remove(fork)
    world.busy.discard(fork.origin)
    for job in fork.jobs:
        world.tell("made", job, world.born(), world.now, JobResult(create_seconds=0.125))
    assert world.state.costs.create() == pytest.approx(0.25)
    assert world.state.costs.fork() == pytest.approx(0.125)


def test_a_measurement_moves_the_estimate_by_its_weight():
    costs = Costs()
    costs.learn("k", "setup", 1.0)
    costs.learn("k", "setup", 2.0)
    assert costs.seconds("k", "setup") == pytest.approx(2.0**0.3)
    costs.learn("k", "setup", 0.0)  # counts as an eighth of the estimate
    assert costs.seconds("k", "setup") == pytest.approx(2.0**0.3 * 8**-0.3)
    costs.forget("k")
    assert costs.seconds("k", "setup") == costs.seconds("other", "setup") != PRIOR["setup"]
    assert Costs().seconds("k", "unheard of") == 0.1
    assert Costs({"setup": 9.0}).seconds("k", "setup") == 9.0


# --- Room -------------------------------------------------------------------------------------------


def test_memory_bounds_as_numbers_do():
    world = Simulation(Budget(sandboxes=100, memory=2_500, sandbox_memory=1_000), QUIET)
    first = [world.request(chain(name)) for name in "ab"]
    late = world.granted(chain("c"))
    assert world.open() == [late]
    world.returned(first[0])
    assert not world.open()
    never = world.answers[world.request(A, number=3)]
    assert isinstance(never, Refuse)
    assert isinstance(never.reason, Shortage)
    assert never.reason.never
    assert len(world.makes) == 0
    world = Simulation(Budget(sandboxes=100, memory=3_000, sandbox_memory=1_000), QUIET)
    assert world.request(A, number=3) in world.state.claims, "exactly the budget is within it"


def test_refills_stay_within_the_memory():
    world = Simulation(Budget(sandboxes=100, memory=2_500, sandbox_memory=1_000), QUIET)
    world.tell("hint", A, 5, world.now)
    world.settle()
    assert (idle(world, A), world.state.stock.memory) == (2, 2_000)


def test_who_waits_for_memory_holds_none():
    world = Simulation(Budget(sandboxes=100, memory=3_000, sandbox_memory=1_000), QUIET)
    world.granted(A, number=2)
    group = world.request(AB, number=2)
    assert (world.open(), world.makes, world.state.stock.memory) == ([group], {}, 2_000)


def test_a_layer_that_something_is_being_made_on_stays():
    world = Simulation(Budget(disk=2_500, layer_disk=1_000), Policy(refill=False, park=False))
    world.stocked(A)
    world.request(AB)
    assert (make(world).start, world.layers) == (2, {"image", "a"})
    world.request(chain("f"))
    assert world.layers == {"image", "a"}
    assert max(world.makes.values(), key=lambda one: one.job).keep == 0, "there is no room for its layer"
    world.settle()


def test_an_idle_sandbox_is_worth_less_once_the_disk_has_its_state():
    world = Simulation(Budget(sandboxes=3), QUIET)
    for name in ("a", "f"):
        request = world.request(chain(name))
        world.finish(make(world), layers={})
        world.returned(request)

    def least():
        found = world.state.stock.least_worth()
        assert found is not None
        return found[0].chain.key

    assert least() == "a", "of equals, the first"
    first, again = world.request(chain("f")), world.request(chain("f"))
    assert again in world.open()
    world.finish(make(world))  # this time layers are kept
    world.returned(first)
    assert least() == "f", "though it was asked for more often"


def test_a_sandbox_that_turns_out_larger_is_counted_so():
    world = Simulation(Budget(sandboxes=10, memory=3_000, sandbox_memory=1_000), QUIET)
    world.stocked(chain("f"))
    world.request(A)
    world.finish(make(world), memory=2_500)
    assert world.state.stock.memory == 2_500, "what was idle had to go"
    assert len(world.destroying) == 1
    world.returned(2)
    assert world.state.stock.memory == world.state.stock.idle_memory == 2_500
    refused = world.answers[world.request(A, number=2)]
    assert isinstance(refused, Refuse), "two of these never fit"
    assert served(world, world.request(A)) == ["warm"]


def test_a_promotion_may_grow_what_it_is_charged_for():
    world = Simulation(Budget(sandboxes=10, memory=3_000, sandbox_memory=1_000), BARE)
    world.request(AB)
    world.finish(make(world), memory=2_000)
    world.give_back(1)
    world.finish_reset("s1", 2)  # down to where A is
    assert idle(world, A) == 1
    world.state.stock.recharge(world.state.instances["s1"], 500)
    world.state.stock.idle_memory = 500
    world.request(AB)
    assert make(world).origin == "s1"
    assert world.state.stock.memory == 2_000
    world.settle()
    assert served(world, 2) == ["promoted"]


def test_nobody_waits_for_what_is_in_nobodys_way():
    """A job waits only for as many destroyed sandboxes as it needs, the oldest first."""
    world = Simulation(Budget(sandboxes=4), Policy(refill=False, park=False))
    leases = [world.request(chain(name)) for name in "abc"]
    world.settle()
    world.give_back(*leases)
    assert world.destroying == ["s1", "s2", "s3"]
    world.request(A)
    assert make(world).after == (), "there is room for one more"
    world.request(AB)
    assert [one.after for one in world.makes.values()] == [(), ("s1",)]
    world = Simulation(
        Budget(sandboxes=9, memory=4_000, sandbox_memory=1_000), Policy(refill=False, park=False)
    )
    leases = [world.request(chain(name)) for name in "abc"]
    world.settle()
    world.give_back(*leases)
    world.request(A)
    assert make(world).after == ()
    world.request(AB)
    assert [one.after for one in world.makes.values()] == [(), ("s1",)]


def test_a_refill_replaces_only_what_is_worth_less_than_half():
    """A refill never evicts a promised sandbox."""
    for times, stays in ((1, True), (20, False)):
        world = Simulation(Budget(sandboxes=1), Policy(refill=False, deepest_layer=0))
        world.stocked(chain("f"))
        prefix = world.state.stock.path(A)[-1]
        f = world.state.stock.path(chain("f"))[-1]
        world.state.stock.count_requests(prefix, times, times, world.now)
        difference = world.state.stock.worth(prefix, 1) - world.state.stock.worth(f, 1)
        assert (difference > log(2)) is not stays
        world.tell("hint", A, 1, world.now)
        world.settle()
        assert idle(world, A) == 1, "a hint takes the place of what demand alone keeps"
        other = chain("g")
        world.tell("hint", other, 1, world.now)
        world.settle()
        assert (idle(world, A), idle(world, other)) == (1, 0), "but not of another hint"


def test_demand_alone_replaces_what_is_worth_less_than_half():
    for times, replaced in ((1, False), (3, True)):
        policy = Policy(deepest_layer=0, shallowest=2, cover=1e4)
        world = Simulation(Budget(sandboxes=1), policy)
        world.stocked(chain("f"))
        world.state.stock.count_requests(world.state.stock.path(A)[-1], times, times, world.now)
        world.state.demand.consider(world.state.stock.path(A)[-1])
        world.decide()
        world.settle()
        assert bool(idle(world, A)) is replaced


# --- Groups and failures ----------------------------------------------------------------------------


def test_who_cannot_be_copied_is_made():
    world = Simulation(policy=QUIET)
    group = world.request(A, number=3)
    world.finish(make(world))
    (fork,) = world.forks
    assert isinstance(fork, Fork)
    world.finish_fork(fork, fails=True)
    assert not world.forks, "copying is not tried again"
    assert len(world.makes) == 2
    world.settle()
    assert served(world, group) == ["cold", "layer", "layer"]


def test_one_failed_copy_of_many_costs_one_attempt():
    world = Simulation(policy=Policy(refill=False, attempts=3))
    group = world.request(A, number=8)
    world.finish(make(world))
    world.finish_fork(world.forks[0], fails=True)
    world.fail(next(iter(world.makes.values())))
    assert group in world.open(), "two failures are borne"
    world.fail(next(iter(world.makes.values())))
    answer = world.answers[group]
    assert isinstance(answer, Refuse)
    assert answer.reason == JobFailure("no", None, "make", "broken")


def test_what_is_ready_for_somebody_and_dies_is_replaced():
    world = Simulation(policy=Policy(refill=False, fork=False))
    world.stocked(A, A)
    group = world.request(A, number=3)
    warm = sorted(world.existing)
    world.tell("died", warm[0], world.now)
    world.settle()
    assert served(world, group).count("warm") == 1
    assert warm[0] not in world.leased[group]
    # The same for one that is promoted, and one that was returned just before.
    world = Simulation(policy=Policy(refill=False, fork=False, deepest_layer=0, starting=1))
    world.stocked(A)
    group = world.request(AB, number=2)
    world.finish(make(world))
    world.tell("died", "s1", world.now)
    world.settle()
    assert "s1" not in world.leased[group]
    world.returned(group)
    holder = world.request(AB, number=2)
    pair = world.request(AB, number=2)
    back = world.leased[holder][0]
    world.give_back(holder)
    world.finish_reset(back, 3)
    world.tell("died", back, world.now)
    world.settle()
    assert back not in world.leased[pair]
    assert world.state.resetting == 0


def test_a_hint_is_for_who_comes_and_for_each_once():
    world = Simulation(policy=QUIET)
    prefix = world.state.stock.path(A)[-1]
    world.tell("hint", A, 2, world.now)
    first = world.request(A)
    assert prefix.hinted == 1
    world.fail(world.makes[min(world.makes)])
    assert prefix.hinted == 1, "the same request, tried once more"
    world.settle()
    assert first in world.leased
    world.request(A, number=4)
    assert prefix.hinted == 0


def test_a_hint_that_nobody_came_for_ends():
    world = Simulation(policy=Policy(refill=False, hint_seconds=30.0, idle_seconds=100.0))
    world.tell("hint", A, 1, world.now)
    world.settle()
    world.pass_time(29.0)
    assert world.state.stock.path(A)[-1].promised == 1
    world.pass_time(1.0)
    assert world.state.stock.path(A)[-1].promised == 0
    assert idle(world, A) == 1
    world.pass_time(70.0)
    world.settle()
    assert idle(world, A) == 0, "nobody came for that either"


def test_those_that_are_promised_never_become_too_old():
    world = Simulation(policy=Policy(refill=False, idle_seconds=10.0))
    world.tell("set_bounds", A, 1, None)
    world.settle()
    (sandbox,) = world.existing
    for _ in range(5):
        world.pass_time(10.0)
        assert (world.destroying, world.existing) == ([], {sandbox})
    world.tell("set_bounds", A, 0, None)
    world.pass_time(10.0)
    assert world.destroying == [sandbox]


def test_what_was_promised_and_dies_is_made_again():
    world = Simulation(policy=QUIET)
    world.tell("set_bounds", A, 1, None)
    world.settle()
    world.tell("died", "s1", world.now)
    assert make(world).background
    world.settle()
    assert idle(world, A) == 1


def test_a_failed_refill_is_tried_again_when_its_time_has_come():
    world = Simulation(policy=Policy(refill=False, backoff=8.0))
    world.tell("set_bounds", A, 1, None)
    world.fail(make(world), depth=2)
    assert not world.makes
    at = wake(world.state)
    assert at is not None
    assert 4.0 <= at <= 8.0
    world.pass_time(at - 0.001)
    assert not world.makes
    world.pass_time(0.001)
    assert make(world).background
    world.fail(make(world))  # this time the machinery fails
    again = wake(world.state)
    assert again is not None
    assert 8.0 <= again - at <= 16.0


def test_what_dies_while_it_is_promoted_is_left_to_who_promotes_it():
    world = Simulation(policy=BARE)
    world.stocked(A)
    request = world.request(AB)
    assert make(world).origin == "s1"
    world.tell("died", "s1", world.now)
    assert world.destroying == []
    world.fail(make(world))
    assert make(world).origin is None
    world.settle()
    assert served(world, request) == ["cold"]


def test_a_refill_may_take_ten_times_as_long_as_thought():
    world = Simulation(policy=Policy(refill=False, refilling=1, late=60.0))
    request = world.request(A)
    world.finish(make(world), stage_seconds=[30.0, 70.0], create_seconds=0.001, layers={})
    world.returned(request)
    world.tell("set_bounds", A, 2, None)
    world.tell("set_bounds", chain("f"), 1, None)
    assert make(world).chain.key == "a"
    world.pass_time(1_000.0)
    assert len(world.makes) == 1
    world.pass_time(1.0)
    assert len(world.makes) == 2


def test_a_bound_holds_at_both_ends():
    world = Simulation(policy=Policy(cover=1e6))
    world.tell("set_bounds", A, 2, 3)
    world.settle()
    assert idle(world, A) == 2
    leases = [world.request(A) for _ in range(5)]
    world.settle()
    world.returned(*leases)
    assert idle(world, A) == 3, "at most so many are kept, whatever the demand"


@pytest.mark.parametrize(("deepest_layer", "kept"), [(None, 2), (0, 5)])
def test_what_cannot_be_reset_beside_the_making_is_made_again(deepest_layer, kept):
    """While requests wait, resets beyond the limit are replaced by a destroy."""
    world = Simulation(policy=Policy(refill=False, resetting=2, deepest_layer=deepest_layer))
    leases = [world.request(A) for _ in range(5)]
    world.settle()
    world.request(AC)
    world.give_back(*leases)
    assert len(world.resets) == kept, "of a state without a layer, none is given up"
    world.settle()
    assert idle(world, A) == kept


def test_whatever_comes_back_is_reset_while_nobody_waits():
    world = Simulation(policy=Policy(refill=False, resetting=2))
    leases = [world.request(A) for _ in range(5)]
    world.settle()
    world.give_back(*leases)
    assert len(world.resets) == 5


def test_who_was_half_served_and_waits_lets_others_have_it():
    """Two claims that each hold a part of what they need do not block each other."""
    world = Simulation(Budget(sandboxes=4), Policy(refill=False, fork=False, deepest_layer=0))
    one, two = world.request(A, number=2), world.request(AB, number=2)
    for job in sorted(world.makes)[::2]:
        world.finish(world.makes[job])
    third = world.request(AC, number=3)
    for _ in range(2):
        world.fail(next(iter(world.makes.values())))
    for _ in range(50):
        world.settle()
        world.give_back(*list(world.leased))
    assert all(isinstance(world.answers[request], Deliver) for request in (one, two, third))


# --- Numbers that are told --------------------------------------------------------------------------


def test_the_estimated_wait_is_for_those_ahead_alone():
    world = Simulation(Budget(sandboxes=2), Policy(refill=False, fork=False, half_life=log(2) * 10))
    leases = [world.request(A), world.request(A)]
    world.settle()
    world.returned(leases[0])
    world.granted(AB)
    world.request(A, patience=500)
    waiting = world.request(A, number=2, patience=10)
    world.request(A, patience=500)
    world.pass_time(10)
    reason = world.answers[waiting].reason
    rate = 0.1 * 2.718281828459045**-1.0  # one return ten seconds ago
    assert reason.estimated_wait == pytest.approx(3 / rate)
    assert (reason.queue, reason.wanted, reason.waited) == (3, 2, 10.0)


def test_returns_fade():
    returns = ReturnRate(half_life=10.0)
    assert returns.seconds_for(1, 5.0) is None
    returns.add(4, 0.0)
    rate = log(2) / 10 * 4
    assert returns.seconds_for(1, 0.0) == pytest.approx(1 / rate)
    assert returns.seconds_for(1, 10.0) == pytest.approx(2 / rate)
    returns.add(2, 10.0)
    assert returns.seconds_for(1, 10.0) == pytest.approx(1 / rate)
    assert returns.seconds_for(1, 1000.0) is None


def test_a_breaker_waits_twice_as_long_each_time():
    policy = Policy(backoff=2.0, longest_backoff=20.0, tolerated=3)
    breaker = Breaker(policy)
    waits = []
    for number in range(1, 8):
        breaker.record("k", JobFailure("no", 3), 100.0)
        assert (breaker.failures, breaker.exhausted, breaker.tripped) == (number, number >= 3, number >= 3)
        waits.append(breaker.retry_at - 100.0)
    for wait, most in zip(waits, (2, 4, 8, 16, 20, 20, 20), strict=True):
        assert most / 2 <= wait <= most
    assert breaker.refuses(breaker.retry_at - 0.1)
    assert not breaker.refuses(breaker.retry_at)
    assert not breaker.delays(breaker.retry_at)
    breaker.probing = True
    assert breaker.refuses(breaker.retry_at)
    assert breaker.delays(breaker.retry_at)
    breaker.record("k", JobFailure("the machinery's"), 100.0)
    assert breaker.exhausted
    assert not breaker.refuses(100.0), "who needs it may try: the recipe is not to blame"
    assert breaker.delays(100.0), "but nobody waits for a refill"


def test_it_is_time_when_something_changes():
    world = Simulation(policy=Policy(refill=False, idle_seconds=50.0, hint_seconds=300.0))
    assert wake(world.state) is None
    world.pass_time(1_000.0)
    world.stocked(A)
    assert wake(world.state) == 1_050.0
    lease = world.request(AB, patience=40.0, lease=10.0)
    assert wake(world.state) == 1_040.0
    world.settle()
    assert wake(world.state) == 1_010.0
    world.tell("keep_alive", lease, None)
    assert wake(world.state) == 1_050.0
    world.tell("hint", AC, 1, world.now)
    world.settle()
    world.pass_time(50.0)
    world.settle()
    world.pass_time(20.0)
    assert wake(world.state) == 1_100.0, "the one that is promised is looked at once more"


def test_a_priority_queue_forgets_what_was_put_before():
    scores = dict.fromkeys(range(10), 1_000.0)
    queue: PriorityQueue[int] = PriorityQueue(lambda item: (scores[item],))
    for number in range(1_000):
        item = number % 10
        scores[item] -= 1 + item
        queue.put(item)
        found = queue.least()
        assert found is not None
        assert found[1] == (scores[found[0]],) == (min(scores.values()),)
        assert len(queue._heap) <= 4 * 10 + 64 + 1
    for item in reversed(range(10)):
        assert queue.due(scores[item]) == item
        assert queue.due(scores[item] - 0.5) is None
        assert item in queue
        queue.drop(item)
    assert (queue.least(), queue.first, len(queue)) == (None, None, 0)


def test_what_is_owed_keeps_its_turn():
    world = Simulation(Budget(sandboxes=1), QUIET)
    holder = world.granted(chain("h"))
    for name in "abc":
        world.tell("hint", chain(name), 1, world.now)
    world.pass_time(1.0)
    world.returned(holder)
    assert idle(world, A) == 1


# --- Memory of recipes ------------------------------------------------------------------------------


def test_recipes_that_nothing_is_kept_for_are_forgotten():
    world = Simulation(policy=Policy(refill=False, park=False, deepest_layer=0, recipes=10))
    for number in range(100):
        world.stocked(chain(f"r{number}/s"))
    stock = world.state.stock
    assert len(stock._chains) == 10
    assert len(stock._prefixes) == 2 + 2 * 10
    assert len(world.state.costs._learned) < 60


def test_the_recipe_that_was_asked_for_last_is_known():
    world = Simulation(policy=Policy(refill=False, park=False, deepest_layer=0, recipes=3))
    for name in ("a", "b", "a", "c", "a", "d", "a", "e"):
        world.stocked(chain(name))
    assert "a" in world.state.stock._chains
    assert "b" not in world.state.stock._chains


def test_a_candidate_says_what_others_were_promised():
    world = Simulation(policy=BARE)
    world.tell("hint", A, 1, world.now)
    world.settle()
    found = candidates(world.state, world.state.stock.path(AB), world.now)
    assert Candidate("promoted", 2, PRIOR["dependencies"], promised=True) in found
    world.tell("set_bounds", A, 0, None)
    world.pass_time(world.state.policy.hint_seconds)
    found = candidates(world.state, world.state.stock.path(AB), world.now)
    assert Candidate("promoted", 2, PRIOR["dependencies"], promised=False) in found

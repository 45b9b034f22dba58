"""When the server refuses calls: only if a queue stands, and then only as many as would wait."""

from __future__ import annotations

import heapq
import random
from collections import Counter, deque
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dutyfree.server.overload import ALWAYS, DELAY, LATE, QUIET, STANDING, OverloadControl
from dutyfree.server.turns import BUDGET


def late(control: OverloadControl, at: float = 0.0) -> float:
    """All calls of a while were late. Returns the time after that."""
    for step in range(4):
        control.note(2 * LATE, at + step * STANDING / 2)
    return at + 2 * STANDING


@given(st.integers(1, 5000))
def test_a_burst_is_admitted(count: int) -> None:
    control = OverloadControl()
    assert all(control.admit("a", 5.0) for _ in range(count))


@given(st.lists(st.floats(LATE, 10), max_size=100), st.floats(0, LATE, exclude_max=True))
def test_if_every_third_call_is_in_time_no_queue_stands(delays: list[float], fast: float) -> None:
    control = OverloadControl()
    for number, delay in enumerate(delays):
        control.note(fast if number % 3 == 0 else delay, number * STANDING / 5)
    assert not control.refusing


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.booleans(), st.floats(0, 0.3)), max_size=200), st.booleans()
)
def test_the_sums_are_those_of_the_calls_that_run(
    steps: list[tuple[str, bool, float]], refuses: bool
) -> None:
    control, running, now = OverloadControl(), deque[tuple[str, float]](), 0.0
    if refuses:
        now = late(control)
    for tenant, begins, seconds in steps:
        now += seconds
        if not begins and running:
            control.end(*running.popleft(), now)
        elif control.admit(tenant, now):
            running.append((tenant, now))
        assert control._of_tenant == +sum(control._running, Counter())
        assert control._count == control._of_tenant.total()


# --- A model of the server ----------------------------------------------------------------------------

CAPACITY = 10_000
"""Calls that the modelled server can carry out in a second."""


READ = 300
"""Calls that the modelled server reads ahead. It does not see how many wait behind those."""


class Modelled(NamedTuple):
    waits: list[float]
    """From the arrival of each call to its end."""
    refused: list[float]
    """When calls were refused."""


def model(arrivals: list[float], capacity: int = CAPACITY) -> Modelled:
    """What an event loop does that handles in each turn the answers that came, and calls for a while."""
    control, found = OverloadControl(), Modelled([], [])
    coming, waiting, answers = deque(sorted(arrivals)), deque[float](), list[tuple[float, float, float]]()
    now = 0.0
    while coming or waiting or answers:
        if not waiting:
            now = max(now, min([*[one[0] for one in answers[:1]], *list(coming)[:1]]))
        while coming and coming[0] <= now:
            waiting.append(coming.popleft())
        control.waiting = min(len(waiting), READ)
        for _ in range(len(answers)):
            if answers[0][0] > now:
                break
            _, arrived, begun = heapq.heappop(answers)
            now += 0.7 / capacity
            control.end("a", begun, now)
            control.note(now - arrived, now)
            found.waits.append(now - arrived)
        end = now + BUDGET
        while waiting and (control.refusing or now < end):
            arrived = waiting.popleft()
            control.waiting = min(len(waiting), READ)
            control.note_wait(now - arrived, now)
            if control.admit("a", now, now - arrived):
                now += 0.3 / capacity
                heapq.heappush(answers, (now + 0.0007, arrived, now))
            else:
                now += 0.15 / capacity
                found.refused.append(now)
    return found


def arriving(rate: float, seconds: float, chance: random.Random) -> list[float]:
    """Random times."""
    times = [0.0]
    while times[-1] < seconds:
        times.append(times[-1] + chance.expovariate(rate))
    return times


@pytest.mark.parametrize("capacity", [2000, CAPACITY])
def test_twice_the_load_is_noticed_before_many_calls_wait(capacity: int) -> None:
    found = model(arriving(2 * capacity, 5, random.Random(1)), capacity)
    assert found.refused[0] < 0.5
    assert sum(wait > 2 * LATE for wait in found.waits) < 0.4 * capacity
    assert max(found.waits) < 0.3


@pytest.mark.parametrize("spread", [0.0, 0.02, 0.05, 0.1, 0.3])
@pytest.mark.parametrize("count", [1000, 2000])
def test_a_batch_of_rollouts_may_begin_together(spread: float, count: int) -> None:
    chance = random.Random(2)
    assert not model([5 + chance.random() * spread for _ in range(count)]).refused


def test_a_burst_that_is_worked_off_is_not_refused() -> None:
    assert not model([5.0] * 1000, capacity=2000).refused


def test_a_load_that_fits_is_never_refused() -> None:
    assert not model(arriving(0.9 * CAPACITY, 5, random.Random(3))).refused


def test_a_standing_queue_bounds_what_runs_at_once() -> None:
    control = OverloadControl()
    now = late(control)
    assert [control.admit("a", now) for _ in range(2 * ALWAYS)].count(True) == ALWAYS


def test_the_bound_follows_the_rate_at_which_calls_end() -> None:
    control = OverloadControl()
    rate = 20_000
    for number in range(rate):
        control.end("a", number / rate, number / rate)
    now = late(control, 1.0 - 2 * STANDING)
    admitted = [control.admit("a", now) for _ in range(rate)].count(True)
    assert abs(admitted - rate * DELAY) <= rate * DELAY * 0.5


def test_calls_that_end_make_room() -> None:
    control = OverloadControl()
    now = late(control)
    while control.admit("a", now):
        pass
    control.end("a", now, now)
    assert control.admit("a", now)
    assert not control.admit("a", now)


def test_long_commands_count_at_their_beginning_only() -> None:
    control = OverloadControl()
    now = late(control)
    while control.admit("a", now):
        pass
    assert control.admit("a", now + 0.21)


def test_what_waited_too_long_is_refused_unless_its_tenant_has_nothing_else() -> None:
    control = OverloadControl()
    now = late(control)
    assert control.admit("a", now, waited=LATE)
    assert not control.admit("a", now, waited=LATE)
    assert control.admit("a", now)
    assert control.admit("b", now, waited=LATE)


def test_calls_that_are_never_refused_make_no_room_for_others() -> None:
    control = OverloadControl()
    now = late(control)
    while control.admit("a", now):
        pass
    control.take("a", now)
    control.end("a", now, now)
    assert not control.admit("a", now)


def test_all_calls_are_taken_again_after_a_quiet_while() -> None:
    control = OverloadControl()
    now = late(control)
    while control.admit("a", now):
        pass
    later = now + QUIET + 1.1
    assert control.admit("a", later)
    assert not control.refusing
    assert all(control.admit("a", later) for _ in range(10 * ALWAYS))


def test_a_greedy_tenant_is_refused_before_others() -> None:
    control = OverloadControl()
    now = late(control)
    while control.admit("greedy", now):
        pass
    modest = [control.admit("modest", now) for _ in range(ALWAYS)].count(True)
    assert modest == ALWAYS // 2
    assert not control.admit("greedy", now)

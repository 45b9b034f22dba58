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


class Modelled(NamedTuple):
    waits: list[float]
    """From the arrival of each call to its end."""
    refused: list[float]
    """When calls were refused."""


def model(arrivals: list[float], chance: random.Random) -> Modelled:
    """What an event loop does that handles in each turn what came during the last one, in any order."""
    control, found = OverloadControl(), Modelled([], [])
    waiting, answers, now = deque(sorted(arrivals)), list[tuple[float, ...]](), 0.0
    while waiting or answers:
        work: list[tuple[float, ...]] = []
        while waiting and waiting[0] <= now:
            work.append((waiting.popleft(),))
        while answers and answers[0][0] <= now:
            work.append(heapq.heappop(answers))
        if not work:
            now = min([*[one[0] for one in answers[:1]], *list(waiting)[:1]])
            continue
        chance.shuffle(work)
        for one in work:
            if len(one) == 3:
                _, arrived, begun = one
                now += 0.7 / CAPACITY
                control.end("a", begun, now)
                control.note(now - begun, now)
                found.waits.append(now - arrived)
            elif control.admit("a", now):
                now += 0.3 / CAPACITY
                heapq.heappush(answers, (now + 0.0007, one[0], now))
            else:
                now += 0.15 / CAPACITY
                found.refused.append(now)
    return found


def arriving(rate: float, seconds: float, chance: random.Random) -> list[float]:
    """Random times."""
    times = [0.0]
    while times[-1] < seconds:
        times.append(times[-1] + chance.expovariate(rate))
    return times


def test_twice_the_load_is_noticed_before_many_calls_wait() -> None:
    chance = random.Random(1)
    found = model(arriving(2 * CAPACITY, 5, chance), chance)
    assert found.refused[0] < 0.3
    assert sum(wait > 0.05 for wait in found.waits) < 0.3 * CAPACITY
    assert max(found.waits) < 0.4


@pytest.mark.parametrize("spread", [0.0, 0.02, 0.05, 0.1, 0.3])
@pytest.mark.parametrize("count", [1000, 2000])
def test_a_batch_of_rollouts_may_begin_together(spread: float, count: int) -> None:
    chance = random.Random(2)
    assert not model([5 + chance.random() * spread for _ in range(count)], chance).refused


def test_a_load_that_fits_is_never_refused() -> None:
    chance = random.Random(3)
    assert not model(arriving(0.9 * CAPACITY, 5, chance), chance).refused


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


def test_long_commands_count_for_a_second_only() -> None:
    control = OverloadControl()
    now = late(control)
    while control.admit("a", now):
        pass
    assert control.admit("a", now + 1.1)


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

"""When the server refuses calls: only if a queue stands, and then only as many as would wait."""

from __future__ import annotations

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


@given(st.lists(st.floats(LATE, 10), max_size=50), st.floats(0, LATE, exclude_max=True))
def test_one_call_in_time_shows_that_no_queue_stands(delays: list[float], fast: float) -> None:
    control = OverloadControl()
    for number, delay in enumerate(delays):
        control.note(fast if number % 5 == 0 else delay, number * STANDING / 5)
    assert not control.refusing


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

"""When the server refuses actions: only if even the fastest one was late."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dutyfree.server.overload import LEAST, OverloadDetector

WINDOW, TARGET = 1.0, 0.1


def detector() -> OverloadDetector:
    return OverloadDetector(TARGET, WINDOW)


def after(delays: list[float]) -> OverloadDetector:
    """A detector after one window with these delays."""
    made = detector()
    made.note(0.0, 0.0)  # begins a window
    made = detector()
    for number, delay in enumerate(delays):
        made.note(delay, number * 1e-6)
    return made


@given(st.lists(st.floats(TARGET * 1.01, 10), min_size=LEAST, max_size=50))
def test_a_window_in_which_all_were_late_is_overload(delays: list[float]) -> None:
    assert after(delays).refuses(WINDOW + 0.1)


@given(st.lists(st.floats(0, 10), min_size=1, max_size=50), st.floats(0, TARGET))
def test_one_fast_action_is_enough_against_it(delays: list[float], fast: float) -> None:
    assert not after([*delays, fast]).refuses(WINDOW + 0.1)


@given(st.lists(st.floats(0, 10), max_size=LEAST - 1))
def test_too_few_actions_say_nothing(delays: list[float]) -> None:
    assert not after(delays).refuses(WINDOW + 0.1)


def test_it_ends_when_nothing_waits_any_more() -> None:
    late = after([1.0] * LEAST)
    assert late.refuses(WINDOW + 0.1)
    assert not late.refuses(2 * WINDOW + 0.2)


def test_it_goes_on_while_actions_are_still_late() -> None:
    late = after([1.0] * LEAST)
    for number in range(LEAST):
        late.note(1.0, WINDOW + 0.1 + number * 1e-6)
    assert late.refuses(2 * WINDOW + 0.2)

"""The rate limit on output: processes that print without end do not slow down others."""

from __future__ import annotations

from collections import Counter
from functools import partial

import anyio
from hypothesis import given
from hypothesis import strategies as st

from dutyfree.engine.sandbox.output_credit import RATE, OutputCredit, OutputRate
from tests.engine import virtual


@given(st.lists(st.tuples(st.integers(1, 1 << 20), st.floats(0, 1)), min_size=1))
def test_all_processes_together_stay_within_the_rate(asked: list[tuple[int, float]]) -> None:
    share, now, moments = OutputRate(), 0.0, []
    for size, later in asked:
        now += later
        moments.append((now + share.wait(size, now), size))
    for number, (begin, _) in enumerate(moments):
        for end, size in moments[number:]:
            given_out = sum(other for at, other in moments if begin <= at <= end) - size
            assert given_out <= RATE * (end - begin) * 1.001 + 1


def test_processes_that_print_little_are_not_slowed_down() -> None:
    virtual.run(_print_much_and_little)


async def _print_much_and_little() -> None:
    rate = float(4 << 20)
    share = OutputRate(rate)
    paid: Counter[int] = Counter()

    def pay(who: int, size: int) -> None:
        paid[who] += size
        if who:  # these use their credit at once
            debts[who].use(size)

    debts = [OutputCredit(partial(pay, who), share) for who in range(9)]
    for who in range(1, 9):
        debts[who].use(1 << 20)
    used, begun = 0, anyio.current_time()
    while anyio.current_time() < begun + 60:
        await anyio.sleep(0.05)
        debts[0].use(1000)
        used += 1000
        assert used - paid[0] < 1 << 20  # the credit that a process starts with
    most = rate * (anyio.current_time() - begun + 1)
    assert most / 2 <= sum(paid[who] for who in range(1, 9)) <= most

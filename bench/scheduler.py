"""P12: the time of one scheduling decision with different numbers of idle sandboxes; and mix.py by policy.

A decision is everything that the scheduler does for one request: arrival, choice, delivery.
"""

from __future__ import annotations

import statistics
from time import perf_counter

import mix
from rounds import Row, figure

from dutyfree.engine.pool.scheduler.decide import candidates, decide, place
from dutyfree.engine.pool.scheduler.state import State
from dutyfree.engine.pool.scheduler.values import (
    Budget,
    Deliver,
    JobResult,
    LeaseRequest,
    Make,
    Policy,
    PrefixChain,
)

RECIPES = 1000
FLEETS = (100, 1_000, 10_000, 100_000)
KINDS = ("base", "image", "repository", "dependencies", "setup")


def chain(number: int) -> PrefixChain:
    """One of a thousand recipes: ten share a repository, and a hundred share an image."""
    image, repository = f"image {number % 10}", f"repository {number % 100}"
    keys = ("base", image, f"{image} {repository}", f"dependencies {number}", f"setup {number}")
    return PrefixChain(keys, KINDS)


def fleet(idle: int) -> tuple[State, float]:
    """A state with ``idle`` idle sandboxes. A third of them have only part of their recipe."""
    state = State(Budget(sandboxes=10**7, memory=10**15, disk=10**15), Policy(starting=10**6, late=1e9))
    now = 0.0
    for number in range(idle):
        now += 0.001
        path = chain(number % RECIPES)
        state.arrive(LeaseRequest(number, path, now + 1e9), now)
        for operation in decide(state, now):
            if isinstance(operation, Make) and not operation.background:
                made = JobResult(layers={1: 10**6, 2: 10**6})
                state.made(operation.job, f"s{operation.job}", now, made)
        decide(state, now)
    for number in range(idle):
        now += 0.001
        held = [entry[0] for entry in state.leases[number].ready]
        state.returned(number, now)
        for sandbox in held:
            state.reset_done(sandbox.id, 2 if number % 3 == 0 else 4, now)
    decide(state, now)  # two refills start, and do not end
    return state, now


def decisions(state: State, now: float, rounds: int, idle: int) -> list[float]:
    """Seconds of each request that is served warm. The sandbox is returned after each."""
    seconds = []
    for number in range(rounds):
        now += 0.01
        request = LeaseRequest(idle + number, chain(number * 7 % min(RECIPES, idle)), now + 1e9)
        start = perf_counter()
        state.arrive(request, now)
        operations = decide(state, now)
        seconds.append(perf_counter() - start)
        for operation in operations:
            if isinstance(operation, Make) and not operation.background:
                state.made(operation.job, operation.origin or f"m{operation.job}", now, JobResult())
        for operation in (*operations, *decide(state, now)):
            if isinstance(operation, Deliver):
                state.returned(operation.request, now)
                for member in operation.members:
                    state.reset_done(member.sandbox, 4, now)
        decide(state, now)
    return seconds[rounds // 10 :]


def placements(state: State, now: float, rounds: int) -> list[float]:
    """Seconds of the choice of a sandbox alone."""
    seconds = []
    for number in range(rounds):
        path = state.stock.path(chain(number * 7 % RECIPES))
        start = perf_counter()
        place(candidates(state, path, now))
        seconds.append(perf_counter() - start)
    return seconds[rounds // 10 :]


async def scheduling(rounds: int) -> list[Row]:
    rows, medians = [], {}
    for idle in FLEETS:
        state, now = fleet(idle)
        chosen = placements(state, now, rounds)
        what = f"one decision with {state.stock.idle:,} idle sandboxes, µs"
        seconds = decisions(state, now, rounds, idle)
        medians[idle] = statistics.median(seconds)
        judged = idle == 10_000
        value, target = medians[idle] * 1e6, 20 if judged else 0
        rows.append(figure("P12" if judged else f"P12-{idle}", what, value, seconds, at_most=target))
        if judged:
            value = statistics.median(chosen) * 1e6
            rows.append(figure("P12-place", "the choice of a sandbox alone, µs", value, chosen))
    growth = medians[100_000] / medians[100]
    rows.append(
        figure("P12-growth", "a decision with 100,000 idle ÷ with 100", growth, [growth], at_most=1.5)
    )
    return rows + mix.rows()

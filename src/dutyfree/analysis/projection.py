"""Worker-hours at scale, from seconds per rollout; and rollouts per second as observed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime

from dutyfree.analysis.cells import Key, Sample
from dutyfree.analysis.findings import Price, Projection, Spread, Throughput
from dutyfree.analysis.model import Cell, least_parallel
from dutyfree.analysis.statistics import Estimate, difference, ratio

ROLLOUTS = (10_000, 30_000, 100_000, 300_000, 1_000_000)
MILLION = 1_000_000
REFERENCE_ACTIONS = 150


def worker_hours(seconds: Estimate, rollouts: int) -> Estimate:
    """N·T/3600."""
    return seconds.scaled(rollouts / 3600)


def project(cells: Iterable[Cell]) -> list[Projection]:
    """Project the cells with the fewest parallel rollouts, because a worker waits for its own rollout."""
    return [
        Projection(
            workload=cell.workload,
            substrate=cell.substrate,
            actions=cell.actions,
            rollouts=rollouts,
            hours=worker_hours(cell.total.p50, rollouts),
        )
        for cell in least_parallel(cells)
        if cell.total is not None
        for rollouts in ROLLOUTS
    ]


def prices(actions: int = REFERENCE_ACTIONS, rollouts: int = MILLION) -> list[Price]:
    """Table 1: arithmetic only, the same for every substrate."""
    return [
        Price("1 s per rollout", 1.0, "rollout", rollouts, actions, rollouts / 3600),
        Price("10 ms per action", 0.010, "action", rollouts, actions, 0.010 * actions * rollouts / 3600),
        Price("100 ms per action", 0.100, "action", rollouts, actions, 0.100 * actions * rollouts / 3600),
    ]


def spreads(cells: Iterable[Cell], by_key: Mapping[Key, Sample], rollouts: int = MILLION) -> list[Spread]:
    """Table 2: the slowest and the fastest substrate of each workload."""
    workloads: dict[str, list[Cell]] = {}
    for cell in least_parallel(cells):
        if cell.total is not None:
            workloads.setdefault(cell.workload, []).append(cell)
    return [_spread(members, by_key, rollouts) for members in workloads.values() if len(members) > 1]


def _spread(members: list[Cell], by_key: Mapping[Key, Sample], rollouts: int) -> Spread:
    ordered = sorted(members, key=lambda cell: cell.total.p50.value if cell.total else 0.0)
    fastest, slowest = ordered[0], ordered[-1]
    assert fastest.total is not None
    assert slowest.total is not None
    slow, fast = by_key[slowest.key].totals(), by_key[fastest.key].totals()
    gap = difference(slow, fast)
    assert gap is not None
    return Spread(
        workload=slowest.workload,
        actions=slowest.actions,
        slowest=slowest.substrate,
        fastest=fastest.substrate,
        slowest_seconds=slowest.total.p50,
        fastest_seconds=fastest.total.p50,
        difference=gap,
        ratio=ratio(slow, fast),
        rollouts=rollouts,
    )


def throughput(sample: Sample) -> Throughput | None:
    """Successful rollouts divided by the time in which any rollout of the cell was running.

    Trials of other cells run in between, so the time from the first start to the last end would be too long.
    """
    periods = sorted(
        (begin, begin + trial.total)
        for trial in sample.trials
        if (begin := _seconds(trial.started)) is not None
    )
    busy, reached = 0.0, float("-inf")
    for begin, end in periods:
        busy += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    if busy <= 0 or not sample.succeeded:
        return None
    return Throughput(
        *sample.key,
        succeeded=len(sample.succeeded),
        busy_seconds=busy,
        per_second=len(sample.succeeded) / busy,
        at_once=sum(end - begin for begin, end in periods) / busy,
    )


def _seconds(started: str) -> float | None:
    try:
        return datetime.fromisoformat(started).timestamp()
    except ValueError:
        return None

"""Worker-hours at scale, from seconds per rollout; and rollouts per second as observed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime

from dutyfree.analysis.cells import Key, Sample
from dutyfree.analysis.findings import Price, Projection, Ratio, Spread, Throughput
from dutyfree.analysis.model import Cell, least_parallel
from dutyfree.analysis.rounds import Rounds
from dutyfree.analysis.statistics import Estimate

ROLLOUTS = (100_000, 300_000, 1_000_000, 3_000_000, 10_000_000)
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
            hours=worker_hours(cell.total.mean, rollouts),
            typical_hours=worker_hours(cell.total.p50, rollouts),
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


def spreads(
    cells: Iterable[Cell],
    by_key: Mapping[Key, Sample],
    ratios: Iterable[Ratio],
    baselines: Mapping[str, str],
    rounds: Rounds,
    rollouts: int = MILLION,
) -> list[Spread]:
    """Table 2: the slowest and the fastest substrate of each workload, by p50; see ``widest``."""
    by_cell = {cell.key: cell for cell in least_parallel(cells) if cell.total is not None}
    pairs: dict[str, list[Ratio]] = {}
    for row in ratios:
        if row.metric == "total" and (row.workload, row.substrate, row.parallel) in by_cell:
            pairs.setdefault(row.workload, []).append(row)
    found = []
    for workload, rows in pairs.items():
        row = widest(rows, baselines)
        slow, fast = ((workload, label, row.parallel) for label in (row.substrate, row.base))
        found.append(_spread(by_cell[slow], by_cell[fast], row, by_key[slow], by_key[fast], rounds, rollouts))
    return found


def widest(rows: Sequence[Ratio], baselines: Mapping[str, str | None]) -> Ratio:
    """The pair that differs most, of those on the same storage (with the same baseline) if there are any."""
    fair = [row for row in rows if baselines.get(row.substrate) == baselines.get(row.base)]
    return max(fair or rows, key=lambda row: row.ratio.value if row.ratio else 0.0)


def _spread(
    slowest: Cell, fastest: Cell, row: Ratio, slows: Sample, fasts: Sample, rounds: Rounds, rollouts: int
) -> Spread:
    slow, fast = slowest.total, fastest.total
    assert slow is not None
    assert fast is not None
    effect = rounds.effect(slows, fasts, slows.totals(), fasts.totals(), "total")
    assert effect is not None
    return Spread(
        workload=slowest.workload,
        actions=slowest.actions,
        slowest=slowest.substrate,
        fastest=fastest.substrate,
        slowest_seconds=slow.p50,
        fastest_seconds=fast.p50,
        difference=effect.difference,
        ratio=row.ratio,
        rollouts=rollouts,
        slowest_mean=slow.mean,
        fastest_mean=fast.mean,
        mean_difference=rounds.mean_difference(slows, fasts, slows.totals(), fasts.totals()),
        shown=row.shown,
        why=row.why,
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

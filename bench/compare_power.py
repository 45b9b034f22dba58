"""Count how often ``dutyfree compare`` is right: about the same thing twice, and about a known slowdown.

One repetition takes runs of A and of B in turn (A, B, A, B, ...) and compares them. In the first half of the
repetitions B is the same as A. In the second half it is slower by a known share. ``compare`` should say "no
difference shown" for at least 95 % of the first, and "slower" for at least 80 % of the second.

Two sources of runs:

- ``resampled``: each run is drawn from one cell of stored records, in stretches of consecutive rounds, so
  that slow minutes stay together. B's times are multiplied. Takes seconds.
- ``live``: each run is a study of T0 on bare. B waits at creation for the known share of the p50 of A. Needs
  a quiet machine, and about an hour for 40 repetitions.

    python bench/compare_power.py resampled docs/results/2026-11-15-paper
    python bench/compare_power.py live --repetitions 40
    python bench/run.py compare-power
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path

import comparisons
import msgspec
import numpy as np
from rounds import Row, figure

from dutyfree.analysis.comparison import compare
from dutyfree.study.records import ActionRecord, Records, Trial, read

RUNS = 8
"""On each side."""
TRIALS = 100
"""In each run."""
SLOWDOWN = 0.05
MANY = 40
"""Repetitions that a target needs."""
STRETCH = 10
"""Consecutive rounds that stay together."""
STORED = Path(__file__).parents[1] / "docs" / "results" / "2026-11-15-paper"
BEGIN = datetime(2026, 1, 1, tzinfo=UTC)

Cell = tuple[str, str, int]
Source = Callable[[float], Awaitable[Records]]
"""Makes a run that is slower by a share."""


def slower(trial: Trial, share: float) -> Trial:
    """The same trial with all its times multiplied."""
    factor = 1 + share

    def action(one: ActionRecord) -> ActionRecord:
        inside = None if one.inside is None else one.inside * factor
        return msgspec.structs.replace(one, seconds=one.seconds * factor, inside=inside)

    return msgspec.structs.replace(
        trial,
        creation=trial.creation * factor,
        readiness=trial.readiness * factor,
        first=action(trial.first) if trial.first else None,
        setup=tuple(action(one) for one in trial.setup),
        actions=tuple(action(one) for one in trial.actions),
        cleanup=trial.cleanup * factor,
        total=trial.total * factor,
    )


def drawn(trials: Sequence[Trial], count: int, random: np.random.Generator) -> Iterator[Trial]:
    """Stretches of consecutive trials from random places."""
    stretch = min(STRETCH, len(trials), count)
    for start in range(0, count, stretch):
        place = int(random.integers(0, len(trials) - stretch + 1))
        for offset in range(min(stretch, count - start)):
            index = start + offset
            yield msgspec.structs.replace(trials[place + offset], index=index, id=f"drawn-{index}")


def resampled(stored: Records, cell: Cell, trials: int, seed: int) -> Source:
    """Runs from the successful trials of one cell of stored records."""
    found = sorted((one for one in stored.measured if one.cell == cell and one.ok), key=lambda one: one.index)
    random = np.random.default_rng(seed)
    number = 0

    async def run(share: float) -> Records:
        nonlocal number
        number += 1
        started = (BEGIN + timedelta(minutes=number)).isoformat()
        return msgspec.structs.replace(
            stored,
            study=msgspec.structs.replace(stored.study, started=started),
            trials=tuple(slower(one, share) for one in drawn(found, trials, random)),
        )

    return run


async def live(trials: int) -> Source:
    """Runs of T0 on bare. A first run finds how long the known share is."""
    pilot = await comparisons.study("T0", trials, {"delayed": 0.0})
    seconds = statistics.median(one.total for one in pilot.measured if one.ok)

    async def run(share: float) -> Records:
        return await comparisons.study("T0", trials, {"delayed": share * seconds * 1e3})

    return run


class Counted(msgspec.Struct):
    """The verdicts about one source of runs."""

    what: str
    same: Counter[str] = msgspec.field(default_factory=Counter)
    slowed: Counter[str] = msgspec.field(default_factory=Counter)
    apart: list[float] = msgspec.field(default_factory=list)
    """Standard deviations of the logarithms of the p50s of the runs of A."""
    seconds: list[float] = msgspec.field(default_factory=list)
    """p50s of the runs of A."""

    @property
    def none_shown(self) -> float:
        return self.same["no difference shown"] / max(1, self.same.total())

    @property
    def found(self) -> float:
        return self.slowed["slower"] / max(1, self.slowed.total())


async def repeat(what: str, source: Source, runs: int, share: float, repetitions: int) -> Counted:
    counted = Counted(what)
    for _ in range(repetitions):
        for counter, slow in ((counted.same, 0.0), (counted.slowed, share)):
            both = [await source(slow if number % 2 else 0.0) for number in range(2 * runs)]
            counter[comparisons.verdict(compare(both[::2], both[1::2]))] += 1
            middles = [statistics.median(one.total for one in run.measured if one.ok) for run in both[::2]]
            counted.apart.append(float(np.std(np.log(middles), ddof=1)))
            counted.seconds += middles
    return counted


def table(found: Sequence[Counted], runs: int, trials: int, share: float) -> str:
    lines = [
        f"{runs} runs of {trials} trials on each side; B slower by {share:.0%}",
        "",
        "| runs of | runs differ by (SD) | same: no difference shown | slower or faster | cannot tell "
        "| slower: found | not shown | cannot tell |",
        "|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for one in found:
        wrong = one.same["slower"] + one.same["faster"]
        numbers = [
            one.same["no difference shown"],
            wrong,
            one.same["cannot tell"],
            one.slowed["slower"],
            one.slowed["no difference shown"],
            one.slowed["cannot tell"],
        ]
        counts = " | ".join(str(number) for number in numbers)
        lines.append(f"| {one.what} | {statistics.median(one.apart):.1%} | {counts} |")
    return "\n".join(lines)


async def from_records(
    where: Path, cells: Sequence[Cell], runs: int, trials: int, share: float, repetitions: int
) -> list[Counted]:
    stored = await asyncio.to_thread(read, where)
    return [
        await repeat(f"{cell[0]} on {cell[1]}", resampled(stored, cell, trials, 1), runs, share, repetitions)
        for cell in cells
    ]


async def compare_power(repetitions: int) -> list[Row]:
    """C6 to C9, for bench/run.py. p50 and p95 are over the p50s of the runs of A."""
    rows = []
    cells = [("T0", "docker", 1), ("T2", "bare", 1)]
    stored = await from_records(STORED, cells, RUNS, TRIALS, SLOWDOWN, MANY)
    alive = await repeat("T0 on bare, live", await live(TRIALS), RUNS, SLOWDOWN, repetitions)
    for same, slowed, what, counted in (
        ("C6", "C7", "stored", stored),
        ("C8", "C9", "live", [alive]),
    ):
        took = [seconds for one in counted for seconds in one.seconds]
        none_shown = min(one.none_shown for one in counted)
        found = min(one.found for one in counted)
        # A few repetitions cannot tell 95 % from 80 %.
        enough = all(one.same.total() >= MANY for one in counted)
        least, power = (0.95, 0.8) if enough else (0.0, 0.0)
        rows += [
            figure(same, f"compare, {what}: no false difference, share", none_shown, took, at_least=least),
            figure(slowed, f"compare, {what}: 5 % slower found, share", found, took, at_least=power),
        ]
    return rows


def cell(text: str) -> Cell:
    workload, _, substrate = text.partition("/")
    if not substrate:
        raise argparse.ArgumentTypeError(f"{text!r} is not WORKLOAD/SUBSTRATE, such as T2/bare")
    return workload, substrate, 1


async def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    commands = parser.add_subparsers(dest="command", required=True)
    add = partial(commands.add_parser, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    stored, alive = add("resampled", help="draw runs from stored records"), add("live", help="measure runs")
    stored.add_argument("records", type=Path, nargs="?", default=STORED)
    stored.add_argument(
        "--cells",
        type=cell,
        nargs="+",
        default=[("T0", "docker", 1), ("T2", "bare", 1)],
        metavar="WORKLOAD/SUBSTRATE",
    )
    for one in (stored, alive):
        one.add_argument("--repetitions", type=int, default=MANY)
        one.add_argument("--runs", type=int, default=RUNS, help="on each side")
        one.add_argument("--trials", type=int, default=TRIALS, help="in each run")
        one.add_argument("--slowdown", type=float, default=SLOWDOWN, help="as a share")
    given = parser.parse_args()
    numbers = (given.runs, given.slowdown, given.repetitions)
    if given.command == "live":
        found = [await repeat("T0 on bare, live", await live(given.trials), *numbers)]
    else:
        runs, share, repetitions = numbers
        found = await from_records(given.records, given.cells, runs, given.trials, share, repetitions)
    print(table(found, given.runs, given.trials, given.slowdown))
    print(
        f"\n{datetime.now(UTC):%Y-%m-%d}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}",
        file=sys.stderr,
    )


if __name__ == "__main__":
    asyncio.run(main())

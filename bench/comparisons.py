"""Count how often comparisons are wrong: compare the same configuration twice, and with an added delay.

Each repetition measures one ``ab`` study, and six runs in turn (A, B, A, B, A, B). A is bare. B is bare too,
or bare with some milliseconds of delay at creation. The verdicts of four methods are counted:

- ``ab``: by the rounds of the study;
- ``in turn``: ``compare`` of the three runs of A with the three runs of B;
- ``one after the other``: ``compare`` of A, A, A with B, B, B; only without a delay, where the first three
of the six
  runs are one side;
- ``trials``: each run with the next one by their trials alone (Mann-Whitney test), which ignores
  that runs differ.

    python bench/comparisons.py --repetitions 30 --delays 0 5
    python bench/run.py comparisons
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import random
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path

import msgspec
from rounds import Row, figure
from scipy.stats import mannwhitneyu

from dutyfree.analysis.ab import compare_rounds
from dutyfree.analysis.cells import METRICS, samples
from dutyfree.analysis.comparison import compare
from dutyfree.analysis.decomposition import Decomposer
from dutyfree.analysis.statistics import ALPHA, holm
from dutyfree.analysis.verdicts import Comparison
from dutyfree.cli.ab import BLOCKS
from dutyfree.study import runner
from dutyfree.study.plan import Plan
from dutyfree.study.records import Records, Trial

RUNS = 3
"""Runs on each side."""
METHODS = ("ab", "in turn", "one after the other", "trials")


class Silent:
    def note(self, text: str) -> None: ...

    def begin(self, done: int, total: int, warmups: int) -> None: ...

    def ended(self, ended: Trial, done: int, total: int, seconds_left: float | None) -> None: ...


async def study(workload: str, trials: int, delays: dict[str, float]) -> Records:
    """Run one study with a substrate for each label."""
    plan = Plan(
        name="comparisons",
        substrates=list(delays),
        options={label: {"use": "delayed:Delayed", "milliseconds": delay} for label, delay in delays.items()},
        workloads={workload: trials},
        renew=max(1, trials // BLOCKS),
        seed=random.randrange(1 << 31),  # noqa: S311 (an order, not a secret)
    )
    with tempfile.TemporaryDirectory() as folder:
        return await runner.run(plan, Path(folder), resume=False, progress=Silent())


def verdict(found: Comparison) -> str:
    """The verdict on the whole rollout, unless another metric is slower or faster."""
    verdicts = {change.metric: change.verdict for change in found.changes}
    return next(
        (one for one in verdicts.values() if one in ("slower", "faster")),
        verdicts.get("total", "cannot tell"),
    )


def by_trials(a: Records, b: Records) -> str:
    """What a Mann-Whitney test over the trials says, which takes them as independent."""
    before, after = (next(iter(samples(one, Decomposer(one)).values())) for one in (a, b))
    pairs = [(values(before), values(after)) for values in METRICS.values()]
    pairs = [(x, y) for x, y in pairs if x.size and y.size]
    for (x, y), p in zip(pairs, holm([float(mannwhitneyu(x, y).pvalue) for x, y in pairs]), strict=True):
        if p is not None and p <= ALPHA:
            return "slower" if statistics.median(y) > statistics.median(x) else "faster"
    return "no difference shown"


class Counted(msgspec.Struct):
    """The verdicts for one delay."""

    delay: float
    verdicts: dict[str, Counter[str]] = msgspec.field(
        default_factory=lambda: {method: Counter() for method in METHODS}
    )
    apart: list[float] = msgspec.field(default_factory=list)
    """Relative differences of the p50s of consecutive runs of A."""
    seconds: list[float] = msgspec.field(default_factory=list)
    """p50 of A in each ab study."""
    loads: list[float] = msgspec.field(default_factory=list)

    def rate(self, method: str, *verdicts: str) -> float:
        counted = self.verdicts[method]
        return sum(counted[one] for one in verdicts) / max(1, counted.total())


async def repeat(workload: str, trials: int, delay: float, repetitions: int) -> Counted:
    counted = Counted(delay)
    for _ in range(repetitions):
        counted.loads.append(os.getloadavg()[0])
        both = compare_rounds(await study(workload, trials, {"A": 0.0, "B": delay}))
        counted.verdicts["ab"][verdict(both)] += 1
        counted.seconds += [change.a for change in both.changes if change.metric == "total" and change.a]
        runs = [
            await study(workload, trials, {"delayed": 0.0 if number % 2 == 0 else delay})
            for number in range(2 * RUNS)
        ]
        counted.verdicts["in turn"][verdict(compare(runs[::2], runs[1::2]))] += 1
        if not delay:
            counted.verdicts["one after the other"][verdict(compare(runs[:RUNS], runs[RUNS:]))] += 1
            middles = [statistics.median(one.total for one in run.measured) for run in runs]
            counted.apart += [abs(y / x - 1) for x, y in pairwise(middles)]
        for before, after in zip(runs[::2], runs[1::2], strict=True):
            counted.verdicts["trials"][by_trials(before, after)] += 1
    return counted


def table(found: Sequence[Counted], workload: str, trials: int) -> str:
    lines = [
        "| trials | B | judged by | comparisons | slower or faster | no difference shown | cannot tell |",
        "|---|---|---|--:|--:|--:|--:|",
    ]
    for counted in found:
        what = f"{counted.delay:g} ms slower" if counted.delay else "the same"
        for method, verdicts in counted.verdicts.items():
            if verdicts:
                different = verdicts["slower"] + verdicts["faster"]
                wrong = f" ({verdicts['faster']} faster)" if counted.delay and verdicts["faster"] else ""
                lines.append(
                    f"| {trials} of {workload} | {what} | {method} | {verdicts.total()} | "
                    f"{different}{wrong} | {verdicts['no difference shown']} | {verdicts['cannot tell']} |"
                )
    return "\n".join(lines)


def circumstances(found: Sequence[Counted]) -> str:
    loads = [load for counted in found for load in counted.loads]
    apart = [share for counted in found for share in counted.apart]
    lines = [
        f"{datetime.now(UTC):%Y-%m-%d}, {os.cpu_count()} cores, {platform.system()} {platform.release()}; "
        f"load {statistics.median(loads):.1f} (from {min(loads):.1f} to {max(loads):.1f}); A takes "
        f"{statistics.median(one for counted in found for one in counted.seconds) * 1e3:.1f} ms"
    ]
    if apart:
        lines.append(
            f"the p50s of consecutive runs of A differ by {statistics.median(apart):.1%} (median), "
            f"and by more than {statistics.quantiles(apart, n=10)[-1]:.1%} in a tenth of cases"
        )
    return "\n".join(lines)


async def comparisons(repetitions: int) -> list[Row]:
    """C1 to C5, for bench/run.py. p50 and p95 are over the p50s of A."""
    same, slower = [await repeat("T0", 40, delay, repetitions) for delay in (0.0, 5.0)]
    took, different = same.seconds + slower.seconds, ("slower", "faster")
    return [
        figure("C1", "ab: false differences, share", same.rate("ab", *different), took, at_most=0.15),
        figure("C2", "ab: 5 ms slower found, share", slower.rate("ab", "slower"), took, at_least=0.8),
        figure(
            "C3",
            "compare by run: false differences, share",
            same.rate("in turn", *different),
            took,
            at_most=0.15,
        ),
        figure("C4", "compare by run: 5 ms slower found, share", slower.rate("in turn", "slower"), took),
        figure("C5", "by trials: false differences, share", same.rate("trials", *different), took),
    ]


async def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--repetitions", type=int, default=20)
    parser.add_argument(
        "--trials", type=int, default=20, help="trials in each run, and on each side of an ab study"
    )
    parser.add_argument("--workload", default="T0")
    parser.add_argument("--delays", type=float, nargs="+", default=[0.0, 5.0], help="milliseconds")
    arguments = parser.parse_args()
    found = []
    for delay in arguments.delays:
        print(f"measuring: a delay of {delay:g} ms", file=sys.stderr)
        found.append(await repeat(arguments.workload, arguments.trials, delay, arguments.repetitions))
    print(table(found, arguments.workload, arguments.trials))
    print(circumstances(found))


if __name__ == "__main__":
    # Import the module by name: otherwise Delayed would exist twice, here and in the imported module.
    import comparisons

    asyncio.run(comparisons.main())

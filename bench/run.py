"""Measure what dutyfree itself costs, compared with the same work done without it.

Both sides run in interleaved rounds, so that other work on the machine affects both. Only ratios have
targets, apart from a few fixed limits. Writes bench/out/latest.json, a list of {id, what, value, target,
holds, n, p50, p95}, and prints a table. ``target`` is null if a figure has none. p50 and p95 are seconds of
the side that is measured. A row may have ``low`` and ``high``, the 95 % interval of the value.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

import compare_power
import comparisons
import docker
import interpreter
import mix_real
import native
import network
import pause
import peers
import pods
import scheduler
import service
import storage
import vm
import walls
import warmth
from rounds import Row, figure, interleaved, ratio

import dutyfree

OUT = Path(__file__).parent / "out" / "latest.json"


async def importing(rounds: int) -> list[Row]:
    """P13: the time of ``import dutyfree`` and of its first use, in a fresh interpreter."""
    program = "from time import perf_counter as t; s = t(); import dutyfree; dutyfree.open; print(t() - s)"
    seconds = [
        float(subprocess.run([sys.executable, "-c", program], capture_output=True, check=True).stdout)
        for _ in range(rounds + 2)
    ][2:]
    return [figure("P13", "import dutyfree, ms", statistics.median(seconds) * 1e3, seconds, at_most=50)]


async def starting(rounds: int) -> list[Row]:
    """S1, S2: the whole command line, from the start of Python to the exit status of a sandboxed command."""
    # As users run it: without PYTHONDONTWRITEBYTECODE and PYTHONUNBUFFERED.
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}

    async def run(*arguments: str) -> None:
        subprocess.run([sys.executable, *arguments], env=kept, capture_output=True, check=True)

    sides = {
        "python": partial(run, "-c", "pass"),
        "run": partial(run, "-m", "dutyfree", "run", "--", "true"),
    }
    found = await interleaved(rounds, sides)
    took = found["run"]
    return [
        figure("S1", "dutyfree run -- true, ms", statistics.median(took) * 1e3, took, at_most=250),
        ratio("S2", "dutyfree run -- true ÷ python -c pass", took, found["python"]),
    ]


async def bare(rounds: int) -> list[Row]:
    """B1, B2: the baseline itself. If it were slow, every tax would look too small."""

    async def run() -> None:
        subprocess.run(["/bin/true"], capture_output=True, check=True)

    async def through_asyncio() -> None:
        process = await asyncio.create_subprocess_exec(
            "/bin/true", stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )
        await process.communicate()

    async with dutyfree.open("bare") as substrate, substrate.sandbox() as sandbox:

        async def execute() -> None:
            await sandbox.exec(["/bin/true"])

        found = await interleaved(rounds, {"bare": execute, "run": run, "asyncio": through_asyncio})
    return [
        ratio("B1", "bare exec ÷ subprocess.run", found["bare"], found["run"], at_most=1.5),
        ratio("B2", "bare exec ÷ asyncio subprocess", found["bare"], found["asyncio"], at_most=1.0),
    ]


async def beside_docker(rounds: int) -> list[Row]:
    """P4: Docker compared with native; P16: Docker through our init compared with Docker as it comes."""
    return await peers.docker(rounds) + await docker.best(rounds)


Part = tuple[str | None, Callable[[int], Awaitable[list[Row]]], Callable[[int], int]]

PARTS: dict[str, Part] = {
    "import": (None, importing, lambda rounds: max(5, rounds // 10)),
    "start": ("native", starting, lambda rounds: max(20, rounds // 4)),
    "bare": (None, bare, lambda rounds: rounds),
    "comparisons": (None, comparisons.comparisons, lambda rounds: max(5, rounds // 10)),
    "compare-power": (None, compare_power.compare_power, lambda rounds: max(2, rounds // 50)),
    "scheduling": (None, scheduler.scheduling, lambda rounds: 10 * rounds),
    "exec": ("native", native.actions, lambda rounds: 2 * rounds),
    "floor": ("native", native.the_floor, lambda rounds: rounds),
    "creation": ("native", native.creation, lambda rounds: rounds),
    "fork": ("native", native.forks, lambda rounds: max(20, rounds // 2)),
    "warm": ("native", warmth.warm, lambda rounds: rounds),
    "mix": ("native", mix_real.real_mix, lambda _: 1),
    "cycles": ("native", native.cycles, lambda rounds: max(3, rounds // 20)),
    "hogs": ("native", native.beside_hogs, lambda rounds: rounds // 2),
    "idle": ("native", native.idle, lambda _: native.IDLE),
    "paused": ("native", pause.paused, lambda _: pause.COUNT),
    "preloaded": ("native", interpreter.preloaded, lambda rounds: rounds // 2),
    "storage": ("native", storage.storage, lambda rounds: max(10, rounds // 4)),
    "network": ("native", network.network, lambda rounds: max(10, rounds // 4)),
    "walls": ("native", walls.walls, lambda rounds: rounds),
    "service": ("native", service.service, lambda rounds: rounds),
    "runtimes": ("native", peers.runtimes, lambda rounds: max(10, rounds // 4)),
    "docker": ("docker", beside_docker, lambda rounds: max(10, rounds // 4)),
    "vm": ("vm", vm.machines, lambda rounds: max(10, rounds // 4)),
    "pods": ("kubernetes", pods.best, lambda rounds: max(10, rounds // 4)),
}
"""Name → the substrate that it needs, the measurement, and its repetitions for a number of rounds."""


async def measure(names: list[str], rounds: int) -> list[Row]:
    rows = []
    for name in names:
        needed, part, repetitions = PARTS[name]
        found = None if needed is None else await dutyfree.substrates.probe(needed)
        if found is not None and not found.available:
            print(f"{name} skipped: {found.detail} ({found.remedy})", file=sys.stderr)
            continue
        print(f"measuring: {name}", file=sys.stderr)
        rows += await part(repetitions(rounds))
    return rows


def write(rows: list[Row]) -> None:
    OUT.parent.mkdir(exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=OUT.parent, delete=False) as file:
        json.dump(rows, file, indent=1)
    Path(file.name).replace(OUT)


def show(rows: list[Row]) -> None:
    print(f"{'id':12} {'what':52} {'value':>9} {'target':>7}  {'p50 ms':>9} {'p95 ms':>9} {'n':>5}")
    for entry in rows:
        target = "" if entry["target"] is None else str(entry["target"])
        mark = {True: "✓", False: "✗", None: ""}[entry["holds"]]
        print(
            f"{entry['id']:12} {entry['what']:52} {entry['value']:9.3f} {target:>7}{mark:2}"
            f"{entry['p50'] * 1e3:9.3f} {entry['p95'] * 1e3:9.3f} {entry['n']:5}{_interval(entry)}"
        )


def _interval(entry: Row) -> str:
    return f"  [{entry['low']:.3f}, {entry['high']:.3f}]" if "low" in entry else ""


def show_markdown(rows: list[Row]) -> None:
    print("| | what | value | target | p50 ms | p95 ms | n |\n|---|---|---|---|---|---|---|")
    for entry in rows:
        mark = {True: " ✓", False: " ✗", None: ""}[entry["holds"]]
        target = "" if entry["target"] is None else f"{entry['target']:g}{mark}"
        times = f"{entry['p50'] * 1e3:.3f} | {entry['p95'] * 1e3:.3f}"
        value = f"{entry['value']:.4g}{_interval(entry)}"
        print(f"| {entry['id']} | {entry['what']} | {value} | {target} | {times} | {entry['n']} |")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--rounds", type=int, default=200, help="repetitions of the fast measurements")
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"one of {', '.join(PARTS)}; default: all")
    parser.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    arguments = parser.parse_args()
    unknown = set(arguments.parts) - set(PARTS)
    if unknown:
        parser.error(f"there is no part {', '.join(sorted(unknown))}; choose from {', '.join(PARTS)}")
    rows = asyncio.run(measure(arguments.parts or list(PARTS), arguments.rounds))
    write(rows)
    (show_markdown if arguments.markdown else show)(rows)
    return 0 if all(entry["holds"] is not False for entry in rows) else 1


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main())

"""What dutyfree itself costs, side by side with what one would do without it.

Rounds are interleaved, so that whatever else the machine does hits both sides alike; only ratios are
judged. Writes bench/out/latest.json, a list of {id, what, value, target, holds, n, p50, p95}, and prints
the table. ``target`` is null where a figure is only reported.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from time import perf_counter

import dutyfree

OUT = Path(__file__).parent / "out" / "latest.json"

Measured = dict[str, list[float]]
Side = Callable[[], Awaitable[object]]


async def interleaved(rounds: int, sides: dict[str, Side]) -> Measured:
    """Seconds of each side, one call of each a round; the first tenth warms up and is dropped."""
    found: Measured = {name: [] for name in sides}
    for _ in range(rounds + rounds // 10):
        for name, side in sides.items():
            start = perf_counter()
            await side()
            found[name].append(perf_counter() - start)
    return {name: values[rounds // 10 :] for name, values in found.items()}


def row(
    identity: str, what: str, over: list[float], under: list[float], target: float | None, low: bool
) -> dict:
    """One ratio of medians. ``low``: the target is an upper bound."""
    value = statistics.median(over) / statistics.median(under)
    holds = None if target is None else (value <= target if low else value >= target)
    return figure(identity, what, value, target, holds, over)


def figure(
    identity: str, what: str, value: float, target: float | None, holds: bool | None, seconds: list[float]
) -> dict:
    ordered = sorted(seconds)
    return {
        "id": identity,
        "what": what,
        "value": round(value, 4),
        "target": target,
        "holds": holds,
        "n": len(ordered),
        "p50": statistics.median(ordered),
        "p95": ordered[int(0.95 * (len(ordered) - 1))],
    }


def importing(rounds: int) -> list[dict]:
    """P13: the import, in a fresh interpreter, as it measures itself."""
    program = "from time import perf_counter as t; s = t(); import dutyfree; print(t() - s)"
    seconds = [
        float(subprocess.run([sys.executable, "-c", program], capture_output=True, check=True).stdout)
        for _ in range(rounds + 2)
    ][2:]
    value = statistics.median(seconds) * 1e3
    return [figure("P13", "import dutyfree, ms", value, 50, value <= 50, seconds)]


async def bare(rounds: int) -> list[dict]:
    """The baseline must not be slow: a slow one would hide the others' tax."""

    async def run() -> None:
        subprocess.run(["/bin/true"], capture_output=True, check=True)

    async def through_asyncio() -> None:
        process = await asyncio.create_subprocess_exec(
            "/bin/true", stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )
        await process.communicate()

    async with dutyfree.open("bare") as substrate, substrate.sandbox() as sandbox:
        found = await interleaved(
            rounds,
            {"bare": lambda: sandbox.exec(["/bin/true"]), "run": run, "asyncio": through_asyncio},
        )
    return [
        row("B1", "bare exec ÷ subprocess.run", found["bare"], found["run"], 1.5, low=True),
        row("B2", "bare exec ÷ asyncio subprocess", found["bare"], found["asyncio"], 1.0, low=True),
    ]


async def docker(rounds: int) -> list[dict]:
    """The Docker substrate must be the way of a careful user: no slower than the engine's own client."""
    async with dutyfree.open("docker") as substrate:
        await substrate.prepare()
        async with substrate.sandbox() as sandbox:
            container = sandbox.id

            async def client() -> None:
                subprocess.run(["docker", "exec", container, "/bin/true"], capture_output=True, check=True)

            execs = await interleaved(rounds, {"api": lambda: sandbox.exec(["/bin/true"]), "client": client})

        async def cold() -> None:
            async with substrate.sandbox() as fresh:
                await fresh.exec(["/bin/true"])

        async def run() -> None:
            subprocess.run(
                ["docker", "run", "--rm", "--network", "none", "dutyfree/study", "/bin/true"],
                capture_output=True,
                check=True,
            )

        creates = await interleaved(max(5, rounds // 5), {"api": cold, "client": run})
    return [
        row("D1", "docker substrate exec ÷ docker exec", execs["api"], execs["client"], 1.0, low=True),
        row(
            "D2",
            "docker create, exec, remove ÷ docker run --rm",
            creates["api"],
            creates["client"],
            None,
            low=True,
        ),
    ]


async def measure(rounds: int) -> list[dict]:
    rows = importing(max(5, rounds // 10)) + await bare(rounds)
    found = await dutyfree.substrates.probe("docker")
    if found.available:
        rows += await docker(max(10, rounds // 4))
    else:
        print(f"docker is left out: {found.detail} ({found.remedy})", file=sys.stderr)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--rounds", type=int, default=200, help="repetitions of the quick measurements")
    rows = asyncio.run(measure(parser.parse_args().rounds))
    OUT.parent.mkdir(exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=OUT.parent, delete=False) as file:
        json.dump(rows, file, indent=1)
    Path(file.name).replace(OUT)
    print(f"{'id':4} {'what':48} {'value':>8} {'target':>7}  {'p50 ms':>8} {'p95 ms':>8} {'n':>4}")
    for entry in rows:
        target = "" if entry["target"] is None else str(entry["target"])
        mark = {True: "✓", False: "✗", None: ""}[entry["holds"]]
        print(
            f"{entry['id']:4} {entry['what']:48} {entry['value']:8.3f} {target:>7}{mark:2}"
            f" {entry['p50'] * 1e3:8.3f} {entry['p95'] * 1e3:8.3f} {entry['n']:4}"
        )
    return 0 if all(entry["holds"] is not False for entry in rows) else 1


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main())

"""The price of each wall of native's isolation: P15, and W rows for single kinds of work.

Sandboxes with different isolation do the same work in interleaved rounds. The baseline is
``isolation="none"``: the same launcher, init and protocol. Each wall is also switched off alone. Ratios
compare the two sides of each round, and their 95 % intervals come from resampling the rounds. The side
``native again`` is native a second time: its ratio to native shows the noise.

The mix is also measured by the CPU time of its processes, which depends less on what else runs.

Writes bench/out/walls.md: a table with a row for each kind of work and a column for each side.

    python bench/run.py walls --rounds 200
"""

from __future__ import annotations

import random
import statistics
import subprocess
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import floor
from rounds import Measured, Row, figure, interleaved

import dutyfree
from dutyfree.engine.launcher.isolation import SOFTWARE, WALLS

HERE = Path(__file__).parent
TABLE = HERE / "out" / "walls.md"

BASE = "none"
SIDES: dict[str, dict[str, Any]] = {
    BASE: {"isolation": "none"},
    "native": {},
    "native again": {},
    "all overlay": {"plain": ()},
    "fixed": {"fixed": SOFTWARE},
    **{f"without {wall}": {"without": (wall,)} for wall in WALLS if wall != "overlay"},
}
"""``all overlay`` has no plain directories; ``fixed`` is native without the wall ``overlay``."""

PROGRAM = "/workspace/walls"
SMALL = "/workspace/small"
KINDS = {
    "null": ("a null system call", ["null", "100000"]),
    "stat": ("stat of a file of /usr", ["stat", "20000", "/usr/bin/env"]),
    "read": ("open, read, close of a small file of /usr", ["read", "10000", "/usr/lib/os-release"]),
    "own read": ("open, read, close of a small file of /workspace", ["read", "10000", SMALL]),
    "files": ("write and remove 2,000 small files", ["files", "1"]),
    "touch": ("touch 200 MB of memory", ["touch", "1"]),
    "compute": ("pure computing", ["compute", "3"]),
}
"""What walls.c does."""

FORKS = "i=0; while [ $i -lt 50 ]; do /bin/true; i=$((i + 1)); done"
IMPORTS = "import argparse, asyncio, email.message, http.client, json, unittest, xml.dom.minidom"
MIX = (
    "rm -rf mix && mkdir mix && cd mix &&"
    " cp -r $(python3 -c 'import json, os; print(os.path.dirname(os.path.dirname(json.__file__)))')"
    "/{asyncio,email,json,unittest,xml} . && python3 -m compileall -q -f . &&"
    " cp ../suite.py . && for n in 1 2 3; do python3 -m unittest -q suite 2>&1 || exit 1; done &&"
    " grep -rl 'def ' . | sort | xargs cat | sha256sum"
)
"""Compute-heavy work of a coding agent: copy a tree, compile it, test it three times, search it."""

SUITE = """
import ast, glob, json, subprocess, sys, tempfile, unittest

class Suite(unittest.TestCase):
    def test_parse(self):
        for name in glob.glob("json/*.py") + glob.glob("xml/**/*.py", recursive=True):
            with open(name) as file:
                self.assertTrue(ast.dump(ast.parse(file.read())))

    def test_json(self):
        data = {str(n): list(range(n)) for n in range(300)}
        self.assertEqual(json.loads(json.dumps(data)), data)

    def test_files(self):
        with tempfile.TemporaryDirectory() as directory:
            for n in range(100):
                with open(f"{directory}/{n}", "w") as file:
                    file.write(str(n) * 100)

    def test_program(self):
        subprocess.run([sys.executable, "-c", "import decimal, logging"], check=True)
"""

MIX_DIVISOR = 8

Work = Callable[[], Awaitable[float]]


def _build(directory: Path) -> bytes:
    """Raises RuntimeError without a compiler. Blocks."""
    found = floor.compiler()
    if found is None:
        raise RuntimeError("no C compiler: install musl-tools")
    target = directory / "walls"
    subprocess.run([*found, *floor.FLAGS, "-o", target, HERE / "walls.c"], check=True)
    return target.read_bytes()


async def _timed(sandbox: Any, command: Sequence[str]) -> float:
    begin = perf_counter()
    seen = await sandbox.exec(list(command))
    took = perf_counter() - begin
    if not seen.ok:
        raise RuntimeError(f"{command} failed: {seen.stderr.decode(errors='replace')}")
    return took


async def _mix(sandbox: Any, cpu: list[float]) -> float:
    begin = perf_counter()
    seen = await sandbox.exec(["bash", "-c", MIX])
    took = perf_counter() - begin
    if not seen.ok:
        raise RuntimeError(f"the mix failed: {seen.stderr.decode(errors='replace')}")
    cpu.append(seen.usage.cpu_seconds)
    return took


async def _inside(sandbox: Any, arguments: Sequence[str]) -> float:
    seen = await sandbox.exec([PROGRAM, *arguments])
    if not seen.ok:
        raise RuntimeError(f"{arguments} failed: {seen.stderr.decode(errors='replace')}")
    return float(seen.stdout) / 1e9


async def _creation(substrate: Any) -> float:
    begin = perf_counter()
    async with substrate.sandbox() as sandbox:
        await sandbox.exec(["/bin/true"])
        return perf_counter() - begin


WORK: dict[str, tuple[str, int, Callable[[Any, Any], Work]]] = {
    "creation": ("create a sandbox, first command", 1, lambda on, _: partial(_creation, on)),
    "exec": ("exec of /bin/true", 1, lambda _, sandbox: partial(_timed, sandbox, ["/bin/true"])),
    "forks": (
        "50 programs started by a shell",
        4,
        lambda _, sandbox: partial(_timed, sandbox, ["sh", "-c", FORKS]),
    ),
    **{
        name: (what, 4, lambda _, sandbox, words=words: partial(_inside, sandbox, words))  # type: ignore[misc]
        for name, (what, words) in KINDS.items()
    },
    "imports": (
        "start Python and import 7 modules",
        4,
        lambda _, sandbox: partial(_timed, sandbox, ["python3", "-c", IMPORTS]),
    ),
}
"""What is done; how many times fewer rounds it gets; and how to do it."""


async def walls(rounds: int) -> list[Row]:
    """P15 and the prices of single walls."""
    with TemporaryDirectory(prefix="dutyfree-walls-") as scratch:
        program = _build(Path(scratch))
    async with AsyncExitStack() as stack:
        substrates: dict[str, Any] = {}
        sandboxes: dict[str, Any] = {}
        for label, options in SIDES.items():
            substrates[label] = await stack.enter_async_context(dutyfree.open("native", **options))
            sandboxes[label] = await stack.enter_async_context(substrates[label].sandbox())
            await sandboxes[label].write(PROGRAM, program, mode=0o755)
            await sandboxes[label].write(SMALL, b"x" * 1000)
            await sandboxes[label].write("/workspace/suite.py", SUITE.encode())
        found = {}
        for name, (_, divisor, make) in WORK.items():
            sides = {label: make(substrates[label], sandboxes[label]) for label in SIDES}
            found[name] = await interleaved(max(10, rounds // divisor), sides)
        times = max(10, rounds // MIX_DIVISOR)
        cpu: Measured = {label: [] for label in SIDES}
        mixes = {label: partial(_mix, sandboxes[label], cpu[label]) for label in SIDES}
        found["mix"] = await interleaved(times, mixes)
        found["mix cpu"] = {label: seconds[-times:] for label, seconds in cpu.items()}
    TABLE.parent.mkdir(exist_ok=True)
    TABLE.write_text(_table(found))
    return _rows(found)


def _rows(found: Mapping[str, Measured]) -> list[Row]:
    mix = found["mix"]
    rows = [
        _row("P15", "compute-heavy mix: native ÷ isolation none", mix, "native", BASE, at_most=1.01),
        _row("P15-cpu", "the same, CPU time", found["mix cpu"], "native", BASE),
        _row("P15a", "the same with a fixed /usr", mix, "fixed", BASE),
        _row("P15b", "the same with plain=()", mix, "all overlay", BASE),
        _row("P15c", "native ÷ native again: the noise", mix, "native", "native again"),
    ]
    rows += [
        _row(f"P15-{label[8:]}"[:12], f"mix: {label} ÷ none", mix, label, BASE)
        for label in SIDES
        if label.startswith("without ")
    ]
    rows += [
        _row(f"W-{name}"[:12], f"{what}: native ÷ none", found[name], "native", BASE)
        for name, (what, _, _) in WORK.items()
    ]
    return rows


def _row(identity: str, what: str, measured: Measured, over: str, under: str, *, at_most: float = 0) -> Row:
    value, low, high = paired_ratio(measured[over], measured[under])
    row = figure(identity, what, value, measured[over], at_most=at_most)
    return {**row, "low": round(low, 4), "high": round(high, 4)}


def paired_ratio(over: Sequence[float], under: Sequence[float]) -> tuple[float, float, float]:
    """The median of the ratios of all rounds, and its 95 % interval by resampling the rounds."""
    ratios = [one / other for one, other in zip(over, under, strict=True)]
    chance = random.Random(1)  # noqa: S311
    medians = sorted(statistics.median(chance.choices(ratios, k=len(ratios))) for _ in range(2000))
    return statistics.median(ratios), medians[50], medians[1949]


def _table(found: Mapping[str, Measured]) -> str:
    """Markdown: the median of ``none``, and for each other side its ratio to ``none`` with the interval."""
    others = [label for label in SIDES if label != BASE]
    lines = [
        f"| work | none, p50 | {' | '.join(others)} |",
        f"|---|---|{'---|' * len(others)}",
    ]
    named = {name: what for name, (what, _, _) in WORK.items()}
    for name, what in {**named, "mix": "compute-heavy mix", "mix cpu": "the same, CPU time"}.items():
        cells = [_cell(*paired_ratio(found[name][label], found[name][BASE])) for label in others]
        lines.append(f"| {what} | {_seconds(statistics.median(found[name][BASE]))} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _cell(value: float, low: float, high: float) -> str:
    return f"{value:.3f} [{low:.3f}, {high:.3f}]"


def _seconds(value: float) -> str:
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if value >= scale:
            return f"{value / scale:.3g} {unit}"
    return f"{value * 1e9:.3g} ns"

"""Native with the files of sandboxes in memory and on disk, compared with a plain directory on disk.

The directory is that of ``bare``. All three run in interleaved rounds.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from functools import partial
from time import perf_counter
from typing import Any

from rounds import Measured, Row, available, figure, interleaved, ratio

import dutyfree
from dutyfree import Limits

TRUE = ["/bin/true"]
LIMITS = Limits(disk=512 << 20)
READY = 8
SETTLE = 0.1
"""Seconds in which the launcher prepares what the calls before have used."""
ALIVE = 64
"""Sandboxes of which the memory is measured: as many as a small disk has room for."""

SMALL = """
import os, time
begin = time.perf_counter()
os.mkdir("small")
for n in range(2000):
    with open(f"small/{n}", "wb") as file:
        file.write(b"x" * 200)
for n in range(2000):
    os.unlink(f"small/{n}")
os.rmdir("small")
print(time.perf_counter() - begin)
"""

PACKAGES = """
import os, shutil, time
begin = time.perf_counter()
for package in range(40):
    os.makedirs(f"site/p{package}/sub")
    for n in range(50):
        name = f"site/p{package}/{'sub/' if n % 3 else ''}m{n}.py"
        with open(name + ".new", "wb") as file:
            file.write(b"x" * (500 + (package * 7919 + n * 104729) % 40000))
        os.rename(name + ".new", name)
for directory, _, names in os.walk("site"):
    for name in names:
        with open(f"{directory}/{name}", "rb") as file:
            file.read()
print(time.perf_counter() - begin)
shutil.rmtree("site")
"""
"""As an installer: 2,000 files of 20 KB in 80 directories, each renamed into place and read again."""


async def storage(rounds: int) -> list[Row]:
    async with (
        dutyfree.open("native", storage="memory", ready=READY, limits=LIMITS) as memory,
        dutyfree.open("native", storage="disk", ready=READY, limits=LIMITS) as disk,
        dutyfree.open("bare", storage="disk") as bare,
    ):
        sides = {"memory": memory, "disk": disk, "directory": bare}
        rows = _against("ST1", "create → first result", await _each(rounds, sides, _first_result, SETTLE))
        rows += _against("ST2", "end of a sandbox", await _each(rounds, sides, _end, SETTLE))
        async with AsyncExitStack() as stack:
            within = {name: await stack.enter_async_context(side.sandbox()) for name, side in sides.items()}
            few = max(5, rounds // 4)
            rows += _against("ST3", "write and remove 2,000 files", await _each(few, within, _run(SMALL)))
            rows += _against("ST4", "write as an installer", await _each(few, within, _run(PACKAGES)))
        rows += [await _memory("memory", memory), await _memory("disk", disk)]
    return rows


async def _each(rounds: int, sides: dict[str, Any], measure: Any, settle: float = 0) -> Measured:
    return await interleaved(rounds, {name: partial(measure, side) for name, side in sides.items()}, settle)


def _against(identity: str, what: str, found: Measured) -> list[Row]:
    return [
        ratio(f"{identity}a", f"{what}: disk ÷ memory", found["disk"], found["memory"]),
        ratio(f"{identity}b", f"{what}: disk ÷ plain directory", found["disk"], found["directory"]),
        ratio(f"{identity}c", f"{what}: memory ÷ plain directory", found["memory"], found["directory"]),
    ]


async def _first_result(substrate: Any) -> float:
    begin = perf_counter()
    async with substrate.sandbox() as sandbox:
        await sandbox.exec(TRUE)
        return perf_counter() - begin


async def _end(substrate: Any) -> float:
    async with substrate.sandbox() as sandbox:
        await sandbox.write("file", bytes(1 << 20))
        begin = perf_counter()
    return perf_counter() - begin


def _run(program: str) -> Any:
    async def run(sandbox: Any) -> float:
        seen = await sandbox.exec(["python3", "-c", program])
        return float(seen.stdout)

    return run


async def _memory(name: str, substrate: Any) -> Row:
    async with AsyncExitStack() as stack:
        await asyncio.sleep(1)  # the launcher prepares what was used
        before, took = available(), []
        for _ in range(ALIVE):
            begin = perf_counter()
            sandbox = await stack.enter_async_context(substrate.sandbox(limits=Limits(disk=64 << 20)))
            await sandbox.exec(TRUE)
            took.append(perf_counter() - begin)
        each = (before - available()) / ALIVE
    return figure(f"ST5-{name}", f"memory of a sandbox, storage={name}, MB", each / 1e6, took)

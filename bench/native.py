"""The native engine compared with the same kernel work in C: P1 to P3, P6, P7, P9, P11, P14."""

from __future__ import annotations

import asyncio
import os
import statistics
import subprocess
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from functools import partial
from time import perf_counter
from typing import Any

import floor
from rounds import Measured, Row, available, figure, interleaved, percentile, ratio

import dutyfree

TRUE = ["/bin/true"]
STATIC = "/workspace/static-true"
HOGS = 8
IDLE = 5000
DIRTY = 100
CHILDREN = 64
TREE = 20_000


async def actions(rounds: int) -> list[Row]:
    """P1, P2: one command, from Python, in a running sandbox."""

    async def spawn() -> None:
        os.waitpid(os.posix_spawn("/bin/true", TRUE, os.environ), 0)

    async def run() -> None:
        subprocess.run(TRUE, capture_output=True, check=True)

    async with dutyfree.open("native") as substrate, substrate.sandbox() as sandbox:

        async def native() -> None:
            await sandbox.exec(TRUE)

        found = await interleaved(rounds, {"native": native, "spawn": spawn, "run": run})
    return [
        ratio(
            "P1",
            "native exec ÷ os.posix_spawn on the host",
            found["native"],
            found["spawn"],
            at_most=1.1,
        ),
        ratio("P2", "native exec ÷ subprocess.run on the host", found["native"], found["run"], at_most=1.0),
    ]


FLOOR = {
    "V": "C on the host: a static program, µs",
    "v": "C on the host: a dynamic program, µs",
    "P": "C: sandbox in a slot, static program, µs",
    "p": "C: sandbox in a slot, dynamic program, µs",
    "F": "C: sandbox without a slot, static program, µs",
    "f": "C: sandbox without a slot, dynamic program, µs",
}


async def the_floor(rounds: int) -> list[Row]:
    """The time of the kernel work alone, from nothing to the first result."""
    with floor.opened() as ([probe], _):

        async def measure(letter: str) -> float:
            return probe.measure(letter)[0]

        found = await interleaved(rounds, {letter: partial(measure, letter) for letter in FLOOR})
    return [
        figure(f"F-{letter}", what, statistics.median(found[letter]) * 1e6, found[letter])
        for letter, what in FLOOR.items()
    ]


async def creation(rounds: int) -> list[Row]:
    """P3, P6: from nothing to the first result, compared with the same kernel work in C."""
    with floor.opened() as ([probe], static):
        async with dutyfree.open("native", ready=0) as cold, dutyfree.open("native") as pooled:
            found = await _creation(rounds, probe, static.read_bytes(), cold, pooled)
    reset, cold_static, pooled_static = found["reset"], found["cold static"], found["pooled static"]
    return [
        ratio("P3a", "create with ready=0 ÷ the same in C", found["fresh"], found["c fresh"], at_most=1.15),
        ratio("P3b", "create by default ÷ C with slots", found["pooled"], found["c pooled"], at_most=1.0),
        ratio("P6", "reset after 100 written files ÷ create with ready=0", reset, cold_static, at_most=0.5),
        ratio("P6b", "the same ÷ create by default", reset, pooled_static),
    ]  # fmt: skip


async def _creation(rounds: int, probe: floor.Floor, static: bytes, cold: Any, pooled: Any) -> Measured:
    async def create(substrate: Any) -> float:
        begin = perf_counter()
        async with substrate.sandbox() as sandbox:
            await sandbox.exec(TRUE)
            return perf_counter() - begin

    async def create_static(substrate: Any) -> float:
        begin = perf_counter()
        async with substrate.sandbox() as sandbox:
            made = perf_counter()
            await sandbox.write(STATIC, static, mode=0o755)
            written = perf_counter()
            await sandbox.exec([STATIC])
            return perf_counter() - begin - (written - made)

    async with pooled.sandbox() as used:

        async def reset() -> float:
            for number in range(DIRTY):
                await used.write(f"dirty/{number}", b"x" * 1000)
            begin = perf_counter()
            await used.reset()
            made = perf_counter()
            await used.write(STATIC, static, mode=0o755)
            written = perf_counter()
            await used.exec([STATIC])
            return perf_counter() - begin - (written - made)

        async def in_c(letter: str) -> float:
            return probe.measure(letter)[0]

        return await interleaved(
            rounds,
            {
                "c fresh": lambda: in_c("f"),
                "fresh": lambda: create(cold),
                "c pooled": lambda: in_c("p"),
                "pooled": lambda: create(pooled),
                "cold static": lambda: create_static(cold),
                "pooled static": lambda: create_static(pooled),
                "reset": reset,
            },
        )


async def forks(rounds: int) -> list[Row]:
    """P7: a fork compared with as many cold creates; and the time of snapshots."""
    options: Any = {"kept": 4 << 30}
    substrate: Any
    cold: Any
    async with AsyncExitStack() as outer:
        substrate = await outer.enter_async_context(dutyfree.open("native", **options))
        cold = await outer.enter_async_context(dutyfree.open("native", ready=0))
        few, many, busy = [await outer.enter_async_context(substrate.sandbox()) for _ in range(3)]
        await few.write("file", b"x" * 1000)
        await busy.write("file", b"x" * 1000)
        await busy.start("sleep 100000")
        await many.exec(f"for i in $(seq {TREE}); do echo $i > $i; done")

        async def snapshot(sandbox: Any) -> float:
            begin = perf_counter()
            recipe = await sandbox.snapshot()
            took = perf_counter() - begin
            substrate.forget(recipe)
            return took

        async def replaced() -> float:
            await many.exec(f"for i in $(seq {DIRTY}); do echo $i > $i; done")
            return await snapshot(many)

        async def child() -> float:
            begin = perf_counter()
            async with substrate.sandbox(kept) as sandbox:
                await sandbox.exec(TRUE)
                return perf_counter() - begin

        async def fork() -> float:
            begin = perf_counter()
            async with few.fork(CHILDREN) as children:
                await asyncio.gather(*[child.exec(TRUE) for child in children])
                return perf_counter() - begin

        async def creations() -> float:
            begin = perf_counter()
            async with AsyncExitStack() as stack:

                async def one() -> None:
                    await (await stack.enter_async_context(cold.sandbox())).exec(TRUE)

                await asyncio.gather(*[one() for _ in range(CHILDREN)])
                return perf_counter() - begin

        kept = await many.snapshot()
        single = {
            "few": lambda: snapshot(few),
            "busy": lambda: snapshot(busy),
            "many": replaced,
            "child": child,
        }
        found = await interleaved(rounds, single)
        found |= await interleaved(max(5, rounds // 10), {"fork": fork, "cold": creations})

    def milliseconds(row: str, what: str, of: str) -> Row:
        return figure(row, what, statistics.median(found[of]) * 1e3, found[of])

    return [
        ratio("P7", f"fork of {CHILDREN} ÷ as many creates with ready=0", found["fork"], found["cold"],
              at_most=0.7),
        milliseconds("P7a", "snapshot of one file, ms", "few"),
        milliseconds("P7b", "the same while a process runs, ms", "busy"),
        milliseconds("P7c", f"snapshot of {DIRTY} rewritten files in a tree of {TREE:,}, ms", "many"),
        milliseconds("P7d", f"from a snapshot of {TREE:,} files to the first result, ms", "child"),
    ]  # fmt: skip


async def cycles(turns: int) -> list[Row]:
    """P14: create, exec, destroy cycles per second on all cores; native and C run in turns of a second."""
    rates: Measured = {"native": [], "c": []}
    with floor.opened(os.cpu_count() or 1) as (probes, _):
        async with dutyfree.open("native", ready=8) as substrate:
            for _ in range(turns):
                rates["native"].append(await _rate(lambda: _cycle(substrate), 2 * len(probes)))
                rates["c"].append(await _rate_in_c(probes))
    value = statistics.median(rates["native"]) / statistics.median(rates["c"])
    took = [1 / rate for rate in rates["native"]]
    return [figure("P14", "create, exec, destroy per second ÷ C with slots", value, took, at_least=0.9)]


async def _cycle(substrate: Any) -> None:
    async with substrate.sandbox() as sandbox:
        await sandbox.exec(TRUE)


async def _rate(one: Callable[[], Awaitable[None]], width: int) -> float:
    begin, counts = perf_counter(), [0] * width

    async def work(index: int) -> None:
        while perf_counter() < begin + 1:
            await one()
            counts[index] += 1

    await asyncio.gather(*map(work, range(width)))
    return sum(counts) / (perf_counter() - begin)


async def _rate_in_c(probes: list[floor.Floor]) -> float:
    def work(probe: floor.Floor) -> int:
        begin, count = perf_counter(), 0
        while perf_counter() < begin + 1:
            probe.measure("p")
            count += 1
        return count

    begin = perf_counter()
    counts = await asyncio.gather(*[asyncio.to_thread(work, probe) for probe in probes])
    return sum(counts) / (perf_counter() - begin)


async def idle(count: int) -> list[Row]:
    """P9: the memory of an idle sandbox."""
    async with dutyfree.open("native") as substrate, AsyncExitStack() as stack:
        async with substrate.sandbox() as first:
            await first.exec(TRUE)
        before, took = available(), []
        sandboxes = []
        for _ in range(count):
            begin = perf_counter()
            sandboxes.append(await stack.enter_async_context(substrate.sandbox()))
            took.append(perf_counter() - begin)
        each = (before - available()) / count
        answered = sum([(await sandbox.exec(TRUE)).ok for sandbox in sandboxes])
    return [
        figure("P9a", "sandboxes alive at once, all answering", answered, took, at_least=IDLE),
        figure("P9b", "memory of each, MB", each / 1e6, took, at_most=0.6),
    ]


async def beside_hogs(rounds: int) -> list[Row]:
    """P11: exec in a quiet sandbox beside busy ones."""
    async with dutyfree.open("native") as substrate, substrate.sandbox() as quiet:

        async def measure() -> list[float]:
            found = []
            for _ in range(rounds):
                begin = perf_counter()
                await quiet.exec(TRUE)
                found.append(perf_counter() - begin)
                await asyncio.sleep(0.002)
            return found

        alone, beside = [], []
        for _ in range(4):
            alone += await measure()
            async with AsyncExitStack() as stack:
                for _ in range(HOGS):
                    hog = await stack.enter_async_context(substrate.sandbox())
                    await hog.start("while :; do :; done")
                await asyncio.sleep(0.2)
                beside += await measure()
    value = percentile(beside, 0.95) / statistics.median(alone)
    return [
        figure("P11", f"p95 of exec beside {HOGS} busy sandboxes ÷ p50 alone", value, beside, at_most=1.5)
    ]

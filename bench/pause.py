"""Paused sandboxes: their CPU time, wake-ups and memory; and the time of pause and resume."""

from __future__ import annotations

import asyncio
import os
import statistics
from collections.abc import Iterator
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

from rounds import Row, available, figure

import dutyfree

COUNT = 500
WATCHED = 60
"""Seconds of observation."""

SERVER = "python3 -m http.server --bind 127.0.0.1 8000"
SLEEPER = 'python3 -c "import time; [time.sleep(0.1) for _ in iter(int, 1)]"'
LOOP = "while :; do :; done"
IS_UP = "until { : < /dev/tcp/127.0.0.1/8000; } 2> /dev/null; do :; done"


class Used(NamedTuple):
    """CPU time and context switches of some processes with all their threads."""

    seconds: float
    switches: int

    def since(self, before: Used) -> Used:
        return Used(self.seconds - before.seconds, self.switches - before.switches)


def used(processes: list[int]) -> Used:
    """Totals since the processes started. Each wake-up is at least one context switch."""
    nanoseconds = switches = 0
    for process in processes:
        with suppress(OSError):
            for thread in Path(f"/proc/{process}/task").iterdir():
                ran, _, turns = (thread / "schedstat").read_text().split()
                nanoseconds += int(ran)
                switches += int(turns)
    return Used(nanoseconds / 1e9, switches)


def children(process: int) -> list[int]:
    listed = [thread / "children" for thread in Path(f"/proc/{process}/task").iterdir()]
    return [int(child) for file in listed for child in file.read_text().split()]


def descendants(process: int) -> Iterator[int]:
    for child in children(process):
        yield child
        yield from descendants(child)


async def timed(method: Any) -> float:
    start = perf_counter()
    await method()
    return perf_counter() - start


async def paused(count: int) -> list[Row]:
    """Z1 to Z8. A third of the sandboxes runs a server, a third a sleeping Python, a third a busy loop."""
    pauses: list[float] = []
    async with dutyfree.open("native") as substrate, AsyncExitStack() as stack:

        async def make(work: str) -> Any:
            sandbox: Any = await stack.enter_async_context(substrate.sandbox())
            await sandbox.start(work)
            if work == SERVER:
                assert (await sandbox.exec(["bash", "-c", IS_UP], timeout=60)).ok
            return sandbox

        first = available()
        sandboxes = [await make(SERVER if number % 2 else SLEEPER) for number in range(count * 2 // 3)]
        await asyncio.sleep(2)
        running = available()
        pauses += [await timed(sandbox.pause) for sandbox in sandboxes]
        stopped = available()
        for _ in range(count - len(sandboxes)):  # one at a time, so that they do not compete
            sandboxes.append(await make(LOOP))
            pauses.append(await timed(sandboxes[-1].pause))
        (launcher,) = children(os.getpid())
        inside, ours = list(descendants(launcher)), [os.getpid(), launcher]
        before = used(inside), used(ours)
        await asyncio.sleep(WATCHED)
        own = used(ours).since(before[1])  # first, because reading the others is work too
        theirs = used(inside).since(before[0])
        resumes = []
        for sandbox in sandboxes:
            resumes.append(await timed(sandbox.resume))
            assert (await sandbox.exec(["/bin/true"])).ok
            await sandbox.pause()
    quiet = count * 2 // 3
    return [
        figure("Z1", f"CPU time of {count} in {WATCHED} s, ms", theirs.seconds * 1e3, pauses, at_most=1),
        figure("Z2", "their context switches per second", theirs.switches / WATCHED, pauses, at_most=0.1),
        figure("Z3", "CPU time of owner and launcher, ms", own.seconds * 1e3, pauses),
        figure("Z4", "their context switches per second", own.switches / WATCHED, pauses),
        figure("Z5", "memory of a running sandbox with Python, MB", (first - running) / quiet / 1e6, pauses),
        figure("Z6", "memory that a pause adds, KiB", (running - stopped) / quiet / 1024, pauses),
        figure("Z7", "pause, ms", statistics.median(pauses) * 1e3, pauses),
        figure("Z8", "resume, ms", statistics.median(resumes) * 1e3, resumes),
    ]  # fmt: skip

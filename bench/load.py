#!/usr/bin/env python3
"""A server under load: many sandboxes, many clients, mixed actions; then twice the load that saturates it.

    .venv/bin/python bench/load.py [--sandboxes 1000] [--clients 64] [--seconds 600] [--overload 60]
                                   [--output FILE] [--saturated FILE]

Clients run in processes of their own, beside the server on one machine, each with one channel. In the first
part every client sends its next action when the last one has ended, so the machine is saturated. In the
second part actions arrive at random times, twice as many as were carried out in the first, whether or not
others have ended. Prints the times of actions that were carried out, errors by code, and the server's memory.
``--output`` writes the figures as JSON after each part. The parts can run apart: ``--overload 0`` leaves the
second out, and ``--saturated`` takes the first from the file of an earlier run on the same machine. Where no
command may run for so long, let it run in the background, and look at its log:

    setsid .venv/bin/python bench/load.py --output load.json > load.log 2>&1 < /dev/null &
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from time import perf_counter
from typing import Any

import dutyfree
from dutyfree.contract.errors import DutyfreeError, Exhausted, Overloaded
from dutyfree.substrates.hosted.sandbox import HostedSandbox
from dutyfree.substrates.hosted.substrate import Hosted

PROCESSES = max(1, min(8, (os.cpu_count() or 2) // 2))
Figures = dict[str, Any]
CONTENT = bytes(range(256)) * 16
MIX = {"exec": 50, "shell command": 10, "read": 15, "write": 15, "list": 5, "search": 5}
"""Kinds of actions, and how often each is chosen."""


async def act(kind: str, sandbox: HostedSandbox) -> None:
    match kind:
        case "exec":
            assert (await sandbox.exec(["/bin/true"], timeout=60)).exit_code == 0
        case "shell command":
            seen = await sandbox.exec("cat file > /dev/null; echo $((6 * 7))", timeout=60)
            assert seen.stdout == b"42\n", seen
        case "read":
            assert await sandbox.read("file") == CONTENT
        case "write":
            await sandbox.write("file", CONTENT)
        case "list":
            assert await sandbox.list(".")
        case "search":
            await sandbox.search(".", "needle")


class Client:
    """One client: its channel, its sandboxes, and what it measured."""

    def __init__(self, url: str, count: int, seed: int) -> None:
        self._url = url
        self._count = count
        self._chance = random.Random(seed)  # noqa: S311 (not a secret)
        self.times: dict[str, list[float]] = {kind: [] for kind in MIX}
        self.errors: Counter[str] = Counter()
        self.refused: list[float] = []
        self._sandboxes: list[HostedSandbox] = []

    async def run(self, stage: Stage) -> None:
        async with dutyfree.open("hosted", url=self._url, lease=300) as hosted:
            await self._with_sandboxes(hosted, stage)

    async def _with_sandboxes(self, hosted: Hosted, stage: Stage) -> None:
        if not self._count:
            return
        async with hosted.group(dutyfree.Recipe(), self._count) as group:
            self._sandboxes = list(group)
            for sandbox in group:
                await sandbox.write("file", CONTENT)
            await stage.ready()
            await (self._open_loop(stage) if stage.rate else self._closed_loop(stage))

    async def _closed_loop(self, stage: Stage) -> None:
        while time.monotonic() < stage.end:
            await self._one()

    async def _open_loop(self, stage: Stage) -> None:
        """Actions at random times, at this client's share of the rate."""
        running: set[asyncio.Task[None]] = set()
        due = time.monotonic()
        while (now := time.monotonic()) < stage.end:
            due += self._chance.expovariate(stage.rate)
            if due > now:
                await asyncio.sleep(due - now)
            task = asyncio.create_task(self._one())
            running.add(task)
            task.add_done_callback(running.discard)
        if running:
            await asyncio.wait(running)

    async def _one(self) -> None:
        (kind,) = self._chance.choices(list(MIX), list(MIX.values()))
        start = perf_counter()
        try:
            await act(kind, self._chance.choice(self._sandboxes))
        except (Exhausted, Overloaded):
            self.refused.append(perf_counter() - start)
        except (DutyfreeError, AssertionError) as error:
            self.errors[f"{type(error).__name__}: {error}"[:200]] += 1
        else:
            self.times[kind].append(perf_counter() - start)


class Stage:
    """What the clients of one process do together: all begin when the last one is ready."""

    def __init__(self, clients: int, seconds: float, rate: float, begin: float) -> None:
        self.rate = rate / clients if rate else 0.0
        self._seconds = seconds
        self._begin = begin
        self.end = 0.0

    async def ready(self) -> None:
        """Wait for the common beginning, as ``time.monotonic`` counts: that is the same in all processes."""
        await asyncio.sleep(max(0.0, self._begin - time.monotonic()))
        self.end = max(self._begin, time.monotonic()) + self._seconds


def work(
    url: str, counts: list[int], seconds: float, rate: float, begin: float, seed: int
) -> dict[str, object]:
    """The clients of one process."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    clients = [Client(url, count, seed * 1000 + number) for number, count in enumerate(counts)]

    async def main() -> None:
        stage = Stage(len(clients), seconds, rate, begin)
        await asyncio.gather(*(client.run(stage) for client in clients))

    asyncio.run(main())
    errors: Counter[str] = Counter()
    for client in clients:
        errors += client.errors
    return {
        "times": {kind: [one for client in clients for one in client.times[kind]] for kind in MIX},
        "errors": dict(errors),
        "refused": [one for client in clients for one in client.refused],
    }


def memory(pid: int) -> int:
    """Resident bytes of a process."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) << 10
    return 0


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[int(share * (len(ordered) - 1))] if ordered else float("nan")


def percentiles(values: list[float]) -> dict[str, float]:
    return {f"p{share}": percentile(values, share / 100) for share in (50, 95, 99)}


def measure(
    url: str, pid: int, sandboxes: int, clients: int, seconds: float, rate: float, title: str
) -> Figures:
    """One part. A ``rate`` of 0 means that each client waits for the end of its last action."""
    counts = [sandboxes // clients + (number < sandboxes % clients) for number in range(clients)]
    shares = [counts[number::PROCESSES] for number in range(PROCESSES)]
    begin = time.monotonic() + 5 + sandboxes / 100
    with ProcessPoolExecutor(PROCESSES) as pool:
        futures = [
            pool.submit(work, url, share, seconds, rate / PROCESSES, begin, number)
            for number, share in enumerate(shares)
        ]
        sizes = []
        while not all(future.done() for future in futures):
            time.sleep(min(1.0, seconds / 20))
            if begin < time.monotonic() < begin + seconds:
                sizes.append(memory(pid))
        results = [future.result() for future in futures]
    times = {kind: [one for found in results for one in found["times"][kind]] for kind in MIX}
    everything = [one for values in times.values() for one in values]
    refused = [one for found in results for one in found["refused"]]
    errors: Counter[str] = Counter()
    for found in results:
        errors.update(found["errors"])
    print(f"\n{title}: {sandboxes} sandboxes, {clients} clients in {PROCESSES} processes, {seconds:g} s")
    print(f"{'':16} {'n':>9} {'p50 ms':>9} {'p95 ms':>9} {'p99 ms':>9}")
    for kind, values in {**times, "all": everything, "refused (429)": refused}.items():
        row = [f"{percentile(values, share) * 1e3:9.2f}" for share in (0.5, 0.95, 0.99)]
        print(f"{kind:16} {len(values):9} {' '.join(row)}")
    print(f"carried out per second {len(everything) / seconds:.0f}, errors {sum(errors.values())}")
    for text, count in errors.most_common(5):
        print(f"  {count} times {text}")
    tenth = max(1, len(sizes) // 10)
    early, late = sizes[tenth : 2 * tenth] or [0], sizes[-tenth:] or [0]
    print(f"server memory, MB: {max(early) / 1e6:.1f} after a tenth, {max(late) / 1e6:.1f} at the end")
    return {
        "sandboxes": sandboxes,
        "clients": clients,
        "seconds": seconds,
        "offered": rate or None,
        "n": len(everything),
        "rate": len(everything) / seconds,
        **percentiles(everything),
        "errors": sum(errors.values()),
        "refused": len(refused),
        "kinds": {
            kind: {
                "n": len(values),
                **{f"p{share}": percentile(values, share / 100) for share in (50, 95, 99)},
            }
            for kind, values in {**times, "refused": refused}.items()
            if values
        },
        "memory": {"early": max(early), "late": max(late)},
    }


def write(path: Path | None, found: dict[str, object]) -> None:
    """Store what was measured so far: a later part may not come to its end."""
    if path is not None:
        path.write_text(json.dumps(found, indent=1) + "\n")


def compared(saturated: Figures, over: Figures) -> dict[str, float]:
    """The overload compared with the first part."""
    found = {"p99": over["p99"] / saturated["p99"], "rate": over["rate"] / saturated["rate"]}
    print(f"\np99 of what was carried out ÷ that when saturated: {found['p99']:.2f}")
    print(f"carried out per second ÷ that when saturated: {found['rate']:.2f}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sandboxes", type=int, default=1000)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=600, help="duration of the first part")
    parser.add_argument("--overload", type=float, default=60, help="duration of the second part; 0 for none")
    parser.add_argument("--output", type=Path, help="a file for the figures, as JSON")
    parser.add_argument("--saturated", type=Path, help="the output of a run to take the first part from")
    arguments = parser.parse_args()
    found: dict[str, Any] = json.loads(arguments.saturated.read_text()) if arguments.saturated else {}
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with tempfile.TemporaryDirectory() as state:
        command = ["serve", "--listen", "127.0.0.1:0", "--state", state, "--until-eof"]
        command += ["--log-level", "warning"]
        with subprocess.Popen(
            [sys.executable, "-m", "dutyfree", *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as server:
            assert server.stdout is not None
            address = re.search(r"serving sandboxes at (\S+);", server.stdout.readline())
            assert address is not None
            host = {
                "date": time.strftime("%Y-%m-%d"),
                "cores": os.cpu_count(),
                "kernel": os.uname().release,
                "load": os.getloadavg()[0],
                "python": platform.python_version(),
            }
            print(*(f"{name} {value}" for name, value in host.items()), sep=", ")
            size = (address[1], server.pid, arguments.sandboxes, arguments.clients)
            if not found:
                found = {"host": host, "saturated": measure(*size, arguments.seconds, 0.0, "saturated")}
                write(arguments.output, found)
            if arguments.overload:
                rate = 2 * found["saturated"]["rate"]
                title = f"twice the load, {rate:.0f} per second"
                found["overload"] = measure(*size, arguments.overload, rate, title)
                found["overload ÷ saturated"] = compared(found["saturated"], found["overload"])
                write(arguments.output, found)
            assert server.stdin is not None
            server.stdin.close()


if __name__ == "__main__":
    main()

"""Endurance of the native engine: many cycles, many sandboxes at once, kills, bombs.

    python bench/soak.py [cycles] [live] [kills] [bombs]      (default: all)

Every part counts what exists before and after: processes, control groups of all hierarchies, mounts,
namespaces, directories, descriptors, and memory of owner and launcher. Writes bench/out/soak.json and prints
a table. The exit status is 1 if something was left, or if a sandbox did not answer. Ctrl-C ends the current
part and prints its counts. Times have no targets.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from time import perf_counter

import anyio

import dutyfree
from dutyfree import Limits, paths

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.engine import counts

OUT = Path(__file__).parent / "out" / "soak.json"

Row = tuple[str, object, object, bool | None]
"""Name, value before or target, value after, and whether it is right (None if it has no target)."""


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def launcher() -> int:
    """The launcher of this process."""
    (found,) = [
        pid
        for pid in counts.children(os.getpid())
        if Path(f"/proc/{pid}/comm").read_text().strip() == "dutyfree-engine"
    ]
    return found


def meminfo() -> dict[str, int]:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return {line.split(":")[0]: int(line.split()[1]) for line in lines}


def resident(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS"))


def percentile(values: list[float], part: float) -> float:
    return sorted(values)[int(part * (len(values) - 1))]


# --- a) Cycles -----------------------------------------------------------------------------------------


def held(pid: int) -> dict[str, int]:
    """Counts of owner and launcher; and of the machine, without a target, because others may use it."""
    family = counts.Family(os.getpid())
    kinds = {kind: sum(space.startswith(f"{kind}:") for space in family.namespaces) for kind in counts.KINDS}
    return {
        "sandboxes": len(family.inits),
        "control groups": len(family.groups()),
        **{f"namespaces, {kind}": count for kind, count in kinds.items()},
        "descriptors of the owner": len(os.listdir("/proc/self/fd")),
        "descriptors of the launcher": len(os.listdir(f"/proc/{pid}/fd")),
        "mounts in the launcher": len(Path(f"/proc/{pid}/mountinfo").read_text().splitlines()),
        "layers of the launcher": len(os.listdir(f"/proc/{pid}/root/l")),
        "directories in /tmp and the cache": len(list(Path("/tmp").glob("dutyfree*")))
        + len(list(paths.cache().glob("*/*"))),
        "memory of the owner, KiB": resident(os.getpid()),
        "memory of the launcher, KiB": resident(pid),
        **{f"machine: control groups, {kind}": count for kind, count in controlled().items()},
        "machine: mounts": len(Path("/proc/self/mountinfo").read_text().splitlines()),
        "machine: slab, KiB": meminfo()["Slab"],
        "machine: available memory, KiB": meminfo()["MemAvailable"],
    }


def controlled() -> dict[str, int]:
    """The kernel's counts of control groups, including those that are removed but not freed."""
    lines = [line.split() for line in Path("/proc/cgroups").read_text().splitlines()]
    return {line[0]: int(line[2]) for line in lines if line[0] in ("cpu", "memory", "pids")}


GROWTH = {"memory of the owner, KiB": 20_000, "memory of the launcher, KiB": 1_000}
"""KiB by which memory may grow, for any number of cycles."""


def judged(name: str, before: int, after: int) -> bool | None:
    if name.startswith("machine:"):
        return None
    return after - before <= GROWTH.get(name, 0)


async def cycles(arguments: argparse.Namespace) -> list[Row]:
    total, done = arguments.cycles, 0
    stop = False
    async with dutyfree.open("native") as substrate:
        pid = launcher()

        async def one() -> None:
            async with substrate.sandbox() as sandbox:
                seen = await sandbox.exec(["/bin/echo", "alive"])
                assert seen.stdout == b"alive\n", seen

        async def worker() -> None:
            nonlocal done
            while done < total and not stop:
                done += 1
                await one()

        async def batch() -> None:
            async with anyio.create_task_group() as tasks:
                for _ in range(arguments.parallel):
                    tasks.start_soon(worker)

        # Warm up: as many slots as the cycles can use, including those that are ready; then caches and the
        # heap.
        async with AsyncExitStack() as stack:
            for _ in range(arguments.parallel):
                await stack.enter_async_context(substrate.sandbox())
            await settled(pid)
        done, total = 0, min(500, arguments.cycles)
        await batch()
        done, total = 0, arguments.cycles
        before, start_time = await settled(pid), perf_counter()
        ticker = asyncio.create_task(progress(lambda: done, lambda: total, "cycles"))
        try:
            await batch()
        except asyncio.CancelledError:
            stop = True
            say(f"stopped after {done} cycles")
        seconds = perf_counter() - start_time
        ticker.cancel()
        after = await settled(pid)
    rows: list[Row] = [
        (f"{done} cycles, {arguments.parallel} at once: per second", None, round(done / seconds, 1), None)
    ]
    rows += [(name, was, after[name], judged(name, was, after[name])) for name, was in before.items()]
    return rows


async def settled(pid: int) -> dict[str, int]:
    """Wait until the counts are stable: the kernel frees namespaces and groups with a delay."""
    found = await anyio.to_thread.run_sync(held, pid)
    for _ in range(40):
        await anyio.sleep(0.25)
        again = await anyio.to_thread.run_sync(held, pid)
        if all(again[name] == found[name] for name in found if "KiB" not in name and "machine" not in name):
            return again
        found = again
    return found


async def progress(done: Callable[[], int], total: Callable[[], int], what: str) -> None:
    start_time = perf_counter()
    while True:
        await anyio.sleep(10)
        rate = done() / (perf_counter() - start_time)
        left = (total() - done()) / max(rate, 1e-9)
        say(f"{done()} of {total()} {what}, {rate:.0f} per second, {left:.0f} s left")


# --- b) Alive at once ----------------------------------------------------------------------------------

PARTS = ("MemAvailable", "Slab", "SUnreclaim", "AnonPages", "KernelStack", "PageTables", "Percpu", "Shmem")


async def live(arguments: argparse.Namespace) -> list[Row]:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    rows: list[Row] = []
    async with dutyfree.open("native") as substrate:
        async with substrate.sandbox() as sandbox:
            await sandbox.exec("true")
        before, start_time = meminfo(), perf_counter()
        async with AsyncExitStack() as stack:
            sandboxes = []
            for number in range(1, arguments.live + 1):
                sandboxes.append(await stack.enter_async_context(substrate.sandbox()))
                if number % max(1, arguments.live // 5) == 0:
                    each = (before["MemAvailable"] - meminfo()["MemAvailable"]) / number
                    say(f"{number} sandboxes, {each:.0f} KiB each, {perf_counter() - start_time:.0f} s")
                    rows.append((f"{number} sandboxes: KiB each", 600, round(each), None))
            rows.append(("seconds to create all", None, round(perf_counter() - start_time, 1), None))
            took, answers = [], 0
            for sandbox in sandboxes:
                start = perf_counter()
                answers += (await sandbox.exec(["/bin/echo", "alive"])).stdout == b"alive\n"
                took.append(perf_counter() - start)
            rows.append(
                ("sandboxes that answered a command", arguments.live, answers, answers == arguments.live)
            )
            rows.append(("a command, ms p50", None, round(statistics.median(took) * 1e3, 2), None))
            rows.append(("a command, ms p95", None, round(percentile(took, 0.95) * 1e3, 2), None))
            after = meminfo()
            rows += [
                (f"{part}: KiB each", None, round(abs(after[part] - before[part]) / arguments.live, 1), None)
                for part in PARTS
            ]
            files = len(os.listdir(f"/proc/{launcher()}/fd"))
            rows.append(
                ("descriptors of the launcher per sandbox", None, round(files / arguments.live, 2), None)
            )
            start_time = perf_counter()
            for sandbox in sandboxes:
                await sandbox.close()
        rows.append(("seconds to remove all", None, round(perf_counter() - start_time, 1), None))
    return rows


# --- c) Kills ------------------------------------------------------------------------------------------

OWNER = textwrap.dedent(
    """
    import anyio, dutyfree
    async def one(substrate, number):
        while True:
            async with substrate.sandbox() as sandbox:
                await sandbox.exec("(setsid sleep 1000 >/dev/null 2>&1 &); head -c 300000 /dev/zero; true")
                await sandbox.write("file", bytes(1_000_000))
                if number % 2:
                    with anyio.move_on_after(0.05):
                        await sandbox.exec("sleep 1000")
    async def main():
        async with dutyfree.open("native") as substrate:
            print("open", flush=True)
            async with anyio.create_task_group() as tasks:
                for number in range(4):
                    tasks.start_soon(one, substrate, number)
    anyio.run(main)
    """
)


def kill_once(chance: random.Random, *, whom: str) -> counts.Family:
    """Start an owner, kill it or its launcher at a random moment, and return what it had then."""
    command = [sys.executable, "-c", OWNER]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as owner:
        if whom == "launcher" or chance.random() < 0.8:
            owner.stdout.readline()
        time.sleep(chance.uniform(0, 0.25))
        if whom == "owner":
            owner.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, owner.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        family = counts.Family(owner.pid)
        if whom == "launcher":
            for pid in family.launchers:
                os.kill(pid, signal.SIGKILL)
            time.sleep(chance.uniform(0, 0.1))
        owner.kill()
    return family


async def kills(arguments: argparse.Namespace) -> list[Row]:
    rows: list[Row] = []
    chance = random.Random(arguments.seed)  # noqa: S311 (moments to kill at)
    for whom in ("owner", "launcher"):
        left: set[str] = set()
        had, families = 0, []
        for number in range(1, arguments.kills + 1):
            family = await anyio.to_thread.run_sync(lambda whom=whom: kill_once(chance, whom=whom))
            had += len(family.processes) + len(family.namespaces)
            # The next launcher removes the control groups of a killed one.
            look = partial(family.remains, groups=whom == "owner")
            left |= await anyio.to_thread.run_sync(look)
            families.append(family)
            if number % 25 == 0:
                say(f"{number} of {arguments.kills} kills of the {whom}, left: {sorted(left) or 'nothing'}")
        for _ in range(10):  # a killed process counts as alive until the host's init has reaped it
            async with dutyfree.open("native"):
                pass
            if not any(family.groups() for family in families[-3:]):
                break
            await anyio.sleep(0.5)
        # Not the namespaces: the kernel reuses their numbers.
        for family in families:
            left |= await anyio.to_thread.run_sync(family.groups)
        rows.append(
            (f"{arguments.kills} kills of the {whom}: processes and namespaces before", None, had, had > 0)
        )
        rows.append((f"{arguments.kills} kills of the {whom}: left", 0, len(left), not left))
        rows += [(thing, None, "left", False) for thing in sorted(left)[:10]]
    return rows


# --- d) Bombs ------------------------------------------------------------------------------------------

BOMBS = {
    "fork": "while :; do (while :; do :; done) & done",
    "memory": "python3 -c 'x = []\nwhile True: x.append(bytearray(1 << 20))'",
    "disk": "while :; do cat /dev/zero > file; rm file; done",
    "inodes": "i=0; while :; do i=$((i + 1)); : > file$i; done",
    "output": "yes",
    "descriptors": "python3 -c 'import os\nwhile True:\n  try: os.dup(0)\n  except OSError: pass'",
    "threads": """python3 -c '
import threading, time
while True:
  try: threading.Thread(target=time.sleep, args=(99,)).start()
  except RuntimeError: pass'""",
    "cpu": "while :; do :; done",
}


async def bombs(arguments: argparse.Namespace) -> list[Row]:
    """Exec in one sandbox beside eight bombs. A bomb that its limits have ended is started again."""
    limits = Limits(memory=128 << 20, pids=64, disk=32 << 20, cpus=0.2)

    async def explode(command: str, until: float) -> None:
        async with substrate.sandbox(limits=limits) as sandbox:
            while perf_counter() < until:
                await sandbox.exec(command, timeout=max(0.1, until - perf_counter()))

    async def latencies(seconds: float) -> list[float]:
        found, end = [], perf_counter() + seconds
        while perf_counter() < end:
            start = perf_counter()
            assert (await ninth.exec(["/bin/echo", "alive"])).stdout == b"alive\n"
            found.append((perf_counter() - start) * 1e3)
            await anyio.sleep(0.02)
        return found

    async with dutyfree.open("native") as substrate, substrate.sandbox() as ninth:
        await latencies(0.5)
        before = await latencies(min(10, arguments.seconds))
        until = perf_counter() + arguments.seconds + 2
        async with anyio.create_task_group() as tasks:
            for command in BOMBS.values():
                tasks.start_soon(explode, command, until)
            await anyio.sleep(1)
            during = await latencies(arguments.seconds)
        after = await latencies(2)
    return [
        (
            f"answers beside {len(BOMBS)} bombs in {arguments.seconds:.0f} s",
            None,
            len(during),
            bool(during),
        ),
        ("ms p50 before, during", *(round(statistics.median(part), 2) for part in (before, during)), None),
        ("ms p95 before, during", *(round(percentile(part, 0.95), 2) for part in (before, during)), None),
        ("ms max before, during", *(round(max(part), 2) for part in (before, during)), None),
        ("ms p50 before, after", *(round(statistics.median(part), 2) for part in (before, after)), None),
    ]


# --- All ------------------------------------------------------------------------------------------------

TESTS = {"cycles": cycles, "live": live, "kills": kills, "bombs": bombs}


def machine() -> dict[str, object]:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "kernel": platform.release(),
        "cpus": os.cpu_count(),
        "memory_gib": round(memory / 2**30, 1),
        "python": platform.python_version(),
        "load": [round(value, 2) for value in os.getloadavg()],
    }


def write(results: dict) -> None:
    OUT.parent.mkdir(exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=OUT.parent, delete=False) as file:
        json.dump(results, file, indent=1)
    Path(file.name).replace(OUT)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("parts", nargs="*", help=f"one of {', '.join(TESTS)}; default: all")
    parser.add_argument("--cycles", type=int, default=100_000, help="number of create, exec, destroy cycles")
    parser.add_argument("--parallel", type=int, default=4, help="cycles in parallel")
    parser.add_argument("--live", type=int, default=5_000, help="sandboxes at once")
    parser.add_argument(
        "--kills", type=int, default=200, help="kills of the owner, and as many of the launcher"
    )
    parser.add_argument("--seconds", type=float, default=30, help="duration of the bombs")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    if unknown := set(arguments.parts) - set(TESTS):
        parser.error(f"there is no part {unknown.pop()!r}: {', '.join(TESTS)}")
    results = {"command": " ".join(sys.argv), "machine": machine(), "parts": {}}
    all_fine = True
    for name in arguments.parts or TESTS:
        start_time = datetime.now(UTC)
        say(f"{name} …")
        try:
            rows = asyncio.run(TESTS[name](arguments))
        except KeyboardInterrupt:
            say("stopped")
            return 130
        results["parts"][name] = {"date": start_time.isoformat(timespec="seconds"), "rows": rows}
        write(results)
        print(f"\n{name}\n{'':56} {'before':>12} {'after':>12}")
        for what, was, now, fine in rows:
            mark = {True: "✓", False: "✗", None: ""}[fine]
            print(f"{what:56} {'' if was is None else was:>12} {now:>12} {mark}")
            all_fine &= fine is not False
    return 0 if all_fine else 1


if __name__ == "__main__":
    sys.exit(main())

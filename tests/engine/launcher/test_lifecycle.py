"""However the owner ends, nothing of the engine is left."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import textwrap
import time

import anyio
import pytest

import dutyfree
from dutyfree import Limits
from dutyfree.contract import Substrate
from dutyfree.contract.errors import ExecError, LimitError, SandboxClosed
from tests.awaiting import enter
from tests.engine import counts
from tests.processes import eventually, speaking_python

ROUNDS = int(os.environ.get("DUTYFREE_KILLS", "12"))

OWNER = textwrap.dedent(
    """
    import anyio, dutyfree, signal
    from dutyfree import Limits
    signal.signal(signal.SIGINT, signal.default_int_handler)  # as started by hand, not in the background
    async def one(substrate, number):
        while True:
            async with substrate.sandbox(limits=Limits(network="on" if number == 2 else "off")) as sandbox:
                await sandbox.exec("(setsid sleep 1000 >/dev/null 2>&1 &); head -c 300000 /dev/zero; true")
                await sandbox.write("file", bytes(1_000_000))
                if number % 2:
                    with anyio.move_on_after(0.05):
                        await sandbox.exec("sleep 1000")
                if number == 3:
                    await sandbox.pause()
                    await anyio.sleep(0.02)
    async def main():
        async with dutyfree.open("native") as substrate:
            print("open", flush=True)
            async with anyio.create_task_group() as tasks:
                for number in range(4):
                    tasks.start_soon(one, substrate, number)
    anyio.run(main)
    """
)


def stopped(process: subprocess.Popen[bytes]) -> counts.Family:
    """Stop the owner, and list what it has at this moment."""
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
    return counts.Family(process.pid)


@pytest.mark.native
@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_killed_owner_leaves_nothing(signum: int) -> None:
    """Kill the owner at any moment: no process, control group or namespace is left."""
    delays = random.Random(signum)
    for _ in range(ROUNDS if signum == signal.SIGKILL else 2):
        with subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            if delays.random() < 0.8:
                process.stdout.readline()
            time.sleep(delays.uniform(0, 0.25))
            family = stopped(process)
            process.send_signal(signum)
            process.send_signal(signal.SIGCONT)
            process.wait()
        assert not family.remains()


@pytest.mark.native
def test_a_killed_launcher_leaves_no_process() -> None:
    families, delays = [], random.Random(1)
    for _ in range(max(1, ROUNDS // 4)):
        with speaking_python(OWNER) as (process, _):
            time.sleep(delays.uniform(0, 0.25))
            family = counts.Family(process.pid)
            for launcher in family.launchers:
                os.kill(launcher, signal.SIGKILL)
            time.sleep(delays.uniform(0, 0.1))
            process.kill()
        assert family.launchers
        assert not family.remains(groups=False)
        families.append(family)

    # The next launcher removes control groups without a process.
    def is_clean() -> bool:
        anyio.run(lambda: enter(dutyfree.open("native")))
        return not any(family.groups() for family in families)

    assert eventually(is_clean), "a killed process exists until the host's init has reaped it"


async def test_closing_leaves_nothing(native: Substrate) -> None:
    before = await anyio.to_thread.run_sync(counts.children, os.getpid())
    async with dutyfree.open("native") as another, another.sandbox() as sandbox:
        await sandbox.exec("sleep 1000 & (setsid sleep 1000 &)")
        family = await anyio.to_thread.run_sync(counts.Family, os.getpid(), before)
    assert family.inits
    assert not await anyio.to_thread.run_sync(family.remains)


async def test_a_sandbox_that_dies_is_told(native: Substrate) -> None:
    before = await anyio.to_thread.run_sync(counts.sandboxes, os.getpid())
    async with native.sandbox() as sandbox:
        (init,) = await anyio.to_thread.run_sync(counts.sandboxes, os.getpid()) - before

        async def kill() -> None:
            await anyio.sleep(0.2)
            os.kill(init, signal.SIGKILL)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(kill)
            with pytest.raises(ExecError, match="died"):
                await sandbox.exec("sleep 100")
        with pytest.raises(SandboxClosed, match="died"):
            await sandbox.read("file")
    async with native.sandbox() as sandbox:
        assert (await sandbox.exec("true")).ok


async def test_many_cycles_leave_no_descriptor(native: Substrate) -> None:
    async def cycle() -> None:
        async with native.sandbox() as sandbox:
            await sandbox.exec("cat", stdin=b"x" * 10_000)
            await sandbox.write("large", bytes(400_000))
            await sandbox.read("large")

    for _ in range(5):
        await cycle()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(50):
        await cycle()
    assert await counts.descriptors(before) <= before


async def test_a_disk_must_fit_into_the_memory(native: Substrate) -> None:
    limits = Limits(memory=64 << 20, disk=64 << 20)
    with pytest.raises(LimitError, match="does not fit"):
        await enter(native.sandbox(limits=limits))
    with pytest.raises(LimitError, match="does not fit"):
        dutyfree.open("native", limits=limits)

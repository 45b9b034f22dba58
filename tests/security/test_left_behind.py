"""What one user of a sandbox leaves for the next, and what a recipe can do to its pool."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest

import dutyfree
from dutyfree import Limits, Ready, Recipe, Service, Stage
from dutyfree.contract.errors import CreateError, ExecError, StageError
from dutyfree.engine.launcher.timeouts import Timeouts
from dutyfree.substrates.native import Native, NativeConfig
from tests.awaiting import PATIENCE, enter, until
from tests.opening import open_native

pytestmark = [
    pytest.mark.usefixtures("cache"),
    pytest.mark.native,
    pytest.mark.root("parts of sandboxes are used again with root"),
]

LIMITS = Limits(memory=256 << 20, pids=64, cpus=0.5)


@pytest.fixture
async def pooled() -> AsyncIterator[Any]:
    async with dutyfree.open("native", ready=1, limits=LIMITS) as substrate:
        yield substrate


async def python(sandbox: Any, script: str) -> str:
    seen = await sandbox.exec(["python3", "-c", script], timeout=100)
    assert seen.ok, seen.stderr.decode()
    return str(seen.stdout.decode())


MISCHIEF = """
import ctypes, os, socket
libc = ctypes.CDLL(None)
assert libc.mq_open(b"/left", os.O_CREAT | os.O_RDWR, 0o666, None) >= 0
assert libc.shmget(1234, 1 << 20, 0o1666) >= 0
open("/dev/shm/left", "w").close()
for family, address in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):
    for kind in (socket.SOCK_DGRAM, socket.SOCK_STREAM):
        for _ in range(5):
            try: socket.socket(family, kind).connect((address, 9))
            except OSError: pass
if os.fork() == 0:
    os.setsid()
    listening = socket.socket(socket.AF_UNIX)
    listening.bind("\\0left")
    os.nice(5)
    os.execvp("sleep", ["sleep", "1000"])
"""

LOOK = """
for file in /proc/net/snmp /proc/net/snmp6 /proc/net/netstat /proc/net/dev /proc/sysvipc/*; do cat $file; done
ls -A /dev/shm /tmp .; nice; umask; ps ax -o comm
cat /proc/net/unix /proc/self/oom_score_adj /proc/self/timens_offsets
"""


async def test_the_next_holder_finds_nothing(pooled: Any) -> None:
    """Also counters: a number that the next user can read is a message. Networks are reused in turns."""
    pool = await pooled.pooled()
    seen = []
    for _ in range(6):
        async with pool.lease(Recipe()) as lease:
            seen.append((await lease.sandbox.exec(LOOK)).stdout)
            await python(lease.sandbox, MISCHIEF)
    assert set(seen) == {seen[0]}
    assert b"left" not in seen[0]


async def test_what_nobody_used_is_used_again(native: Any) -> None:
    """Without this, the test above would prove nothing."""
    cookie = "import socket; print(socket.socket(socket.AF_UNIX).getsockopt(socket.SOL_SOCKET, 71, 8))"
    seen: set[str] = set()
    for _ in range(500):
        async with native.sandbox() as sandbox:
            network = await python(sandbox, cookie)  # the kernel reuses numbers of namespaces
        if network in seen:
            return
        seen.add(network)
    raise AssertionError(f"{len(seen)} sandboxes, each with a network of its own")


def group_files(launcher: int, names: tuple[str, ...]) -> list[Path]:
    """Control groups of its sandboxes, in all hierarchies."""
    found = []
    for directory, _, files in os.walk("/sys/fs/cgroup"):
        if Path(directory).parent.name.startswith(f"dutyfree-{launcher}-"):
            found += [Path(directory, name) for name in names if name in files]
    return [path for path in found if path.parent.name != "init"]


@pytest.mark.parametrize(
    ("files", "wrong"),
    [
        (("pids.max",), "33"),
        (("memory.max", "memory.limit_in_bytes"), str(128 << 20)),
        (("cpu.max", "cpu.cfs_quota_us"), "30000"),
        (("cpu.weight", "cpu.shares"), "50"),
    ],
    ids=["pids", "memory", "cpu", "weight"],
)
async def test_verification_sees_limits_that_are_others(
    pooled: Any, files: tuple[str, ...], wrong: str
) -> None:
    async with pooled.sandbox() as sandbox:
        await sandbox.verify()
        found = await anyio.to_thread.run_sync(group_files, pooled.node.launcher.pid, files)
        assert found
        for path in found:
            await anyio.to_thread.run_sync(path.write_text, wrong)
        with pytest.raises(ExecError, match="not as new: limits"):
            await sandbox.verify()


async def test_verification_sees_message_queues(pooled: Any) -> None:
    async with pooled.sandbox() as sandbox:
        await sandbox.verify()
        queue = "import ctypes, os; print(ctypes.CDLL(None).mq_open(b'/left', os.O_CREAT, 0o600, None))"
        assert int(await python(sandbox, queue)) >= 0
        with pytest.raises(ExecError, match="message queues"):
            await sandbox.verify()


# --- Recipes that try to take the whole pool --------------------------------------------------------


@pytest.mark.parametrize("says", ["echo 999999999999", "sleep 1000"], ids=["large", "never"])
async def test_what_a_service_takes_is_not_asked_of_its_sandbox(pooled: Any, says: str) -> None:
    """A recipe that could lie about its memory could evict all others from the pool."""
    pool = await pooled.pooled()
    await pool.prefetch([Recipe()], 2)
    with anyio.fail_after(60):
        await pool.until_idle(Recipe(), 2)
    hold = "held = bytearray(20 << 20); print('on', flush=True); time.sleep(1000)"
    wanted = Recipe(
        stages=(
            Stage(
                "setup",
                tuple(
                    f"printf '#!/bin/sh\n{says}\n' > {at}/grep; chmod +x {at}/grep"
                    for at in ("/usr/local/sbin", "/usr/local/bin", "/usr/bin")
                ),
            ),
        ),
        services=(Service("held", ("python3", "-c", f"import time; {hold}"), Ready(line="on")),),
    )
    lease = await pool.acquire(wanted, deadline=100)
    assert 20 << 20 <= lease.sandboxes[0].services_memory < 40 << 20
    pool.release(lease)
    assert pool.ledger.events["evicted"] == 0


async def test_a_program_that_never_ends_holds_up_no_reset() -> None:
    shell = (
        "cp /bin/sh /usr/bin/kept-sh; printf '#!/usr/bin/kept-sh\nsleep 1000\n' > /tmp/sh; chmod +x /tmp/sh"
    )
    wanted = Recipe(stages=(Stage("setup", (f"{shell}; mv /tmp/sh $(readlink -f /bin/sh)",)),))
    async with Native(NativeConfig(ready=1, limits=LIMITS), Timeouts(warm_up=0.5)) as native:
        pool = await native.pooled()
        await enter(pool.lease(wanted, deadline=100))
        await until(lambda: pool.ledger.events["discarded"], pool.changed)


async def test_a_stage_that_never_ends_is_stopped() -> None:
    recipe = Recipe(stages=(Stage("setup", ("echo begun; sleep 1000",)),))
    for seconds in PATIENCE:
        async with open_native(longest_stage=seconds) as native:
            with anyio.fail_after(200), pytest.raises(StageError) as stopped:
                await native.prepare(recipe)
            assert list(await native.sandboxes()) == []
        if "begun" in stopped.value.output:
            break
    assert f"was stopped after {seconds} s: begun" in str(stopped.value)


STOPPER = (
    "python3 -c 'import os\nwhile True:\n try: os.kill(-1, 19)\n except OSError: pass' > /dev/null 2>&1 &"
)


async def test_a_stage_that_holds_up_its_init_is_given_up() -> None:
    recipe = Recipe(stages=(Stage("setup", (STOPPER, *["true"] * 5000)),))
    async with open_native(longest_stage=2) as native:
        with anyio.fail_after(200), pytest.raises(CreateError, match=r"stopped answering|was stopped"):
            await native.prepare(recipe)

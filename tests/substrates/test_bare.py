"""What bare promises beyond the contract: nothing of it outlives it, however its owner ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import anyio
import anyio.to_thread
import pytest

import dutyfree
from dutyfree.errors import CreateError, DispatchError, Unavailable
from dutyfree.substrates.bare import PREFIX, remove_leftovers

OWNER = """
import asyncio, sys, dutyfree
async def main():
    async with dutyfree.open("bare", directory=sys.argv[1]) as substrate, substrate.sandbox() as sandbox:
        await sandbox.write("file", b"x")
        # One child in the process group, one that left it.
        await sandbox.exec("sleep 1000 & setsid sleep 1000 & echo $!")
        print("ready", flush=True)
        await sandbox.exec("sleep 1000")
asyncio.run(main())
"""


def processes_marked(text):
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if text.encode() in path.read_bytes():
                found.append(path.parent.name)
        except OSError:
            continue
    return found


def gone(directory, deadline=10.0):
    """Wait for the reaper: no process of the owner's and no directory."""
    until = time.monotonic() + deadline
    while time.monotonic() < until:
        if not list(directory.glob(f"{PREFIX}*")) and not processes_marked(str(directory)):
            return True
        time.sleep(0.05)
    return False


def owner(directory):
    process = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(directory)], stdout=subprocess.PIPE, start_new_session=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    return process


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_killed_owner_leaves_nothing(tmp_path, number):
    with owner(tmp_path) as process:
        assert processes_marked(str(tmp_path))
        os.kill(process.pid, number)
    assert gone(tmp_path)


def test_what_even_the_reaper_left_is_removed_by_the_next_owner(tmp_path):
    with owner(tmp_path) as process:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        reaper = next(pid for pid in children if "reaper" in Path(f"/proc/{pid}/cmdline").read_text())
        os.kill(int(reaper), signal.SIGKILL)
        process.kill()
    assert list(tmp_path.glob(f"{PREFIX}*"))
    assert remove_leftovers(tmp_path) == 1
    assert gone(tmp_path, 1.0)


@pytest.mark.anyio
async def test_a_living_owners_directory_is_left_alone(tmp_path):
    async with dutyfree.open("bare", directory=str(tmp_path)):
        assert await anyio.to_thread.run_sync(remove_leftovers, tmp_path) == 0
        assert len(list(tmp_path.iterdir())) == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.anyio
async def test_commands_get_a_small_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("SECRET_TOKEN", "x")
    async with dutyfree.open("bare") as substrate, substrate.sandbox() as sandbox:
        seen = (await sandbox.exec("env")).stdout.decode()
    assert "SECRET_TOKEN" not in seen
    assert f"HOME={sandbox.workdir}" in seen


@pytest.mark.anyio
async def test_limits_that_it_cannot_enforce_are_refused():
    async with dutyfree.open("bare") as substrate:
        for limits in (dutyfree.Limits(memory=1 << 20), dutyfree.Limits(network="off")):
            with pytest.raises(CreateError, match="bare cannot limit"):
                async with substrate.sandbox(limits=limits):
                    pass


@pytest.mark.anyio
async def test_a_directory_that_cannot_be_used_is_said():
    with pytest.raises(Unavailable, match=r"/nonexistent.*directory="):
        async with dutyfree.open("bare", directory="/nonexistent"):
            pass


@pytest.mark.anyio
async def test_unknown_users_and_unusable_arguments_are_dispatch_errors():
    async with dutyfree.open("bare") as substrate, substrate.sandbox() as sandbox:
        with pytest.raises(DispatchError, match="no user 'nobody-of-that-name'"):
            await sandbox.exec("true", user="nobody-of-that-name")
        with pytest.raises(DispatchError, match="not a command"):
            await sandbox.exec(["echo", "a\0b"])
        assert (await sandbox.exec("true")).ok


@pytest.mark.anyio
async def test_usage_and_spans_tell_the_commands_own_time():
    async with dutyfree.open("bare") as substrate, substrate.sandbox() as sandbox:
        seen = await sandbox.exec(["python3", "-c", "x = bytearray(200 << 20)"])
    assert seen.usage is not None
    assert seen.usage.cpu_seconds > 0
    assert (seen.usage.peak_memory or 0) > 200 << 20
    assert seen.command_seconds is not None
    assert seen.command_seconds <= seen.seconds


@pytest.mark.anyio
async def test_no_descriptor_is_lost():
    async with dutyfree.open("bare") as substrate, substrate.sandbox() as sandbox:
        await sandbox.exec("true")
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(20):
            await sandbox.exec("cat", stdin=b"x" * 100_000)
            await sandbox.exec(["no-such-program"])
            await sandbox.exec("sleep 5", timeout=0.01)
        assert len(os.listdir("/proc/self/fd")) == before


def test_nothing_is_left_in_the_temporary_directory():
    mine = list(Path(tempfile.gettempdir()).glob(f"{PREFIX}{os.getpid()}.*"))
    assert not mine


@pytest.mark.anyio
async def test_commands_at_once_do_not_take_each_others_descriptors():
    """A stream that ends early gives its number free, and another command gets it."""
    async with dutyfree.open("bare") as substrate, substrate.sandbox() as sandbox:

        async def some(number):
            for _ in range(15):
                await sandbox.exec(["sh", "-c", f"exec >&- 2>&-; sleep 0.00{number % 7}"])

        with anyio.fail_after(60):
            async with anyio.create_task_group() as tasks:
                for number in range(12):
                    tasks.start_soon(some, number)

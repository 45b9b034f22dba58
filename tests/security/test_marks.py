"""A process that imitates another command's mark, to outlive its own command."""

from __future__ import annotations

import textwrap

import anyio
import pytest

from dutyfree.contract import Substrate
from dutyfree.contract.abilities import ManagedProcesses
from tests.awaiting import appeared

pytestmark = pytest.mark.native

CHANGELING = """
import ctypes, os, resource, struct, time
libc = ctypes.CDLL(None)
def newer():
    own = resource.getrlimit(15)[1]
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try: lines = open(f"/proc/{pid}/limits").read().splitlines()
        except OSError: continue
        (line,) = [line for line in lines if line.startswith("Max realtime timeout")]
        found = line.split()[4]
        if found.isdigit() and int(found) < own: return int(found)
def become(mark):
    both = struct.pack("QQ", mark, mark)
    for number in (0, os.getpid()):
        libc.prlimit64(number, 15, both, None)
        libc.syscall(302, number, 15, both, None)
    libc.syscall(160, 15, both)
    resource.setrlimit(15, (mark, mark))
if os.fork() == 0:
    if os.fork() == 0:
        os.setsid()
        os.environ.clear()
        open("begun", "w")
        while (mark := newer()) is None: time.sleep(0.01)
        become(mark)
        open("tried", "w")
        while True:
            open("beats", "a").write("x")
            time.sleep(0.02)
    os._exit(0)
time.sleep(1000)
"""


async def test_a_process_cannot_take_the_mark_of_a_newer_command(native: Substrate) -> None:
    """It can read other marks and lower limits, but cannot change its own mark."""
    async with native.sandbox() as sandbox:
        assert isinstance(sandbox, ManagedProcesses)
        old = await sandbox.start(["python3", "-c", textwrap.dedent(CHANGELING)])
        await appeared(sandbox, "begun")
        new = await sandbox.start(["sleep", "1000"])
        await appeared(sandbox, "tried")
        await appeared(sandbox, "beats")
        await old.kill()
        size = len(await sandbox.read("beats"))
        await anyio.sleep(0.3)
        assert len(await sandbox.read("beats")) == size > 0
        assert new.running
        await new.kill()


async def test_what_a_command_left_behind_outlives_others(native: Substrate) -> None:
    """It belongs to a command that has ended, and to none that is killed later."""
    async with native.sandbox() as sandbox:
        await sandbox.exec("(while :; do echo x >> beats; sleep 0.02; done) >/dev/null 2>&1 </dev/null &")
        await appeared(sandbox, "beats")
        assert (await sandbox.exec("sleep 1000", timeout=0.2)).timed_out
        size = len(await sandbox.read("beats"))
        with anyio.fail_after(60):
            while len(await sandbox.read("beats")) == size:  # noqa: ASYNC110 (files tell nobody)
                await anyio.sleep(0.02)

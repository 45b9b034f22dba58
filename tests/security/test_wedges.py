"""Processes in a sandbox can block its init for ever, but never the owner."""

from __future__ import annotations

import contextlib
import os
import textwrap
from typing import Any

import anyio
import pytest

from dutyfree import Limits
from dutyfree.contract import Sandbox, Substrate
from dutyfree.contract.abilities import ShellSessions
from dutyfree.contract.errors import ActionError, SandboxGone
from tests.awaiting import appeared, overrun

LIMITS = Limits(memory=256 << 20, pids=64)


async def background(sandbox: Sandbox, script: str) -> None:
    """Start a script that goes on after its command has ended, and wait until it runs."""
    begun = "open('begun', 'w').close()\n"
    await sandbox.write("script.py", (begun + textwrap.dedent(script)).encode())
    await sandbox.exec("python3 script.py >/dev/null 2>&1 </dev/null &")
    await appeared(sandbox, "begun")


STOPPER = """
import os
while True:
    try: os.kill(-1, 19)
    except OSError: pass
"""


FAR = {"PATH": ":".join([*(f"/{number}" for number in range(4000)), "/usr/bin"])}
"""A PATH so long that a process is stopped while it searches its program, and init with it."""


async def run_until_it_fails(sandbox: Sandbox) -> None:
    while True:
        await sandbox.exec(["true"], env=FAR, timeout=0.2)


async def cancel_until_it_fails(sandbox: Sandbox) -> None:
    while True:
        with anyio.move_on_after(0.3):
            await sandbox.exec(["true"], env=FAR)
        with anyio.move_on_after(0.3):
            await sandbox.read("/etc/passwd")


async def test_an_init_that_is_held_up_ends_the_sandbox(impatient: Substrate) -> None:
    async with impatient.sandbox(limits=LIMITS) as sandbox:
        await background(sandbox, STOPPER)
        with anyio.fail_after(200):
            with pytest.raises(SandboxGone, match="stopped answering because of what runs in it"):
                await run_until_it_fails(sandbox)
            with pytest.raises(SandboxGone):
                await sandbox.exec("true")
            with pytest.raises(SandboxGone):
                await sandbox.read("/etc/passwd")
    async with impatient.sandbox() as sandbox:
        assert (await sandbox.exec("true")).ok


async def test_a_cancelled_action_comes_back(impatient: Substrate) -> None:
    async with impatient.sandbox(limits=LIMITS) as sandbox:
        await background(sandbox, STOPPER)
        with anyio.fail_after(200), pytest.raises(SandboxGone):
            await cancel_until_it_fails(sandbox)


async def test_threads_that_outlive_the_first(native: Substrate) -> None:
    script = """
    import ctypes, threading, time
    def beat():
        while True:
            open("beats", "a").write("x")
            print("beat", flush=True)
            time.sleep(0.02)
    threading.Thread(target=beat, daemon=True).start()
    ctypes.CDLL(None).syscall(EXIT, 0)
    """.replace("EXIT", "60" if os.uname().machine == "x86_64" else "93")
    async with native.sandbox(limits=LIMITS) as sandbox:
        with anyio.fail_after(200):
            seen = await overrun(sandbox, ["python3", "-c", textwrap.dedent(script)], b"beat")
        assert seen.timed_out
        size = len(await sandbox.read("beats"))
        await anyio.sleep(0.3)
        assert len(await sandbox.read("beats")) == size > 0


@pytest.mark.parametrize(
    "replace", ["mkfifo /etc/passwd", "ln -s /dev/zero /etc/passwd", "truncate -s 1T /etc/passwd"]
)
async def test_a_list_of_users_without_end(native: Substrate, replace: str) -> None:
    async with native.sandbox(limits=LIMITS) as sandbox:
        await sandbox.exec(f"rm /etc/passwd; {replace}")
        with anyio.fail_after(60):
            seen = await sandbox.exec("true", user="nobody", timeout=1)
            assert (seen.exit_code, seen.started) == (126, False)
            assert (await sandbox.exec(["id", "-u"], user="65534")).stdout == b"65534\n"


TRACER = """
import ctypes, os
libc, seen = ctypes.CDLL(None), {1, os.getpid()}
while True:
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) not in seen:
            if libc.syscall(101, 0x4206, int(name), None, None) == 0: seen.add(int(name))
"""


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="numbers of x86-64")
async def test_a_tracer_does_not_hide_the_end(native: Substrate) -> None:
    async with native.sandbox(limits=LIMITS) as sandbox:
        await background(sandbox, TRACER)
        with anyio.fail_after(60):
            seen = await sandbox.exec("sleep 0.3; sleep 300", timeout=1)
        assert seen.timed_out
        assert (await sandbox.exec("true", timeout=60)).ok


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="numbers of x86-64")
async def test_a_tracer_does_not_hide_an_end_that_takes_long(native: Substrate) -> None:
    """As with a process that has much memory, or any process on a busy machine."""
    large = "import time; held = bytearray(b'x') * (600 << 20); time.sleep(300)"
    async with native.sandbox(limits=Limits(memory=1 << 30, pids=64)) as sandbox:
        await background(sandbox, TRACER)
        with anyio.fail_after(60):
            seen = await sandbox.exec(["python3", "-c", large], timeout=3)
        assert seen.timed_out
        assert (await sandbox.exec("true", timeout=60)).ok


async def test_a_shell_comes_back(impatient: Substrate) -> None:
    async with impatient.sandbox(limits=LIMITS) as sandbox:
        assert isinstance(sandbox, ShellSessions)
        with anyio.fail_after(200), contextlib.suppress(ActionError):
            async with sandbox.shell() as held:
                await held.run("true")
                await background(sandbox, STOPPER)
                for _ in range(20):
                    with anyio.move_on_after(0.2):
                        await sandbox.exec("true")
                    await held.run("true", timeout=0.2)


async def test_questions_to_init_keep_nothing_from_standing_still(native: Any) -> None:
    """A process that waits for the seccomp broker cannot be frozen, so init must answer before it stops."""
    storm = """
    import os, socket
    for _ in range(5): os.fork()
    while True:
        try:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one: one.connect(("127.0.0.1", 9))
        except OSError: pass
    """
    async with native.sandbox(limits=LIMITS) as sandbox:
        await background(sandbox, storm)
        for _ in range(5):
            await sandbox.pause()
            await sandbox.resume()
            native.forget(await sandbox.snapshot())
        assert (await sandbox.exec("echo alive", timeout=60)).stdout == b"alive\n"

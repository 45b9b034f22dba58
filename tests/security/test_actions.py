"""Terminals, watches, searches and processes against hostile processes in the sandbox."""

from __future__ import annotations

import os
import textwrap

import anyio
import pytest

from dutyfree import Limits, List, Read
from dutyfree.contract.errors import ActionError, ExecError, SandboxClosed
from dutyfree.engine.sandbox.sandbox import NativeSandbox
from dutyfree.substrates.native import Native
from tests.awaiting import appeared, enter

LIMITS = Limits(memory=256 << 20, pids=64)


async def search_until_it_fails(sandbox: NativeSandbox) -> None:
    while True:
        await sandbox.search("/usr", "no such text anywhere", timeout=0.3)


async def test_a_terminal_that_nobody_reads_holds_up_nobody(native: Native) -> None:
    async with native.sandbox(limits=LIMITS) as sandbox:
        async with sandbox.terminal("yes full") as held:
            await anyio.sleep(0.3)
            with anyio.fail_after(60):
                assert (await sandbox.exec("echo beside", timeout=60)).stdout == b"beside\n"
                await sandbox.write("file", b"x")
            assert b"full" in await held.read()
        assert (await sandbox.exec("true", timeout=60)).ok


async def test_a_terminal_whose_command_reads_nothing(native: Native) -> None:
    stopped = "stty raw -echo; echo on; kill -STOP $$"
    async with native.sandbox(limits=LIMITS) as sandbox, sandbox.terminal(stopped) as held:
        assert b"on" in await held.read()
        with anyio.move_on_after(0.5) as scope:
            await held.write(bytes(1_000_000))
        assert scope.cancelled_caught
        with anyio.fail_after(60):
            assert (await sandbox.exec("true", timeout=60)).ok
            await held.kill()
            assert (await held.wait()).signal == 9


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="numbers of x86-64")
async def test_a_terminals_tracer_holds_up_nobody(native: Native) -> None:
    tracer = """
    import ctypes, os
    libc, seen = ctypes.CDLL(None), {1, os.getpid()}
    open("tracing", "w")
    while True:
        for name in os.listdir("/proc"):
            if name.isdigit() and int(name) not in seen:
                if libc.syscall(101, 0x4206, int(name), None, None) == 0: seen.add(int(name))
    """
    async with native.sandbox(limits=LIMITS) as sandbox:
        await sandbox.write("script.py", textwrap.dedent(tracer).encode())
        await sandbox.start(["python3", "script.py"])
        await appeared(sandbox, "tracing")
        with anyio.fail_after(60):
            async with sandbox.terminal("echo x; sleep 100") as held:
                await held.read()
            # A tracer can hide a command's end from init, but cannot stop its timeout or other commands.
            await sandbox.exec("true", timeout=1)
            assert await sandbox.read("tracing") == b""


async def test_all_terminals_taken(native: Native) -> None:
    taker = """
    import os, time
    held = []
    try:
        while True: held.append(os.openpty())
    except OSError: open("full", "w")
    time.sleep(100)
    """
    async with native.sandbox(limits=LIMITS) as sandbox:
        await sandbox.write("script.py", textwrap.dedent(taker).encode())
        await sandbox.start(["python3", "script.py"])
        await appeared(sandbox, "full")
        with pytest.raises(ActionError, match="cannot be started"):
            await enter(sandbox.terminal())
        assert (await sandbox.exec("true")).ok


async def test_a_terminal_goes_with_its_sandbox(native: Native) -> None:
    async with native.sandbox(limits=LIMITS) as sandbox, sandbox.terminal() as held:
        await sandbox.close()
        with anyio.fail_after(60):
            while await held.read():
                pass
            with pytest.raises((SandboxClosed, ExecError)):
                await held.wait()


async def test_workers_that_are_killed_or_stopped(impatient: Native) -> None:
    """Processes in the sandbox can end a search or a watch of it, and nothing else."""
    async with impatient.sandbox(limits=LIMITS) as sandbox:
        async with sandbox.watch(".") as changes:
            await sandbox.exec("kill -9 -1")
            with anyio.fail_after(60):
                assert [change async for change in changes] == []
        await sandbox.start("while :; do kill -STOP -1; done")
        with anyio.fail_after(60), pytest.raises(ActionError):
            await search_until_it_fails(sandbox)
    async with impatient.sandbox() as sandbox:
        assert (await sandbox.exec("true")).ok


async def test_no_descriptor_of_a_worker_is_to_be_had(native: Native) -> None:
    async with native.sandbox() as sandbox, sandbox.watch("."):
        seen = await sandbox.exec("for p in /proc/[0-9]*; do ls $p/fd 2>/dev/null | wc -l; done")
        # Root of the sandbox sees descriptors of the shell and its children, none of the watcher or init.
        hidden = [line for line in seen.stdout.split() if line == b"0"]
        assert len(hidden) >= 2


async def test_pids_taken(native: Native) -> None:
    """At the limit of processes, actions report it, and those that need no process go on."""
    forker = """
    import os, time
    try:
        while os.fork(): pass
    except OSError: open("full", "w")
    time.sleep(100)
    """
    async with native.sandbox(limits=Limits(memory=256 << 20, pids=8)) as sandbox:
        await sandbox.write("file", b"text")
        await sandbox.write("script.py", textwrap.dedent(forker).encode())
        await sandbox.start(["python3", "script.py"])
        await appeared(sandbox, "full")
        with pytest.raises(OSError, match="temporarily unavailable"):
            await sandbox.search(".", "text")
        with pytest.raises(OSError, match="temporarily unavailable"):
            await enter(sandbox.watch("."))
        await sandbox.edit("file", b"text", b"other")
        assert await sandbox.batch([]) == ()
        results = await sandbox.batch([Read("file"), List(".")], stop_on_failure=False)
        assert results[0] == b"other"
        assert isinstance(results[1], tuple)

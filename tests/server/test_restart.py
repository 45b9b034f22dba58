"""Sandboxes outlive their server: killed, stopped and replaced servers, seen by a client."""

from __future__ import annotations

import asyncio
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import anyio
import pytest

import dutyfree
from dutyfree.contract import Recipe
from dutyfree.contract.errors import DutyfreeError, SandboxClosed, SubstrateError
from dutyfree.contract.services import Ready, Service
from dutyfree.engine.host import census
from tests.awaiting import until

pytestmark = pytest.mark.native


class Server:
    """A server that can be killed and started again at the same address, with the same state."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.address = f"unix:{directory / 's'}"
        self.process: subprocess.Popen[str] | None = None

    def start(self, *arguments: str) -> str:
        """Start it, and wait until it serves. Returns what it printed."""
        command = ("serve", "--listen", self.address, "--state", str(self.directory / "state"), *arguments)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "dutyfree", *command], stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        with self.process.stdout as printed:
            line = printed.readline()
        assert re.search("serving sandboxes", line), line
        return line

    def kill(self, number: int = signal.SIGKILL) -> None:
        assert self.process is not None
        self.process.send_signal(number)
        self.process.wait()

    async def launcher(self) -> int:
        """The process of its launcher."""
        assert self.process is not None
        found = await anyio.to_thread.run_sync(census.launchers)
        (launcher,) = [one.pid for one in found if one.owner == self.process.pid]
        return launcher


@pytest.fixture
def server() -> Iterator[Server]:
    with tempfile.TemporaryDirectory(prefix="df-") as directory:
        found = Server(Path(directory))
        found.start()
        try:
            yield found
        finally:
            assert found.process is not None
            if found.process.poll() is None:
                found.kill(signal.SIGINT)


async def restart(server: Server, number: int = signal.SIGKILL) -> None:
    await anyio.to_thread.run_sync(server.kill, number)
    await anyio.to_thread.run_sync(server.start)


async def test_a_killed_server_loses_no_sandbox(server: Server) -> None:
    service = Service("server", "echo up; exec sleep 1000", ready=Ready(line="up"))
    async with (
        dutyfree.open("hosted", url=server.address) as hosted,
        hosted.sandbox(Recipe(services=(service,)), labels={"run": "seven"}) as sandbox,
        hosted.group(Recipe(), 3) as group,
    ):
        await sandbox.write("file", b"kept")
        for number, member in enumerate(group):
            await member.write("number", str(number).encode())
        snapshot = await group[2].snapshot()
        process = await sandbox.start("while sleep 0.05; do echo tick; done")
        await restart(server)
        assert await sandbox.read("file") == b"kept"
        assert [await member.read("number") for member in group] == [b"0", b"1", b"2"]
        assert set(await hosted.sandboxes()) == {sandbox.id, *(member.id for member in group)}
        (state,) = await sandbox.services()
        assert (state.running, state.starts) == (True, 1)
        (found,) = await sandbox.processes()
        assert found.id == process.id
        assert process.running
        await process.kill()
        assert (await process.wait()).signal == signal.SIGKILL
        await group[0].reset()
        assert (await group[0].exec("ls")).stdout == b""
        async with hosted.sandbox(snapshot) as copy:
            assert await copy.read("number") == b"2"
        async with group[1].fork(2) as children:
            assert [await child.read("number") for child in children] == [b"1", b"1"]
    assert await server.launcher()


async def test_a_stopped_server_hands_over_and_running_calls_finish(server: Server) -> None:
    async with dutyfree.open("hosted", url=server.address) as hosted, hosted.sandbox() as sandbox:
        running = asyncio.ensure_future(sandbox.exec("touch begun; sleep 2; echo done"))
        await until(lambda: _begun(sandbox))
        stopping = asyncio.ensure_future(restart(server, signal.SIGTERM))
        assert (await running).stdout == b"done\n"
        assert (await sandbox.exec("ls")).stdout == b"begun\n"  # by the next server
        await stopping


async def _begun(sandbox: dutyfree.Sandbox) -> bool:
    return any(entry.name == "begun" for entry in await sandbox.list("."))


async def test_replace_takes_over_without_a_failed_call(server: Server) -> None:
    async with dutyfree.open("hosted", url=server.address) as hosted, hosted.sandbox() as sandbox:
        first = server.process
        assert first is not None
        replacing = asyncio.ensure_future(anyio.to_thread.run_sync(server.start, "--replace"))
        count = 0
        while not replacing.done():
            count += 1
            assert (await sandbox.exec(f"echo {count} >> log; echo {count}")).stdout == f"{count}\n".encode()
        await replacing
        assert first.wait() == 0
        assert (await sandbox.read("log")).splitlines() == [str(n).encode() for n in range(1, count + 1)]


MISTAKES = {
    "an address of all, without a token": ("--listen", "0.0.0.0:0"),
    "an address of another machine": ("--listen", "192.0.2.1:7800"),
    "an unknown option": ("--option", "foo=bar"),
    "a wrong value": ("--option", "ready=x"),
    "values that do not fit together": ("--option", "isolation=none", "--option", 'without=["seccomp"]'),
    "no certificate": ("--certificate", "/nonexistent/pem", "--key", "/nonexistent/key"),
    "a path that no socket can have": ("--listen", "unix:/nonexistent/s"),
}


async def replaced(server: Server, *arguments: str) -> subprocess.CompletedProcess[bytes]:
    """Try to replace a server, with the arguments of a mistake."""
    usual = ("--listen", server.address, "--state", str(server.directory / "state"), "--replace")
    command = [sys.executable, "-m", "dutyfree", "serve", *usual[arguments[:1] == ("--listen",) and 2 :]]
    return await anyio.run_process([*command, *arguments], check=False)


@pytest.mark.parametrize("arguments", MISTAKES.values(), ids=MISTAKES)
async def test_a_mistake_stops_no_server(server: Server, arguments: tuple[str, ...]) -> None:
    failed = await replaced(server, *arguments)
    assert failed.returncode in (1, 2), failed.stderr
    assert server.process is not None
    assert server.process.poll() is None
    async with dutyfree.open("hosted", url=server.address) as hosted, hosted.sandbox() as sandbox:
        assert (await sandbox.exec("echo on")).stdout == b"on\n"


async def test_an_address_in_use_by_another_program_stops_no_server(server: Server) -> None:
    for other, name in ((socket.socket(), ""), (socket.socket(socket.AF_UNIX), f"{server.directory}/other")):
        with other:
            other.bind(name or ("127.0.0.1", 0))
            other.listen()
            address = f"unix:{name}" if name else f"127.0.0.1:{other.getsockname()[1]}"
            failed = await replaced(server, "--listen", address)
            assert b"cannot listen on" in failed.stderr
            assert server.process is not None
            assert server.process.poll() is None


async def test_a_server_takes_over_the_port_of_the_former_one(server: Server) -> None:
    await anyio.to_thread.run_sync(server.kill, signal.SIGTERM)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        server.address = f"127.0.0.1:{free.getsockname()[1]}"
    await anyio.to_thread.run_sync(server.start)
    first = server.process
    await anyio.to_thread.run_sync(server.start, "--replace")
    assert first is not None
    assert first.wait() == 0


def _last_owner(launcher: int) -> tuple[int, str]:
    """Whom ``ps`` names as the owner, once the launcher has noticed the end of the former one."""
    wrong = None
    for _ in range(100):
        (kept,) = [one for one in census.sandboxes() if one.launcher == launcher]
        wrong = (kept.owner, kept.program)
        if kept.owner == 0:
            break
        time.sleep(0.02)
    assert wrong is not None
    return wrong


async def test_sandboxes_without_a_server_have_no_owner(server: Server) -> None:
    """The second server has taken them over, so the launcher has the number of an owner to forget."""
    async with dutyfree.open("hosted", url=server.address) as hosted, hosted.sandbox():
        await restart(server)
        launcher = await server.launcher()
        await anyio.to_thread.run_sync(server.kill)
        owner = await anyio.to_thread.run_sync(_last_owner, launcher)
        assert owner == (0, "(no owner: they end with their leases)")
        await anyio.to_thread.run_sync(server.start)


async def test_a_second_server_with_the_same_state_is_refused(server: Server) -> None:
    command = [sys.executable, "-m", "dutyfree", "serve", "--listen", "127.0.0.1:0"]
    done = await anyio.run_process([*command, "--state", str(server.directory / "state")], check=False)
    assert done.returncode != 0
    assert b"--replace" in done.stderr


async def test_ctrl_c_ends_the_sandboxes(server: Server) -> None:
    async with dutyfree.open("hosted", url=server.address, reconnect=1) as hosted:
        context = hosted.sandbox()
        sandbox = await context.__aenter__()
        launcher = await server.launcher()
        await anyio.to_thread.run_sync(server.kill, signal.SIGINT)
        await until(lambda: not os.path.exists(f"/proc/{launcher}"))  # noqa: PTH110
        await anyio.to_thread.run_sync(server.start)
        with pytest.raises(SandboxClosed):
            await sandbox.exec("true")
        await context.__aexit__(None, None, None)


async def test_sigint_ends_a_server_that_a_script_started_in_the_background(server: Server) -> None:
    await anyio.to_thread.run_sync(server.kill, signal.SIGINT)
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as a shell without job control does
    try:
        server.start()
    finally:
        signal.signal(signal.SIGINT, before)
    assert server.process is not None
    await anyio.to_thread.run_sync(server.kill, signal.SIGINT)
    assert server.process.returncode == 130


async def test_a_lease_that_ends_without_a_server_ends_the_sandbox(server: Server) -> None:
    async with dutyfree.open("hosted", url=server.address, lease=3, reconnect=60) as hosted:
        context = hosted.sandbox()
        sandbox = await context.__aenter__()
        launcher = await server.launcher()
        await anyio.to_thread.run_sync(server.kill)
        await until(lambda: not os.path.exists(f"/proc/{launcher}"))  # noqa: PTH110
        await anyio.to_thread.run_sync(server.start)
        with pytest.raises(SandboxClosed):
            await sandbox.exec("true")
        await context.__aexit__(None, None, None)


async def test_the_same_key_gets_the_same_sandbox_from_the_next_server(server: Server) -> None:
    async with dutyfree.open("hosted", url=server.address) as hosted:
        wanted = dutyfree.wire.calls.Create("key-1", dutyfree.wire.recipes.WireRecipe(), None, {}, 60.0)
        connection = hosted._connection
        (first,) = await connection.call("create", "", wanted)
        await restart(server)
        (second,) = await connection.call("create", "", wanted)
        assert first.id == second.id
        await connection.call("release", first.id)
        await restart(server)
        with pytest.raises(DutyfreeError, match="has ended"):
            await connection.call("create", "", wanted)


@pytest.mark.slow
async def test_fifty_kills_under_load(server: Server) -> None:
    """No sandbox is lost that should live, none lives that should not, no lease is doubled."""
    chance = random.Random(1)
    counts = {"calls": 0, "failed": 0, "sandboxes": 0}
    over = False

    async def rollout(hosted: dutyfree.substrates.hosted.substrate.Hosted, number: int) -> None:
        while not over:
            try:
                async with hosted.sandbox(labels={"worker": str(number)}) as sandbox:
                    counts["sandboxes"] += 1
                    await work(sandbox)
            except SandboxClosed as error:
                raise AssertionError(f"a sandbox was lost: {error}") from error
            except SubstrateError:
                counts["failed"] += 1  # the creation or the end met a kill

    async def work(sandbox: dutyfree.Sandbox) -> None:
        # The client repeats a write by itself. A command that met a kill is not repeated.
        await sandbox.write("done", b"0")
        for turn in range(20):
            if over:
                return
            counts["calls"] += 1
            try:
                assert (await sandbox.exec("cat done")).stdout == str(turn).encode()
            except SandboxClosed:
                raise
            except SubstrateError:
                counts["failed"] += 1
            await sandbox.write("done", str(turn + 1).encode())

    async with dutyfree.open("hosted", url=server.address, lease=60) as hosted:
        async with anyio.create_task_group() as tasks:
            for number in range(8):
                tasks.start_soon(rollout, hosted, number)
            for _ in range(50):
                await anyio.sleep(chance.uniform(0.05, 1.0))
                await restart(server)
            over = True
        assert await hosted.sandboxes() == ()
    assert counts["calls"] > 500
    assert counts["sandboxes"] > 50
    launcher = await server.launcher()
    alive = await anyio.to_thread.run_sync(census.sandboxes)
    assert not [one.id for one in alive if one.launcher == launcher]


async def test_a_server_that_cannot_start_leaves_the_sandboxes(server: Server) -> None:
    state = ("--state", str(server.directory / "state"))
    async with (
        dutyfree.open("hosted", url=server.address) as substrate,
        substrate.sandbox() as sandbox,
    ):
        await sandbox.write("kept", b"1")
        await anyio.to_thread.run_sync(server.kill, signal.SIGTERM)
        wrong = ("--listen", server.address, "--certificate", "/nonexistent", "--key", "/nonexistent")
        for arguments in (wrong, ("--listen", "unix:/nonexistent/s")):
            command = [sys.executable, "-m", "dutyfree", "serve", *state, *arguments]
            failed = await anyio.run_process(command, check=False)
            assert failed.returncode != 0
        await anyio.to_thread.run_sync(server.start)
        assert await sandbox.read("kept") == b"1"


@pytest.mark.parametrize("seconds", [0.0, 0.04, 0.08])
async def test_a_server_that_is_told_to_stop_while_it_starts(server: Server, seconds: float) -> None:
    lock = server.directory / "state" / "lock"
    async with (
        dutyfree.open("hosted", url=server.address) as substrate,
        substrate.sandbox() as sandbox,
    ):
        await sandbox.write("kept", b"1")
        await anyio.to_thread.run_sync(server.kill, signal.SIGTERM)
        command = ["serve", "--listen", server.address, "--state", str(lock.parent)]
        start = partial(subprocess.Popen[bytes], [sys.executable, "-m", "dutyfree", *command])
        starting = await anyio.to_thread.run_sync(start)
        await until(lambda: lock.read_text() == str(starting.pid))
        await anyio.sleep(seconds)
        starting.terminate()
        await anyio.to_thread.run_sync(starting.wait)
        await anyio.to_thread.run_sync(server.start)
        assert await sandbox.read("kept") == b"1"

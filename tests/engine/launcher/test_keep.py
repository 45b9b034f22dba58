"""Sandboxes that outlive their owner: adoption by another process, leases, what is swept."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import NamedTuple

import anyio
import msgspec
import pytest

from dutyfree.contract.errors import CreateError
from dutyfree.engine.sandbox.kept import KeptSandbox
from dutyfree.engine.sandbox.sandbox import NativeSandbox
from dutyfree.substrates.native import Native, NativeConfig
from tests.awaiting import enter, until
from tests.processes import speaking_python

pytestmark = pytest.mark.native

OWNER = """
import asyncio, sys, time
from contextlib import AsyncExitStack
from pathlib import Path

import msgspec
from dutyfree import Recipe, Stage
from dutyfree.substrates.native import Native, NativeConfig

async def main():
    config, keeper = NativeConfig(**{options}), Path(sys.argv[1])
    spare = [open("/dev/null") for _ in range(40)]  # so that the socket of the launcher has a high number
    async with Native(config, keeper=keeper) as native, AsyncExitStack() as stack:
        async def held(lease, recipe=Recipe()):
            sandbox = await stack.enter_async_context(native.sandbox(recipe))
            if lease:
                sandbox.set_lease(time.monotonic() + lease)
            return sandbox
{body}
        kept = msgspec.msgpack.encode([one.kept({{}}) for one in sandboxes])
        print(native.node.launcher.pid, kept.hex(), flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


class Killed(NamedTuple):
    """What an owner has left."""

    launcher: int
    kept: list[KeptSandbox]

    async def ended(self) -> None:
        """Wait until the launcher has ended, and all its sandboxes with it."""
        await until(lambda: not self._exists())

    def _exists(self) -> bool:
        return Path(f"/proc/{self.launcher}").exists()


@contextmanager
def killed_owner(keeper: Path, body: str, **options: object) -> Iterator[Killed]:
    """An owner that was killed."""
    lines = "\n".join(" " * 8 + line for line in body.strip().splitlines())
    code = OWNER.replace("{options}", repr(options)).replace("{body}", lines)
    code = code.replace("{{", "{").replace("}}", "}")
    with speaking_python(code, str(keeper)) as (process, line):
        launcher, coded = line.split()
        kept = msgspec.msgpack.decode(bytes.fromhex(coded), type=list[KeptSandbox])
        process.send_signal(signal.SIGKILL)
        process.wait()
        yield Killed(int(launcher), kept)


@asynccontextmanager
async def adopted(
    keeper: Path, kept: list[KeptSandbox], **options: object
) -> AsyncIterator[list[NativeSandbox]]:
    """The same sandboxes with a new owner."""
    config = msgspec.convert(options, NativeConfig)
    async with Native(config, keeper=keeper) as native, AsyncExitStack() as stack:
        found = [await stack.enter_async_context(native.node.adopt(one)) for one in kept]
        await native.node.sweep(kept)
        yield [sandbox for sandbox, _ in found]


@pytest.fixture
def keeper(tmp_path: Path) -> Path:
    return tmp_path / "launcher.sock"


async def test_a_new_owner_adopts_what_the_killed_one_had(keeper: Path) -> None:
    body = """
sandbox = await held(60)
await sandbox.write("file", b"kept")
process = await sandbox.start("while sleep 0.01; do date > tick; done")
sandboxes = [sandbox]
"""
    with killed_owner(keeper, body) as killed:
        async with adopted(keeper, killed.kept) as (sandbox,):
            assert sandbox.id == killed.kept[0].id
            assert await sandbox.read("file") == b"kept"
            (process,) = await sandbox.processes()
            assert process.running
            assert process.id == killed.kept[0].processes[0].id
            await until(lambda: _has(sandbox, "tick"))
            await sandbox.remove("tick")
            await until(lambda: _has(sandbox, "tick"))
            await process.kill()
            assert (await sandbox.exec("echo again")).stdout == b"again\n"
            await sandbox.reset()
            assert (await sandbox.exec("ls")).stdout == b""
    await killed.ended()


async def _has(sandbox: NativeSandbox, name: str) -> bool:
    return any(entry.name == name for entry in await sandbox.list("."))


async def test_layers_snapshots_and_forks_go_on(keeper: Path) -> None:
    body = """
recipe = Recipe(stages=(Stage("setup", ("echo built > built",)),))
sandbox = await held(60, recipe)
await sandbox.write("file", b"before")
snapshot = await sandbox.snapshot()
sandbox.set_lease(time.monotonic() + 60)
await sandbox.write("file", b"after")
sandboxes = [sandbox]
"""
    with killed_owner(keeper, body) as killed:
        async with adopted(keeper, killed.kept) as (sandbox,):
            assert await sandbox.read("file") == b"after"
            async with sandbox.fork(2) as children:
                assert [await child.read("file") for child in children] == [b"after", b"after"]
                assert [await child.read("built") for child in children] == [b"built\n", b"built\n"]
            await sandbox.reset()
            assert await sandbox.read("built") == b"built\n"
            assert not await _has(sandbox, "file")


async def test_services_go_on(keeper: Path) -> None:
    body = """
from dutyfree.contract.services import Service, Ready
service = Service("server", "echo up; exec sleep 1000", ready=Ready(line="up"))
sandbox = await held(60, Recipe(services=(service,)))
sandboxes = [sandbox]
"""
    with killed_owner(keeper, body) as killed:
        assert killed.kept[0].running
        async with adopted(keeper, killed.kept) as (sandbox,):
            (state,) = await sandbox.services()
            assert state.running
            assert state.starts == 1
            assert (
                await sandbox.exec("pgrep -c sleep || ps ax | grep -c '[s]leep 1000'")
            ).stdout.strip() == b"1"
            assert sandbox.alive


async def test_a_paused_sandbox_stays_paused(keeper: Path) -> None:
    body = """
sandbox = await held(60)
await sandbox.write("file", b"kept")
await sandbox.pause()
sandboxes = [sandbox]
"""
    with killed_owner(keeper, body) as killed:
        async with adopted(keeper, killed.kept) as (sandbox,):
            assert sandbox.paused
            await sandbox.resume()
            assert await sandbox.read("file") == b"kept"


async def test_a_command_that_ran_for_the_former_owner_is_killed(keeper: Path) -> None:
    body = """
sandbox = await held(60)
running = asyncio.ensure_future(sandbox.exec("touch begun; sleep 1000"))
while not any(entry.name == "begun" for entry in await sandbox.list(".")):
    await asyncio.sleep(0.01)
sandboxes = [sandbox]
"""
    with killed_owner(keeper, body) as killed:
        async with adopted(keeper, killed.kept) as (sandbox,):
            await until(lambda: _runs_nothing(sandbox))


async def _runs_nothing(sandbox: NativeSandbox) -> bool:
    return b"sleep" not in (await sandbox.exec("cat /proc/[0-9]*/comm")).stdout


async def test_a_process_that_ended_meanwhile_tells_its_exit_code(keeper: Path) -> None:
    body = """
sandbox = await held(60)
process = await sandbox.start("sleep 5.0123; exit 7")
other = await sandbox.start("sleep 1000")
sandboxes = [sandbox]
"""
    with killed_owner(keeper, body) as killed:
        await until(lambda: not _runs("sleep 5.0123"))
        async with adopted(keeper, killed.kept) as (sandbox,):
            process, other = await sandbox.processes()
            assert (await process.wait()).exit_code == 7
            await other.kill()


def _runs(command: str) -> bool:
    """Whether a process of this machine has this command line."""
    return subprocess.run(["pgrep", "-fx", command], capture_output=True, check=False).returncode == 0


async def test_a_sandbox_without_a_lease_ends_with_its_owner(keeper: Path) -> None:
    body = """
sandboxes = [await held(60), await held(0)]
"""
    with killed_owner(keeper, body) as killed:
        leased, unleased = killed.kept
        async with (
            Native(NativeConfig(), keeper=keeper) as native,
            native.node.adopt(leased) as (sandbox, until_),
        ):
            assert 0 < until_ - time.monotonic() <= 60
            with pytest.raises(CreateError, match="no such sandbox"):
                await enter(native.node.adopt(unleased))
            assert (await sandbox.exec("echo lives")).stdout == b"lives\n"


async def test_without_a_new_owner_all_ends_with_the_last_lease(keeper: Path) -> None:
    body = """
sandboxes = [await held(0.5), await held(1.5)]
"""
    with killed_owner(keeper, body) as killed:
        await killed.ended()
        async with Native(NativeConfig(), keeper=keeper) as native:
            with pytest.raises(CreateError, match="no such sandbox"):
                await enter(native.node.adopt(killed.kept[1]))
            async with native.sandbox() as fresh:
                assert (await fresh.exec("echo new")).stdout == b"new\n"


async def test_a_launcher_without_an_owner_does_not_spin(keeper: Path) -> None:
    body = """
sandboxes = [await held(60)]
"""
    with killed_owner(keeper, body) as killed:
        await anyio.sleep(0.5)
        before = _cpu_ticks(killed.launcher)
        await anyio.sleep(1)
        assert _cpu_ticks(killed.launcher) - before < 20  # of 100 in this second
        async with adopted(keeper, killed.kept) as (sandbox,):
            assert (await sandbox.exec("true")).exit_code == 0


def _cpu_ticks(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


async def test_what_is_not_adopted_is_swept(keeper: Path) -> None:
    body = """
sandboxes = [await held(60), await held(60)]
"""
    with killed_owner(keeper, body) as killed:
        async with (
            Native(NativeConfig(), keeper=keeper) as native,
            native.node.adopt(killed.kept[0]) as (sandbox, _),
        ):
            assert await native.node.sweep(killed.kept[:1]) == 1
            assert (await sandbox.exec("true")).exit_code == 0
            with pytest.raises(CreateError):
                await enter(native.node.adopt(killed.kept[1]))


@pytest.mark.root("written files go to a disk image")
async def test_files_on_disk_stay(keeper: Path, cache: Path) -> None:
    body = """
sandbox = await held(60)
await sandbox.write("file", b"kept")
sandboxes = [sandbox]
"""
    with killed_owner(keeper, body, storage="disk") as killed:
        async with adopted(keeper, killed.kept, storage="disk") as (sandbox,):
            assert await sandbox.read("file") == b"kept"
            await sandbox.reset()
            assert not await _has(sandbox, "file")


async def test_another_isolation_does_not_adopt(keeper: Path) -> None:
    body = """
sandboxes = [await held(2)]
"""
    with killed_owner(keeper, body) as killed:
        config = NativeConfig(without=("seccomp",))
        async with Native(config, keeper=keeper) as native:
            with pytest.raises(CreateError, match="no such sandbox"):
                await enter(native.node.adopt(killed.kept[0]))

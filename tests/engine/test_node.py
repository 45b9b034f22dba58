"""The native substrate, beyond what the conformance suite checks on every substrate."""

from __future__ import annotations

import asyncio
import os
import resource
import select
import shutil
import socket
import tarfile
import threading
import time
from pathlib import Path

import anyio
import anyio.to_thread
import pytest
import uvloop

import dutyfree
from dutyfree import Limits, Recipe, Stage
from dutyfree.contract import Observation, Substrate
from dutyfree.contract.abilities import Chunk, Resettable, ShellSessions, Streaming
from dutyfree.contract.errors import ActionError, DispatchError
from dutyfree.engine.host import census
from dutyfree.substrates.native import Native
from tests.awaiting import until
from tests.engine import counts


@pytest.fixture
def rootfs(tmp_path: Path) -> Path:
    """A root file system with one program in it."""
    busybox = shutil.which("busybox")
    if busybox is None or b"interpreter" in Path(busybox).read_bytes()[:4096]:
        pytest.skip("busybox is missing; to enable it: apt-get install busybox-static")
    root = tmp_path / "root"
    (root / "bin").mkdir(parents=True)
    shutil.copy(busybox, root / "bin/busybox")
    for name in ("sh", "cat", "id", "ls", "true", "echo"):
        (root / "bin" / name).symlink_to("busybox")
    (root / "etc").mkdir()
    (root / "etc/mine").write_text("of the image")
    return root


async def test_a_directory_is_an_image(native: Substrate, rootfs: Path) -> None:
    async with native.sandbox(Recipe(image=str(rootfs))) as sandbox:
        assert (
            await sandbox.exec("cat /etc/mine; echo changed > /etc/mine; id -u")
        ).stdout == b"of the image0\n"
        assert (await sandbox.exec(["ls", "/"])).stdout.split() == [
            name.encode() for name in ("bin", "dev", "etc", "proc", "sys", "tmp", "workspace")
        ]
    assert (rootfs / "etc/mine").read_text() == "of the image"


async def test_a_tar_is_an_image(
    native: Substrate, rootfs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DUTYFREE_CACHE", str(tmp_path / "cache"))
    with tarfile.open(tmp_path / "image.tar", "w") as tar:
        tar.add(rootfs, ".")
    for _ in range(2):
        async with native.sandbox(Recipe(image=str(tmp_path / "image.tar"))) as sandbox:
            assert (await sandbox.exec("cat /etc/mine")).stdout == b"of the image"


async def test_stages_write_anywhere(native: Substrate) -> None:
    """Changes of a stage anywhere in the root are in each sandbox, which can change them for itself."""
    commands = ("echo 1 > /usr/local/made", "rm -rf /usr/share/doc", "echo 2 > /etc/made", "mkdir /opt/x")
    recipe = Recipe(stages=(Stage("setup", commands=commands),))
    seen = "cat /usr/local/made /etc/made; ls /usr/share/doc; ls -d /opt/x; rm /etc/made"
    for _ in range(2):
        async with native.sandbox(recipe) as sandbox:
            assert (await sandbox.exec(seen)).stdout == b"1\n2\n/opt/x\n"


async def test_the_network_is_the_hosts_when_asked_for(native: Substrate) -> None:
    reach = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), 20)"
    with socket.create_server(("127.0.0.1", 0)) as server:
        command = ["python3", "-c", reach, str(native.host_address), str(server.getsockname()[1])]
        async with native.sandbox(limits=Limits(network="on")) as sandbox:
            assert (await sandbox.exec(command)).ok
        async with native.sandbox() as sandbox:
            assert not (await sandbox.exec(command)).ok


async def test_servers_have_any_port_of_their_loopback(native: Substrate) -> None:
    serve = (
        "import socket; s = socket.create_server(('127.0.0.1', 80));"
        "socket.create_connection(('127.0.0.1', 80))"
    )
    for _ in range(3):  # the network namespace is reused: the port must be free
        async with native.sandbox() as sandbox:
            seen = await sandbox.exec(["python3", "-c", serve])
            assert seen.ok, seen.stderr


async def test_terminals(native: Substrate) -> None:
    async with native.sandbox() as sandbox:
        seen = await sandbox.exec(["python3", "-c", "import pty; pty.spawn(['tty'])"])
        assert seen.stdout.strip() == b"/dev/pts/0"


async def test_a_slow_reader_holds_only_its_own_command(native: Substrate) -> None:
    """Output that is not read stays in the sandbox, in bounded memory, and blocks no other sandbox."""
    async with native.sandbox() as sandbox:
        assert isinstance(sandbox, Streaming)
        stream = sandbox.stream("head -c 200000000 /dev/zero; echo end >&2")
        first = await anext(stream)
        assert isinstance(first, Chunk)
        await anyio.sleep(0.3)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for _ in range(20):
            assert (await sandbox.exec("echo beside")).stdout == b"beside\n"
        total = len(first.data)
        last: Chunk | Observation = first
        async for last in stream:
            total += len(last.data) if isinstance(last, Chunk) else 0
        assert isinstance(last, Observation)
        assert last.ok
        assert total == 200_000_004
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 30_000  # KB


async def test_much_output_is_cut_within_the_sandbox(native: Substrate) -> None:
    async with native.sandbox(limits=Limits(output=1 << 20, memory=32 << 20)) as sandbox:
        seen = await sandbox.exec("echo begin; head -c 1000000000 /dev/zero; echo end")
        assert len(seen.stdout) == 1 << 20
        assert len(seen.stdout) + seen.cut.stdout == 1_000_000_010
        assert (seen.stdout[:6], seen.stdout[-4:]) == (b"begin\n", b"end\n")


async def test_reset_leaves_no_trace(native: Substrate) -> None:
    async with native.sandbox() as sandbox:
        assert isinstance(sandbox, Resettable)
        trace = "touch /tmp/x /dev/shm/x /usr/x file; ipcmk -Q >/dev/null; (setsid sleep 100 &)"
        look = "ls /tmp /dev/shm /usr/x . 2>/dev/null; ipcs -q | grep -c 0x; ls /proc | grep -c '^[0-9]'"
        await sandbox.exec(trace)
        dirty = (await sandbox.exec(look)).stdout
        await sandbox.reset()
        clean = (await sandbox.exec(look)).stdout
        assert b"x" in dirty.split()
        assert b"x" not in clean.split()
        assert b"file" not in clean
        assert clean.split()[-2] == b"0"


async def test_a_paused_sandbox_says_so(native: Native) -> None:
    async with native.sandbox() as sandbox:
        await sandbox.pause()
        with pytest.raises(DispatchError, match="paused"):
            await sandbox.exec("true")
        if native.features.freezer and os.geteuid() == 0:  # root sees all processes
            assert await _state(sandbox.id) == "paused"
        await sandbox.resume()
        assert (await sandbox.exec("true")).ok
        assert await _state(sandbox.id) in ("idle", "running")


async def _state(identity: str) -> str:
    """The state that ``dutyfree ps`` shows."""
    found = await anyio.to_thread.run_sync(census.sandboxes)
    (living,) = [living for living in found if living.id == identity]
    return living.state


async def test_a_shell_that_ends_is_told(native: Substrate) -> None:
    async with native.sandbox() as sandbox:
        assert isinstance(sandbox, ShellSessions)
        async with sandbox.shell() as held:
            seen = await held.run("echo last; exit 3")
            assert (seen.exit_code, seen.stdout) == (3, b"last\n")
            with pytest.raises(ActionError, match="has ended"):
                await held.run("true")
        async with sandbox.shell() as held:
            seen = await held.run("while :; do :; done", timeout=0.3)
            assert seen.timed_out
            with pytest.raises(ActionError, match="has ended"):
                await held.run("true")
        assert (await sandbox.list("/tmp")) == ()


async def test_syntax_errors_do_not_end_a_shell_unsaid(native: Substrate) -> None:
    async with native.sandbox() as sandbox:
        assert isinstance(sandbox, ShellSessions)
        async with sandbox.shell() as held:
            seen = await held.run("echo 'unclosed")
            assert seen.exit_code != 0
            assert seen.stderr


async def test_a_cancelled_transfer_leaves_nothing(native: Substrate, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for number in range(20):
        (source / str(number)).write_bytes(bytes(5_000_000))
    before = threading.active_count()
    async with native.sandbox() as sandbox:
        for seconds in (0.0, 0.005, 0.02):
            with anyio.move_on_after(seconds):
                await sandbox.upload(source, "tree")
        await sandbox.upload(source, "tree")
        for seconds in (0.0, 0.005, 0.02):
            with anyio.move_on_after(seconds) as scope:
                await sandbox.download("tree", tmp_path / "target")
            assert (tmp_path / "target").exists() != scope.cancelled_caught
            shutil.rmtree(tmp_path / "target", ignore_errors=True)
        assert (await sandbox.exec("true")).ok
    await until(lambda: threading.active_count() <= before + 2)


async def test_many_commands_at_once_have_their_bound(native: Substrate) -> None:
    async with native.sandbox() as sandbox:

        async def one() -> bool:
            try:
                return (await sandbox.exec("sleep 0.5")).ok
            except DispatchError:
                return False

        results = await asyncio.gather(*(one() for _ in range(1100)))
        assert results.count(True) >= 1000
        assert (await sandbox.exec("true")).ok


def test_a_forked_copy_of_the_owner_holds_nothing() -> None:
    others = counts.children(os.getpid())

    async def main() -> tuple[counts.Family, int]:
        async with dutyfree.open("native") as substrate, substrate.sandbox():
            family = await anyio.to_thread.run_sync(counts.Family, os.getpid(), others)
            pid = os.fork()
            if pid == 0:
                time.sleep(1000)  # noqa: ASYNC251 (another process)
                os._exit(0)
        return family, pid

    family, pid = asyncio.run(main())
    try:
        assert family.inits
        assert not family.remains()
    finally:
        os.kill(pid, 9)
        os.waitpid(pid, 0)


def test_uvloop() -> None:
    async def main() -> bytes:
        async with dutyfree.open("native") as substrate, substrate.sandbox() as sandbox:
            await sandbox.write("file", bytes(1_000_000))
            return (await sandbox.exec("wc -c", stdin=await sandbox.read("file"))).stdout

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(main()) == b"1000000\n"


async def test_the_probe_says_what_is_missing(tmp_path: Path) -> None:
    found = await Native.probe(Native.Config(program=str(tmp_path / "missing")))  # type: ignore[arg-type]
    assert not found.available
    assert "gcc" in found.remedy


async def test_facts(native: Substrate) -> None:
    facts = await native.facts()

    assert facts["limits"].startswith("cgroup ")
    assert facts["mode"] in ("root", "rootless")
    assert facts["python"].startswith("3.")
    assert "git" in facts


async def test_holes_stay_holes(native: Substrate, tmp_path: Path) -> None:
    """A sandbox cannot fill the downloader's disk with data that it never wrote."""
    async with native.sandbox() as sandbox:
        await sandbox.exec("truncate -s 100M sparse; printf x >> sparse")
        await sandbox.download("sparse", tmp_path / "sparse")
    found = await anyio.to_thread.run_sync((tmp_path / "sparse").stat)
    assert found.st_size == (100 << 20) + 1
    assert found.st_blocks * 512 < 1 << 20


async def test_a_command_that_ends_as_it_is_cancelled(native: Native) -> None:
    """The process ends after the cancellation, and before the cancelled task runs."""
    async with native.sandbox() as sandbox:
        channel = sandbox._lifecycle.channel()
        task = asyncio.create_task(sandbox.exec(["/bin/true"]))
        await asyncio.sleep(0)
        channel._loop.remove_reader(channel._descriptor)
        heard = select.poll()
        heard.register(channel._descriptor, select.POLLIN)
        assert await anyio.to_thread.run_sync(heard.poll, 60_000)
        channel._loop.add_reader(channel._descriptor, channel._receive)
        task.cancel()
        channel._receive()
        ended, _ = await asyncio.wait([task], timeout=60)
        assert ended
        assert task.cancelled()
        assert (await sandbox.exec("echo whole")).stdout == b"whole\n"

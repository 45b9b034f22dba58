"""The substrate ``hosted``: a server of its own, an emulated distance, shells, and how it ends."""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from time import perf_counter

import anyio.to_thread
import pytest

import dutyfree
from dutyfree import gc
from dutyfree.contract import Substrate
from dutyfree.contract.abilities import Forkable, NetworkControl, Pooling, Terminals
from dutyfree.contract.errors import ExecError, OptionError, Unavailable
from dutyfree.server.state_lock import locked
from dutyfree.server.tokens import Tokens
from dutyfree.substrates.hosted import Hosted
from dutyfree.substrates.hosted.own_server import PREFIX, leftovers
from tests.awaiting import until
from tests.processes import eventually, speaking_python
from tests.relay import Relay, relay
from tests.serving import certificates, serving

pytestmark = pytest.mark.native


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DUTYFREE_URL", "DUTYFREE_TOKEN"):
        monkeypatch.delenv(name, raising=False)


async def test_it_needs_an_address() -> None:
    with pytest.raises(Unavailable, match="DUTYFREE_URL"):
        await AsyncExitStack().enter_async_context(dutyfree.open("hosted"))
    with pytest.raises(Unavailable, match="not the address of a server"):
        await AsyncExitStack().enter_async_context(dutyfree.open("hosted", url="ftp://x"))
    with pytest.raises(OptionError):
        dutyfree.open("hosted", lease=0)


def create_token(state: Path) -> None:
    with Tokens(state / "server.sqlite") as tokens:
        tokens.create("trainer")


async def test_a_token_that_the_server_does_not_know(tmp_path: Path) -> None:
    await anyio.to_thread.run_sync(create_token, tmp_path)
    with serving(tmp_path) as url:
        for token, said in (("dutyfree_wrong", "does not know the token"), ("", "give a token:")):
            with pytest.raises(Unavailable, match=said):
                await AsyncExitStack().enter_async_context(dutyfree.open("hosted", url=url, token=token))


async def test_the_wrong_scheme(tmp_path: Path) -> None:
    root, chain, key = await anyio.to_thread.run_sync(certificates, tmp_path)
    secured = ("--certificate", str(chain), "--key", str(key))
    for arguments, wrong, right in ((secured, "http", "https"), ((), "https", "http")):
        with serving(tmp_path / right, *arguments) as url:
            netloc = url.partition("://")[2]
            with pytest.raises(Unavailable, match=f"use {right}://{netloc}"):
                await AsyncExitStack().enter_async_context(
                    dutyfree.open("hosted", url=f"{wrong}://{netloc}", certificates=str(root))
                )


async def test_a_server_of_its_own_ends_with_it() -> None:
    async with dutyfree.open("hosted", serve=True) as hosted, hosted.sandbox() as sandbox:
        assert isinstance(hosted, Substrate)
        assert isinstance(hosted, Pooling)
        assert isinstance(sandbox, Forkable)
        assert isinstance(sandbox, Terminals)
        assert isinstance(sandbox, NetworkControl) == (os.geteuid() == 0)
        seen = await sandbox.exec("echo hello")
        assert seen.stdout == b"hello\n"
        assert seen.spans[0].name == "network"
        assert abs(sum(span.seconds for span in seen.spans) - seen.seconds) < seen.seconds
        url = hosted.url
    with pytest.raises(Unavailable):
        await AsyncExitStack().enter_async_context(dutyfree.open("hosted", url=url))


async def test_a_distance_delays_every_call() -> None:
    async with dutyfree.open("hosted", serve=True, round_trip=0.05) as hosted, hosted.sandbox() as sandbox:
        start = perf_counter()
        seen = await sandbox.exec("true")
        assert perf_counter() - start >= 0.05
        assert sum(span.seconds for span in seen.spans if span.name == "network") >= 0.05
        assert "50 ms away" in (await hosted.facts())["server"]


@asynccontextmanager
async def relayed(url: str) -> AsyncIterator[tuple[Relay, Hosted]]:
    """A substrate whose connection a test can hold back and cut."""
    host, _, port = url.removeprefix("http://").rpartition(":")
    async with (
        relay(host, int(port)) as between,
        dutyfree.open("hosted", url=f"http://127.0.0.1:{between.port}") as hosted,
    ):
        yield between, hosted


async def test_a_connection_that_is_lost_while_calls_are_sent(tmp_path: Path) -> None:
    """Those that can be repeated are repeated; of the others it is not known whether they ran."""
    content = bytes(16 << 20)
    with serving(tmp_path) as url:
        async with relayed(url) as (between, hosted), hosted.sandbox() as sandbox:
            between.requests.clear()
            writing = asyncio.create_task(sandbox.write("file", content))
            running = asyncio.create_task(sandbox.exec("cat", stdin=content))
            await until(lambda: hosted._connection._open_socket().paused)
            between.cut()
            await writing
            with pytest.raises(ExecError, match="the connection was lost while exec ran"):
                await running
            assert await sandbox.read("file") == content


async def test_no_command_of_a_shell_gets_the_answer_of_another(tmp_path: Path) -> None:
    """Also if one is cancelled while it is sent: the client does not know how far it came."""
    with serving(tmp_path) as url:
        async with relayed(url) as (between, hosted), hosted.sandbox() as sandbox:
            async with sandbox.shell() as shell:
                between.requests.clear()
                writing = asyncio.create_task(sandbox.write("large", bytes(16 << 20)))
                await until(lambda: hosted._connection._open_socket().paused)
                sending = asyncio.create_task(shell.run("echo one"))
                await asyncio.sleep(0)
                sending.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await sending
                between.pass_on()
                await writing
                with pytest.raises(ExecError, match="open another shell"):
                    await shell.run("echo two")
            async with sandbox.shell() as shell:
                assert (await shell.run("echo two")).stdout == b"two\n"


PROGRAM = """
import asyncio, os
import dutyfree

async def main():
    async with dutyfree.open("hosted", serve=True) as hosted, hosted.sandbox() as sandbox:
        print(hosted._server.pid, flush=True)
        await sandbox.exec("sleep 1000")

asyncio.run(main())
"""


def children(pid: int) -> Iterator[int]:
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        yield from map(int, path.read_text().split())


def test_a_killed_client_leaves_no_server(tmp_path: Path) -> None:
    with speaking_python(PROGRAM, env={**os.environ, "TMPDIR": str(tmp_path)}) as (process, line):
        server = int(line)
        launchers = eventually(lambda: list(children(server)))
        assert launchers
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert eventually(lambda: not any(Path(f"/proc/{pid}").exists() for pid in (server, *launchers)))
        assert not list(tmp_path.glob(f"{PREFIX}*"))


def test_the_directory_of_a_killed_server_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for name in ("killed", "living", "starting"):
        (tmp_path / f"{PREFIX}{name}").mkdir()
    (tmp_path / f"{PREFIX}killed" / "lock").touch()
    with locked(tmp_path / f"{PREFIX}living"):
        assert [path.name for path in leftovers()] == [f"{PREFIX}killed"]
        planned = {one.what for one in gc._local(1 << 60, dry_run=True)}
        assert str(tmp_path / f"{PREFIX}killed") in planned

"""The substrate ``hosted``: a server of its own, an emulated distance, and how it ends."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from time import perf_counter

import pytest

import dutyfree
from dutyfree.contract import Substrate
from dutyfree.contract.abilities import Forkable, NetworkControl, Pooling, Terminals
from dutyfree.contract.errors import OptionError, Unavailable
from tests.processes import eventually, speaking_python

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


def test_a_killed_client_leaves_no_server() -> None:
    with speaking_python(PROGRAM) as (process, line):
        server = int(line)
        launchers = eventually(lambda: list(children(server)))
        assert launchers
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert eventually(lambda: not any(Path(f"/proc/{pid}").exists() for pid in (server, *launchers)))

"""Files that clients send."""

from __future__ import annotations

import asyncio
import os
import secrets
import stat
from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import anyio.to_thread
import pytest

import dutyfree
from dutyfree.contract.errors import DutyfreeError, Exhausted, RecipeError
from dutyfree.engine.launcher.protocol import MEMBER
from dutyfree.server.files import MOST_ARRIVING, MOST_ENTRIES, RECEIVED_AT_ONCE, TenantFiles
from dutyfree.server.service import Service
from dutyfree.substrates.hosted import Hosted
from dutyfree.wire import calls
from tests.awaiting import until
from tests.server.in_process import served


@pytest.fixture
async def hosted(tmp_path: Path) -> AsyncIterator[tuple[Service, Hosted]]:
    """A server in this process, and a client of it."""
    async with (
        served(tmp_path) as (service, address),
        dutyfree.open("hosted", url=f"http://{address}") as found,
    ):
        yield service, found


def test_what_a_killed_server_had_begun_to_receive_is_removed(tmp_path: Path) -> None:
    files = TenantFiles(tmp_path)
    old, fresh = files.scratch("tenant"), files.scratch("tenant")
    (tmp_path / "tenant/.receiving-tree/deep").mkdir(parents=True)
    kept = tmp_path / "tenant" / ("0" * 64)
    kept.touch()
    for path in (old, kept, tmp_path / "tenant/.receiving-tree"):
        os.utime(path, (0, 0))
    files.sweep()
    assert sorted(path.name for path in (tmp_path / "tenant").iterdir()) == sorted([fresh.name, kept.name])


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.native
async def test_transfers_that_fail_leave_no_descriptors(hosted: tuple[Service, Hosted]) -> None:
    _, substrate = hosted
    async with substrate.sandbox() as sandbox:

        async def fail(method: str, name: str, arguments: object) -> None:
            call = await substrate._connection.begin(method, name, arguments)
            with pytest.raises(DutyfreeError):
                await call.finish()

        async def fail_in_all_ways() -> None:
            await fail("put_files", "", calls.Files(("no digest",)))
            for method in ("upload", "download"):
                await fail(method, "sb-none", calls.Location("x"))
                await fail(method, sandbox.id, calls.Location("a\0b"))
                await fail(method, sandbox.id, calls.Location("x" * 40_000))
                await (await substrate._connection.begin(method, sandbox.id, calls.Location("x"))).cancel()
            await sandbox.pause()
            for method in ("upload", "download"):
                await fail(method, sandbox.id, calls.Location("x"))
            await sandbox.resume()

        await fail_in_all_ways()  # threads, and what else stays open once
        before = descriptors()
        for _ in range(20):
            await fail_in_all_ways()
        await until(lambda: descriptors() <= before)


@pytest.mark.native
async def test_a_client_that_sends_no_files_is_not_waited_for(hosted: tuple[Service, Hosted]) -> None:
    service, substrate = hosted
    service.files.stall = 0.2
    call = await substrate._connection.begin("put_files", "", calls.Files(("0" * 64,)))
    with pytest.raises(RecipeError, match="no part of the files came within"), anyio.fail_after(20):
        await call.finish()
    assert not service.files._arriving["local"]


@pytest.mark.native
async def test_silent_clients_take_no_thread_that_others_need(hosted: tuple[Service, Hosted]) -> None:
    service, substrate = hosted
    begun = [
        await substrate._connection.begin("put_files", "", calls.Files((secrets.token_hex(32),)))
        for _ in range(50)
    ]
    limiter = service.files._turns_of("local").threads
    await until(lambda: limiter.statistics().tasks_waiting == 50 - RECEIVED_AT_ONCE)
    assert anyio.to_thread.current_default_thread_limiter().borrowed_tokens == 0
    with anyio.fail_after(20):
        assert await service.tokens.tenant("dutyfree_" + "x" * 43) is None
    before = descriptors()
    await asyncio.gather(*(call.cancel() for call in begun))
    await until(lambda: descriptors() <= before - 50)  # each had a pipe


async def test_a_tenant_whose_files_are_slow_to_remove_delays_no_other(tmp_path: Path) -> None:
    files = TenantFiles(tmp_path)
    received = await anyio.to_thread.run_sync(files.scratch, "two")
    with files._turns_of("one").making_room:
        keeping = asyncio.create_task(files.keep("two", received))
        assert (await asyncio.wait([keeping], timeout=20))[0]
    assert await files.missing("two", [await keeping]) == []


async def test_what_arrives_is_counted_before_it_is_there(tmp_path: Path) -> None:
    tree = MEMBER.pack(0, stat.S_IFDIR | 0o755, 0) + MEMBER.pack(3, stat.S_IFREG | 0o644, 1) + b"axyz"
    tree += MEMBER.pack(2, stat.S_IFLNK | 0o777, 4) + b"linkto" + MEMBER.pack(0, 0, 0)
    files = TenantFiles(tmp_path)
    for size in (1, 7, len(tree)):
        with files.arriving("one") as arrival:
            for at in range(0, len(tree), size):
                await arrival.add_tree(tree[at : at + size])
            assert arrival.size == files._arriving["one"] == len(tree) + 4 * 4096
    assert files._arriving["one"] == 0


async def test_what_arrives_is_bounded(tmp_path: Path) -> None:
    files = TenantFiles(tmp_path)
    with files.arriving("one") as arrival, pytest.raises(RecipeError, match=f"more than {MOST_ENTRIES}"):
        await arrival.add_tree((MEMBER.pack(0, stat.S_IFREG | 0o644, 1) + b"x") * (MOST_ENTRIES + 1))
    files._arriving["one"] = MOST_ARRIVING
    with files.arriving("one") as arrival, pytest.raises(Exhausted, match="you are sending more"):
        await arrival.add(1)
    assert files._arriving["one"] == MOST_ARRIVING

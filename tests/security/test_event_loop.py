"""Large answers are parsed in parts, so that no sandbox can block its owner's event loop."""

from __future__ import annotations

import asyncio
import os
import random
import stat
from collections.abc import Awaitable
from typing import TypeVar

import anyio
import pytest

from dutyfree.contract import Exec, List, Search, Substrate
from dutyfree.contract.errors import CollectError, InputClosed
from dutyfree.engine.launcher import protocol
from dutyfree.engine.launcher.protocol import EXIT
from dutyfree.engine.sandbox import batch, contents, observation, search
from dutyfree.engine.sandbox.observation import PART
from dutyfree.engine.sandbox.pending import PendingCommand, PendingOperation
from dutyfree.engine.sandbox.pipes import AsyncDescriptor
from dutyfree.engine.sandbox.sandbox import NativeSandbox

T = TypeVar("T")
MANY = 60_000


async def turns(work: Awaitable[T]) -> tuple[T, int]:
    """The result, and how often other tasks ran meanwhile."""
    count = 0

    async def beat() -> None:
        nonlocal count
        while True:
            count += 1
            await asyncio.sleep(0)

    beating = asyncio.ensure_future(beat())
    try:
        return await work, count
    finally:
        beating.cancel()


def listed(names: list[bytes]) -> bytes:
    return b"".join(protocol.ENTRY.pack(7, stat.S_IFREG | 0o644, len(name)) + name for name in names)


@pytest.mark.parametrize("order", ["sorted", "reversed", "random", "alike"])
async def test_a_large_directory(order: str) -> None:
    names = [b"%06d" % number if order != "alike" else b"x" * 200 + b"%d" % number for number in range(MANY)]
    given = {"sorted": names, "reversed": names[::-1], "random": random.sample(names, MANY), "alike": names}
    found, had = await turns(observation.entries(listed(given[order])))
    assert [os.fsencode(entry.name) for entry in found] == sorted(names)
    # Once in each part of reading, splitting and sorting.
    assert had > 2 * MANY // PART


@pytest.mark.parametrize("count", [0, 1, PART - 1, PART, PART + 1, 3 * PART])
async def test_directories_of_any_size(count: int) -> None:
    names = [b"%d" % number for number in range(count)]
    found = await observation.entries(listed(names))
    assert [os.fsencode(entry.name) for entry in found] == sorted(names)


async def test_a_large_search() -> None:
    match = protocol.MATCH.pack(1, 3, 5, 0) + b"a/bline1"
    last = protocol.MATCH.pack(2, 0, 0, protocol.MatchFlag.LAST)
    found, had = await turns(search.decode(Search("below", "x"), match * MANY + last))
    assert (len(found.matches), found.matches[-1].path, found.unseen) == (MANY, "below/a/b", 2)
    assert had >= MANY // PART


async def test_many_answers_at_once() -> None:
    loop = asyncio.get_running_loop()
    answers = []
    for _ in range(64):
        answer = PendingOperation(loop, 0)
        answer.data.append(listed([b"%d" % number for number in range(500)]))
        answer.done.set_result(0)
        answers.append(answer)
    found, had = await turns(batch.results([List("x")] * 64, answers))
    assert len(found) == 64
    assert had >= 64 // batch.RESULTS_AT_ONCE


async def test_in_a_sandbox(native: Substrate) -> None:
    async with native.sandbox() as sandbox:
        assert isinstance(sandbox, NativeSandbox)
        fill = "import os; os.mkdir('d'); [open(f'd/{number}', 'w').close() for number in range(20000)]"
        assert (await sandbox.exec(["python3", "-c", fill])).ok
        assert [entry.name for entry in await sandbox.list("d")] == sorted(map(str, range(20000)))
        found = await sandbox.search("d", names=["*"], limit=30000)
        assert (len(found.matches), found.truncated) == (20000, False)


NONSENSE = {
    "cut": protocol.ENTRY.pack(1, stat.S_IFREG, 5) + b"abc",
    "shorter than a record": b"x" * 5,
    "without a name": protocol.ENTRY.pack(1, stat.S_IFREG, 0),
    "another directory's": listed([b"../up"]),
    "two names": listed([b"a\0b"]),
    "longer than all": protocol.ENTRY.pack(1, stat.S_IFREG, 0xFFFFFFFF) + b"abc",
}


@pytest.mark.parametrize("nonsense", list(NONSENSE))
async def test_lists_that_make_no_sense(nonsense: str) -> None:
    with pytest.raises(CollectError):
        await observation.entries(NONSENSE[nonsense])


@pytest.mark.parametrize("status", [0x137F, -1, 0x7F, 0xFFFF])
async def test_ends_that_make_no_sense(status: int) -> None:
    running = PendingCommand(asyncio.get_running_loop(), 0)
    ended = EXIT.unpack(EXIT.pack(status, *[0] * 12))
    with pytest.raises(CollectError):
        observation.observe(Exec("x"), running, ended, 0.0)


async def test_files_that_are_none() -> None:
    """Descriptors from a compromised PID 1 are closed, and nothing waits for them."""
    for make in (lambda: os.pipe(), lambda: (os.open("/", os.O_RDONLY),), lambda: (os.open("/dev/zero", 0),)):
        descriptor, *rest = make()
        with pytest.raises(CollectError):
            await contents.read_whole(descriptor, "file")
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)
        for other in rest:
            os.close(other)


async def test_a_terminal_that_others_make_wait() -> None:
    """A process with a copy of it can do so: it is given up, and not read."""
    ours, other = os.openpty()
    copy = os.dup(ours)
    side = AsyncDescriptor(ours)
    try:
        os.set_blocking(copy, True)
        with anyio.fail_after(30):
            assert await side.read(lambda: False) == b""
            with pytest.raises(InputClosed, match="made it blocking"):
                await side.write(b"x")
    finally:
        side.close()
        os.close(copy)
        os.close(other)

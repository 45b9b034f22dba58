"""The owner leaks no descriptor, at whatever moment an action is cancelled."""

from __future__ import annotations

import asyncio
import os
import select
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from dutyfree import Read, Write
from dutyfree.contract.errors import SubstrateError
from dutyfree.engine.sandbox.sandbox import NativeSandbox
from dutyfree.substrates.native import Native
from tests.engine import counts

pytestmark = pytest.mark.native

LARGE = bytes(3 << 20)  # so large that it is sent as a descriptor


def count() -> int:
    return len(os.listdir("/proc/self/fd"))


async def _terminal(sandbox: NativeSandbox) -> None:
    async with sandbox.terminal() as terminal:
        await terminal.wait()


async def _shell(sandbox: NativeSandbox) -> None:
    async with sandbox.shell() as shell:
        await shell.run("true")


ACTIONS: dict[str, Callable[[NativeSandbox], Awaitable[Any]]] = {
    "read": lambda sandbox: sandbox.read("large"),
    "write": lambda sandbox: sandbox.write("other", LARGE),
    "batch": lambda sandbox: sandbox.batch([Read("large"), Write("third", LARGE), Read("third")]),
    "stdin": lambda sandbox: sandbox.exec("cat > /dev/null", stdin=LARGE),
    "terminal": _terminal,
    "shell": _shell,
}


@pytest.mark.parametrize("name", ACTIONS)
async def test_a_cancelled_action_leaks_no_descriptor(native: Native, name: str) -> None:
    async with native.sandbox() as sandbox:
        await sandbox.write("large", LARGE)
        before = count()
        for moment in range(40):
            task = asyncio.ensure_future(ACTIONS[name](sandbox))
            await asyncio.sleep(moment * 0.0001)
            task.cancel()
            await asyncio.wait([task])
        assert await counts.descriptors(before) <= before


async def test_a_wrong_stdin_leaks_no_descriptor(native: Native) -> None:
    async with native.sandbox() as sandbox:
        before = count()
        with pytest.raises(TypeError):
            await sandbox.exec("true", stdin="text")  # type: ignore[arg-type]
        assert await counts.descriptors(before) <= before


async def test_a_dead_sandbox_leaks_no_descriptor(native: Native) -> None:
    before = count()
    for _ in range(5):
        async with native.sandbox() as sandbox:
            await sandbox.exec("true")
            sandbox._lifecycle.handle.give_up()
            _until_hung_up(sandbox._lifecycle.channel()._socket.fileno())
            with pytest.raises(SubstrateError):
                await sandbox.exec("true", stdin=b"in")
    assert await counts.descriptors(before) <= before


def _until_hung_up(descriptor: int) -> None:
    """Wait without the event loop, so that it does not notice the end first."""
    poll = select.poll()
    poll.register(descriptor, select.POLLHUP)
    assert poll.poll(60_000)

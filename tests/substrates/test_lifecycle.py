"""Requests that run to their end although the caller is cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import anyio
import anyio.lowlevel
import pytest

from dutyfree.contract.errors import CleanupError
from dutyfree.substrates.local.lifecycle import closing, uninterrupted


class _Request:
    """Something that is made when ``answered`` is set."""

    def __init__(self) -> None:
        self.begun, self.answered = anyio.Event(), anyio.Event()
        self.undone: list[str] = []

    async def make(self) -> str:
        self.begun.set()
        await self.answered.wait()
        return "made"

    async def undo(self, made: str) -> None:
        await anyio.lowlevel.checkpoint()
        self.undone.append(made)


async def test_the_result() -> None:
    request = _Request()
    request.answered.set()
    assert await uninterrupted(request.make(), request.undo) == "made"
    assert request.undone == []


async def test_an_error() -> None:
    async def fail() -> str:
        raise ValueError("no")

    request = _Request()
    with pytest.raises(ValueError, match="no"):
        await uninterrupted(fail(), request.undo)


@pytest.mark.parametrize("times", [1, 3])
async def test_a_task_that_is_cancelled_undoes_what_was_made(times: int) -> None:
    request = _Request()
    task = asyncio.create_task(uninterrupted(request.make(), request.undo))
    await request.begun.wait()
    for _ in range(times):
        task.cancel()
        await anyio.sleep(0.01)
    assert not task.done()
    request.answered.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert request.undone == ["made"]


async def test_a_scope_that_is_cancelled_undoes_what_was_made() -> None:
    request = _Request()
    with anyio.CancelScope() as scope:
        loop = asyncio.get_running_loop()
        later: Callable[[], None] = request.answered.set
        loop.call_later(0.05, scope.cancel)
        loop.call_later(0.1, later)
        await uninterrupted(request.make(), request.undo)
        pytest.fail("the cancellation was lost")
    assert scope.cancelled_caught
    assert request.undone == ["made"]


class _Closing:
    """A sandbox whose end takes until ``may_end`` is set."""

    def __init__(self) -> None:
        self.begun, self.may_end = anyio.Event(), anyio.Event()
        self.closed = False

    async def close(self) -> None:
        self.begun.set()
        await self.may_end.wait()
        self.closed = True


@pytest.mark.parametrize("times", [1, 3])
async def test_a_cancellation_waits_until_the_sandbox_is_closed(times: int) -> None:
    """Also that of ``Task.cancel``, which a shield of anyio does not stop."""
    sandbox = _Closing()

    async def use() -> None:
        async with closing(sandbox):
            pass

    task = asyncio.create_task(use())
    await sandbox.begun.wait()
    for _ in range(times):
        task.cancel()
        await anyio.sleep(0.01)
    assert not task.done()
    sandbox.may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert sandbox.closed


class _Unremovable:
    async def close(self) -> None:
        await anyio.lowlevel.checkpoint()
        raise PermissionError(1, "not permitted", "/there")


async def test_what_cannot_be_removed_is_an_error_of_the_cleanup() -> None:
    with pytest.raises(CleanupError, match="/there"):
        async with closing(_Unremovable()):
            pass


async def test_the_error_of_the_body_passes() -> None:
    with pytest.raises(ValueError, match="of the body"):
        async with closing(_Unremovable()):
            raise ValueError("of the body")

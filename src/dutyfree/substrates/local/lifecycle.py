"""Open a substrate only where it works, let requests end, and close sandboxes in any case."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, Protocol, TypeVar

import anyio
import anyio.lowlevel

from dutyfree.contract import Availability
from dutyfree.contract.errors import CleanupError, SubstrateError, Unavailable
from dutyfree.engine.sandbox.lifecycle import to_the_end

T = TypeVar("T")


def require(found: Availability, substrate: str) -> None:
    """Raises Unavailable, with the remedy, if the probe found that the substrate does not work."""
    if not found.available:
        raise Unavailable(f"{substrate}: {found.detail}", remedy=found.remedy)


async def uninterrupted(work: Coroutine[Any, Any, T], undo: Callable[[T], Awaitable[None]]) -> T:
    """Run ``work`` to its end, also if the caller is cancelled meanwhile.

    Then ``undo`` gets its result, and the cancellation goes on. For a request that makes something: only its
    answer says what is to be removed. A shield of anyio alone does not stop ``asyncio.timeout``.
    """
    task = asyncio.create_task(work)
    try:
        with anyio.CancelScope(shield=True):
            await asyncio.shield(task)
        await anyio.lowlevel.checkpoint_if_cancelled()
    except asyncio.CancelledError:
        undone = asyncio.create_task(_undo(task, undo))
        with anyio.CancelScope(shield=True):
            while not undone.done():
                with contextlib.suppress(asyncio.CancelledError):  # once more
                    await asyncio.wait([undone])
        raise
    return task.result()


async def _undo(task: asyncio.Task[T], undo: Callable[[T], Awaitable[None]]) -> None:
    await asyncio.wait([task])
    if not task.cancelled() and task.exception() is None:
        await undo(task.result())


class Closable(Protocol):
    """A sandbox that can be closed."""

    async def close(self) -> None:
        """Raises OSError, SubstrateError."""


@asynccontextmanager
async def closing(sandbox: Closable) -> AsyncIterator[None]:
    """Close a sandbox at the end of the context. A cancellation waits until it is closed.

    Raises CleanupError for an OSError of ``close``. If the body raises, that error passes instead.
    """
    succeeded = False
    try:
        yield
        succeeded = True
    finally:
        try:
            await to_the_end(sandbox.close())
        except OSError as error:
            if succeeded:
                raise CleanupError(f"cannot remove {error.filename}: {error.strerror}") from error
        except SubstrateError:
            if succeeded:
                raise

"""What blocks for long, beside the event loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Protocol, TypeVar, runtime_checkable

import anyio
import anyio.to_thread

from dutyfree.engine.store.cancel import Halt

T = TypeVar("T")


@runtime_checkable
class _Closable(Protocol):
    def close(self) -> None: ...


async def threaded(function: Callable[[], T], halt: Halt) -> T:
    """Cancelled, it is halted and waited for, and what it still brings is closed.

    In a thread beyond those that others share: what they are asked for by what runs in here must not wait
    for it.
    """
    beyond = anyio.CapacityLimiter(1)
    running = asyncio.ensure_future(anyio.to_thread.run_sync(function, limiter=beyond))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        halt.set()
        with anyio.CancelScope(shield=True), contextlib.suppress(Exception):
            late = await running
            if isinstance(late, _Closable):
                await anyio.to_thread.run_sync(late.close)
        raise

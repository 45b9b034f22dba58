"""Bytes between the items of a call and a pipe, which the init of a sandbox reads or writes itself."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio

from dutyfree.contract.errors import ActionError, RecipeError
from dutyfree.server.handlers.registry import Context

CHUNK = 64 << 10
"""Bytes that an item has at most."""


async def send_all(context: Context, descriptor: int) -> None:
    os.set_blocking(descriptor, False)
    while True:
        try:
            data = os.read(descriptor, CHUNK)
        except BlockingIOError:
            await anyio.wait_readable(descriptor)
            continue
        if not data:
            return
        await context.send(data)


@asynccontextmanager
async def fed(context: Context, largest: int | None = None) -> AsyncIterator[int]:
    """The read end of a pipe into which the client's items go. The receiver closes it.

    After ``largest`` bytes it ends, and the receiver sees a stream that is cut off.
    """
    theirs, ours = os.pipe()
    os.set_blocking(ours, False)
    room = largest

    async def feed() -> None:
        nonlocal room
        try:
            while (item := await context.receive()) is not None:
                rest = memoryview(item)
                if room is not None and (room := room - len(rest)) < 0:
                    return
                while rest:
                    try:
                        rest = rest[os.write(ours, rest) :]
                    except BlockingIOError:
                        await anyio.wait_writable(ours)
        except BrokenPipeError:
            pass  # the receiver has ended, and says why
        finally:
            os.close(ours)

    feeding = asyncio.create_task(feed())
    try:
        yield theirs
    except (ActionError, RecipeError, OSError) as error:
        if room is not None and room < 0:
            raise RecipeError(f"the files have more than {largest} bytes") from error
        raise
    finally:
        feeding.cancel()
        await asyncio.wait([feeding])


def first_error(group: BaseExceptionGroup[BaseException]) -> BaseException:
    found = group.exceptions[0]
    return first_error(found) if isinstance(found, BaseExceptionGroup) else found

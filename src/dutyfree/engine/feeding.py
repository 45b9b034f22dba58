"""A command's standard input, written as it comes and as the command reads."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterable, AsyncIterator


@contextlib.asynccontextmanager
async def fed(source: AsyncIterable[bytes]) -> AsyncIterator[int]:
    """The end of a pipe to be handed over; what the source gives is written into the other, until the end.

    Raises what the source raises, on leaving.
    """
    theirs, ours = os.pipe()
    os.set_blocking(ours, False)
    task = asyncio.get_running_loop().create_task(_write(source, ours))
    task.add_done_callback(lambda _: os.close(ours))
    try:
        yield theirs
    finally:
        if not task.done():
            task.cancel()
        await asyncio.wait([task])
    if not task.cancelled():
        task.result()


async def _write(source: AsyncIterable[bytes], pipe: int) -> None:
    # A command that reads no more is none the worse for it.
    with contextlib.suppress(BrokenPipeError):
        async for part in source:
            rest = memoryview(part)
            while rest:
                try:
                    rest = rest[os.write(pipe, rest) :]
                except BlockingIOError:
                    await _writable(pipe)


async def _writable(pipe: int) -> None:
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()
    loop.add_writer(pipe, _settle, ready)
    try:
        await ready
    finally:
        loop.remove_writer(pipe)


def _settle(ready: asyncio.Future[None]) -> None:
    if not ready.done():
        ready.set_result(None)

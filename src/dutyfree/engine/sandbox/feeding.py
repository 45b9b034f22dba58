"""A command's standard input, written as it comes and as the command reads."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterable, AsyncIterator

from dutyfree.engine.sandbox import contents
from dutyfree.engine.sandbox.pipes import Descriptor


@contextlib.asynccontextmanager
async def fed(source: AsyncIterable[bytes]) -> AsyncIterator[int]:
    """The end of a pipe to be handed over; what the source gives is written into the other, until the end.

    Raises what the source raises, on leaving.
    """
    theirs, ours = contents.pipe()
    pipe = Descriptor(ours)
    task = asyncio.get_running_loop().create_task(_write(source, pipe))
    task.add_done_callback(lambda _: pipe.close())
    try:
        yield theirs
    finally:
        if not task.done():
            task.cancel()
        await asyncio.wait([task])
    if not task.cancelled():
        task.result()


async def _write(source: AsyncIterable[bytes], pipe: Descriptor) -> None:
    # A command that reads no more is none the worse for it.
    with contextlib.suppress(BrokenPipeError):
        async for part in source:
            await pipe.write(part)

"""Bytes between the items of a call and a pipe, which the init of a sandbox reads or writes itself.

The other end of a pipe belongs to its receiver from the moment on at which it gets it. So look first whether
the receiver will take it.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import anyio

from dutyfree.contract.arguments import encoded_path
from dutyfree.contract.errors import DutyfreeError, RecipeError, file_error
from dutyfree.engine.sandbox import pipes
from dutyfree.engine.sandbox.pipes import AsyncDescriptor, create_pipe
from dutyfree.engine.sandbox.sandbox import NativeSandbox
from dutyfree.server.handlers.registry import Context

CHUNK = 64 << 10
"""Bytes that an item has at most."""
LONGEST_PATH = 32 << 10
"""Bytes of a path in a sandbox: more than the kernel takes, and less than the engine does."""

Admit = Callable[[bytes], Awaitable[None]]


async def check_transfer(sandbox: NativeSandbox, path: str) -> None:
    """Raise what a transfer of a tree would raise before it has taken its end of a pipe. Does not wait.

    Raises DispatchError, ArgumentError, RequestError, FileError.
    """
    await sandbox.processes()  # says whether it is closed or paused
    if len(encoded_path(path)) > LONGEST_PATH:
        raise file_error(errno.ENAMETOOLONG, f"{path[:100]}…")


@asynccontextmanager
async def drained(context: Context) -> AsyncIterator[int]:
    """The write end of a pipe whose content goes to the client as items. The sender closes it."""
    ours, theirs = create_pipe()
    pipe = AsyncDescriptor(ours)
    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_send_all, context, pipe)
            yield theirs
    except BaseExceptionGroup as group:
        raise first_error(group) from group
    finally:
        pipe.close()


async def _send_all(context: Context, pipe: AsyncDescriptor) -> None:
    while data := await pipe.read(lambda: False):
        await context.send(data)


@asynccontextmanager
async def fed(context: Context, admit: Admit | None = None, stall: float | None = None) -> AsyncIterator[int]:
    """The read end of a pipe into which the client's items go. The receiver closes it.

    ``admit`` looks at each item, and raises DutyfreeError for one that is too much. ``stall``: the seconds in
    which the next item must come. After either, the receiver sees a stream that is cut off.
    """
    refused: list[DutyfreeError] = []

    async def items() -> AsyncIterator[bytes]:
        try:
            while (item := await _next(context, stall)) is not None:
                if admit is not None:
                    await admit(item)
                yield item
        except DutyfreeError as error:
            refused.append(error)

    try:
        async with pipes.fed(items()) as theirs:
            yield theirs
    except (DutyfreeError, OSError) as error:
        if refused:
            raise refused[0] from error
        raise


async def _next(context: Context, stall: float | None) -> bytes | None:
    """The next item of the client. Raises RecipeError."""
    try:
        async with asyncio.timeout(stall):
            item: bytes | None = await context.receive()
    except TimeoutError:
        raise RecipeError(f"no part of the files came within {stall:g} s", remedy="send them again") from None
    return item


def first_error(group: BaseExceptionGroup[BaseException]) -> BaseException:
    found = group.exceptions[0]
    return first_error(found) if isinstance(found, BaseExceptionGroup) else found

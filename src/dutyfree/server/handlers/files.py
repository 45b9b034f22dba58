"""The calls about the files of a sandbox."""

from __future__ import annotations

import os
from typing import Any

import anyio
import anyio.to_thread

from dutyfree.contract import Edit, Found, List, Read, Search, Write
from dutyfree.server.bodies import LARGEST_REQUEST
from dutyfree.server.handlers.item_pipe import fed, first_error, send_all
from dutyfree.server.handlers.registry import Context, handles
from dutyfree.wire import calls


@handles
async def read(context: Context, wanted: Read) -> bytes:
    return await context.held.sandbox.read(wanted.path, largest=LARGEST_REQUEST)


@handles
async def write(context: Context, wanted: Write) -> None:
    await context.held.sandbox.write(wanted.path, wanted.data, mode=wanted.mode)


@handles
async def list_(context: Context, wanted: List) -> tuple[Any, ...]:
    return await context.held.sandbox.list(wanted.path)


@handles
async def remove(context: Context, wanted: calls.Location) -> None:
    await context.held.sandbox.remove(wanted.path)


@handles
async def edit(context: Context, wanted: Edit) -> None:
    await context.held.sandbox.edit(wanted.path, wanted.old, wanted.new)


@handles
async def search(context: Context, wanted: Search) -> Found:
    return await context.held.sandbox.search(
        wanted.path,
        wanted.text,
        regex=wanted.regex,
        ignore_case=wanted.ignore_case,
        names=wanted.names,
        skip=wanted.skip,
        binary=wanted.binary,
        limit=wanted.limit,
        width=wanted.width,
        timeout=wanted.timeout,
    )


@handles
async def watch(context: Context, wanted: calls.Watch) -> None:
    async with context.held.sandbox.watch(wanted.path, recursive=wanted.recursive) as changes:
        await context.send(())  # from now on every change is reported
        async for change in changes:
            await context.send((change,))


@handles
async def upload(context: Context, wanted: calls.Location) -> None:
    """Unpack a tree stream. The bytes go through a pipe straight to the sandbox's init."""
    async with fed(context) as descriptor:
        await context.held.sandbox.unpack(wanted.path, descriptor)


@handles
async def download(context: Context, wanted: calls.Location) -> None:
    """Pack a tree stream."""
    ours, theirs = os.pipe()
    stream = await anyio.to_thread.run_sync(os.fdopen, ours, "rb", 0)
    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(send_all, context, stream.fileno())
            await context.held.sandbox.pack(wanted.path, theirs)
    except BaseExceptionGroup as group:
        raise first_error(group) from group
    finally:
        stream.close()

"""The calls about the files of a sandbox."""

from __future__ import annotations

from typing import Any

from dutyfree.contract import Edit, Found, List, Read, Search, Write
from dutyfree.server.bodies import LARGEST_REQUEST
from dutyfree.server.handlers.item_pipe import check_transfer, drained, fed
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
    sandbox = context.held.sandbox
    await check_transfer(sandbox, wanted.path)
    async with fed(context) as descriptor:
        await sandbox.unpack(wanted.path, descriptor)


@handles
async def download(context: Context, wanted: calls.Location) -> None:
    """Pack a tree stream. The bytes come through a pipe straight from the sandbox's init."""
    sandbox = context.held.sandbox
    await check_transfer(sandbox, wanted.path)
    async with drained(context) as descriptor:
        await sandbox.pack(wanted.path, descriptor)

"""Ports of sandboxes as addresses on this machine, for clients that want one: browsers, HTTP libraries."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
from anyio.abc import ByteStream, SocketAttribute, SocketStream

from dutyfree.contract.abilities import Ports

_CHUNK = 256 << 10


@asynccontextmanager
async def forward(
    sandbox: Ports, port: int, *, host: str = "127.0.0.1", local_port: int = 0
) -> AsyncIterator[tuple[str, int]]:
    """An address on this machine whose connections lead to the port of the sandbox, while the context lasts.

    A connection made while nobody listens in there is closed at once. Raises OSError if the local port
    cannot be had.
    """
    listener = await anyio.create_tcp_listener(local_host=host, local_port=local_port)

    async def lead(outer: SocketStream) -> None:
        async with outer:
            # What fails on one side is seen on the other as an end, which is all that can be said to it.
            with contextlib.suppress(OSError, anyio.BrokenResourceError, anyio.ClosedResourceError):
                async with await sandbox.connect(port) as inner:
                    await _both_ways(outer, inner)

    async with listener, anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, lead)
        yield host, listener.extra(SocketAttribute.local_port)  # noqa: S610
        tasks.cancel_scope.cancel()


async def _both_ways(one: ByteStream, other: ByteStream) -> None:
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_carry, one, other)
        tasks.start_soon(_carry, other, one)


async def _carry(source: ByteStream, sink: ByteStream) -> None:
    with contextlib.suppress(anyio.EndOfStream):
        while True:
            await sink.send(await source.receive(_CHUNK))
    await sink.send_eof()

"""Forward a port of a sandbox to an address on this machine, for browsers and HTTP libraries."""

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
    """Listen on an address of this machine, and forward each connection to a port of the sandbox.

    It closes a connection at once if no process listens on the port. Raises OSError if the local port is not
    free.
    """
    listener = await anyio.create_tcp_listener(local_host=host, local_port=local_port)

    async def serve(outer: SocketStream) -> None:
        async with outer:
            # If one side fails, the other side sees the end of the stream.
            with contextlib.suppress(OSError, anyio.BrokenResourceError, anyio.ClosedResourceError):
                async with await sandbox.connect(port) as inner:
                    await _relay(outer, inner)

    async with listener, anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, serve)
        yield host, listener.extra(SocketAttribute.local_port)  # noqa: S610
        tasks.cancel_scope.cancel()


async def _relay(one: ByteStream, other: ByteStream) -> None:
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_copy, one, other)
        tasks.start_soon(_copy, other, one)


async def _copy(source: ByteStream, sink: ByteStream) -> None:
    with contextlib.suppress(anyio.EndOfStream):
        while True:
            await sink.send(await source.receive(_CHUNK))
    await sink.send_eof()

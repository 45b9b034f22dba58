"""An emulated distance: a relay on the loopback that delays all bytes by half of a round trip, both ways.

It is for measuring what a distant server costs. It delays what is sent on a kept connection, as a long line
does. It does not emulate bandwidth, loss, or how TCP starts a connection.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

_CHUNK = 256 << 10


@asynccontextmanager
async def delayed(host: str, port: int, round_trip: float) -> AsyncIterator[tuple[str, int]]:
    """An address on the loopback that leads to ``host`` and ``port``, ``round_trip`` seconds away."""
    connections: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        connections.add(task)
        try:
            there, back = await asyncio.open_connection(host, port)
            await asyncio.gather(
                _forward(reader, back, round_trip / 2), _forward(there, writer, round_trip / 2)
            )
        except (OSError, asyncio.CancelledError):
            pass  # one side has closed the connection, or the relay ends
        finally:
            connections.discard(task)

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        found: tuple[str, int] = server.sockets[0].getsockname()[:2]
        yield found
    finally:
        server.close()
        for task in list(connections):
            task.cancel()
        if connections:
            await asyncio.wait(connections)


async def _forward(source: asyncio.StreamReader, sink: asyncio.StreamWriter, seconds: float) -> None:
    """Forward all bytes, each ``seconds`` after it came, and then the end."""
    loop = asyncio.get_running_loop()
    on_the_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(maxsize=1024)

    async def arrive() -> None:
        while True:
            due, data = await on_the_way.get()
            await asyncio.sleep(max(0.0, due - loop.time()))
            if not data:
                return
            sink.write(data)
            await sink.drain()

    arriving = asyncio.create_task(arrive())
    try:
        data = b"?"
        while data:
            data = await source.read(_CHUNK)
            await on_the_way.put((loop.time() + seconds, data))
        await arriving
    finally:
        arriving.cancel()
        with contextlib.suppress(OSError):
            sink.close()

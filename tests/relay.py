"""A TCP relay in front of a real server: it can hold back what either side sends, and cut connections."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator


class Relay:
    """Passes bytes on in both directions while ``requests`` and ``answers`` are set."""

    def __init__(self, host: str, port: int) -> None:
        self._target = host, port
        self._writers: set[asyncio.StreamWriter] = set()
        self.requests, self.answers = asyncio.Event(), asyncio.Event()
        self.pass_on()
        self.port = 0

    def pass_on(self) -> None:
        self.requests.set()
        self.answers.set()

    def cut(self) -> None:
        """End all connections; what was held back is lost. New ones work again."""
        for writer in self._writers:
            writer.transport.abort()
        self.pass_on()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there_reader, there_writer = await asyncio.open_connection(*self._target)
        self._writers |= {writer, there_writer}
        try:
            await asyncio.gather(
                _carry(reader, there_writer, self.requests), _carry(there_reader, writer, self.answers)
            )
        finally:
            for each in (writer, there_writer):
                self._writers.discard(each)
                each.transport.abort()


async def _carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, flows: asyncio.Event) -> None:
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(1 << 16):
            await flows.wait()
            writer.write(data)
            await writer.drain()
        writer.close()


@contextlib.asynccontextmanager
async def relay(host: str, port: int) -> AsyncIterator[Relay]:
    """A relay on a free port of 127.0.0.1."""
    made = Relay(host, port)
    server = await asyncio.start_server(made.serve, "127.0.0.1", 0)
    made.port = server.sockets[0].getsockname()[1]
    try:
        yield made
    finally:
        server.close()
        made.cut()

"""Servers of the fake: functions from what a client sent to what it hears."""

from __future__ import annotations

from collections.abc import Callable

import anyio
from anyio.abc import ByteStream

Server = Callable[[bytes], bytes]


class ScriptedStream(ByteStream):
    """A connection to one: each piece sent is answered, the end of sending ends the answers."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._answers, self._taken = anyio.create_memory_object_stream[bytes](1024)
        self._rest = b""

    async def send(self, item: bytes) -> None:
        """Raises ClosedResourceError after the end."""
        if answer := self._server(item):
            await self._answers.send(answer)

    async def receive(self, max_bytes: int = 65536) -> bytes:
        """Raises EndOfStream."""
        data = self._rest or await self._taken.receive()
        self._rest = data[max_bytes:]
        return data[:max_bytes]

    async def send_eof(self) -> None:
        await self._answers.aclose()

    async def aclose(self) -> None:
        await self._answers.aclose()
        await self._taken.aclose()

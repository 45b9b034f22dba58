"""Background processes of a sandbox on a server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from dutyfree.contract import Command, Observation
from dutyfree.contract.abilities import Piece
from dutyfree.contract.arguments import check_bytes
from dutyfree.contract.errors import LimitError
from dutyfree.substrates.hosted.connection import Connection, PendingCall
from dutyfree.wire.calls import ProcessCall, ProcessInfo

_WRITE = 256 << 10


class HostedProcess:
    """A background process. See ``abilities.ManagedProcess``."""

    def __init__(self, connection: Connection, sandbox: str, info: ProcessInfo, waiting: PendingCall) -> None:
        """``waiting``: a call of process_wait, by which this client learns of the end."""
        self.id = info.id
        self.command: Command = info.command
        self._connection = connection
        self._sandbox = sandbox
        self._waiting = waiting

    @classmethod
    async def watched(cls, connection: Connection, sandbox: str, info: ProcessInfo) -> HostedProcess:
        waiting = await connection.begin("process_wait", sandbox, ProcessCall(info.id))
        if not info.running:
            await asyncio.wait([waiting.done])
        return cls(connection, sandbox, info, waiting)

    @property
    def running(self) -> bool:
        return not self._waiting.done.done()

    async def wait(self) -> Observation:
        await asyncio.wait([self._waiting.done])
        found: Observation = await self._waiting.finish()
        return found

    async def kill(self) -> None:
        await self._call("process_kill", ProcessCall(self.id))
        await asyncio.wait([self._waiting.done])

    async def signal(self, number: int) -> None:
        """Raises LimitError for a number that is not a signal."""
        if not 0 < number < 65:
            raise LimitError(f"there is no signal {number}")
        await self._call("process_signal", ProcessCall(self.id, signal=number))

    async def write(self, data: bytes) -> None:
        check_bytes(data, "what is written to a process")
        for at in range(0, len(data) or 1, _WRITE):
            await self._call("process_write", ProcessCall(self.id, data=bytes(data[at : at + _WRITE])))

    async def close_stdin(self) -> None:
        await self._call("process_close", ProcessCall(self.id))

    async def output(self, after: int = 0) -> AsyncIterator[Piece]:
        call = await self._connection.begin("process_output", self._sandbox, ProcessCall(self.id, after))
        try:
            while (piece := await call.item()) is not None:
                yield piece
            await call.finish()
        finally:
            await call.cancel()

    async def _call(self, method: str, arguments: ProcessCall) -> None:
        await self._connection.call(method, self._sandbox, arguments)

"""What a client holds open in a sandbox: a shell, a terminal, a connection to a port."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
from anyio.abc import ByteStream

from dutyfree.contract import Observation
from dutyfree.contract.arguments import check_bytes, check_command, encoded
from dutyfree.contract.errors import (
    ActionError,
    ExecError,
    InputClosed,
    LimitError,
    SandboxClosed,
    SubstrateError,
)
from dutyfree.substrates.hosted.connection import PendingCall
from dutyfree.wire.calls import ShellCommand, TerminalInput
from dutyfree.wire.errors import restore

_SIZE_MAX = 0xFFFF
_numbers = itertools.count(1)


@asynccontextmanager
async def ended(call: PendingCall) -> AsyncIterator[PendingCall]:
    """End a call with the context: its input ends, and it is stopped if it does not end by that."""
    try:
        yield call
    finally:
        await call.cancel()


async def opened(call: PendingCall) -> None:
    """Wait for the first item, with which the server says that it is open. Raises the call's error."""
    if await call.item() is None:
        await call.finish()
        raise ExecError("the server ended the call before it began")


class HostedShell:
    """A shell session. See ``abilities.Shell``."""

    def __init__(self, call: PendingCall) -> None:
        self._call = call
        self._busy = asyncio.Lock()
        self._owes_answer = False
        """Whether a command was sent, or a part of it, and its answer has not come."""

    async def run(self, command: str, *, timeout: float | None = None) -> Observation:
        """Raises ActionError if the shell has ended, ExecError if it still owes an earlier answer."""
        check_command(command, timeout=timeout)
        encoded(command, "a command", "bad_request")
        async with self._busy:
            if self._owes_answer and not self._call.done.done():  # this command would get it
                raise ExecError(
                    "a command in this shell was cancelled, and its end is not known",
                    remedy="open another shell",
                )
            self._owes_answer = True
            if not await self._call.send(ShellCommand(command, timeout)):
                raise await self._end()
            try:
                answer = await self._call.item()
            except asyncio.CancelledError:
                with anyio.CancelScope(shield=True), contextlib.suppress(SubstrateError):
                    await self._call.send(ShellCommand("", interrupt=True))
                    await self._call.item()
                    self._owes_answer = False
                raise
            self._owes_answer = False
        if answer is None:
            raise await self._end()
        if answer.error is not None:
            raise restore(answer.error)
        found: Observation = answer.observation
        return found

    async def _end(self) -> Exception:
        try:
            await self._call.finish()
        except Exception as error:  # noqa: BLE001 (the caller raises it)
            return error
        return ActionError("the shell has ended", kind="ended", remedy="open another shell")


class HostedTerminal:
    """A command in a terminal. See ``abilities.Terminal``."""

    def __init__(self, sandbox: str, call: PendingCall) -> None:
        self.id = f"{sandbox}-terminal-{next(_numbers)}"
        self._call = call

    async def read(self) -> bytes:
        data = await self._call.item()
        return b"" if data is None else data

    async def write(self, data: bytes) -> None:
        check_bytes(data, "what is written to a terminal")
        for at in range(0, len(data), 1 << 16):
            if not await self._call.send(TerminalInput(bytes(data[at : at + (1 << 16)]))):
                raise InputClosed("the command has ended")
        if self._call.done.done():
            raise InputClosed("the command has ended")

    async def resize(self, rows: int, columns: int) -> None:
        if not (0 < rows <= _SIZE_MAX and 0 < columns <= _SIZE_MAX):
            raise LimitError(
                f"a terminal of {rows} rows and {columns} columns: both must be 1 to {_SIZE_MAX}"
            )
        await self._call.send(TerminalInput(size=(rows, columns)))

    async def wait(self) -> Observation:
        await asyncio.wait([self._call.done])
        found: Observation = await self._call.finish()
        return found

    async def kill(self) -> None:
        await self._call.send(TerminalInput(kill=True))
        await asyncio.wait([self._call.done])


class HostedStream(ByteStream):
    """A connection to a server in a sandbox."""

    def __init__(self, call: PendingCall) -> None:
        self._call = call
        self._rest = b""
        self._closed = False

    async def receive(self, max_bytes: int = 65536) -> bytes:
        if self._closed:
            raise anyio.ClosedResourceError
        while not self._rest:
            data = await self._call.item()
            if data is None:
                raise anyio.EndOfStream
            self._rest = data
        part, self._rest = self._rest[:max_bytes], self._rest[max_bytes:]
        return part

    async def send(self, item: bytes) -> None:
        if self._closed:
            raise anyio.ClosedResourceError
        if not await self._call.send(bytes(item)):
            raise anyio.BrokenResourceError

    async def send_eof(self) -> None:
        await self._call.end_input()

    async def aclose(self) -> None:
        if not self._closed:
            self._closed = True
            await self._call.cancel()


def closed(name: str) -> SandboxClosed:
    """The error of a sandbox that this client has released."""
    return SandboxClosed(f"sandbox {name} is closed")

"""A kept exec as a connected socket: a task carries bytes between the websocket and one end of a socket pair.

Each message of the websocket begins with the number of its channel: 0 is stdin, 1 stdout, 2 stderr, 3 how the
command ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from dutyfree.substrates.kubernetes.api import Api, ApiError, ApiLost
from dutyfree.substrates.kubernetes.status import CONTAINER

if TYPE_CHECKING:
    import aiohttp

STDIN, STDOUT, STDERR, STATUS = range(4)
CHUNK = 32 << 10
"""Bytes of one message: servers have buffers of this size."""
SAID = 500
"""Bytes that are kept of stderr."""
_TCP_INFO = struct.Struct("@24xI28xI")
"""Of the kernel's tcp_info: the segments without an acknowledgement, and milliseconds since the last one."""
STUCK_MILLISECONDS = 2000


class ExecStream:
    """The streams of one command in a pod. If the socket is closed, the command's stdin ends."""

    def __init__(self, api: Api, pod: str) -> None:
        self._api = api
        self._pod = pod
        self._task: asyncio.Task[None] | None = None
        self._said = b""
        self._connection: socket.socket | None = None
        self.exit_code: int | None = None
        """That of the command, if it failed and the server said so."""

    @property
    def said(self) -> str:
        """The end of stderr, and what the server said about the end of the command."""
        return self._said.decode(errors="replace").strip()

    @property
    def is_stuck(self) -> bool:
        """Whether the other end has not acknowledged for a while what we sent."""
        return self._connection is not None and is_unacknowledged(self._connection)

    async def open(self, command: Sequence[str], first: bytes = b"") -> socket.socket:
        """Start the command, and send ``first`` to it. Raises ApiError, ApiLost."""
        loop = asyncio.get_running_loop()
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        theirs.setblocking(False)
        opened: asyncio.Future[None] = loop.create_future()
        self._task = loop.create_task(self._run(command, first, theirs, opened))
        try:
            await opened
        except BaseException:
            self._task.cancel()
            ours.close()
            raise
        return ours

    async def ended(self) -> None:
        """Wait for the end of the websocket."""
        if self._task is not None:
            await asyncio.wait([self._task])

    async def _run(
        self, command: Sequence[str], first: bytes, theirs: socket.socket, opened: asyncio.Future[None]
    ) -> None:
        execution = self._api.execution(self._pod, command, container=CONTAINER, stdin=True, reads=True)
        with theirs:
            try:
                async with execution as websocket:
                    self._connection = websocket.get_extra_info("socket")
                    for start in range(0, len(first), CHUNK):
                        await _send(websocket, first[start : start + CHUNK])
                    opened.set_result(None)
                    await self._carry(websocket, theirs)
            except (ApiError, ApiLost, OSError) as error:
                self._said = (self._said + f" {error}".encode())[-SAID:]
                if not opened.done():
                    opened.set_exception(
                        error if isinstance(error, ApiError | ApiLost) else ApiLost(str(error))
                    )

    def _end(self, found: Mapping[str, Any]) -> None:
        self.exit_code = exit_code(found)
        if found.get("status") != "Success":
            self._said = (self._said + b" " + str(found.get("message", "")).encode())[-SAID:]

    async def _carry(self, websocket: aiohttp.ClientWebSocketResponse, theirs: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        sending = loop.create_task(_send_all(websocket, theirs))
        try:
            async for message in websocket:
                data = message.data
                if not isinstance(data, bytes) or len(data) < 2:
                    continue
                if data[0] == STDOUT:
                    await loop.sock_sendall(theirs, memoryview(data)[1:])
                elif data[0] == STDERR:
                    self._said = (self._said + data[1:])[-SAID:]
                elif data[0] == STATUS:
                    self._end(parsed_status(data[1:]))
        finally:
            sending.cancel()
            with contextlib.suppress(asyncio.CancelledError, OSError):
                await sending


def is_unacknowledged(connection: socket.socket) -> bool:
    """Whether the kernel of the other end has not acknowledged for a while what was sent.

    It does, also if the program there does not read.
    """
    with contextlib.suppress(OSError):  # it is closed
        found = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
        waiting, since = _TCP_INFO.unpack(found)
        return bool(waiting and since > STUCK_MILLISECONDS)
    return False


def parsed_status(data: bytes) -> dict[str, Any]:
    """What the server says about the end of a command."""
    with contextlib.suppress(msgspec.DecodeError):
        return dict(msgspec.json.decode(data))
    return {"message": data.decode(errors="replace")}


def exit_code(found: Mapping[str, Any]) -> int | None:
    """The exit code of a command that failed; None if it did not, or if the cause was another one."""
    if found.get("reason") == "NonZeroExitCode":
        for cause in (found.get("details") or {}).get("causes") or ():
            if cause.get("reason") == "ExitCode" and str(cause.get("message")).isdigit():
                return int(cause["message"])
    return None


async def _send_all(websocket: aiohttp.ClientWebSocketResponse, theirs: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    with contextlib.suppress(ConnectionError):
        while data := await loop.sock_recv(theirs, CHUNK):
            await _send(websocket, data)
    await websocket.close()


async def _send(websocket: aiohttp.ClientWebSocketResponse, data: bytes) -> None:
    await websocket.send_bytes(b"\0" + data)

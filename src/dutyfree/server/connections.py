"""Connections of clients, as uvicorn serves them, with bounds: how many, how large, and how slow.

A client that sends a request byte by byte, takes no answers, or is gone without a word must cost little, and
not for long. The server looks at all connections twice a second and ends those that are too slow, so that a
request costs no timer.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections import Counter
from collections.abc import Iterable
from http import HTTPStatus
from typing import Any, Protocol

import msgspec
import uvicorn
from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

UNWANTED_MAX = 16 << 20
"""Bytes of a body that are read and dropped after its request was refused."""

CONNECTION = "dutyfree.connection"
"""The key of the connection in the scope of its requests."""

_NO_LINGER = struct.pack("ii", 1, 0)


class ConnectionLimits(msgspec.Struct, frozen=True):
    """The bounds of all connections of a server."""

    connections: int = 8192
    """Of all clients together."""
    per_address: int = 2048
    """Of one network address. Clients of a Unix socket have none."""
    head_bytes: int = 64 << 10
    """Bytes of the head of a request: its first line and its headers."""
    head_seconds: float = 20.0
    """Seconds for the head, from the connection or its first byte on."""
    stall_seconds: float = 30.0
    """Seconds that a transfer may stand still, in either direction."""
    slowest: int = 4096
    """Bytes per second that a transfer needs on average to go on for longer than that."""
    ping_seconds: float = 20.0
    """After how many quiet seconds a WebSocket is pinged."""
    pong_seconds: float = 60.0
    """Seconds for the answer to a ping. A client whose event loop is blocked for longer loses its channel."""

    def extended(self, until: float, size: int, now: float) -> float:
        """Until when a transfer may go on that could last until ``until``, after ``size`` more bytes.

        What came fast before does not count: a transfer never has more than ``stall_seconds`` left.
        """
        return min(until + size / self.slowest, now + self.stall_seconds)


class Upgrades(Protocol):
    """Who takes over a connection whose client upgrades it to a port of a sandbox."""

    def target(self, url: bytes) -> Any | None:
        """What the URL names, if that is a port."""

    async def upgrade(
        self, scope: Scope, target: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Relay the connection until it ends."""


class GuardedConfig(uvicorn.Config):
    """uvicorn's settings, with ours for its protocols."""

    def __init__(self, app: Any, limits: ConnectionLimits, ports: Upgrades, **options: Any) -> None:
        super().__init__(
            app,
            http=HttpConnection,
            ws_ping_interval=limits.ping_seconds,
            ws_ping_timeout=limits.pong_seconds,
            **options,
        )
        self.open_connections = OpenConnections(limits)
        self.ports = ports


class OpenConnections:
    """How many connections there are, in all and by address."""

    def __init__(self, limits: ConnectionLimits) -> None:
        self.limits = limits
        self.total = 0
        self.by_address: Counter[str] = Counter()

    def has_room(self, address: str) -> bool:
        """Whether one more may come from this address, which is empty for a Unix socket."""
        if self.total >= self.limits.connections:
            return False
        return not address or self.by_address[address] < self.limits.per_address

    def add(self, address: str) -> None:
        self.total += 1
        self.by_address[address] += 1

    def remove(self, address: str) -> None:
        self.total -= 1
        self.by_address[address] -= 1
        if not self.by_address[address]:
            del self.by_address[address]


class UnreadAnswer:
    """Watches whether a client takes what is sent to it."""

    def __init__(self, transport: asyncio.Transport, limits: ConnectionLimits) -> None:
        self._transport = transport
        self._limits = limits
        self._until: float | None = None
        self._size = 0

    def paused(self) -> None:
        """From now on nothing more is written until the client has taken most of it."""
        self._begin()

    def resumed(self) -> None:
        self._until = None

    def _begin(self) -> None:
        self._until = asyncio.get_running_loop().time() + self._limits.stall_seconds
        self._size = self._transport.get_write_buffer_size()

    def is_stuck(self, now: float) -> bool:
        """Whether the client takes too little. A connection that closes must get rid of its rest too."""
        if self._until is None:
            if self._transport.is_closing() and self._transport.get_write_buffer_size():
                self._begin()
            return False
        left = self._transport.get_write_buffer_size()
        self._until = self._limits.extended(self._until, max(0, self._size - left), now)
        self._size = left
        return now > self._until


class HttpConnection(HttpToolsProtocol):
    """An HTTP connection with bounds."""

    config: GuardedConfig
    _counted = False
    _head_since: float | None = None
    _head_size = 0
    _body_until: float | None = None
    _unwanted = 0
    streams = False
    """Whether the body of the request is passed on as it comes, for as long as the client likes."""
    lost = False
    """Whether the client has closed the connection."""
    _working: asyncio.Task[Any] | None = None

    @property
    def _limits(self) -> ConnectionLimits:
        return self.config.open_connections.limits

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._unread = UnreadAnswer(transport, self._limits)
        self._head_since = self.loop.time()
        opened, address = self.config.open_connections, address_of(self.client)
        if not opened.has_room(address):
            self._refuse(503, "too many connections", "retry-after: 5\r\n")
            return
        self._counted = True
        opened.add(address)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.lost = True
        self._cancel_working()
        if self._counted:
            self.config.open_connections.remove(address_of(self.client))

    def cancel_when_lost(self, task: asyncio.Task[Any] | None) -> None:
        """Cancel this task, and no other, when the client goes away."""
        self._working = task
        if task is None:
            return
        if self.lost:
            self.loop.call_soon(self._cancel_working)
        else:
            self.flow.resume_reading()  # paused after a large body: then the end would not be seen

    def _cancel_working(self) -> None:
        if self._working is not None:
            self._working.cancel()

    # --- What arrives -----------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if self._head_since is None and self._body_until is None:
            self._head_since = self.loop.time()  # the first byte of the next request
        if self._head_since is not None:
            self._head_size += len(data)
        super().data_received(data)
        if self._head_since is not None and self._head_size > self._limits.head_bytes:
            self._refuse(431, f"the head of a request may have {self._limits.head_bytes} bytes")

    def on_headers_complete(self) -> None:
        self._head_since, self._head_size = None, 0
        size = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        if size > self._limits.head_bytes:
            self._refuse(431, f"the head of a request may have {self._limits.head_bytes} bytes")
            return
        self._body_until, self._unwanted = self.loop.time() + self._limits.stall_seconds, 0
        self.streams = False
        self.scope[CONNECTION] = self  # type: ignore[literal-required]
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        if self._body_until is not None:
            self._body_until = self._limits.extended(self._body_until, len(body), self.loop.time())
        if self._is_early:
            return
        if self.cycle.response_complete:  # it was refused. To close at once would take the answer away
            self._unwanted += len(body)
            if self._unwanted > UNWANTED_MAX:
                reset(self.transport)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._body_until = None
        if not self._is_early:
            super().on_message_complete()

    @property
    def _is_early(self) -> bool:
        """Whether no request has been passed on yet, which uvicorn's types do not know."""
        return self.cycle is None

    # --- Upgrades ---------------------------------------------------------------------------------------

    def _should_upgrade(self) -> bool:
        return self.config.ports.target(self.url) is not None or super()._should_upgrade()

    def handle_websocket_upgrade(self) -> None:
        is_answered = self.cycle is None or self.cycle.response_complete
        if not is_answered or self.flow.write_paused:  # write_paused: the client has not read the answer
            # From then on another protocol would learn that the connection is lost, and the request go on.
            self._refuse(400, "an upgrade must wait for the answers to the requests before it")
            return
        target = self.config.ports.target(self.url)
        if target is None:
            super().handle_websocket_upgrade()
        else:
            task = self.loop.create_task(self._upgrade(target))
            self.tasks.add(task)
            task.add_done_callback(self.tasks.discard)

    async def _upgrade(self, target: Any) -> None:
        """Hand the connection over."""
        reader = asyncio.StreamReader(loop=self.loop)
        protocol = asyncio.StreamReaderProtocol(reader, loop=self.loop)
        protocol.connection_made(self.transport)
        self.transport.set_protocol(protocol)
        self.connections.discard(self)
        writer = asyncio.StreamWriter(self.transport, protocol, reader, self.loop)
        scope = {**self.scope, "type": "http", "path": target.prefix, "query_string": b""}
        try:
            await self.config.ports.upgrade(scope, target, reader, writer)
        finally:
            self.config.open_connections.remove(address_of(self.client))
            writer.close()

    # --- Time -------------------------------------------------------------------------------------------

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread.paused()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._unread.resumed()

    def check(self, now: float) -> None:
        """End the connection if its client is too slow."""
        limits = self._limits
        if self._unread.is_stuck(now):
            reset(self.transport)
        elif self.transport.is_closing():
            return
        elif self._head_since is not None and now - self._head_since > limits.head_seconds:
            self._refuse(408, "the head of the request did not come in time")
        elif self._body_until is not None and not self.streams:
            if self.flow.read_paused:  # we do not take it: that is not the client's fault
                self._body_until = now + limits.stall_seconds
            elif now <= self._body_until:
                return
            elif self.cycle is not None and self.cycle.response_complete:
                reset(self.transport)
            else:
                self._refuse(408, "the body of the request comes too slowly")

    def _refuse(self, status: int, reason: str, headers: str = "") -> None:
        """Answer, unless an answer has begun, and close."""
        started = self.cycle is not None and self.cycle.response_started and not self.cycle.response_complete
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if not started:
            body = msgspec.json.encode({"error": {"code": "refused", "message": reason}}) + b"\n"
            head = (
                f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: application/json\r\n"
                f"{headers}content-length: {len(body)}\r\nconnection: close\r\n\r\n"
            )
            self.transport.write(head.encode() + body)
        self.transport.close()


def reset(transport: asyncio.Transport) -> None:
    """End a connection at once. Without a reset, the kernel would keep what the client does not take."""
    found = transport.get_extra_info("socket")
    if found is not None:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
    transport.abort()


def address_of(client: tuple[str, int] | None) -> str:
    """The address of a client; empty for a Unix socket."""
    return client[0] if client else ""


def check_all(connections: Iterable[Any], now: float) -> None:
    """End all connections whose clients are too slow."""
    for connection in list(connections):
        connection.check(now)

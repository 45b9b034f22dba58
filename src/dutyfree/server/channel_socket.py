"""The WebSocket of a channel: uvicorn's, without the queue and the task that bring messages to others.

Those cost two turns of the event loop and two system calls for each message, about as much as reading a file.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import cast

from starlette.websockets import WebSocket
from uvicorn._types import ASGISendEvent
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import Frame
from websockets.http11 import Request

from dutyfree.server.connections import GuardedConfig, UnreadAnswer, address_of, reset
from dutyfree.server.turns import Inbox, Turns
from dutyfree.wire.websocket import MessageFinder, pack

PIECES_MAX = 1024
"""Fragments of one message. Empty ones count for nothing in its size."""

_SCOPE = "dutyfree.socket"


class ChannelSocket(WebSocketsSansIOProtocol):
    """A WebSocket whose messages go to a function at once, after ``hand_over``."""

    config: GuardedConfig
    _inbox: Inbox | None = None
    _finder: MessageFinder | None = None
    _descriptor: int | None = None
    """Of the connection, if its bytes go as they are."""
    _pauses = 0
    """How many reasons there are to read no messages: too many answers wait, or messages."""
    _pong = b""
    """The answer to the latest ping, if the client does not take what was sent before."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._unread = UnreadAnswer(self.transport, self.config.open_connections.limits)
        self._turn = asyncio.Lock()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.config.open_connections.remove(address_of(self.client))  # HttpConnection has added it

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread.paused()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._unread.resumed()
        if self._pong:
            pong, self._pong = self._pong, b""
            self.transport.write(pong)

    def pause_reading(self) -> None:
        """Take no further messages. ``check`` ends a client that does not take the answers."""
        self._pauses += 1
        if self._pauses == 1 and not self.transport.is_closing():
            self.transport.pause_reading()

    def resume_reading(self) -> None:
        self._pauses -= 1
        if not (self._pauses or self.read_paused or self.transport.is_closing()):
            self.transport.resume_reading()  # read_paused: uvicorn has too many messages that are no frames

    def check(self, now: float) -> None:
        """End the connection if its client does not take what is sent."""
        if self._unread.is_stuck(now):
            reset(self.transport)

    def handle_ping(self) -> None:
        if self.writable.is_set():
            super().handle_ping()
        else:  # only the latest is answered, or they would pile up
            self._pong = b"".join(self.conn.data_to_send())

    def keepalive_timeout(self) -> None:
        if self._pauses:  # its pong may be there, unread
            self.pong_timer = self.pending_ping_payload = None
            self.schedule_ping()
            return
        super().keepalive_timeout()
        reset(self.transport)  # the client is gone, or reads nothing: what is not sent yet never will be

    def handle_cont(self, event: Frame) -> None:
        super().handle_cont(event)
        if len(self.frames) > PIECES_MAX:
            reset(self.transport)

    async def send(self, message: ASGISendEvent) -> None:
        await super().send(message)
        if message["type"] == "websocket.http.response.body" and not message.get("more_body"):
            self.handshake_complete = True  # it was refused. uvicorn logs an error otherwise

    @staticmethod
    def of(socket: WebSocket) -> ChannelSocket:
        """The protocol of a connection that an endpoint gets."""
        found: ChannelSocket = socket.scope[_SCOPE]
        return found

    def handle_connect(self, event: Request) -> None:
        super().handle_connect(event)
        if not self.close_sent:  # otherwise it was no handshake
            cast("dict[str, object]", self.scope)[_SCOPE] = self

    def send_receive_event_to_app(self) -> None:
        if self._inbox is None or self.curr_msg_data_type == "text" or self.close_sent:
            super().send_receive_event_to_app()
            return
        parts, self.frames = self.frames, []
        self._inbox.add(bytes(parts[0]) if len(parts) == 1 else b"".join(parts))

    def data_received(self, data: bytes) -> None:
        if self._finder is not None:
            self._finder.feed(data)
        else:
            super().data_received(data)

    def hand_over(self, turns: Turns, on_message: Callable[[bytes, float], None]) -> None:
        """From now on pass messages to this function, with when they came."""

        def handle(message: bytes, since: float) -> None:
            if not (self.close_sent or self.disconnected):
                on_message(message, since)

        self._inbox = Inbox(turns, self, handle)
        if self.transport.get_extra_info("sslcontext") is None:
            self._descriptor = self.transport.get_extra_info("socket").fileno()
        size = self.config.ws_max_size
        self._finder = MessageFinder(size, self._inbox.add, super().data_received, masked=True)

    def write_now(self, frame: bytes) -> bool:
        """Send a message if the client has taken those before; False if it has not, or is gone."""
        if not self.writable.is_set() or self.disconnected or self.close_sent or self.transport.is_closing():
            return False
        data = pack(frame)
        if self._descriptor is not None and not self.transport.get_write_buffer_size():
            # At once: uvloop writes at the end of a turn of the loop.
            try:
                sent = os.write(self._descriptor, data)
            except OSError:  # the transport finds out what is wrong, or waits
                sent = 0
            if sent == len(data):
                return True
            data = data[sent:]
        self.transport.write(data)
        return True

    async def write(self, frame: bytes) -> None:
        """Send a message, when the client has taken those before. Raises ConnectionError if it is gone."""
        if self.writable.is_set():
            self._write(frame)
            return
        async with self._turn:  # otherwise all that wait would be written at once
            while not self.writable.is_set():
                await self.writable.wait()
            self._write(frame)

    def _write(self, frame: bytes) -> None:
        if self.disconnected or self.close_sent or self.transport.is_closing():
            raise ConnectionError("the client is gone")
        self.transport.write(pack(frame))

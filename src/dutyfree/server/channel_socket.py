"""The WebSocket of a channel: uvicorn's, without the queue and the task that bring messages to others.

Those cost two turns of the event loop and two system calls for each message, about as much as reading a file.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from starlette.websockets import WebSocket
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.http11 import Request

_SCOPE = "dutyfree.socket"


class ChannelSocket(WebSocketsSansIOProtocol):
    """A WebSocket whose messages go to ``on_message`` at once, from when it is set."""

    on_message: Callable[[bytes], None] | None = None

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
        if self.on_message is None or self.curr_msg_data_type == "text" or self.close_sent:
            super().send_receive_event_to_app()
            return
        parts, self.frames = self.frames, []
        self.on_message(bytes(parts[0]) if len(parts) == 1 else b"".join(parts))

    async def write(self, frame: bytes) -> None:
        """Send a message, when the client has taken those before. Raises ConnectionError if it is gone."""
        if not self.writable.is_set():
            await self.writable.wait()
        if self.disconnected or self.close_sent or self.transport.is_closing():
            raise ConnectionError("the client is gone")
        self.conn.send_binary(frame)
        self.transport.write(b"".join(self.conn.data_to_send()))

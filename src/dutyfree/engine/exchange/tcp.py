"""Connect to peers over TCP."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from urllib.parse import urlsplit

from dutyfree.contract.errors import CreateError, UsageError
from dutyfree.engine.exchange import messages
from dutyfree.engine.exchange.messages import CancellableReader, MessageStream
from dutyfree.engine.exchange.protocol import Peer, StreamPeer
from dutyfree.engine.store.cancel import CancelToken

SCHEME = "tcp://"

CONNECT_SECONDS = 5.0
KEEPALIVE_SECONDS = 30.0
"""After this time without an answer to the kernel's keep-alive probes, a machine counts as gone."""

_IDLE, _INTERVAL, _PROBES = 5, 5, 4


def parse_address(text: str) -> tuple[str, int]:
    """Parse ``HOST:PORT``, with brackets around an IPv6 address. Raises UsageError."""
    with contextlib.suppress(ValueError):
        parts = urlsplit(f"//{text}")
        if parts.hostname and parts.port is not None and parts.netloc == text and "@" not in text:
            return parts.hostname, parts.port
    raise UsageError(
        f"{text!r} is not an address", remedy="write HOST:PORT, such as node-1:7400 or [::1]:7400"
    )


@contextlib.contextmanager
def connect(source: str, cancel: CancelToken) -> Iterator[Peer]:
    """Connect to the server at ``tcp://HOST:PORT``. Raises UsageError, CreateError."""
    host, port = parse_address(source.removeprefix(SCHEME))
    token = messages.read_token()
    try:
        connection = socket.create_connection((host, port), CONNECT_SECONDS)
    except OSError as error:
        raise CreateError(
            f"{source} does not answer: {error}", remedy="is `dutyfree layer serve --bind` running there?"
        ) from error
    with connection:
        try:
            enable_keepalive(connection)
            stream = MessageStream(CancellableReader(connection.fileno(), cancel), SocketWriter(connection))
            stream = messages.client_handshake(stream, token)
        except OSError as error:
            raise CreateError(f"the connection to {source} failed: {error}") from error
        yield StreamPeer(stream)


class SocketWriter:
    """Writes to a connection without buffering. Raises OSError if the other end does not read in time."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def write(self, data: bytes, /) -> None:
        self._connection.sendall(data)

    def flush(self) -> None:
        """Nothing to do: there is no buffer."""


def enable_keepalive(connection: socket.socket) -> None:
    """Let the kernel detect that the other machine is gone, even while the connection is idle."""
    connection.settimeout(KEEPALIVE_SECONDS)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_NODELAY, 1),
        (socket.TCP_KEEPIDLE, _IDLE),
        (socket.TCP_KEEPINTVL, _INTERVAL),
        (socket.TCP_KEEPCNT, _PROBES),
        (socket.TCP_USER_TIMEOUT, int(KEEPALIVE_SECONDS * 1000)),
    ):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)

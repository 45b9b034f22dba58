"""Peers over TCP: addresses as people write them, and connections that notice when the other end is gone."""

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

TCP = "tcp://"

CONNECTING = 5.0
"""Seconds in which a machine that is there answers."""
SILENCE = 30.0
"""Seconds after which a machine that no longer answers the kernel's own questions is taken for gone."""

_IDLE, _BETWEEN, _TRIES = 5, 5, 4


def address(text: str) -> tuple[str, int]:
    """``HOST:PORT``, with brackets around an IPv6 address. Raises UsageError."""
    with contextlib.suppress(ValueError):
        parts = urlsplit(f"//{text}")
        if parts.hostname and parts.port is not None and parts.netloc == text and "@" not in text:
            return parts.hostname, parts.port
    raise UsageError(f"{text!r} is no address", remedy="write HOST:PORT, such as node-1:7400 or [::1]:7400")


@contextlib.contextmanager
def connected(source: str, cancel: CancelToken) -> Iterator[Peer]:
    """One who listens there (``tcp://HOST:PORT``). Raises UsageError, CreateError."""
    host, port = address(source.removeprefix(TCP))
    token = messages.token()
    try:
        connection = socket.create_connection((host, port), CONNECTING)
    except OSError as error:
        raise CreateError(
            f"{source} does not answer: {error}", remedy="is `dutyfree layer serve --bind` running there?"
        ) from error
    with connection:
        try:
            watched(connection)
            said = messages.greeted(
                MessageStream(CancellableReader(connection.fileno(), cancel), SocketWriter(connection)), token
            )
        except OSError as error:
            raise CreateError(f"{source} cannot be asked: {error}") from error
        yield StreamPeer(said)


class SocketWriter:
    """A connection as a file that is written: as fast as it is read at the other end, but no slower.

    Raises OSError where a piece is not taken in time.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def write(self, data: bytes, /) -> None:
        self._connection.sendall(data)

    def flush(self) -> None:
        """Nothing is held back."""


def watched(connection: socket.socket) -> None:
    """Have the kernel find out whether the other machine is still there, also while nothing is said."""
    connection.settimeout(SILENCE)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_NODELAY, 1),
        (socket.TCP_KEEPIDLE, _IDLE),
        (socket.TCP_KEEPINTVL, _BETWEEN),
        (socket.TCP_KEEPCNT, _TRIES),
        (socket.TCP_USER_TIMEOUT, int(SILENCE * 1000)),
    ):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)

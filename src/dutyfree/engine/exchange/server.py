"""Serve layers over TCP, for clusters whose machines cannot log in to each other.

The number of clients, the time of each, and the number of layers that are packed at once are limited. On any
address but the loopback, clients need a token (``messages``). The data is not encrypted.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import threading
from collections.abc import Callable
from time import monotonic

from dutyfree.contract.errors import DutyfreeError, UsageError
from dutyfree.engine.exchange import messages, protocol, tcp
from dutyfree.engine.exchange.messages import CancellableReader, Hello, MessageStream
from dutyfree.engine.exchange.protocol import StorePeer
from dutyfree.engine.exchange.tcp import SocketWriter
from dutyfree.engine.store.cancel import POLL_SECONDS, Cancelled, CancelToken
from dutyfree.engine.store.store import Store

CLIENTS_MAX = 64
PACKING_MAX = 2
"""Clients for which layers are packed at the same time: each takes a processor."""
HANDSHAKE_SECONDS = 10.0
IDLE_SECONDS = 60.0
"""A client that sends no request for this time is disconnected."""
CONNECTION_SECONDS = 1800.0
"""The longest connection. A client that is disconnected continues in the next one."""

Report = Callable[[str], None]


def listen(address: str, token: bytes) -> socket.socket:
    """Open a listening socket at ``HOST:PORT``. Raises UsageError."""
    host, port = tcp.parse_address(address)
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, place = found[0]
        if not (token or ipaddress.ip_address(place[0]).is_loopback):
            raise UsageError(
                f"serving at {address} needs a token: other machines could get every layer",
                remedy=f"set {messages.TOKEN} or {messages.TOKEN_FILE} at both ends, or use 127.0.0.1",
            )
        return socket.create_server(place[:2], family=family, backlog=CLIENTS_MAX)
    except (OSError, OverflowError) as error:
        raise UsageError(f"cannot listen at {address}: {error}") from error


class LayerServer:
    """Answers clients at one listening socket. ``serve`` blocks."""

    def __init__(
        self,
        store: Store,
        listener: socket.socket,
        token: bytes,
        report: Report,
        *,
        handshake_seconds: float = HANDSHAKE_SECONDS,
    ) -> None:
        self._store = store
        self._listener = listener
        self._token = token
        self._report = report
        self._handshake_seconds = handshake_seconds
        self._pack_limit = threading.Semaphore(PACKING_MAX)
        self._clients: dict[threading.Thread, tuple[socket.socket, float]] = {}
        """Each client's connection and its deadline."""

    def serve(self, cancel: CancelToken) -> None:
        """Serve until cancelled. Raises Cancelled."""
        self._listener.settimeout(POLL_SECONDS)
        try:
            while True:
                cancel.check()
                self._disconnect_overdue(monotonic())
                try:
                    connection, address = self._listener.accept()
                except TimeoutError:
                    continue
                except OSError:  # too many open files, or the client is gone already
                    cancel.wait(POLL_SECONDS)
                    continue
                self._start(connection, str(address[0]), cancel)
        finally:
            self._listener.close()
            cancel.set()
            self._disconnect_overdue(float("inf"))
            for thread in list(self._clients):
                thread.join()

    def _start(self, connection: socket.socket, client: str, cancel: CancelToken) -> None:
        if len(self._clients) >= CLIENTS_MAX:
            stream = MessageStream(CancellableReader(connection.fileno(), cancel), SocketWriter(connection))
            with connection, contextlib.suppress(OSError):
                stream.send(Hello(error=f"it serves {CLIENTS_MAX} other clients already"))
            return
        thread = threading.Thread(
            target=self._answer, args=(connection, client, cancel), name=f"dutyfree {client}"
        )
        self._clients[thread] = connection, monotonic() + self._handshake_seconds
        try:
            thread.start()
        except RuntimeError:  # the system has no more threads
            del self._clients[thread]
            connection.close()

    def _disconnect_overdue(self, now: float) -> None:
        for thread, (connection, deadline) in list(self._clients.items()):
            if not thread.is_alive():
                del self._clients[thread]
            elif now > deadline:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)  # wakes the thread, wherever it is

    def _answer(self, connection: socket.socket, client: str, cancel: CancelToken) -> None:
        thread = threading.current_thread()
        with connection:
            reader = CancellableReader(connection.fileno(), cancel, self._handshake_seconds)
            try:
                tcp.enable_keepalive(connection)
                stream = MessageStream(reader, SocketWriter(connection))
                stream = messages.server_handshake(stream, self._token)
                self._clients[thread] = connection, monotonic() + CONNECTION_SECONDS
                reader.timeout = IDLE_SECONDS
                sent = protocol.serve(StorePeer(self._store, cancel, self._pack_limit), stream, cancel)
                if sent:
                    self._report(f"{client}: sent {sent} bytes of layers")
            except Cancelled:
                return
            except (OSError, DutyfreeError) as error:
                self._report(f"{client}: {error}")

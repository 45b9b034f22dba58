"""Layers for whoever connects: the exchange over TCP, for clusters without logins between their machines.

It answers a bounded number of clients, each for a bounded time, and packs a bounded number of layers at once.
Outside of the loopback it wants a token (``lines``). What is said is not encrypted.
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
from dutyfree.engine.exchange.messages import PATIENCE, CancellableReader, Hello, MessageStream
from dutyfree.engine.exchange.protocol import StorePeer
from dutyfree.engine.exchange.tcp import SocketWriter
from dutyfree.engine.store.cancel import Cancelled, CancelToken
from dutyfree.engine.store.store import Store

CLIENTS = 64
"""Conversations at once; further ones are told so."""
PACKING = 2
"""Of them, those for which something is packed: it takes a processor each."""
GREETING = 10.0
"""Seconds in which a client shows that it knows the token."""
IDLE = 60.0
"""Seconds after which one that asks nothing is hung up on."""
LONGEST = 1800.0
"""Seconds of one conversation: what was cut by that is taken up again in the next."""

Say = Callable[[str], None]


def bound(where: str, token: bytes) -> socket.socket:
    """A socket that listens at ``HOST:PORT``. Raises UsageError."""
    host, port = tcp.address(where)
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, place = found[0]
        if not (token or ipaddress.ip_address(place[0]).is_loopback):
            raise UsageError(
                f"at {where} others could have every layer: that needs a token",
                remedy=f"set {messages.TOKEN} or {messages.TOKEN_FILE} at both ends, or listen at 127.0.0.1",
            )
        return socket.create_server(place[:2], family=family, backlog=CLIENTS)
    except (OSError, OverflowError) as error:
        raise UsageError(f"nobody can listen at {where}: {error}") from error


class LayerServer:
    """One server. ``serve`` blocks."""

    def __init__(self, store: Store, listener: socket.socket, token: bytes, say: Say) -> None:
        self._store = store
        self._listener = listener
        self._token = token
        self._say = say
        self._turn = threading.Semaphore(PACKING)
        self._clients: dict[threading.Thread, tuple[socket.socket, float]] = {}
        """Whom we talk to, and until when at most."""

    def serve(self, cancel: CancelToken) -> None:
        """Until it is halted. Raises Cancelled."""
        self._listener.settimeout(PATIENCE)
        try:
            while True:
                cancel.check()
                self._hang_up(monotonic())
                try:
                    connection, address = self._listener.accept()
                except TimeoutError:
                    continue
                except OSError:  # too many files are open, or it was gone before it was there
                    cancel.wait(PATIENCE)
                    continue
                self._begin(connection, str(address[0]), cancel)
        finally:
            self._listener.close()
            cancel.set()
            self._hang_up(float("inf"))
            for thread in list(self._clients):
                thread.join()

    def _begin(self, connection: socket.socket, who: str, cancel: CancelToken) -> None:
        if len(self._clients) >= CLIENTS:
            with connection, contextlib.suppress(OSError):
                MessageStream(CancellableReader(connection.fileno(), cancel), SocketWriter(connection)).put(
                    Hello(error=f"it talks to {CLIENTS} others")
                )
            return
        thread = threading.Thread(target=self._answer, args=(connection, who, cancel), name=f"dutyfree {who}")
        self._clients[thread] = connection, monotonic() + GREETING
        try:
            thread.start()
        except RuntimeError:  # no more threads are to be had
            del self._clients[thread]
            connection.close()

    def _hang_up(self, now: float) -> None:
        """On those whose time is over."""
        for thread, (connection, until) in list(self._clients.items()):
            if not thread.is_alive():
                del self._clients[thread]
            elif now > until:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)  # the thread notices, wherever it is

    def _answer(self, connection: socket.socket, who: str, cancel: CancelToken) -> None:
        thread = threading.current_thread()
        with connection:
            reader = CancellableReader(connection.fileno(), cancel, GREETING)
            try:
                tcp.watched(connection)
                known = messages.received(MessageStream(reader, SocketWriter(connection)), self._token)
                self._clients[thread] = connection, monotonic() + LONGEST
                reader.silence = IDLE
                sent = protocol.serve(StorePeer(self._store, cancel, self._turn), known, cancel)
                if sent:
                    self._say(f"{who}: {sent} bytes of layers")
            except Cancelled:
                return
            except (OSError, DutyfreeError) as error:
                self._say(f"{who}: {error}")

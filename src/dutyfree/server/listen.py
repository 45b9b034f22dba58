"""Listen for clients: on a TCP address, with or without TLS, or on a Unix socket."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import os
import socket
import ssl
import struct
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import uvicorn
from starlette.requests import HTTPConnection
from starlette.types import Scope

from dutyfree.contract.errors import Unavailable, UsageError
from dutyfree.engine.host import proc
from dutyfree.server import ports
from dutyfree.server.access import Access
from dutyfree.server.app import Routes, waited_for
from dutyfree.server.bodies import ByteBudget, bounded
from dutyfree.server.channel_socket import ChannelSocket
from dutyfree.server.connections import ConnectionLimits, GuardedConfig, check_all
from dutyfree.server.e2b import envd, templates
from dutyfree.server.service import Service
from dutyfree.server.tokens import Tokens
from dutyfree.wire import frames

DEFAULT = "127.0.0.1:7800"
_BACKLOG = 1024
_PEER = struct.Struct("3i")
"""struct ucred: the process, user and group at the other end of a Unix socket."""
_PEER_OPTION = (socket.SOL_SOCKET, socket.SO_PEERCRED)
_PROBE_SECONDS = 5.0
_LISTENING = "0A"
"""The state of a listening socket in /proc/net/tcp."""
_CHECK_TICKS = 5
"""uvicorn's ticks, of a tenth of a second, between two looks at all connections."""


class Address:
    """Where a server listens: ``HOST:PORT``, or ``unix:PATH``."""

    def __init__(self, text: str) -> None:
        """Raises UsageError."""
        self.path = text.removeprefix("unix:") if text.startswith("unix:") else None
        self.host, self.port = "", 0
        if self.path is not None:
            if not self.path:
                raise UsageError("the Unix socket has no path", remedy="write unix:/run/dutyfree.sock")
            return
        host, colon, port = text.rpartition(":")
        if not colon or not port.isdigit() or int(port) > 65535:
            raise UsageError(f"{text!r} is not HOST:PORT", remedy=f"write {DEFAULT}, or unix:PATH")
        self.host, self.port = host.strip("[]"), int(port)

    @property
    def is_local(self) -> bool:
        """Whether only programs on this machine can connect."""
        if self.path is not None:
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    def check_free(self, leaving: int | None) -> None:
        """Raises Unavailable if a server could not listen here once the process ``leaving`` has ended."""
        try:
            with self.bind():
                if self.path is not None:
                    Path(self.path).unlink()
        except Unavailable as error:
            cause = error.__cause__
            in_use = isinstance(cause, OSError) and cause.errno == errno.EADDRINUSE
            if not in_use or leaving is None or not self._is_served_by(leaving):
                raise

    def _is_served_by(self, pid: int) -> bool:
        if self.path is not None:
            return _unix_server(self.path) == pid
        return not _listening_sockets(self.port).isdisjoint(_sockets_of(pid))

    def bind(self) -> socket.socket:
        """A listening socket. Raises Unavailable."""
        try:
            if self.path is not None:
                return _bind_unix(Path(self.path))
            return _bind_tcp(self.host, self.port)
        except OSError as error:
            where = self.path or f"{self.host}:{self.port}"
            remedy = "choose another address with --listen"
            if error.errno == errno.EADDRINUSE:
                remedy = "stop the program that listens there, or choose another port with --listen"
            raise Unavailable(
                f"cannot listen on {where}: {error.strerror or error}", remedy=remedy
            ) from error


def _unix_server(path: str) -> int | None:
    """The process that listens at a path; None if there is none."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(_PROBE_SECONDS)
        try:
            probe.connect(path)
        except TimeoutError:
            return 0  # it is too busy to say who it is
        except OSError:
            return None
        process: int = _PEER.unpack(probe.getsockopt(*_PEER_OPTION, _PEER.size))[0]
        return process


def _listening_sockets(port: int) -> set[str]:
    """The listening sockets with this port, by inode."""
    found = set()
    for table in ("net/tcp", "net/tcp6"):
        for line in proc.text(table).splitlines()[1:]:
            words = line.split()
            if words[3] == _LISTENING and int(words[1].rpartition(":")[2], 16) == port:
                found.add(words[9])
    return found


def _sockets_of(pid: int) -> set[str]:
    """The sockets that a process has, by inode."""
    found = set()
    with contextlib.suppress(OSError):
        for opened in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):  # closed meanwhile
                found.add(str(opened.readlink()).removeprefix("socket:[").removesuffix("]"))
    return found


def _find_lost_clients(listener: socket.socket) -> None:
    """Let the kernel probe quiet connections, and end those whose client is gone. Connections inherit it."""
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in ((socket.TCP_KEEPIDLE, 60), (socket.TCP_KEEPINTVL, 15), (socket.TCP_KEEPCNT, 4)):
        listener.setsockopt(socket.IPPROTO_TCP, option, value)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 120_000)  # milliseconds


def _bind_tcp(host: str, port: int) -> socket.socket:
    # With the number of TCP: asyncio sets TCP_NODELAY only then. Otherwise the second part of an answer waits
    # for the acknowledgement of the first one, up to 40 ms.
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    with _closed_on_error(listener):
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        _find_lost_clients(listener)
        listener.bind((host, port))
        listener.listen(_BACKLOG)
    return listener


def _bind_unix(path: Path) -> socket.socket:
    """Listen at a path, which replaces the socket of a server that has ended. Others cannot connect."""
    if path.is_socket():
        if _unix_server(str(path)) is not None:
            raise OSError(errno.EADDRINUSE, "a server listens there already")
        path.unlink()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with _closed_on_error(listener):
        before = os.umask(0o177)
        try:
            listener.bind(str(path))
        finally:
            os.umask(before)
        listener.listen(_BACKLOG)
    return listener


@contextlib.contextmanager
def _closed_on_error(listener: socket.socket) -> Iterator[None]:
    try:
        yield
    except OSError:
        listener.close()
        raise


def url_of(listener: socket.socket, *, tls: bool) -> str:
    """The address for clients."""
    if listener.family == socket.AF_UNIX:
        return f"unix:{listener.getsockname()}"
    host, port = listener.getsockname()[:2]
    return f"{'https' if tls else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"


def check_tokens(address: Address, tokens: Tokens) -> None:
    """Raises UsageError if anyone on the network could use the server without a token."""
    if not address.is_local and not tokens.exist():
        raise UsageError(
            f"{address.host}:{address.port} can be reached from other machines, and there is no token",
            remedy="create one: dutyfree token create TENANT",
        )


def check_certificate(certificate: Path, key: Path) -> None:
    """Raises UsageError if TLS cannot use the certificate with the key."""
    with _certificate_errors(certificate, key):
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key)


@contextlib.contextmanager
def _certificate_errors(certificate: Path | None, key: Path | None) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UsageError(
            f"cannot use the certificate {certificate} with the key {key}: {error.strerror or error}",
            remedy="give two files in PEM format: the certificate and its private key",
        ) from error


@asynccontextmanager
async def serving(
    service: Service,
    address: Address,
    *,
    certificate: Path | None = None,
    key: Path | None = None,
    connections: ConnectionLimits | None = None,
    budget: ByteBudget | None = None,
) -> AsyncIterator[str]:
    """Serve while the context lasts; gives the URL. Raises UsageError, Unavailable."""
    check_tokens(address, service.tokens)
    access = Access(service.tokens, needs_token=not address.is_local or service.tokens.exist())
    routes = Routes(service, access)

    def tenant_of(scope: Scope) -> str | None:
        connection = HTTPConnection(scope)
        return access.known_tenant(connection) or envd.tenant_of(service, connection)

    def passes_on(scope: Scope) -> bool:
        return ports.passes_on(scope) or templates.is_upload(scope)

    config = GuardedConfig(
        bounded(waited_for(routes.app(), service), passes_on, budget or service.quotas.bytes, tenant_of),
        connections or ConnectionLimits(),
        routes.ports,
        log_config=None,
        access_log=False,
        lifespan="off",
        ws=ChannelSocket,
        ws_max_size=frames.FRAME_MAX,
        ws_per_message_deflate=False,
        server_header=False,
        ssl_certfile=None if certificate is None else str(certificate),
        ssl_keyfile=None if key is None else str(key),
        timeout_graceful_shutdown=5,
    )
    with _certificate_errors(certificate, key):
        config.load()  # here, because a server task that fails never listens
    listener = address.bind()
    server = _Server(config)
    task = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        await server.listening.wait()
        yield url_of(listener, tls=certificate is not None)
    finally:
        service.readiness.draining = True
        service.events.close()  # or their readers would keep the server from ending
        server.should_exit = True
        await asyncio.wait([task])
        if address.path is not None:
            Path(address.path).unlink(missing_ok=True)  # noqa: ASYNC240 (at the end)
        task.result()


class _Server(uvicorn.Server):
    """Leaves signals to the caller, and says when it listens."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()

    async def on_tick(self, counter: int) -> bool:
        if counter % _CHECK_TICKS == 0:
            check_all(self.server_state.connections, asyncio.get_running_loop().time())
        return await super().on_tick(counter)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listening.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

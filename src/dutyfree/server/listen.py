"""Listen for clients: on a TCP address, with or without TLS, or on a Unix socket."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import os
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import uvicorn
from starlette.requests import HTTPConnection
from starlette.types import Scope

from dutyfree.contract.errors import Unavailable, UsageError
from dutyfree.server import ports
from dutyfree.server.access import Access
from dutyfree.server.app import Routes
from dutyfree.server.bodies import ByteBudget, bounded
from dutyfree.server.channel_socket import ChannelSocket
from dutyfree.server.connections import ConnectionLimits, GuardedConfig, check_all
from dutyfree.server.e2b import envd, templates
from dutyfree.server.service import Service
from dutyfree.wire import frames

DEFAULT = "127.0.0.1:7800"
_BACKLOG = 1024
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

    def bind(self) -> socket.socket:
        """A listening socket. Raises Unavailable."""
        try:
            if self.path is not None:
                return _bind_unix(Path(self.path))
            family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
            # With the number of TCP: asyncio sets TCP_NODELAY only then. Otherwise the second part of an
            # answer waits for the acknowledgement of the first one, up to 40 ms.
            listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            _find_lost_clients(listener)
            listener.bind((self.host, self.port))
            listener.listen(_BACKLOG)
        except OSError as error:
            where = self.path or f"{self.host}:{self.port}"
            remedy = "choose another address with --listen"
            if error.errno == errno.EADDRINUSE:
                remedy = "stop the program that listens there, or choose another port with --listen"
            raise Unavailable(
                f"cannot listen on {where}: {error.strerror or error}", remedy=remedy
            ) from error
        return listener


def _find_lost_clients(listener: socket.socket) -> None:
    """Let the kernel probe quiet connections, and end those whose client is gone. Connections inherit it."""
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in ((socket.TCP_KEEPIDLE, 60), (socket.TCP_KEEPINTVL, 15), (socket.TCP_KEEPCNT, 4)):
        listener.setsockopt(socket.IPPROTO_TCP, option, value)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 120_000)  # milliseconds


def _bind_unix(path: Path) -> socket.socket:
    """Listen at a path, which replaces the socket of a server that has ended. Others cannot connect."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    if path.is_socket():
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe, contextlib.suppress(OSError):
            probe.connect(str(path))
            raise OSError(errno.EADDRINUSE, "a server listens there already")
        path.unlink()
    before = os.umask(0o177)
    try:
        listener.bind(str(path))
    finally:
        os.umask(before)
    listener.listen(_BACKLOG)
    return listener


def url_of(listener: socket.socket, *, tls: bool) -> str:
    """The address for clients."""
    if listener.family == socket.AF_UNIX:
        return f"unix:{listener.getsockname()}"
    host, port = listener.getsockname()[:2]
    return f"{'https' if tls else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"


def check(address: Address, service: Service) -> None:
    """Raises UsageError if anyone on the network could use the server without a token."""
    if not address.is_local and not service.tokens.exist():
        raise UsageError(
            f"{address.host}:{address.port} can be reached from other machines, and there is no token",
            remedy="create one: dutyfree token create TENANT",
        )


def _load(config: uvicorn.Config, certificate: Path | None, key: Path | None) -> None:
    """Read the certificate and the key. Raises UsageError if TLS cannot use them."""
    try:
        config.load()
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
    check(address, service)
    access = Access(service.tokens, needs_token=not address.is_local or service.tokens.exist())
    routes = Routes(service, access)

    def tenant_of(scope: Scope) -> str | None:
        connection = HTTPConnection(scope)
        return access.known_tenant(connection) or envd.tenant_of(service, connection)

    def passes_on(scope: Scope) -> bool:
        return ports.passes_on(scope) or templates.is_upload(scope)

    config = GuardedConfig(
        bounded(routes.app(), passes_on, budget or service.quotas.bytes, tenant_of),
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
    _load(config, certificate, key)  # here, because a server task that fails never listens
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

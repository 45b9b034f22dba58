"""Servers inside of sandboxes: HTTP by path, and any protocol over TCP after an upgrade.

``/v1/sandboxes/ID/ports/PORT/…`` goes to that port on the loopback of the sandbox, and nowhere else. What
comes back was written by untrusted code, and has the same origin as this server. So a page gets an origin of
its own (``Content-Security-Policy: sandbox``), and neither sets nor gets cookies. The client's token stays
here.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import anyio
import h11
from anyio.abc import ByteStream
from starlette.requests import ClientDisconnect, HTTPConnection, Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from dutyfree.contract.errors import ActionError, DutyfreeError
from dutyfree.server import logs
from dutyfree.server.access import SUBPROTOCOL, Access, Refused
from dutyfree.server.connections import CONNECTION, reset
from dutyfree.server.json_form import dump
from dutyfree.server.service import Service
from dutyfree.wire.errors import WireError, describe, retry_headers, status_of

PATH = re.compile(rb"/v1/sandboxes/([^/?]{1,80})/ports/(\d{1,5})(/[^?]*)?")
TCP = "tcp"
"""The protocol of an upgrade to plain TCP."""

_CHUNK = 64 << 10
_HEAD_SECONDS = 30.0
"""In how many seconds a server in a sandbox must answer an upgrade."""
_HEADS_MAX = 64 << 10
_STATUS_END = 600

_HOP = ("connection", "keep-alive", "proxy-connection", "te", "trailer", "transfer-encoding", "upgrade")
_SECRET = ("authorization", "proxy-authorization", "x-api-key", "cookie")
"""Headers that are not for the sandbox: they are the client's identity here, or that of another sandbox."""
_HARMFUL = (
    "set-cookie",
    "clear-site-data",
    "strict-transport-security",
    "alt-svc",
    "service-worker-allowed",
    "proxy-authenticate",
    "www-authenticate",
    "nel",
    "report-to",
    "reporting-endpoints",
)
"""Headers by which an answer could act on the whole origin, which is this server's."""
_SAFE = (
    (
        "content-security-policy",
        "sandbox allow-scripts allow-forms allow-popups allow-modals allow-downloads",
    ),
    ("x-content-type-options", "nosniff"),
    ("referrer-policy", "no-referrer"),
    ("cross-origin-opener-policy", "same-origin"),
)


class Target(NamedTuple):
    """A port of a sandbox, and what is asked of it."""

    sandbox: str
    port: int
    path: str
    """As it is sent, with the query."""

    @property
    def prefix(self) -> str:
        return f"/v1/sandboxes/{self.sandbox}/ports/{self.port}"


def target_of(url: bytes) -> Target | None:
    """What a URL without a host names, if that is a port."""
    path, mark, query = url.partition(b"?")
    found = PATH.fullmatch(path)
    if found is None or not 0 < int(found[2]) < 65536:
        return None
    asked = (found[3] or b"/") + mark + query
    return Target(found[1].decode("ascii", "replace"), int(found[2]), asked.decode("ascii", "replace"))


class PortRoutes:
    """The routes to the ports of all sandboxes."""

    def __init__(self, service: Service, access: Access) -> None:
        self._service = service
        self._access = access

    def routes(self) -> list[Route]:
        one = "/v1/sandboxes/{sandbox}/ports/{port:int}"
        return [Route(one, _Endpoint(self)), Route(one + "/{path:path}", _Endpoint(self))]

    @asynccontextmanager
    async def _connected(self, connection: HTTPConnection, target: Target) -> AsyncIterator[ByteStream]:
        """A connection to the port. It counts as one call of its tenant. Raises Refused, DutyfreeError."""
        if connection.headers.get("service-worker"):
            raise Refused(403, "forbidden", "a page of a sandbox cannot have a service worker")
        tenant = await self._access.tenant(connection, page_of_sandbox=True)
        held = self._service.sandboxes.get(tenant, target.sandbox)
        self._service.check_draining()
        with self._service.quotas.call(tenant):
            async with await held.sandbox.connect(target.port) as inner:
                yield inner

    # --- HTTP -------------------------------------------------------------------------------------------

    async def proxy(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, and its answer back, both as they come."""
        request = Request(scope, receive)
        raw = scope["raw_path"] + (b"?" + scope["query_string"] if scope["query_string"] else b"")
        target = target_of(raw)
        response: Response | None = None
        try:
            if target is None:
                raise Refused(404, "not_found", "there is no such port")
            if not scope["path_params"].get("path") and not scope["raw_path"].endswith(b"/"):
                response = RedirectResponse(target.prefix + target.path, 308)
            else:
                async with self._connected(request, target) as inner:
                    scope[CONNECTION].streams = True
                    await _Exchange(request, send, target, inner).run()
        except Refused as error:
            logs.refused(request, error.status, error.error.code)
            response = _failure(error.error, error.status)
        except DutyfreeError as error:
            found = describe(error)
            status = 502 if isinstance(error, ActionError) else status_of(found)
            response = _failure(found, status, retry_headers(error))
        except ClientDisconnect:
            response = Response(status_code=499)
        if response is not None:
            await response(scope, receive, send)

    # --- Upgrades ---------------------------------------------------------------------------------------

    def target(self, url: bytes) -> Target | None:
        return target_of(url)

    async def upgrade(
        self, scope: Scope, target: Target, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Relay a connection after ``Connection: Upgrade``: a WebSocket of a server, or plain TCP."""
        connection = HTTPConnection(scope)
        protocol = connection.headers.get("upgrade", "").lower()
        try:
            async with self._connected(connection, target) as inner:
                rest = b""
                if protocol == TCP:
                    writer.write(
                        b"HTTP/1.1 101 Switching Protocols\r\nconnection: Upgrade\r\nupgrade: tcp\r\n\r\n"
                    )
                else:
                    rest = await _handshake(connection, target, inner, writer)
                writer.write(rest)
                await _relay(reader, writer, inner)
        except Refused as error:
            logs.refused(connection, error.status, error.error.code)
            _write_failure(writer, error.error, error.status)
        except DutyfreeError as error:
            status = 502 if isinstance(error, ActionError) else status_of(describe(error))
            _write_failure(writer, describe(error), status)
        except (OSError, TimeoutError, anyio.BrokenResourceError, anyio.EndOfStream, h11.ProtocolError):
            found = WireError("bad_gateway", "the server in the sandbox refused the upgrade", "task", False)
            _write_failure(writer, found, 502)


class _Endpoint:
    """An ASGI application, which takes all methods."""

    def __init__(self, routes: PortRoutes) -> None:
        self._routes = routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._routes.proxy(scope, receive, send)


# --- HTTP -------------------------------------------------------------------------------------------


class _Exchange:
    """One request and its answer."""

    def __init__(self, request: Request, send: Send, target: Target, inner: ByteStream) -> None:
        self._request = request
        self._send = send
        self._target = target
        self._inner = inner
        self._wire = h11.Connection(h11.CLIENT, max_incomplete_event_size=_HEADS_MAX)
        self._started = False

    async def run(self) -> None:
        """Raises ClientDisconnect, and ActionError if the server gives no answer that is one."""
        asking = asyncio.ensure_future(self._ask())
        answering = asyncio.ensure_future(self._answer())
        try:
            await asyncio.wait([asking, answering], return_when=asyncio.FIRST_COMPLETED)
            if not answering.done() and asking.exception() is not None:
                asking.result()  # the client is gone
            await answering
        except (anyio.BrokenResourceError, anyio.EndOfStream, h11.ProtocolError) as error:
            if self._started:  # the client must not take a part for the whole
                reset(self._request.scope[CONNECTION].transport)
            else:
                where = f"port {self._target.port}"
                raise ActionError(f"the server at {where} of the sandbox gave no answer") from error
        finally:
            for task in (asking, answering):
                task.cancel()
            await asyncio.wait([asking, answering])
            for task in (asking, answering):
                task.cancelled() or task.exception()  # it was seen above, or came with the end

    async def _ask(self) -> None:
        """Send the request, and wait until the client goes away. Raises ClientDisconnect."""
        headers = list(_passed_on(self._request, self._target))
        await self._transmit(
            h11.Request(method=self._request.method, target=self._target.path, headers=headers)
        )
        with contextlib.suppress(anyio.BrokenResourceError):  # it answers before it has read all
            async for part in self._request.stream():
                if part:
                    await self._transmit(h11.Data(data=part))
            await self._transmit(h11.EndOfMessage())
        while (await self._request.receive())["type"] != "http.disconnect":
            pass
        raise ClientDisconnect

    async def _transmit(self, event: h11.Event) -> None:
        if data := self._wire.send(event):
            await self._inner.send(data)

    async def _answer(self) -> None:
        while True:
            event = self._wire.next_event()
            if event is h11.NEED_DATA:
                try:
                    self._wire.receive_data(await self._inner.receive(_CHUNK))
                except anyio.EndOfStream:
                    self._wire.receive_data(b"")
            elif isinstance(event, h11.Response):
                if event.status_code >= _STATUS_END:
                    raise h11.RemoteProtocolError("there is no such status")
                headers = _answered(event.headers, self._target)
                start = {"type": "http.response.start", "status": event.status_code, "headers": headers}
                self._started = True
                await self._send(start)
            elif isinstance(event, h11.Data):
                await self._send({"type": "http.response.body", "body": bytes(event.data), "more_body": True})
            elif isinstance(event, h11.EndOfMessage):
                await self._send({"type": "http.response.body", "body": b""})
                return
            elif isinstance(event, h11.ConnectionClosed) or event is h11.PAUSED:
                raise anyio.EndOfStream


def _passed_on(connection: HTTPConnection, target: Target) -> Iterable[tuple[str, str]]:
    """The headers for the server in the sandbox."""
    listed = {name.strip().lower() for name in connection.headers.get("connection", "").split(",")}
    dropped = {*_HOP, *_SECRET, *listed, "host", "expect"}
    yield "Host", f"localhost:{target.port}"
    yield "Connection", "close"
    yield "X-Forwarded-Prefix", target.prefix
    yield "X-Forwarded-Host", connection.headers.get("host", "")
    yield "X-Forwarded-Proto", connection.url.scheme
    for name, value in connection.headers.items():
        if name == "sec-websocket-protocol" and not (value := _without_token(value)):
            continue
        if name not in dropped and not name.startswith("x-forwarded-"):
            yield name, value
    if "transfer-encoding" in connection.headers and "content-length" not in connection.headers:
        yield "Transfer-Encoding", "chunked"


def _without_token(protocols: str) -> str:
    """The subprotocols of a WebSocket that are for its server: one of them may carry the client's token."""
    names = [name.strip() for name in protocols.split(",")]
    return ", ".join(name for name in names if not name.lower().startswith(SUBPROTOCOL))


def _answered(headers: Iterable[tuple[bytes, bytes]], target: Target) -> list[tuple[bytes, bytes]]:
    """The headers for the client."""
    pairs = [(name.decode("latin-1").lower(), value.decode("latin-1")) for name, value in headers]
    listed = {
        one.strip().lower() for name, value in pairs if name == "connection" for one in value.split(",")
    }
    # Of two equal headers, a browser may take the first, or none. Of policies for content it takes both.
    ours = {name for name, _ in _SAFE} - {"content-security-policy"}
    dropped = {*_HOP, *_HARMFUL, *ours, *listed}
    found = [
        (name, _located(value, target) if name == "location" else value)
        for name, value in pairs
        if name not in dropped
    ]
    return [(name.encode(), value.encode("latin-1")) for name, value in (*found, *_SAFE)]


def _located(place: str, target: Target) -> str:
    """Where a redirection leads, from outside."""
    own = re.match(rf"https?://(?:localhost|127\.0\.0\.1):{target.port}(?=/|$)", place)
    if own is not None:
        place = place[own.end() :] or "/"
    return target.prefix + place if place.startswith("/") and not place.startswith("//") else place


# --- Upgrades ---------------------------------------------------------------------------------------


async def _handshake(
    connection: HTTPConnection, target: Target, inner: ByteStream, writer: asyncio.StreamWriter
) -> bytes:
    """Let the server in the sandbox switch protocols. Returns what it has sent after its head.

    Raises h11.ProtocolError, TimeoutError and anyio's errors if it does not.
    """
    wire = h11.Connection(h11.CLIENT, max_incomplete_event_size=_HEADS_MAX)
    upgrade = connection.headers.get("upgrade", "")
    headers = [pair for pair in _passed_on(connection, target) if pair[0] != "Connection"]
    headers += [("Connection", "Upgrade"), ("Upgrade", upgrade)]
    data = wire.send(h11.Request(method="GET", target=target.path, headers=headers))
    data = (data or b"") + (wire.send(h11.EndOfMessage()) or b"")
    async with asyncio.timeout(_HEAD_SECONDS):
        await inner.send(data)
        while (event := wire.next_event()) is h11.NEED_DATA:
            wire.receive_data(await inner.receive(_CHUNK))
    if not isinstance(event, h11.InformationalResponse) or event.status_code != 101:
        raise h11.RemoteProtocolError("no upgrade")
    writer.write(
        b"HTTP/1.1 101 Switching Protocols\r\nconnection: Upgrade\r\nupgrade: " + upgrade.encode() + b"\r\n"
    )
    for name, value in _answered(event.headers, target):
        if name.startswith(b"sec-websocket-"):
            writer.write(name + b": " + value + b"\r\n")
    writer.write(b"\r\n")
    return bytes(wire.trailing_data[0])


async def _relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, inner: ByteStream) -> None:
    """Pass bytes on in both directions until both have ended, or one fails."""

    async def inwards() -> None:
        while data := await reader.read(_CHUNK):
            await inner.send(data)
        await inner.send_eof()

    async def outwards() -> None:
        with contextlib.suppress(anyio.EndOfStream):
            while True:
                writer.write(await inner.receive(_CHUNK))
                await writer.drain()
        if writer.can_write_eof():
            writer.write_eof()

    tasks = [asyncio.ensure_future(inwards()), asyncio.ensure_future(outwards())]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        for task in tasks:
            task.cancelled() or task.exception()  # the other side is gone


def _failure(error: WireError, status: int, headers: dict[str, str] | None = None) -> Response:
    return Response(dump({"error": error}) + b"\n", status, headers, media_type="application/json")


def _write_failure(writer: asyncio.StreamWriter, error: WireError, status: int) -> None:
    body = dump({"error": error}) + b"\n"
    head = f"HTTP/1.1 {status} Refused\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
    writer.write(head.encode() + b"connection: close\r\n\r\n" + body)


def passes_on(scope: Any) -> bool:
    """Whether the body of a request is passed on as it comes, and never held as a whole."""
    return PATH.match(scope.get("raw_path", b"")) is not None

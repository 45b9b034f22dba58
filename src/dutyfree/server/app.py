"""The HTTP routes of the service: the channel, the calls over plain HTTP, and what operators look at.

Every call of ``wire.calls`` without items is also ``POST /v1/CALL`` or ``POST /v1/sandboxes/ID/CALL``, with
its arguments as JSON or MessagePack. Creation, listing, removal and files have the routes that people expect.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.convertors import StringConvertor, register_url_convertor
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route, WebSocketRoute
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.websockets import WebSocket, WebSocketDisconnect

from dutyfree.contract import Read, Write
from dutyfree.contract.errors import ArgumentError, DutyfreeError, Exhausted, UsageError
from dutyfree.server import event_stream, json_form, logs, openapi
from dutyfree.server.access import Access, Refused
from dutyfree.server.bodies import LARGEST_REQUEST
from dutyfree.server.channel import Channel, ProtocolError
from dutyfree.server.channel_socket import ChannelSocket
from dutyfree.server.dashboard import pages as dashboard
from dutyfree.server.disconnects import while_connected
from dutyfree.server.e2b.control import ControlRoutes
from dutyfree.server.e2b.envd import EnvdRoutes
from dutyfree.server.fusion import run_code
from dutyfree.server.handlers import HANDLERS, DirectCall
from dutyfree.server.handlers.creation import info
from dutyfree.server.layers import LayerRoutes
from dutyfree.server.observed import Origin, command_of, request_id
from dutyfree.server.ports import PortRoutes
from dutyfree.server.requests import CreateRequest
from dutyfree.server.sandboxes import Held
from dutyfree.server.service import Service
from dutyfree.server.swerex import SwerexRoutes
from dutyfree.server.tokens import FRESH
from dutyfree.wire import calls, codec, frames
from dutyfree.wire.arguments import decode_arguments
from dutyfree.wire.errors import WireError, describe, retry_headers, status_of
from dutyfree.wire.recipes import WireRecipe

MSGPACK = "application/msgpack"
EVENTS = "/v1/events"
PAGE = 100
"""Sandboxes on a page of the list."""

_log = logging.getLogger(__name__)


class _CallOfNode(StringConvertor):
    regex = "|".join(name for name in openapi.plain_calls() if name in openapi.NODE_CALLS)


class _CallOfSandbox(StringConvertor):
    regex = "|".join(name for name in openapi.plain_calls() if name not in openapi.NODE_CALLS)


register_url_convertor("node_call", _CallOfNode())
register_url_convertor("sandbox_call", _CallOfSandbox())

Endpoint = Callable[["Routes", Request, str], Awaitable[Response]]


class Routes:
    """The endpoints of one service."""

    def __init__(self, service: Service, access: Access) -> None:
        self._service = service
        self._access = access
        self.ports = PortRoutes(service, access)
        self._layers = LayerRoutes(service.distribution, service.layer_access, access)

    def app(self) -> Starlette:
        return Starlette(
            routes=[  # the first one that fits is taken, so the most frequent one comes first
                Route(
                    "/v1/sandboxes/{sandbox}/{call:sandbox_call}",
                    self._guarded(Routes.call),
                    methods=["POST"],
                ),
                Route("/healthz", _healthy),
                Route("/readyz", self.readyz),
                Route("/metrics", self._guarded(Routes.metrics, while_draining=True), methods=["GET"]),
                WebSocketRoute(frames.PATH, self.channel),
                Route("/v1/sandboxes", self._guarded(Routes.create), methods=["POST"]),
                Route("/v1/sandboxes", self._guarded(Routes.list), methods=["GET"]),
                Route("/v1/sandboxes/{sandbox}", self._guarded(Routes.show), methods=["GET"]),
                Route("/v1/sandboxes/{sandbox}", self._guarded(Routes.remove), methods=["DELETE"]),
                Route("/v1/sandboxes/{sandbox}/files", self._guarded(Routes.read), methods=["GET"]),
                Route("/v1/sandboxes/{sandbox}/files", self._guarded(Routes.write), methods=["PUT"]),
                Route("/v1/{call:node_call}", self._guarded(Routes.call), methods=["POST"]),
                Route(EVENTS, self._guarded(Routes.events, while_draining=True), methods=["GET"]),
                Route("/v1/openapi.json", _document),
                *dashboard.routes(),
                Route("/run_code", self._guarded(Routes.run_code), methods=["POST"]),
                *ControlRoutes(self._service, self._access).routes(),
                *EnvdRoutes(self._service).routes(),
                *self.ports.routes(),
                *SwerexRoutes(self._service, self._access).routes(),
                Route("/v1/layers", self._guarded(Routes.layers), methods=["GET"]),
                *self._layers.routes(),
            ],
            exception_handlers={404: _unknown, 405: _unknown},
        )

    def _guarded(
        self, endpoint: Endpoint, *, while_draining: bool = False
    ) -> Callable[[Request], Awaitable[Response]]:
        """``while_draining``: whether it also answers while another server is about to go on."""

        async def guarded(request: Request) -> Response:
            request.state.request_id = request_id(request.headers.get("x-request-id"))
            response = await answered(request)
            response.headers["x-request-id"] = request.state.request_id
            return response

        async def answered(request: Request) -> Response:
            try:
                tenant = await self._access.tenant(request)
                if not while_draining:
                    self._service.check_draining()
                with self._service.quotas.call(tenant):
                    return await endpoint(self, request, tenant)
            except Refused as error:
                logs.refused(request, error.status, error.error.code)
                return _answer(request, {"error": error.error}, error.status)
            except DutyfreeError as error:
                found = describe(error)
                return _answer(request, {"error": found}, status_of(found), retry_headers(error))
            except ClientDisconnect:
                return Response(status_code=499)
            except Exception as error:  # noqa: BLE001 (a defect, which is logged)
                _log.exception("%s %s failed", request.method, request.url.path)
                return _answer(request, {"error": describe(error)}, 500)

        return guarded

    # --- The channel ------------------------------------------------------------------------------------

    async def channel(self, socket: WebSocket) -> None:
        try:
            tenant = await self._access.tenant(socket)
            with self._service.quotas.channel(tenant):
                await self._converse(socket, tenant)
        except Refused as error:
            await socket.send_denial_response(_failure(error.error, error.status))
        except Exhausted as error:
            await socket.send_denial_response(_failure(describe(error), 429, retry_headers(error)))

    async def _converse(self, socket: WebSocket, tenant: str) -> None:
        await socket.accept(subprotocol=frames.PROTOCOL)
        direct = ChannelSocket.of(socket)
        channel = Channel(self._service, tenant, direct, LARGEST_REQUEST)
        ended: asyncio.Future[tuple[int, str]] = asyncio.get_running_loop().create_future()

        def receive(frame: bytes, since: float) -> None:
            if ended.done():
                return
            try:
                channel.receive(frame, since)
            except ProtocolError as error:
                ended.set_result((4400, str(error)[:100]))
            except Exception:  # noqa: BLE001 (a defect, which must not leave a call without an answer)
                _log.exception("a message of a channel failed")
                ended.set_result((1011, "a defect of the server"))

        direct.hand_over(self._service.turns, receive)
        gone = asyncio.create_task(socket.receive())  # the end, or a text, which is no frame
        refused = asyncio.create_task(self._until_refused(socket))
        try:
            watched: list[asyncio.Future[Any]] = [ended, gone, refused]
            await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
            code, reason = (4401, "the token was revoked") if refused.done() else (4400, "a text is no frame")
            if ended.done():
                code, reason = ended.result()
            ended.cancel()  # no further messages are handled
            with contextlib.suppress(RuntimeError, WebSocketDisconnect):  # it is closed already
                await socket.close(code, reason)
        finally:
            ended.cancel()
            gone.cancel()
            refused.cancel()
            await channel.close()

    async def _until_refused(self, socket: WebSocket) -> None:
        """Wait until the token of a channel was revoked."""
        with contextlib.suppress(Refused):
            while True:
                await asyncio.sleep(FRESH)
                await self._access.tenant(socket)

    # --- Sandboxes --------------------------------------------------------------------------------------

    async def create(self, request: Request, tenant: str) -> Response:
        wanted = await _body(request, CreateRequest)
        if wanted.image is not None and wanted.recipe is not None:
            raise UsageError("give an image or a recipe, not both", remedy="name the image in the recipe")
        self._service.overload.check(tenant, "create")
        key = request.headers.get("idempotency-key") or secrets.token_hex(16)
        call = calls.Create(
            key,
            wanted.recipe or WireRecipe(wanted.image),
            wanted.limits,
            wanted.labels,
            wanted.lease,
            patience=wanted.patience or _prefer_wait(request),
        )
        work = HANDLERS["create"](DirectCall(self._service, tenant, ""), call)
        observed = self._service.calls.call("create", tenant, lambda: _origin(request, tenant), work)
        (made,) = await while_connected(request, observed)
        return _answer(request, made, 201)

    async def run_code(self, request: Request, tenant: str) -> Response:
        return await run_code(self._service, tenant, request)

    async def readyz(self, _request: Request) -> Response:
        found = await self._service.readiness.look()
        return json_form.json_response(found, 200 if found.ready else 503)

    async def events(self, request: Request, tenant: str) -> Response:
        return await event_stream.stream(self._service.events, self._access, tenant, request)

    async def layers(self, request: Request, tenant: str) -> Response:
        return await self._layers.chains(request, tenant)

    async def metrics(self, request: Request, _tenant: str) -> Response:
        await self._access.check_operator(request)
        return Response(self._service.metrics.text(), media_type="text/plain; version=0.0.4")

    async def list(self, request: Request, tenant: str) -> Response:
        """A page of sandboxes, by id. ``next`` is the ``after`` of the following page."""
        after = request.query_params.get("after", "")
        found = sorted(self._service.sandboxes.of(tenant), key=lambda held: held.id)
        rest = [held for held in found if held.id > after]
        page = [info(held) for held in rest[:PAGE]]
        following = page[-1].id if len(rest) > PAGE else None
        return _answer(request, {"sandboxes": page, "next": following})

    async def show(self, request: Request, tenant: str) -> Response:
        return _answer(request, info(self._held(request, tenant)))

    async def remove(self, request: Request, tenant: str) -> Response:
        await self._service.sandboxes.release(self._held(request, tenant))
        return Response(status_code=204)

    async def read(self, request: Request, tenant: str) -> Response:
        path = _query(request, "path")
        data = await HANDLERS["read"](self._call(request, tenant), Read(path))
        return Response(data, media_type="application/octet-stream")

    async def write(self, request: Request, tenant: str) -> Response:
        path, mode = _query(request, "path"), request.query_params.get("mode", "644")
        try:
            number = int(mode, 8)
        except ValueError:
            raise ArgumentError(f"mode must be octal digits, not {mode[:20]!r}") from None
        await HANDLERS["write"](self._call(request, tenant), Write(path, await request.body(), number))
        return Response(status_code=204)

    async def call(self, request: Request, tenant: str) -> Response:
        """A call of the table. It is cancelled if the client goes away."""
        name = request.path_params["call"]
        arguments = await _body(request, calls.CALLS[name].arguments)
        self._service.overload.check(tenant, name)
        work = HANDLERS[name](self._call(request, tenant), arguments)
        observed = self._service.calls.call(name, tenant, lambda: _origin(request, tenant, arguments), work)
        return _answer(request, await while_connected(request, observed))

    def _call(self, request: Request, tenant: str) -> DirectCall:
        return DirectCall(self._service, tenant, request.path_params.get("sandbox", ""))

    def _held(self, request: Request, tenant: str) -> Held:
        return self._service.sandboxes.get(tenant, request.path_params["sandbox"])


def waited_for(app: ASGIApp, service: Service) -> ASGIApp:
    """The same application. A server that another one replaces waits for the requests that run."""

    async def counted(scope: Scope, receive: Receive, send: Send) -> None:
        # Events are read for ever. A request that comes while the server waits is refused.
        if scope["type"] != "http" or scope["path"] == EVENTS or service.draining:
            await app(scope, receive, send)
            return
        with service.metrics.waited_for():
            await app(scope, receive, send)

    return counted


async def _document(_: Request) -> Response:
    return Response(openapi.document(), media_type="application/json")


async def _unknown(request: Request, error: Exception) -> Response:
    """The answer to a request that no route takes: an error of the same form as all others."""
    assert isinstance(error, HTTPException)
    message = f"there is no {request.method} {request.url.path[:200]}"
    found = WireError("not_found", message, "program", retryable=False, remedy="see: GET /v1/openapi.json")
    return _answer(request, {"error": found}, error.status_code, dict(error.headers or {}))


async def _healthy(_: Request) -> Response:
    return Response("ok\n", media_type="text/plain")


def _origin(request: Request, tenant: str, arguments: object = None) -> Origin:
    return Origin(
        tenant,
        request.path_params.get("sandbox", ""),
        request.state.request_id,
        request.headers.get("traceparent", ""),
        command_of(arguments),
    )


def _prefer_wait(request: Request) -> float | None:
    """The seconds that a client wants to wait at most, if it says so (``Prefer: wait=10``, RFC 7240)."""
    for preference in request.headers.get("prefer", "").split(","):
        name, _, value = preference.partition("=")
        if name.strip().lower() == "wait" and value.strip().isdigit():
            return float(value)
    return None


def _query(request: Request, name: str) -> str:
    """Raises ArgumentError."""
    value = request.query_params.get(name)
    if value is None:
        raise ArgumentError(f"the query has no {name}", remedy=f"add ?{name}=…")
    return value


async def _body(request: Request, kind: Any) -> Any:
    body = await request.body()
    if request.headers.get("content-type", "").startswith(MSGPACK):
        try:
            return decode_arguments(body, kind)
        except msgspec.DecodeError as error:
            raise ArgumentError(f"the body of the request is not valid: {error}") from error
    return json_form.load(body, kind)


def _failure(error: WireError, status: int, headers: dict[str, str] | None = None) -> Response:
    body = json_form.dump({"error": error}) + b"\n"
    return Response(body, status, headers, media_type="application/json")


def _answer(
    request: Request, value: object, status: int = 200, headers: dict[str, str] | None = None
) -> Response:
    if MSGPACK in request.headers.get("accept", ""):
        return Response(codec.encode(value), status, headers, media_type=MSGPACK)
    return Response(json_form.dump(value) + b"\n", status, headers, media_type="application/json")

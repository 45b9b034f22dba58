"""E2B's API for sandboxes as a whole: create, connect, list, end, pause, fork, snapshots, the network."""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Any

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from dutyfree.contract import Limits
from dutyfree.contract.errors import DutyfreeError, RecipeError, UsageError
from dutyfree.server.access import Access, Refused
from dutyfree.server.disconnects import while_connected
from dutyfree.server.handlers import HANDLERS, DirectCall
from dutyfree.server.json_form import json_response
from dutyfree.server.sandboxes import Held
from dutyfree.server.service import Service
from dutyfree.wire import calls
from dutyfree.wire.errors import describe, retry_headers, status_of
from dutyfree.wire.recipes import WireRecipe

ENVD_VERSION = "0.6.1"
"""The version of E2B's own program in a sandbox whose calls are served here."""
BASE = ("base", "default", "")
"""Templates that stand for the server's usual image."""
LEASE = 300
"""Seconds that a sandbox lives if the client does not say."""
PAUSED = 7 * 86400.0
"""Seconds that a paused sandbox is kept."""

Endpoint = Callable[["ControlRoutes", Request, str], Awaitable[Response]]


class NewSandbox(msgspec.Struct, frozen=True, rename="camel"):
    """What the SDK sends to create a sandbox. Fields that mean nothing here are ignored."""

    template_id: str = msgspec.field(default="", name="templateID")
    timeout: float | None = None
    metadata: dict[str, str] = {}
    env_vars: dict[str, str] = {}
    allow_internet_access: bool | None = msgspec.field(default=None, name="allow_internet_access")
    network: dict[str, Any] | None = None


class Seconds(msgspec.Struct, frozen=True):
    timeout: float | None = None
    duration: float | None = None
    count: int | None = None


class ControlRoutes:
    """The routes of E2B's control API."""

    def __init__(self, service: Service, access: Access) -> None:
        self._service = service
        self._access = access
        self._templates: dict[str, str] = {}

    def routes(self) -> list[Route]:
        one = "/sandboxes/{sandbox}"
        endpoints: list[tuple[str, str, Endpoint]] = [
            ("POST", "/v2/sandboxes", ControlRoutes.create),
            ("POST", "/sandboxes", ControlRoutes.create),
            ("GET", "/v2/sandboxes", ControlRoutes.list),
            ("GET", "/sandboxes", ControlRoutes.list),
            ("GET", one, ControlRoutes.show),
            ("DELETE", one, ControlRoutes.kill),
            ("POST", f"{one}/timeout", ControlRoutes.set_timeout),
            ("POST", f"{one}/refreshes", ControlRoutes.set_timeout),
            ("POST", f"{one}/pause", ControlRoutes.pause),
            ("POST", f"{one}/resume", ControlRoutes.resume),
            ("POST", f"{one}/connect", ControlRoutes.resume),
            ("POST", f"/v2{one}/connect", ControlRoutes.resume),
            ("POST", f"{one}/fork", ControlRoutes.fork),
            ("POST", f"{one}/snapshots", ControlRoutes.snapshot),
            ("PUT", f"{one}/network", ControlRoutes.set_network),
            ("DELETE", "/templates/{template:path}", ControlRoutes.remove_template),
        ]
        return [Route(path, self._guarded(endpoint), methods=[verb]) for verb, path, endpoint in endpoints]

    def _guarded(self, endpoint: Endpoint) -> Callable[[Request], Awaitable[Response]]:
        async def guarded(request: Request) -> Response:
            try:
                return await endpoint(self, request, await self._access.tenant(request))
            except ClientDisconnect:
                return Response(status_code=499)
            except Refused as error:
                return json_response({"code": error.status, "message": str(error)}, error.status)
            except DutyfreeError as error:
                status = status_of(describe(error))
                return json_response({"code": status, "message": str(error)}, status, retry_headers(error))

        return guarded

    # --- Sandboxes --------------------------------------------------------------------------------------

    async def create(self, request: Request, tenant: str) -> Response:
        wanted = await _body(request, NewSandbox)
        context = DirectCall(self._service, tenant)
        call = calls.Create(
            key=request.headers.get("idempotency-key") or secrets.token_hex(16),
            recipe=WireRecipe(self._image(wanted.template_id), env=wanted.env_vars),
            limits=Limits(network=_network(wanted)),
            labels=wanted.metadata,
            lease=wanted.timeout or LEASE,
        )
        (made,) = await while_connected(request, HANDLERS["create"](context, call))
        held = self._service.sandboxes.get(tenant, made.id)
        held.template = wanted.template_id or BASE[0]
        await self._service.sandboxes.save(held)
        return json_response(_created(held), 201)

    def _image(self, template: str) -> str | None:
        """The image of a template. Raises RecipeError."""
        name = template.partition(":")[0]
        if name in BASE:
            return None
        if template in self._templates:
            return self._templates[template]
        raise RecipeError(f"template {template!r} not found", remedy="use 'base', or a snapshot")

    async def list(self, request: Request, tenant: str) -> Response:
        query = request.query_params
        states = query.getlist("state")
        wanted_states = {one for state in states for one in state.split(",")} or {"running", "paused"}
        pairs = dict(pair.split("=", 1) for pair in query.get("metadata", "").split("&") if "=" in pair)
        limit, after = int(query.get("limit", "100")), query.get("nextToken", "")
        found = sorted(self._service.sandboxes.of(tenant), key=lambda held: held.id)
        matching = [
            held
            for held in found
            if held.id > after
            and _state(held) in wanted_states
            and all(held.labels.get(name) == value for name, value in pairs.items())
        ]
        page = matching[:limit]
        headers = {"x-next-token": page[-1].id} if len(matching) > limit else {}
        return json_response([_listed(held) for held in page], headers=headers)

    async def show(self, request: Request, tenant: str) -> Response:
        held = self._held(request, tenant)
        return json_response({**_listed(held), "envdAccessToken": held.access_token})

    async def kill(self, request: Request, tenant: str) -> Response:
        await self._service.sandboxes.release(self._held(request, tenant))
        return Response(status_code=204)

    async def set_timeout(self, request: Request, tenant: str) -> Response:
        held = self._held(request, tenant)
        wanted = await _body(request, Seconds)
        self._service.sandboxes.keep_alive(held, wanted.timeout or wanted.duration or LEASE)
        return Response(status_code=204)

    async def pause(self, request: Request, tenant: str) -> Response:
        held = self._held(request, tenant)
        if held.sandbox.paused:
            return json_response({"code": 409, "message": "the sandbox is paused already"}, 409)
        await held.sandbox.pause()
        self._service.sandboxes.keep_alive(held, PAUSED)
        await self._service.sandboxes.save(held)
        return Response(status_code=204)

    async def resume(self, request: Request, tenant: str) -> Response:
        held = self._held(request, tenant)
        wanted = await _body(request, Seconds)
        was_paused = held.sandbox.paused
        if was_paused:
            await held.sandbox.resume()
        self._service.sandboxes.keep_alive(held, wanted.timeout or LEASE)
        await self._service.sandboxes.save(held)
        return json_response(_created(held), 201 if was_paused else 200)

    async def fork(self, request: Request, tenant: str) -> Response:
        parent = self._held(request, tenant)
        wanted = await _body(request, Seconds)
        call = calls.Fork(secrets.token_hex(16), wanted.count or 1, wanted.timeout or LEASE)
        work = HANDLERS["fork"](DirectCall(self._service, tenant, parent.id), call)
        made = await while_connected(request, work)
        children = [self._service.sandboxes.get(tenant, one.id) for one in made]
        for child in children:
            child.template = parent.template
        return json_response([{"sandbox": _created(child)} for child in children], 201)

    async def snapshot(self, request: Request, tenant: str) -> Response:
        """Keep the files of a sandbox as a template, by which others are created."""
        kept = await HANDLERS["snapshot"](
            DirectCall(self._service, tenant, self._held(request, tenant).id), calls.Snapshot()
        )
        name = f"snapshot-{secrets.token_hex(8)}"
        self._templates[name] = kept.image
        return json_response({"snapshotID": name, "names": []}, 201)

    async def remove_template(self, request: Request, tenant: str) -> Response:
        image = self._templates.get(request.path_params["template"])
        if image is None:
            return json_response({"code": 404, "message": "template not found"}, 404)
        self._service.forget_snapshot(tenant, WireRecipe(image))
        del self._templates[request.path_params["template"]]
        return Response(status_code=204)

    async def set_network(self, request: Request, tenant: str) -> Response:
        held = self._held(request, tenant)
        wanted = await _body(request, NewSandbox)
        network = msgspec.json.decode(await request.body() or b"{}")
        policy = _network(msgspec.structs.replace(wanted, network=network))
        call = calls.SetNetwork(policy)
        await HANDLERS["set_network"](DirectCall(self._service, tenant, held.id), call)
        return Response(status_code=204)

    def _held(self, request: Request, tenant: str) -> Held:
        return self._service.sandboxes.get(tenant, request.path_params["sandbox"])


def _network(wanted: NewSandbox) -> Any:
    """The network policy of a request: on, unless it says otherwise. Raises UsageError."""
    rules = wanted.network or {}
    allowed, denied = rules.get("allowOut") or (), rules.get("denyOut") or ()
    if wanted.allow_internet_access is False and not allowed:
        return "off"
    if allowed:
        return tuple(str(one) for one in allowed)
    if denied:
        if "0.0.0.0/0" in denied:
            return "off"
        raise UsageError("a list of denied hosts is not supported", remedy="list the allowed ones: allow_out")
    return "on"


def _created(held: Held) -> dict[str, Any]:
    return {
        "templateID": held.template,
        "sandboxID": held.id,
        "clientID": "dutyfree",
        "envdVersion": ENVD_VERSION,
        "envdAccessToken": held.access_token,
    }


def _listed(held: Held) -> dict[str, Any]:
    return {
        "templateID": held.template,
        "sandboxID": held.id,
        "clientID": "dutyfree",
        "startedAt": _time(held.created),
        "endAt": _time(held.expires),
        "cpuCount": 0,
        "memoryMB": 0,
        "diskSizeMB": 0,
        "state": _state(held),
        "envdVersion": ENVD_VERSION,
        "metadata": held.labels,
    }


def _state(held: Held) -> str:
    return "paused" if held.sandbox.paused else "running"


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


async def _body(request: Request, kind: Any) -> Any:
    """Raises UsageError."""
    try:
        return msgspec.json.decode(await request.body() or b"{}", type=kind)
    except msgspec.MsgspecError as error:
        raise UsageError(f"the body of the request is not valid: {error}") from error

"""E2B's API for sandboxes as a whole: create, connect, list, end, pause, fork, snapshots, the network.

A sandbox remembers the build of its template as ``TEMPLATE@BUILD``; clients see the part before the @.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from dutyfree.contract import Limits, NetworkPolicy
from dutyfree.contract.errors import DutyfreeError, RecipeError, UsageError
from dutyfree.server.access import Access, Refused
from dutyfree.server.disconnects import while_connected
from dutyfree.server.e2b.control_json import ENVD_VERSION, body_of, time_text
from dutyfree.server.e2b.template_builds import BASE, limits_of
from dutyfree.server.e2b.template_steps import HOME
from dutyfree.server.e2b.template_store import DEFAULT_TAG, Build, TakenSnapshot, TemplateRef
from dutyfree.server.e2b.templates import TemplateRoutes
from dutyfree.server.handlers import HANDLERS, DirectCall
from dutyfree.server.json_form import json_response
from dutyfree.server.sandboxes import Held
from dutyfree.server.service import Service
from dutyfree.wire import calls
from dutyfree.wire.errors import describe, retry_headers, status_of
from dutyfree.wire.recipes import WireRecipe

LEASE = 300
"""Seconds that a sandbox lives if the client does not say."""
PAUSED = 7 * 86400.0
"""Seconds that a paused sandbox is kept."""
NO_NETWORK_OPTIONS = ("rules", "egressProxy", "dnsServers", "httpsPorts", "maskRequestHost")
"""What E2B can do with the network of a sandbox, and this server cannot."""

Endpoint = Callable[["ControlRoutes", Request, str], Awaitable[Response]]


class NewSandbox(msgspec.Struct, frozen=True, rename="camel"):
    """What the SDK sends to create a sandbox. Fields that change nothing here are ignored."""

    template_id: str = msgspec.field(default="", name="templateID")
    timeout: float | None = None
    metadata: dict[str, str] = {}
    env_vars: dict[str, str] = {}
    allow_internet_access: bool | None = msgspec.field(default=None, name="allow_internet_access")
    network: dict[str, Any] | None = None
    auto_pause: bool | None = None
    mcp: dict[str, Any] | None = None
    iam: dict[str, Any] | None = None
    volume_mounts: list[Any] | None = None

    def check(self) -> None:
        """Refuse what a client would miss without noticing. Raises UsageError."""
        unknown = {
            "a pause at the end of the timeout": self.auto_pause,
            "an MCP gateway": self.mcp,
            "identities of sandboxes": self.iam,
            "volumes": self.volume_mounts,
        }
        if missing := [name for name, wanted in unknown.items() if wanted]:
            raise UsageError(f"this server does not have {' and '.join(missing)}", remedy="leave it out")


class Seconds(msgspec.Struct, frozen=True):
    timeout: float | None = None
    duration: float | None = None
    count: int | None = None


class Kept(msgspec.Struct, frozen=True):
    """What a client wants to keep of a sandbox: its memory too, or the files alone."""

    memory: bool | None = None
    name: str | None = None


class ControlRoutes:
    """The routes of E2B's control API."""

    def __init__(self, service: Service, access: Access) -> None:
        self._service = service
        self._access = access
        self._templates = TemplateRoutes(service)
        self._store = service.templates.store

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
            ("GET", f"{one}/metrics", ControlRoutes.metrics),
            ("GET", "/snapshots", ControlRoutes.list_snapshots),
            ("DELETE", "/templates/{template:path}", ControlRoutes.remove_template),
            *(
                (verb, f"/{what}{rest}", ControlRoutes.refuse)
                for what in ("volumes", "secrets")
                for rest in ("", "/{name:path}")
                for verb in ("GET", "POST", "DELETE")
            ),
        ]
        return [
            *self._templates.routes(self._guarded),
            *(
                Route(path, self._guarded(endpoint.__get__(self)), methods=[verb])
                for verb, path, endpoint in endpoints
            ),
        ]

    def _guarded(
        self, endpoint: Callable[[Request, str], Awaitable[Response]]
    ) -> Callable[[Request], Awaitable[Response]]:
        async def guarded(request: Request) -> Response:
            try:
                tenant = await self._access.tenant(request)
                self._service.check_draining()
                with self._service.quotas.call(tenant):
                    return await endpoint(request, tenant)
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
        wanted: NewSandbox = await body_of(request, NewSandbox)
        wanted.check()
        start = self._start(tenant, wanted.template_id)
        recipe = msgspec.structs.replace(start.recipe, env={**start.recipe.env, **wanted.env_vars})
        limits = Limits(network=_network(wanted, self._service.open_network))
        call = calls.Create(
            key=request.headers.get("idempotency-key") or secrets.token_hex(16),
            recipe=recipe,
            limits=limits if start.build is None else limits_of(start.build, limits.network),
            labels=wanted.metadata,
            lease=wanted.timeout or LEASE,
        )
        creating = HANDLERS["create"](DirectCall(self._service, tenant), call)
        (made,) = await while_connected(request, creating)
        held = self._service.sandboxes.get(tenant, made.id)
        held.template = start.name
        await self._service.sandboxes.save(held)
        return json_response(_created(held), 201)

    def _start(self, tenant: str, template: str) -> _Start:
        """What a template means. Raises RecipeError."""
        name, tag = TemplateRef.parse(template)
        taken = self._store.snapshots.get((tenant, name))
        if taken is not None and tag in (None, DEFAULT_TAG):
            home = {"HOME": HOME}
            return _Start(f"{name}@{taken.build}", WireRecipe(taken.image, env=home), None)
        state = self._service.templates.base(tenant, template)
        found = self._service.templates.store.ready(tenant, template)
        if found is None:
            return _Start(template or BASE[0], state.recipe, None)
        return _Start(f"{found[0].id}@{found[1].id}", state.recipe, found[1])

    async def list(self, request: Request, tenant: str) -> Response:
        query = request.query_params
        states = query.getlist("state")
        wanted_states = {one for state in states for one in state.split(",")} or {"running", "paused"}
        pairs = dict(pair.split("=", 1) for pair in query.get("metadata", "").split("&") if "=" in pair)
        limit = int(query["limit"]) if query.get("limit", "").isdigit() else 100
        last, ascending = query.get("nextToken", ""), query.get("order") == "asc"
        found = sorted(self._service.sandboxes.of(tenant), key=_place, reverse=not ascending)
        matching = [
            held
            for held in found
            if (not last or (_place(held) > last if ascending else _place(held) < last))
            and _state(held) in wanted_states
            and all(held.labels.get(name) == value for name, value in pairs.items())
        ]
        page = matching[:limit]
        headers = {"x-next-token": _place(page[-1])} if page and len(matching) > limit else {}
        return json_response([_listed(held) for held in page], headers=headers)

    async def show(self, request: Request, tenant: str) -> Response:
        held = self._held(request, tenant)
        return json_response({**_listed(held), "envdAccessToken": held.access_token})

    async def kill(self, request: Request, tenant: str) -> Response:
        await self._service.sandboxes.release(self._held(request, tenant))
        return Response(status_code=204)

    async def metrics(self, request: Request, tenant: str) -> Response:
        """None are kept: the answer is that of a sandbox without metrics yet."""
        self._held(request, tenant)
        return json_response([])

    async def set_timeout(self, request: Request, tenant: str) -> Response:
        held = self._held(request, tenant)
        wanted = await body_of(request, Seconds)
        self._service.sandboxes.keep_alive(held, wanted.timeout or wanted.duration or LEASE)
        return Response(status_code=204)

    async def pause(self, request: Request, tenant: str) -> Response:
        held = self._held(request, tenant)
        if (await body_of(request, Kept)).memory is False:
            raise UsageError(
                "a paused sandbox keeps its processes here",
                remedy="leave keep_memory and mode out, or take a snapshot and create a sandbox of it",
            )
        if held.sandbox.paused:
            return json_response({"code": 409, "message": "the sandbox is paused already"}, 409)
        await held.sandbox.pause()
        self._service.sandboxes.keep_alive(held, PAUSED)
        await self._service.sandboxes.save(held)
        return Response(status_code=204)

    async def resume(self, request: Request, tenant: str) -> Response:
        held = self._held(request, tenant)
        wanted = await body_of(request, Seconds)
        was_paused = held.sandbox.paused
        if was_paused and (await body_of(request, Kept)).memory is False:
            raise UsageError("a paused sandbox goes on with its processes here", remedy="leave on_resume out")
        lease = wanted.timeout or LEASE
        if was_paused:
            await held.sandbox.resume()
            self._service.sandboxes.keep_alive(held, lease)
        else:  # a second client must not shorten the time of the first
            self._service.sandboxes.extend(held, lease)
        await self._service.sandboxes.save(held)
        return json_response(_created(held), 201 if was_paused else 200)

    async def fork(self, request: Request, tenant: str) -> Response:
        parent = self._held(request, tenant)
        wanted = await body_of(request, Seconds)
        call = calls.Fork(secrets.token_hex(16), wanted.count or 1, wanted.timeout or LEASE)
        work = HANDLERS["fork"](DirectCall(self._service, tenant, parent.id), call)
        made = await while_connected(request, work)
        children = [self._service.sandboxes.get(tenant, one.id) for one in made]
        for child in children:
            child.template = parent.template
            await self._service.sandboxes.save(child)
        return json_response([{"sandbox": _created(child)} for child in children], 201)

    async def snapshot(self, request: Request, tenant: str) -> Response:
        """Keep the files of a sandbox as a template, by which others are created."""
        held = self._held(request, tenant)
        wanted: Kept = await body_of(request, Kept)
        if wanted.memory:
            raise UsageError("a snapshot keeps the files alone here", remedy="use mode filesystem, or none")
        name = TemplateRef.parse(wanted.name).name if wanted.name else f"snapshot-{secrets.token_hex(8)}"
        self._store.check_snapshot(tenant, name)
        kept = await HANDLERS["snapshot"](DirectCall(self._service, tenant, held.id), calls.Snapshot())
        if (old := self._store.snapshots.get((tenant, name))) is not None:
            await self._forget(tenant, name, old)
        taken = TakenSnapshot(kept.image, held.id, held.template.partition("@")[2])
        await self._store.add_snapshot(tenant, name, taken)
        return json_response(_snapshot(name), 201)

    async def list_snapshots(self, request: Request, tenant: str) -> Response:
        query = request.query_params
        sandbox, after = query.get("sandboxID"), query.get("nextToken", "")
        wanted = TemplateRef.parse(query["name"]).name if "name" in query else None
        limit = int(query["limit"]) if query.get("limit", "").isdigit() else 100
        found = sorted(
            name
            for (owner, name), taken in self._store.snapshots.items()
            if owner == tenant
            and name > after
            and sandbox in (None, taken.sandbox)
            and wanted in (None, name)
        )
        headers = {"x-next-token": found[limit - 1]} if len(found) > limit else {}
        return json_response([_snapshot(name) for name in found[:limit]], headers=headers)

    async def remove_template(self, request: Request, tenant: str) -> Response:
        given = request.path_params["template"]
        name = TemplateRef.parse(given).name
        taken = self._store.snapshots.get((tenant, name))
        if taken is None:
            await self._templates.remove(given, tenant)
        else:
            await self._forget(tenant, name, taken)
        return Response(status_code=204)

    async def _forget(self, tenant: str, name: str, taken: TakenSnapshot) -> None:
        """Remove a snapshot, which may have ended with an earlier server."""
        await self._store.remove_snapshot(tenant, name)
        with contextlib.suppress(RecipeError):
            await self._service.forget_snapshot(tenant, WireRecipe(taken.image))

    async def refuse(self, request: Request, _tenant: str) -> Response:
        """What E2B has and this server does not. Raises UsageError."""
        what = request.url.path.split("/")[1]
        raise UsageError(f"this server does not have {what}", remedy="use files of the sandbox, or variables")

    async def set_network(self, request: Request, tenant: str) -> Response:
        held = self._held(request, tenant)
        wanted = await body_of(request, NewSandbox)
        network = await body_of(request, Any)
        policy = _network(msgspec.structs.replace(wanted, network=network), self._service.open_network)
        call = calls.SetNetwork(policy)
        await HANDLERS["set_network"](DirectCall(self._service, tenant, held.id), call)
        return Response(status_code=204)

    def _held(self, request: Request, tenant: str) -> Held:
        return self._service.sandboxes.get(tenant, request.path_params["sandbox"])


class _Start(NamedTuple):
    """With what a sandbox starts."""

    name: str
    recipe: WireRecipe
    build: Build | None


def _snapshot(name: str) -> dict[str, Any]:
    full = f"{name}:{DEFAULT_TAG}"
    return {"snapshotID": full, "names": [full]}


def _network(wanted: NewSandbox, usual: NetworkPolicy) -> NetworkPolicy:
    """The network policy of a request: ``usual``, unless it says otherwise. Raises UsageError."""
    rules = wanted.network or {}
    if missing := [name for name in NO_NETWORK_OPTIONS if rules.get(name)]:
        names = " and ".join(missing)
        raise UsageError(f"this server does not have the network options {names}", remedy="leave them out")
    allowed, denied = rules.get("allowOut") or (), rules.get("denyOut") or ()
    if wanted.allow_internet_access is False and not allowed:
        return "off"
    if allowed:
        return tuple(str(one) for one in allowed)
    if denied:
        if "0.0.0.0/0" in denied:
            return "off"
        raise UsageError("a list of denied hosts is not supported", remedy="list the allowed ones: allow_out")
    return usual


def _created(held: Held) -> dict[str, Any]:
    return {
        "templateID": held.template.partition("@")[0],
        "sandboxID": held.id,
        "clientID": "dutyfree",
        "envdVersion": ENVD_VERSION,
        "envdAccessToken": held.access_token,
    }


def _listed(held: Held) -> dict[str, Any]:
    return {
        "templateID": held.template.partition("@")[0],
        "sandboxID": held.id,
        "clientID": "dutyfree",
        "startedAt": time_text(held.created),
        "endAt": time_text(held.expires),
        "cpuCount": 0,
        "memoryMB": 0,
        "diskSizeMB": 0,
        "state": _state(held),
        "envdVersion": ENVD_VERSION,
        "metadata": held.labels,
    }


def _place(held: Held) -> str:
    """Its place in the list: by the time of its creation."""
    return f"{held.created:020.6f}_{held.id}"


def _state(held: Held) -> str:
    return "paused" if held.sandbox.paused else "running"

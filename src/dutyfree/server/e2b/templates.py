"""E2B's API for templates: request a build, upload its files, start it, follow it; names, tags, removal."""

from __future__ import annotations

import re
import secrets
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import anyio.to_thread
import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Scope

from dutyfree.contract.errors import DutyfreeError, LimitError, RecipeError
from dutyfree.server.access import Refused
from dutyfree.server.bodies import declared_size
from dutyfree.server.e2b.control_json import ENVD_VERSION, body_of, time_text
from dutyfree.server.e2b.template_builds import BASE, BuildStart
from dutyfree.server.e2b.template_store import DEFAULT_TAG, Build, BuildLog, Template, TemplateRef
from dutyfree.server.files import Arrival
from dutyfree.server.json_form import json_response
from dutyfree.server.service import Service
from dutyfree.wire.errors import describe, retry_headers, status_of

LARGEST_UPLOAD = 2 << 30
"""Bytes of the archive of one COPY."""
UPLOAD_LINKS = 100
"""Links for uploads of one tenant that are known. The oldest are forgotten."""
LOG_PAGE = 100
"""Lines of a log in one answer."""
LARGEST_BUILD = 1 << 20
"""Bytes of the request that starts a build: its steps."""

_HASH = re.compile(r"[A-Za-z0-9_-]{1,128}")
"""The SDK's name for the files of a COPY."""
_UPLOADS = "/templates/uploads/"

Endpoint = Callable[["TemplateRoutes", Request, str], Awaitable[Response]]
Guard = Callable[[Callable[[Request, str], Awaitable[Response]]], Callable[[Request], Awaitable[Response]]]


class BuildRequest(msgspec.Struct, frozen=True, rename="camel"):
    name: str = ""
    alias: str = ""
    tags: tuple[str, ...] = ()
    cpu_count: int | None = None
    memory_mb: int | None = msgspec.field(default=None, name="memoryMB")


class TagRequest(msgspec.Struct, frozen=True):
    target: str = ""
    name: str = ""
    tags: tuple[str, ...] = ()


class TemplateRoutes:
    """The routes of templates."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._store = service.templates.store
        self._links: dict[str, tuple[str, str]] = {}
        """The tenant and the hash of each upload that may come, by a secret in its link."""

    def routes(self, guard: Guard) -> list[Route]:
        one, build = "/templates/{template}", "/templates/{template}/builds/{build}"
        endpoints: list[tuple[str, str, Endpoint]] = [
            ("POST", "/v3/templates", TemplateRoutes.request),
            ("POST", f"/v2{build}", TemplateRoutes.start),
            ("GET", f"{build}/status", TemplateRoutes.status),
            ("GET", f"{build}/logs", TemplateRoutes.logs),
            ("GET", f"{one}/files/{{hash}}", TemplateRoutes.upload_link),
            ("GET", "/templates/aliases/{alias:path}", TemplateRoutes.alias),
            ("POST", "/templates/tags", TemplateRoutes.assign_tags),
            ("DELETE", "/templates/tags", TemplateRoutes.remove_tags),
            ("GET", "/templates/{template:path}/tags", TemplateRoutes.tags),
            ("GET", "/templates", TemplateRoutes.list),
            ("GET", "/v2/templates", TemplateRoutes.list),
            ("GET", one, TemplateRoutes.show),
        ]
        return [
            Route(_UPLOADS + "{link}", self.upload, methods=["PUT"], name="e2b_upload"),
            *(
                Route(path, guard(endpoint.__get__(self)), methods=[verb])
                for verb, path, endpoint in endpoints
            ),
        ]

    # --- Builds -----------------------------------------------------------------------------------------

    async def request(self, request: Request, tenant: str) -> Response:
        wanted: BuildRequest = await body_of(request, BuildRequest)
        name = wanted.name or wanted.alias
        if TemplateRef.parse(name).name in BASE:
            raise RecipeError(f"{name!r} is the template of the server", remedy="choose another name")
        template, build = self._store.request(
            tenant, name, wanted.tags, wanted.cpu_count or None, wanted.memory_mb or None
        )
        await self._store.save(template)
        answer = {
            "templateID": template.id,
            "buildID": build.id,
            "public": False,
            "names": [template.name],
            "tags": build.tags,
            "aliases": [template.name],
        }
        return json_response(answer, 202)

    async def start(self, request: Request, tenant: str) -> Response:
        template = self._template(request, tenant)
        if len(await request.body()) > LARGEST_BUILD:
            raise LimitError(f"the steps of a template may have {LARGEST_BUILD} bytes")
        wanted = await body_of(request, BuildStart)
        self._service.templates.start(template, self._build(request, template), wanted)
        return Response(status_code=202)

    async def status(self, request: Request, tenant: str) -> Response:
        template = self._template(request, tenant)
        build = self._build(request, template)
        begin = _number(request, "logsOffset", 0)
        page = build.logs[begin : begin + min(LOG_PAGE, _number(request, "limit", LOG_PAGE))]
        answer: dict[str, Any] = {
            "templateID": template.id,
            "buildID": build.id,
            "status": build.status,
            "logs": [],
            "logEntries": [_entry(one) for one in page],
        }
        if build.failure is not None:
            lines = [_entry(one) for one in build.logs if one.step == build.failure.step][-LOG_PAGE:]
            failure = build.failure
            answer["reason"] = {"message": failure.message, "step": failure.step, "logEntries": lines}
        return json_response(answer)

    async def logs(self, request: Request, tenant: str) -> Response:
        build = self._build(request, self._template(request, tenant))
        return json_response({"logs": [_entry(one) for one in build.logs[-LOG_PAGE:]]})

    # --- Files ------------------------------------------------------------------------------------------

    async def upload_link(self, request: Request, tenant: str) -> Response:
        """Where to put the files of a COPY. The link is a secret: the SDK sends no key with the files."""
        self._template(request, tenant)
        files_hash = request.path_params["hash"]
        if not _HASH.fullmatch(files_hash):
            raise RecipeError(f"{files_hash[:80]!r} is no hash of files")
        digest = self._store.upload(tenant, files_hash)
        present = digest is not None and not await self._service.files.missing(tenant, [digest])
        link = secrets.token_urlsafe(24)
        self._links[link] = (tenant, files_hash)
        own = [name for name, (owner, _) in self._links.items() if owner == tenant]
        for old in own[:-UPLOAD_LINKS]:
            del self._links[old]
        url = request.url_for("e2b_upload", link=link)
        return json_response({"present": present, "url": str(url)}, 201)

    async def upload(self, request: Request) -> Response:
        """Keep an archive as it is: it is unpacked in a sandbox only."""
        wanted = self._links.pop(request.path_params["link"], None)
        if wanted is None:
            return json_response({"code": 404, "message": "there is no such link"}, 404)
        tenant, files_hash = wanted  # its bytes are the tenant's, whatever address they come from
        files = self._service.files
        scratch = await anyio.to_thread.run_sync(files.scratch, tenant)
        try:
            with files.arriving(tenant) as arrival:
                await _receive(request, scratch, arrival)
                digest = await files.keep(tenant, scratch)
        except ClientDisconnect:
            return Response(status_code=499)
        except Refused as error:
            return json_response({"code": error.status, "message": str(error)}, error.status)
        except DutyfreeError as error:
            status = status_of(describe(error))
            return json_response({"code": status, "message": str(error)}, status, retry_headers(error))
        finally:
            await anyio.to_thread.run_sync(lambda: scratch.unlink(missing_ok=True))
        await self._store.add_upload(tenant, files_hash, digest)
        return Response(status_code=200)

    # --- Names and tags ---------------------------------------------------------------------------------

    async def alias(self, request: Request, tenant: str) -> Response:
        """A name alone is known as soon as its first build was requested; one with a tag when it is ready."""
        wanted = TemplateRef.parse(request.path_params["alias"])
        if wanted.name in BASE:
            return json_response({"templateID": BASE[0], "public": True})
        template = self._store.find(tenant, wanted.name)
        if template is None or (wanted.tag is not None and wanted.tag not in template.tags):
            raise _not_found(request.path_params["alias"])
        return json_response({"templateID": template.id, "public": False})

    async def assign_tags(self, request: Request, tenant: str) -> Response:
        wanted: TagRequest = await body_of(request, TagRequest)
        found = self._store.ready(tenant, wanted.target)
        if found is None:
            raise _not_found(wanted.target)
        template, build = found
        self._store.assign(template, build.id, wanted.tags)
        await self._store.save(template)
        return json_response({"buildID": build.id, "tags": wanted.tags}, 201)

    async def remove_tags(self, request: Request, tenant: str) -> Response:
        wanted: TagRequest = await body_of(request, TagRequest)
        template = self._store.find(tenant, TemplateRef.parse(wanted.name).name)
        if template is None or not all(tag in template.tags for tag in wanted.tags):
            raise _not_found(wanted.name)
        if DEFAULT_TAG in wanted.tags:
            raise RecipeError(f"the tag {DEFAULT_TAG} stays", remedy="delete the template, or build it again")
        for tag in set(wanted.tags):
            del template.tags[tag]
        await self._store.save(template)
        return Response(status_code=204)

    async def tags(self, request: Request, tenant: str) -> Response:
        template = self._template(request, tenant)
        found = [
            {"tag": name, "buildID": tag.build, "createdAt": time_text(tag.assigned)}
            for name, tag in template.tags.items()
        ]
        return json_response(found)

    # --- Templates --------------------------------------------------------------------------------------

    async def list(self, _request: Request, tenant: str) -> Response:
        return json_response([_template(one) for one in self._store.of(tenant) if one.builds])

    async def show(self, request: Request, tenant: str) -> Response:
        template = self._template(request, tenant)
        builds = [_build(one) for one in template.builds.values()]
        return json_response({**_template(template), "builds": builds})

    async def remove(self, name: str, tenant: str) -> None:
        """Raises Refused. Sandboxes of the template go on."""
        template = self._store.find(tenant, TemplateRef.parse(name).name)
        if template is None:
            raise _not_found(name)
        await self._store.remove(template)

    def _template(self, request: Request, tenant: str) -> Template:
        """Raises Refused."""
        name = request.path_params["template"]
        template = self._store.find(tenant, TemplateRef.parse(name).name)
        if template is None:
            raise _not_found(name)
        return template

    def _build(self, request: Request, template: Template) -> Build:
        build = template.builds.get(request.path_params["build"])
        if build is None:
            raise _not_found(request.path_params["build"])
        return build


def is_upload(scope: Scope) -> bool:
    """Whether a request is an upload: it goes to the disk as it comes, within bounds of its own."""
    path: str = scope["path"]
    return scope["method"] == "PUT" and path.startswith(_UPLOADS)


async def _receive(request: Request, path: Path, arrival: Arrival) -> None:
    """Write a body to a file. Raises Refused if it is too large, Exhausted, and ClientDisconnect."""
    size = declared_size(request.scope)
    async with await anyio.open_file(path, "wb") as file:
        async for part in request.stream():
            size = max(size, arrival.size + len(part))
            if size > LARGEST_UPLOAD:
                raise Refused(413, "too_large", f"the files of a step may have {LARGEST_UPLOAD} bytes")
            await arrival.add(len(part))
            await file.write(part)


def _not_found(name: str) -> Refused:
    return Refused(404, "not_found", f"template {name[:80]!r} not found")


def _number(request: Request, name: str, usual: int) -> int:
    text = request.query_params.get(name, "")
    return int(text) if text.isdigit() else usual


def _entry(log: BuildLog) -> dict[str, Any]:
    return {"timestamp": time_text(log.time), "level": log.level, "message": log.message, "step": log.step}


def _template(template: Template) -> dict[str, Any]:
    latest = template.latest
    return {
        "templateID": template.id,
        "buildID": latest.id,
        "cpuCount": latest.cpus or 0,
        "memoryMB": latest.memory or 0,
        "diskSizeMB": 0,
        "public": False,
        "aliases": [template.name],
        "names": [template.name],
        "createdAt": time_text(template.created),
        "updatedAt": time_text(latest.updated or latest.created),
        "createdBy": None,
        "lastSpawnedAt": None,
        "spawnCount": 0,
        "buildCount": len(template.builds),
        "envdVersion": ENVD_VERSION,
        "buildStatus": latest.status,
    }


def _build(build: Build) -> dict[str, Any]:
    return {
        "buildID": build.id,
        "status": build.status,
        "createdAt": time_text(build.created),
        "updatedAt": time_text(build.updated or build.created),
        "cpuCount": build.cpus or 0,
        "memoryMB": build.memory or 0,
    }

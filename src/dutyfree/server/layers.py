"""The routes for layers: the pull side of the OCI distribution API, and which chains of layers there are.

Other nodes fetch layers here before they build them, and any client of a registry can pull images
(docs/layers.md). ``layer_access`` decides what a caller may see.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import anyio
import anyio.to_thread
import msgspec
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from dutyfree.contract.errors import ArgumentError, DutyfreeError
from dutyfree.engine.exchange.distribution import NAMES_MAX, Distribution, Sees
from dutyfree.engine.images.reference import DIGEST
from dutyfree.engine.store.cancel import Cancelled
from dutyfree.server.access import OPERATOR, Access, Refused
from dutyfree.server.layer_access import LayerAccess, everything

TRANSFERS_MAX = 64
"""Blobs that are sent to one tenant at the same time. So clients that do not receive hurt only themselves."""
READS_MAX = 8
"""Requests of one tenant that read the store, or wait for a layer to be packed, at the same time."""

_VERSION = {"Docker-Distribution-API-Version": "registry/2.0"}
_CHALLENGE = {"WWW-Authenticate": 'Basic realm="dutyfree"'}

_log = logging.getLogger(__name__)

T = TypeVar("T")
Endpoint = Callable[[Request, str], Awaitable[Response]]


class LayerRoutes:
    """The endpoints."""

    def __init__(self, distribution: Distribution, layers: LayerAccess, access: Access) -> None:
        self._distribution = distribution
        self._layers = layers
        self._access = access
        self._reads: dict[str, anyio.CapacityLimiter] = {}
        self._transfers: Counter[str] = Counter()

    def routes(self) -> list[Route]:
        reads = ["GET", "HEAD"]
        return [
            Route("/v2/", self._guarded(_version), methods=reads),
            Route("/v2/{name:path}/manifests/{reference}", self._guarded(self.manifest), methods=reads),
            Route("/v2/{name:path}/blobs/{digest}", self._guarded(self.blob), methods=reads),
            Route("/v2/{name:path}/tags/list", self._guarded(self.tags), methods=["GET"]),
            Route("/v2/{rest:path}", self._guarded(_unsupported), methods=_METHODS),
        ]

    def _guarded(self, endpoint: Endpoint) -> Callable[[Request], Awaitable[Response]]:
        async def guarded(request: Request) -> Response:
            try:
                return await endpoint(request, await self._access.tenant(request))
            except Refused as error:
                code = "UNAUTHORIZED" if error.status == 401 else "DENIED"
                return _error(error.status, code, str(error), _CHALLENGE if error.status == 401 else {})
            except DutyfreeError as error:  # the disk is full, or the layer was removed just now
                return _error(503, "UNAVAILABLE", error.message, {"Retry-After": "5"})
            except Cancelled:
                return _error(503, "UNAVAILABLE", "the server ends")
            except Exception:  # noqa: BLE001 (a defect or a broken disk, which is logged)
                _log.exception("%s %s failed", request.method, request.url.path)
                return _error(500, "UNKNOWN", "the server failed; its log says why")

        return guarded

    async def chains(self, request: Request, tenant: str) -> Response:
        """Which of the named chains there are. Raises ArgumentError."""
        names = request.query_params.getlist("name")
        if not 0 < len(names) <= NAMES_MAX:
            raise ArgumentError(f"the query has {len(names)} names", remedy=f"give 1 to {NAMES_MAX}: ?name=…")
        found = await self._read(tenant, lambda sees: self._distribution.offer(names, sees))
        return Response(msgspec.json.encode(found), media_type="application/json")

    async def tags(self, request: Request, tenant: str) -> Response:
        name = request.path_params["name"]
        found = await self._read(tenant, lambda sees: self._distribution.tags(name, sees))
        if not found:
            return _error(404, "NAME_UNKNOWN", "there is no such repository")
        return Response(msgspec.json.encode({"name": name, "tags": found}), media_type="application/json")

    async def manifest(self, request: Request, tenant: str) -> Response:
        name, wanted = request.path_params["name"], request.path_params["reference"]
        found = await self._read(tenant, lambda sees: self._distribution.manifest(name, wanted, sees))
        if found is None:
            return _error(404, "MANIFEST_UNKNOWN", "there is no such manifest")
        headers = {**_VERSION, "Docker-Content-Digest": found.descriptor["digest"]}
        return Response(found.data, headers=headers, media_type=found.kind)

    async def blob(self, request: Request, tenant: str) -> Response:
        digest = request.path_params["digest"]
        if not DIGEST.fullmatch(digest):
            return _error(400, "DIGEST_INVALID", "a digest is sha256: and 64 hexadecimal digits")
        found = await self._read(tenant, lambda sees: self._distribution.blob(digest, sees))
        if found is None:
            return _error(404, "BLOB_UNKNOWN", "there is no such blob")
        headers = {**_VERSION, "Docker-Content-Digest": digest, "ETag": f'"{digest}"'}
        if isinstance(found, bytes):
            return Response(found, headers=headers, media_type="application/octet-stream")
        if self._transfers[tenant] >= TRANSFERS_MAX:
            message = f"{TRANSFERS_MAX} blobs are being sent to you already"
            return _error(429, "TOOMANYREQUESTS", message, {"Retry-After": "5"})
        return _BlobResponse(found, headers, tenant, self._transfers)

    async def _read(self, tenant: str, work: Callable[[Sees], T]) -> T:
        def run() -> T:
            return work(everything if tenant == OPERATOR else self._layers.sees(tenant))

        limiter = self._reads.setdefault(tenant, anyio.CapacityLimiter(READS_MAX))
        return await anyio.to_thread.run_sync(run, limiter=limiter)


class _BlobResponse(FileResponse):
    """A blob, with ranges."""

    chunk_size = 256 << 10
    max_ranges = 1

    def __init__(self, path: Path, headers: dict[str, str], tenant: str, transfers: Counter[str]) -> None:
        super().__init__(path, headers=headers, media_type="application/octet-stream")
        self._tenant = tenant
        self._transfers = transfers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._transfers[self._tenant] += 1
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._transfers[self._tenant] -= 1


_METHODS = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE"]


async def _version(_request: Request, _tenant: str) -> Response:
    return Response(b"{}", headers=_VERSION, media_type="application/json")


async def _unsupported(request: Request, _tenant: str) -> Response:
    if request.method in ("GET", "HEAD"):
        return _error(404, "NAME_UNKNOWN", "there is nothing at this path")
    return _error(405, "UNSUPPORTED", "images and layers can be pulled here, not pushed")


def _error(status: int, code: str, message: str, headers: dict[str, str] | None = None) -> Response:
    """An error as registries answer it."""
    body: dict[str, Any] = {"errors": [{"code": code, "message": message}]}
    return Response(
        msgspec.json.encode(body), status, {**_VERSION, **(headers or {})}, media_type="application/json"
    )

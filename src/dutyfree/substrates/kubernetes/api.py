"""Requests to the API server, with the configuration, TLS and logins of the official client.

Objects are plain dicts: the client's models are of one version of Kubernetes, and servers are of many.
"""

from __future__ import annotations

import asyncio
import os
import warnings
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlencode

import anyio
import anyio.to_thread
import msgspec

from dutyfree import paths
from dutyfree.contract.errors import Unavailable
from dutyfree.substrates.kubernetes.config import KubernetesConfig

if TYPE_CHECKING:
    import aiohttp

INSTALL = "install it: pip install '/path/to/dutyfree[kubernetes]'"
REMEDY = "name a cluster with kubeconfig= or KUBECONFIG; in a clone of dutyfree, `make k8s-up` starts one"
ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
JSON, JSON_PATCH, MERGE_PATCH = (
    "application/json",
    "application/json-patch+json",
    "application/merge-patch+json",
)
CHANNELS = "v4.channel.k8s.io"
CLOSE_SECONDS = 5.0
WATCH_SECONDS = 300

Object = dict[str, Any]


class ApiError(Exception):
    """The API server refused a request."""

    def __init__(self, status: int, message: str, reason: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.reason = reason


class ApiLost(Exception):  # noqa: N818 (names the state)
    """The API server does not answer, or the connection to it broke."""


class Api:
    """One cluster, in one namespace."""

    def __init__(self, client: Any, namespace: str, source: str, answer_seconds: float) -> None:
        self._client = client
        self._settings = client.configuration
        rest = client.rest_client
        # Its session has the certificates; newer clients make it with the first request.
        self._session: aiohttp.ClientSession = rest.pool_manager or rest._create_pool_manager()
        rest.pool_manager = self._session
        self.namespace = namespace
        self.source = source
        """The kubeconfig, or what else named the cluster."""
        self._answer_seconds = answer_seconds

    @property
    def server(self) -> str:
        return str(self._settings.host)

    def path(self, kind: str, name: str = "", *, group: str = "") -> str:
        """The path of the objects of a kind in the namespace, or of one of them."""
        base = f"/apis/{group}" if group else "/api/v1"
        return f"{base}/namespaces/{self.namespace}/{kind}" + (f"/{quote(name)}" if name else "")

    async def request(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, object] | None = None,
        body: object = None,
        content: str = JSON,
    ) -> Object:
        """Raises ApiError, ApiLost."""
        import aiohttp

        try:
            async with self._session.request(
                method,
                self._url(path, query or {}),
                headers={**await self._login(), "Accept": JSON, "Content-Type": content},
                data=None if body is None else msgspec.json.encode(body),
                timeout=aiohttp.ClientTimeout(total=self._answer_seconds),
                **self._route(),
            ) as response:
                return _decoded(response.status, await response.read())
        except (aiohttp.ClientError, OSError) as error:  # TimeoutError too
            raise ApiLost(self._lost(error)) from error

    async def events(self, path: str, query: Mapping[str, object]) -> AsyncIterator[Object]:
        """The events of a watch, until the server ends it. Raises ApiError, ApiLost."""
        import aiohttp

        # The server ends the watch after this time. So a connection that is silent for longer is broken.
        silent = WATCH_SECONDS + self._answer_seconds
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=self._answer_seconds, sock_read=silent)
        query = {**query, "watch": "1", "timeoutSeconds": WATCH_SECONDS}
        try:
            async with self._session.get(
                self._url(path, query),
                headers={**await self._login(), "Accept": JSON},
                timeout=timeout,
                **self._route(),
            ) as response:
                if response.status != 200:
                    _decoded(response.status, await response.read())
                async for line in response.content:
                    event = msgspec.json.decode(line)
                    if event["type"] == "ERROR":
                        found = event["object"]
                        raise ApiError(
                            found.get("code", 500), found.get("message", ""), found.get("reason", "")
                        )
                    yield event
        except (aiohttp.ClientError, OSError, msgspec.DecodeError) as error:
            raise ApiLost(self._lost(error)) from error

    @asynccontextmanager
    async def execution(
        self, pod: str, command: Sequence[str], *, container: str, stdin: bool
    ) -> AsyncIterator[aiohttp.ClientWebSocketResponse]:
        """Run a command in a pod; its streams are channels of the websocket. Raises ApiError, ApiLost."""
        import aiohttp

        flags = {"container": container, "stdin": str(stdin).lower(), "stdout": "true", "stderr": "true"}
        words = [("command", word.encode(errors="surrogateescape")) for word in command]
        try:
            socket = await asyncio.wait_for(
                self._session.ws_connect(
                    self._url(self.path("pods", pod) + "/exec", [*flags.items(), *words]),
                    headers=await self._login(),
                    protocols=(CHANNELS,),
                    max_msg_size=0,
                    **self._route(),
                ),
                self._answer_seconds,
            )
        except aiohttp.WSServerHandshakeError as error:
            raise ApiError(error.status, error.message) from error
        except (aiohttp.ClientError, OSError) as error:
            raise ApiLost(self._lost(error)) from error
        try:
            yield socket
        finally:
            with anyio.CancelScope(shield=True), anyio.move_on_after(CLOSE_SECONDS):
                await socket.close()

    def _url(self, path: str, query: Mapping[str, object] | Sequence[tuple[str, str | bytes]]) -> Any:
        import yarl

        asked = f"?{urlencode(query, quote_via=quote)}" if query else ""
        return yarl.URL(f"{self.server}{path}{asked}", encoded=True)

    async def _login(self) -> dict[str, str]:
        """The headers with the token; the client renews it. A certificate is in the session already."""
        found = (await self._settings.auth_settings()).values()
        return {each["key"]: each["value"] for each in found if each.get("in") == "header"}

    def _route(self) -> dict[str, Any]:
        route = {
            "proxy": self._settings.proxy,
            "proxy_headers": self._settings.proxy_headers,
            "server_hostname": self._settings.tls_server_name,
        }
        return {name: value for name, value in route.items() if value}

    def _lost(self, error: Exception) -> str:
        return f"the API server {self.server} does not answer: {str(error) or type(error).__name__}"

    async def close(self) -> None:
        await self._client.close()


def _decoded(status: int, data: bytes) -> Object:
    try:
        found = msgspec.json.decode(data) if data else {}
    except msgspec.DecodeError:
        found = {"message": data[:500].decode(errors="replace").strip()}
    if status >= 400:
        raise ApiError(status, found.get("message") or f"status {status}", found.get("reason", ""))
    return dict(found)


# --- Which cluster ----------------------------------------------------------------------------------------


async def connect(config: KubernetesConfig) -> Api:
    """Read the configuration; nothing is sent yet. Raises Unavailable."""
    client, namespace, source = await anyio.to_thread.run_sync(_client, config)
    return Api(client(), config.namespace or namespace or "default", source, config.answer_seconds)


def _client(config: KubernetesConfig) -> tuple[Any, str, str]:
    """How to make the client, the namespace, and where they come from. Blocks."""
    source = _kubeconfig(config)
    if not source and not (ACCOUNT / "token").exists():
        raise Unavailable("no cluster is known: there is no kubeconfig", remedy=REMEDY)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # generated code
            from kubernetes.aio import client
            from kubernetes.aio import config as loading
    except ImportError as error:
        raise Unavailable(f"the Kubernetes client is not installed: {error}", remedy=INSTALL) from error
    configuration = client.Configuration()
    configuration.connection_pool_maxsize = 0  # without a bound: each sandbox holds a connection
    if not source:
        loading.load_incluster_config(client_configuration=configuration)
        namespace = (ACCOUNT / "namespace").read_text().strip()
        return lambda: client.ApiClient(configuration), namespace, "the service account of this pod"
    if not any(Path(one).is_file() for one in source.split(os.pathsep)):
        raise Unavailable(f"there is no kubeconfig {source}", remedy=REMEDY)
    try:
        loader = asyncio.run(
            loading.load_kube_config(source, config.context or None, configuration, persist_config=False)
        )
        found = loader.current_context["context"].get("namespace") or ""
    except Exception as error:  # of the file, its logins or their programs
        raise Unavailable(
            f"the kubeconfig {source} cannot be used: {str(error) or type(error).__name__}",
            remedy=f"check that `KUBECONFIG={source} kubectl version` works",
        ) from error
    return lambda: client.ApiClient(configuration), found, source


def _kubeconfig(config: KubernetesConfig) -> str:
    """The path of the kubeconfig, or ""."""
    if named := config.kubeconfig or os.environ.get("KUBECONFIG", ""):
        return str(Path(named).expanduser())
    usual, ours = Path("~/.kube/config").expanduser(), paths.cache() / "kubernetes/node/kubeconfig"
    if usual.exists():
        return str(usual)
    return str(ours) if ours.exists() and not ACCOUNT.exists() else ""

"""Requests to the API server, with the configuration, TLS and logins of the official client.

Objects are plain dicts: the client's models are of one version of Kubernetes, and servers are of many.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import socket
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar
from urllib.parse import quote, urlencode

import anyio
import anyio.to_thread
import msgspec

from dutyfree import paths
from dutyfree.contract.errors import Unavailable
from dutyfree.substrates.kubernetes.config import KubernetesConfig

if TYPE_CHECKING:
    import aiohttp

INSTALL = "install it: pip install -e '/path/to/dutyfree[kubernetes]'"
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
KEEPALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}
"""Seconds and counts after which a silent connection whose other end is gone counts as broken."""
UNTAKEN_SECONDS = 60
"""The same, while data is on its way that the other end does not take."""
BUSY_RETRIES = 5
"""How often a request is repeated that the server refused because it has too many."""

_BUSY, _UNAUTHORIZED, _FORBIDDEN = 429, 401, 403

T = TypeVar("T")
Object = dict[str, Any]
Login = dict[str, str]


class ApiError(Exception):
    """The API server refused a request."""

    def __init__(self, status: int, message: str, reason: str = "", wait: float | None = None) -> None:
        """``wait``: the seconds after which the server wants to be asked again."""
        super().__init__(message)
        self.status = status
        self.message = message
        self.reason = reason
        self.wait = wait

    @property
    def may_be_done(self) -> bool:
        """Whether what was asked for may have been done: an error of the server itself does not say."""
        return self.status >= 500


class ApiLost(Exception):  # noqa: N818 (names the state)
    """The API server does not answer, or the connection to it broke."""

    may_be_done = True


class Api:
    """One cluster, in one namespace."""

    def __init__(
        self,
        client: Any,
        namespace: str,
        source: str,
        answer_seconds: float,
        fresh_keys: Callable[[], Mapping[str, str]] | None = None,
    ) -> None:
        """``fresh_keys``: the keys of a new login; it blocks. None if the client renews them by itself."""
        self._client = client
        self._fresh_keys = fresh_keys
        self._renewing = anyio.Lock()
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
        """Ask; ask a server that is too busy again, when it wants that. Raises ApiError, ApiLost."""
        import aiohttp

        data = None if body is None else msgspec.json.encode(body)

        async def ask(login: Login) -> Object:
            try:
                async with self._session.request(
                    method,
                    self._url(path, query or {}),
                    headers={**login, "Accept": JSON, "Content-Type": content},
                    data=data,
                    timeout=aiohttp.ClientTimeout(total=self._answer_seconds),
                    **self._route(),
                ) as response:
                    return _decoded(response.status, await response.read(), response.headers)
            except (aiohttp.ClientError, OSError) as error:  # TimeoutError too
                raise ApiLost(self._lost(error)) from error

        for _ in range(BUSY_RETRIES):
            try:
                return await self._logged_in(ask)
            except ApiError as error:
                if error.status != _BUSY or error.wait is None:
                    raise
                await anyio.sleep(min(error.wait, self._answer_seconds))
        return await self._logged_in(ask)

    async def events(self, path: str, query: Mapping[str, object]) -> AsyncIterator[Object]:
        """The events of a watch, until the server ends it. Raises ApiError, ApiLost."""
        import aiohttp

        # The server ends the watch after this time. So a connection that is silent for longer is broken.
        silent = WATCH_SECONDS + self._answer_seconds
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=self._answer_seconds, sock_read=silent)
        query = {**query, "watch": "1", "timeoutSeconds": WATCH_SECONDS}
        login = await self._login()
        try:
            async with self._session.get(
                self._url(path, query),
                headers={**login, "Accept": JSON},
                timeout=timeout,
                **self._route(),
            ) as response:
                if response.status == _UNAUTHORIZED:
                    await self._renew(login)  # for the next try
                if response.status != 200:
                    _decoded(response.status, await response.read(), response.headers)
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
        self, pod: str, command: Sequence[str], *, container: str, stdin: bool, reads: bool = False
    ) -> AsyncIterator[aiohttp.ClientWebSocketResponse]:
        """Run a command in a pod; its streams are channels of the websocket. Raises ApiError, ApiLost.

        ``reads``: the command reads its stdin as long as the connection works.
        """
        import aiohttp

        flags = {"container": container, "stdin": str(stdin).lower(), "stdout": "true", "stderr": "true"}
        words = [("command", word.encode(errors="surrogateescape")) for word in command]

        async def connect(login: Login) -> aiohttp.ClientWebSocketResponse:
            try:
                return await asyncio.wait_for(
                    self._session.ws_connect(
                        self._url(self.path("pods", pod) + "/exec", [*flags.items(), *words]),
                        headers=login,
                        protocols=(CHANNELS,),
                        max_msg_size=0,
                        **self._route(),
                    ),
                    self._answer_seconds,
                )
            except aiohttp.WSServerHandshakeError as error:
                hint = "; the account needs create and get on pods/exec" if error.status == _FORBIDDEN else ""
                raise ApiError(error.status, f"the exec was refused: {error.status}{hint}") from error
            except (aiohttp.ClientError, OSError) as error:
                raise ApiLost(self._lost(error)) from error

        websocket = await self._logged_in(connect)
        _keep_alive(websocket.get_extra_info("socket"), reads)
        try:
            yield websocket
        finally:
            with anyio.CancelScope(shield=True), anyio.move_on_after(CLOSE_SECONDS):
                await websocket.close()

    def _url(self, path: str, query: Mapping[str, object] | Sequence[tuple[str, str | bytes]]) -> Any:
        import yarl

        asked = f"?{urlencode(query, quote_via=quote)}" if query else ""
        return yarl.URL(f"{self.server}{path}{asked}", encoded=True)

    async def _logged_in(self, ask: Callable[[Login], Awaitable[T]]) -> T:
        """Ask with the login; if it is not valid any more, again with a new one. Raises ApiError, ApiLost."""
        login = await self._login()
        try:
            return await ask(login)
        except ApiError as error:
            if error.status != _UNAUTHORIZED or not await self._renew(login):
                raise
        return await ask(await self._login())

    async def _login(self) -> Login:
        """The headers with the token. A certificate is in the session already."""
        found = (await self._settings.auth_settings()).values()
        return {each["key"]: each["value"] for each in found if each.get("in") == "header"}

    async def _renew(self, used: Login) -> bool:
        """Log in again, unless that has been done since ``used``. Returns whether the login is another one.

        A login with certificates stays as it was: they are in the session. Raises ApiError.
        """
        async with self._renewing:
            if await self._login() == used and self._fresh_keys is not None:
                try:
                    with anyio.fail_after(self._answer_seconds):  # its program may wait for a person
                        fresh = await anyio.to_thread.run_sync(self._fresh_keys, abandon_on_cancel=True)
                    self._settings.api_key = dict(fresh)
                except TimeoutError as error:
                    raise ApiError(
                        _UNAUTHORIZED, f"no new login within {self._answer_seconds:g} s (answer_seconds)"
                    ) from error
                except Exception as error:  # of the kubeconfig's login, or of its program
                    raise ApiError(_UNAUTHORIZED, f"the login could not be renewed: {error}") from error
            return await self._login() != used

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


def _decoded(status: int, data: bytes, headers: Mapping[str, str]) -> Object:
    try:
        found = msgspec.json.decode(data) if data else {}
    except msgspec.DecodeError:
        found = {"message": data[:500].decode(errors="replace").strip()}
    if status >= 400:
        again = headers.get("Retry-After", "")
        wait = float(again) if again.isdecimal() else None
        raise ApiError(status, found.get("message") or f"status {status}", found.get("reason", ""), wait)
    return dict(found)


def _keep_alive(connection: Any, reads: bool) -> None:
    """Let the kernel notice when the other end of a connection is gone.

    Pings of the websocket would not do: a server answers none while a command does not read its stdin. Nor is
    there a limit for data that such a command does not take.
    """
    if connection is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in KEEPALIVE.items():
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        if reads:  # the kernel sends no probes while data is on its way
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNTAKEN_SECONDS * 1000)


# --- Which cluster ----------------------------------------------------------------------------------------


async def connect(config: KubernetesConfig) -> Api:
    """Read the configuration; nothing is sent yet. Raises Unavailable."""
    known = await anyio.to_thread.run_sync(_cluster, config)
    namespace = config.namespace or known.namespace or "default"
    return Api(known.client(), namespace, known.source, config.answer_seconds, known.fresh_keys)


class _Cluster(NamedTuple):
    """What the configuration says."""

    client: Callable[[], Any]
    namespace: str
    source: str
    fresh_keys: Callable[[], Mapping[str, str]] | None = None


def _cluster(config: KubernetesConfig) -> _Cluster:
    """Read the configuration. Blocks. Raises Unavailable."""
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
        return _Cluster(lambda: client.ApiClient(configuration), namespace, "the service account of this pod")
    if not any(Path(one).is_file() for one in source.split(os.pathsep)):
        raise Unavailable(f"there is no kubeconfig {source}", remedy=REMEDY)
    try:
        loader = asyncio.run(
            loading.load_kube_config(source, config.context or None, configuration, persist_config=False)
        )
        found = loader.current_context["context"].get("namespace") or ""
    except Exception as error:  # of the file, its logins or their programs
        known = _contexts(source) if config.context else []
        if known and config.context not in known:
            raise Unavailable(
                f"the kubeconfig {source} has no context {config.context!r}",
                remedy=f"check the option context=; the file has: {', '.join(known)}",
            ) from error
        named = f" --context {shlex.quote(config.context)}" if config.context else ""
        raise Unavailable(
            f"the kubeconfig {source} cannot be used: {str(error) or type(error).__name__}",
            remedy=f"check that `KUBECONFIG={source} kubectl{named} version` works",
        ) from error

    def fresh_keys() -> Mapping[str, str]:
        # The same loader: it has what a login by OpenID Connect needs for the next one.
        renewed = client.Configuration()
        asyncio.run(loader.load_and_set(renewed))
        return dict(renewed.api_key)

    return _Cluster(lambda: client.ApiClient(configuration), found, source, fresh_keys)


def _contexts(source: str) -> list[str]:
    """The names of the contexts in these files; none if they cannot be read. Blocks."""
    import yaml  # the Kubernetes client needs it too

    found = []
    for path in source.split(os.pathsep):
        try:
            table = yaml.safe_load(Path(path).read_text())
            found += [str(each["name"]) for each in table["contexts"]]
        except (OSError, ValueError, yaml.YAMLError, KeyError, TypeError):
            continue
    return found


def _kubeconfig(config: KubernetesConfig) -> str:
    """The path of the kubeconfig, or ""."""
    if named := config.kubeconfig or os.environ.get("KUBECONFIG", ""):
        return str(Path(named).expanduser())
    usual, ours = Path("~/.kube/config").expanduser(), paths.cache() / "kubernetes/node/kubeconfig"
    if usual.exists():
        return str(usual)
    return str(ours) if ours.exists() and not ACCOUNT.exists() else ""

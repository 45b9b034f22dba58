"""A small HTTP client for registries: connection reuse, redirects, proxies. Thread-safe.

It uses the standard library's client, because imports dominate the time of a pull that finds nothing new.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import unquote, urljoin, urlsplit

from dutyfree.engine.store.cancel import CancelToken

if TYPE_CHECKING:
    import ssl

CONNECT_SECONDS = 10.0
READ_SECONDS = 60.0
"""Timeout of one read."""
REDIRECTS_MAX = 10
PIECE = 256 << 10
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 5), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 4))
"""Idle time, interval and number of the probes with which the kernel notices that a machine is gone."""

_REDIRECTS = (301, 302, 303, 307, 308)


class ConnectionLost(Exception):  # noqa: N818 (names the state)
    """The connection failed. ``reached`` says whether it was ever established."""

    def __init__(self, reason: str, *, reached: bool = True) -> None:
        super().__init__(reason)
        self.reached = reached


class BadResponse(Exception):  # noqa: N818 (names the state)
    """The server's response is invalid."""


class _Endpoint(NamedTuple):
    secure: bool
    host: str
    port: int


class HttpResponse:
    """A response whose body is read as a stream."""

    def __init__(self, url: str, inner: http.client.HTTPResponse) -> None:
        self.url = url
        self.status = inner.status
        self.headers = inner.headers
        self._inner = inner
        self._left = inner.length
        self.whole = self._left == 0

    def pieces(self) -> Iterator[bytes]:
        """The body, each piece as soon as it arrives. Raises ConnectionLost."""
        while not self.whole:
            try:
                piece = self._inner.read1(PIECE if self._left is None else min(PIECE, self._left))
            except (OSError, http.client.HTTPException) as error:
                raise ConnectionLost(f"the connection was lost: {_reason(error)}") from error
            if not piece:
                if self._left:
                    raise ConnectionLost("the connection was closed before the end of the response")
                self.whole = True
                return
            if self._left is not None:
                self._left -= len(piece)
                self.whole = self._left == 0
            yield piece

    def close(self) -> None:
        self._inner.close()


class HttpClient:
    """Reuses connections until ``close``. Calls ``check_url`` before each request; it may raise.

    When ``cancel`` is set, connections in use are shut down, so that no thread waits for a silent server.
    """

    def __init__(
        self,
        headers: Mapping[str, str],
        check_url: Callable[[str], None],
        cancel: CancelToken | None = None,
    ) -> None:
        self._headers = dict(headers)
        self._check_url = check_url
        self._cancel = cancel or CancelToken()
        self._idle: dict[_Endpoint, list[http.client.HTTPConnection]] = {}
        self._lock = threading.Lock()
        self._tls_context: ssl.SSLContext | None = None

    def close(self) -> None:
        with self._lock:
            connections = [one for kept in self._idle.values() for one in kept]
            self._idle.clear()
        for connection in connections:
            connection.close()

    @contextlib.contextmanager
    def request(
        self,
        url: str,
        headers: Mapping[str, str],
        form: bytes | None = None,
        read_seconds: float = READ_SECONDS,
    ) -> Iterator[HttpResponse]:
        """GET a URL, or POST a form to it; follow redirects. Raises ConnectionLost, BadResponse."""
        own = {**self._headers, **headers}
        if form is not None:
            own["Content-Type"] = "application/x-www-form-urlencoded"
        for _ in range(REDIRECTS_MAX):
            self._check_url(url)
            endpoint = _endpoint(url)
            with self._connection(endpoint, url, own, form, read_seconds) as response:
                if response.status not in _REDIRECTS:
                    yield response
                    return
                target = response.headers.get("location")
            if target is None or form is not None:
                raise BadResponse("it redirects without a location, or redirects a POST")
            url = urljoin(url, target)
            if _endpoint(url) != endpoint:  # do not send the login to another host
                own.pop("Authorization", None)
        raise BadResponse(f"it redirects more than {REDIRECTS_MAX} times")

    # --- Connections --------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _connection(
        self, endpoint: _Endpoint, url: str, headers: dict[str, str], form: bytes | None, seconds: float
    ) -> Iterator[HttpResponse]:
        """Send a request, and give the connection back after the response was read."""
        proxy = _proxy(endpoint)
        parts = urlsplit(url)
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        if proxy and not endpoint.secure:
            target, headers = url, {**headers, **_proxy_login(proxy)}
        while True:
            with self._lock:
                kept = self._idle.get(endpoint)
                connection = kept.pop() if kept else None
            used = connection is not None
            if connection is None:
                connection = self._connect(endpoint, proxy)
            with self._cancel.on_set(partial(_shut_down, connection)):
                try:
                    connection.sock.settimeout(seconds)
                    connection.request("GET" if form is None else "POST", target, form, headers)
                    response = HttpResponse(url, connection.getresponse())
                except http.client.InvalidURL as error:
                    connection.close()
                    raise BadResponse(str(error)) from error
                except (OSError, http.client.HTTPException) as error:
                    connection.close()
                    if not used:  # else the server may have closed an idle connection: try a new one
                        raise ConnectionLost(_reason(error)) from error
                    continue
                try:
                    yield response
                finally:
                    self._release(endpoint, connection, response)
                return

    def _connect(self, endpoint: _Endpoint, proxy: str) -> http.client.HTTPConnection:
        where = urlsplit(proxy)
        if proxy and (where.scheme != "http" or not where.hostname):
            raise BadResponse(f"the proxy {proxy} is not supported: name it http://host:port")
        host, port = (where.hostname or "", where.port or 80) if proxy else (endpoint.host, endpoint.port)
        connection: http.client.HTTPConnection
        if endpoint.secure:
            connection = http.client.HTTPSConnection(host, port, timeout=CONNECT_SECONDS, context=self._tls())
            if proxy:
                connection.set_tunnel(endpoint.host, endpoint.port, _proxy_login(proxy))
        else:
            connection = http.client.HTTPConnection(host, port, timeout=CONNECT_SECONDS)
        try:
            connection.connect()
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise ConnectionLost(_reason(error), reached=False) from error
        connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEPALIVE:
            connection.sock.setsockopt(socket.IPPROTO_TCP, option, value)
        return connection

    def _tls(self) -> ssl.SSLContext:
        import ssl

        with self._lock:
            if self._tls_context is None:
                self._tls_context = ssl.create_default_context()
            return self._tls_context

    def _release(
        self, endpoint: _Endpoint, connection: http.client.HTTPConnection, response: HttpResponse
    ) -> None:
        reusable = response.whole and connection.sock is not None
        response.close()
        if not reusable:
            connection.close()
            return
        with self._lock:
            self._idle.setdefault(endpoint, []).append(connection)


def _shut_down(connection: http.client.HTTPConnection) -> None:
    """Wake the thread that waits for this connection. The thread closes it."""
    with contextlib.suppress(OSError, AttributeError):  # it is closed already
        # Not the method of a TLS socket, which would take the connection from the thread that uses it.
        socket.socket.shutdown(connection.sock, socket.SHUT_RDWR)


def _endpoint(url: str) -> _Endpoint:
    try:
        parts = urlsplit(url)
        if parts.scheme in ("http", "https") and parts.hostname:
            secure = parts.scheme == "https"
            return _Endpoint(secure, parts.hostname, parts.port or (443 if secure else 80))
    except ValueError:
        pass
    raise BadResponse(f"{url!r} is not a valid URL")


def _proxy(endpoint: _Endpoint) -> str:
    """The proxy for a host from the environment, or an empty string."""
    if not any(name.lower() in ("http_proxy", "https_proxy", "all_proxy") for name in os.environ):
        return ""
    from urllib.request import getproxies, proxy_bypass

    if proxy_bypass(f"{endpoint.host}:{endpoint.port}"):
        return ""
    known = getproxies()
    found = known.get("https" if endpoint.secure else "http") or known.get("all") or ""
    return found if "://" in found or not found else f"http://{found}"


def _proxy_login(proxy: str) -> dict[str, str]:
    import base64

    where = urlsplit(proxy)
    if where.username is None:
        return {}
    login = f"{unquote(where.username)}:{unquote(where.password or '')}"
    return {"Proxy-Authorization": "Basic " + base64.b64encode(login.encode()).decode()}


def _reason(error: Exception) -> str:
    return str(error) or type(error).__name__

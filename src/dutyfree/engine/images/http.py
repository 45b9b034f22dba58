"""HTTP as registries need it, and no more: kept connections, redirects, proxies. For several threads.

The standard library's own client underneath: a pull in which nothing is to be fetched takes as long as its
imports do.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import unquote, urljoin, urlsplit

if TYPE_CHECKING:
    import ssl

CONNECT_SECONDS = 10.0
READ_SECONDS = 60.0
"""Without a byte, after which a connection counts as cut."""
REDIRECTS = 10
PIECE = 256 << 10

_MOVED = (301, 302, 303, 307, 308)


class ConnectionLost(Exception):  # noqa: N818 (what became of the connection)
    """The connection failed. ``reached`` tells whether there ever was one."""

    def __init__(self, reason: str, *, reached: bool = True) -> None:
        super().__init__(reason)
        self.reached = reached


class BadResponse(Exception):  # noqa: N818 (what was answered)
    """The answer cannot be followed."""


class _Place(NamedTuple):
    secure: bool
    host: str
    port: int


class HttpResponse:
    """An answer whose body is read as it comes."""

    def __init__(self, url: str, inner: http.client.HTTPResponse) -> None:
        self.url = url
        self.status = inner.status
        self.headers = inner.headers
        self._inner = inner
        self._left = inner.length
        self.whole = self._left == 0

    def pieces(self) -> Iterator[bytes]:
        """The body, each piece as soon as it is there. Raises ConnectionLost."""
        while not self.whole:
            try:
                piece = self._inner.read1(PIECE if self._left is None else min(PIECE, self._left))
            except (OSError, http.client.HTTPException) as error:
                raise ConnectionLost(f"the connection was cut: {_reason(error)}") from error
            if not piece:
                if self._left:
                    raise ConnectionLost("the connection was cut: it ended in the middle")
                self.whole = True
                return
            if self._left is not None:
                self._left -= len(piece)
                self.whole = self._left == 0
            yield piece

    def close(self) -> None:
        self._inner.close()


class HttpClient:
    """Kept connections, until ``close``. ``allowed`` sees every address before it is asked, and may raise."""

    def __init__(self, headers: Mapping[str, str], allowed: Callable[[str], None]) -> None:
        self._headers = dict(headers)
        self._allowed = allowed
        self._idle: dict[_Place, list[http.client.HTTPConnection]] = {}
        self._lock = threading.Lock()
        self._trust: ssl.SSLContext | None = None

    def close(self) -> None:
        with self._lock:
            connections = [one for kept in self._idle.values() for one in kept]
            self._idle.clear()
        for connection in connections:
            connection.close()

    @contextlib.contextmanager
    def ask(self, url: str, headers: Mapping[str, str], form: bytes | None = None) -> Iterator[HttpResponse]:
        """GET a URL, or POST a form to it; follow redirects. Raises ConnectionLost, BadResponse."""
        own = {**self._headers, **headers}
        if form is not None:
            own["Content-Type"] = "application/x-www-form-urlencoded"
        for _ in range(REDIRECTS):
            self._allowed(url)
            place = _place(url)
            connection, response = self._send(place, url, own, form)
            try:
                if response.status not in _MOVED:
                    yield response
                    return
                target = response.headers.get("location")
            finally:
                self._give_back(place, connection, response)
            if target is None or form is not None:
                raise BadResponse("it leads nowhere")
            url = urljoin(url, target)
            if _place(url) != place:  # what we are is no business of others
                own.pop("Authorization", None)
        raise BadResponse("it leads in circles")

    # --- Connections --------------------------------------------------------------------------------

    def _send(
        self, place: _Place, url: str, headers: dict[str, str], form: bytes | None
    ) -> tuple[http.client.HTTPConnection, HttpResponse]:
        proxy = _proxy(place)
        parts = urlsplit(url)
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        if proxy and not place.secure:
            target, headers = url, {**headers, **_proxy_login(proxy)}
        while True:
            with self._lock:
                kept = self._idle.get(place)
                connection = kept.pop() if kept else None
            used = connection is not None
            if connection is None:
                connection = self._connect(place, proxy)
            try:
                connection.request("GET" if form is None else "POST", target, form, headers)
                return connection, HttpResponse(url, connection.getresponse())
            except http.client.InvalidURL as error:
                connection.close()
                raise BadResponse(str(error)) from error
            except (OSError, http.client.HTTPException) as error:
                connection.close()
                if not used:  # a kept connection may have ended while nobody looked
                    raise ConnectionLost(_reason(error)) from error

    def _connect(self, place: _Place, proxy: str) -> http.client.HTTPConnection:
        where = urlsplit(proxy)
        if proxy and (where.scheme != "http" or not where.hostname):
            raise BadResponse(f"the proxy {proxy} is of a kind that is not known: name it http://host:port")
        host, port = (where.hostname or "", where.port or 80) if proxy else (place.host, place.port)
        connection: http.client.HTTPConnection
        if place.secure:
            connection = http.client.HTTPSConnection(
                host, port, timeout=CONNECT_SECONDS, context=self._trusted()
            )
            if proxy:
                connection.set_tunnel(place.host, place.port, _proxy_login(proxy))
        else:
            connection = http.client.HTTPConnection(host, port, timeout=CONNECT_SECONDS)
        try:
            connection.connect()
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise ConnectionLost(_reason(error), reached=False) from error
        connection.sock.settimeout(READ_SECONDS)
        return connection

    def _trusted(self) -> ssl.SSLContext:
        import ssl

        with self._lock:
            if self._trust is None:
                self._trust = ssl.create_default_context()
            return self._trust

    def _give_back(
        self, place: _Place, connection: http.client.HTTPConnection, response: HttpResponse
    ) -> None:
        reusable = response.whole and connection.sock is not None
        response.close()
        if not reusable:
            connection.close()
            return
        with self._lock:
            self._idle.setdefault(place, []).append(connection)


def _place(url: str) -> _Place:
    try:
        parts = urlsplit(url)
        if parts.scheme in ("http", "https") and parts.hostname:
            secure = parts.scheme == "https"
            return _Place(secure, parts.hostname, parts.port or (443 if secure else 80))
    except ValueError:
        pass
    raise BadResponse(f"{url!r} is no address")


def _proxy(place: _Place) -> str:
    """The proxy that the environment tells for an address; none without one."""
    if not any(name.lower() in ("http_proxy", "https_proxy", "all_proxy") for name in os.environ):
        return ""
    from urllib.request import getproxies, proxy_bypass

    if proxy_bypass(f"{place.host}:{place.port}"):
        return ""
    known = getproxies()
    found = known.get("https" if place.secure else "http") or known.get("all") or ""
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

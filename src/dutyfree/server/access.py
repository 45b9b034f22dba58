"""Who asks: the tenant of a request, from its token."""

from __future__ import annotations

import base64
import binascii
import contextlib
import ipaddress
from urllib.parse import urlsplit

from starlette.requests import HTTPConnection

from dutyfree.server.tenant_rules import LOCAL
from dutyfree.server.tokens import PREFIX, Tokens
from dutyfree.wire.errors import WireError

OPERATOR = "operator"
"""The tenant whose tokens see what the whole server does."""
_INVALID = "it was revoked, or another server created it; create one there: dutyfree token create TENANT"
_RESERVED = f"the tenant of this token is {LOCAL!r}, a name that the server uses for callers without a token"
SUBPROTOCOL = "dutyfree.token."
"""Begins the WebSocket subprotocol that carries a token."""


class Refused(Exception):  # noqa: N818 (names the state)
    """The caller may not do this. ``status`` is that of the answer."""

    def __init__(self, status: int, code: str, message: str, remedy: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.error = WireError(code, message, "program", retryable=False, remedy=remedy)


class Access:
    """Decides who a caller is."""

    def __init__(self, tokens: Tokens, *, needs_token: bool) -> None:
        self._tokens = tokens
        self._needs_token = needs_token

    async def tenant(self, connection: HTTPConnection, *, page_of_sandbox: bool = False) -> str:
        """The tenant of a request. Raises Refused.

        ``page_of_sandbox``: whether a page that a sandbox serves may ask. To a browser it is another site,
        although its images and styles come from here.
        """
        _check_origin(connection, any_site=page_of_sandbox)
        secret = _secret(connection)
        if not secret.startswith(PREFIX) and not self._needs_token and not await self._tokens.any_exist():
            _check_host(connection)
            return LOCAL
        if not secret:
            raise Refused(401, "unauthorized", "the server needs a token", "send Authorization: Bearer TOKEN")
        tenant = await self._tokens.tenant(secret)
        if tenant is None:
            raise Refused(401, "unauthorized", "this token is not valid", _INVALID)
        if tenant == LOCAL:  # from a time when the name was not reserved
            raise Refused(
                403, "forbidden", _RESERVED, "create a token for another tenant, and revoke this one"
            )
        return tenant

    def known_tenant(self, connection: HTTPConnection) -> str | None:
        """The tenant of a token that ``tenant`` has found lately, however the request writes it."""
        return self._tokens.known_tenant(_secret(connection))

    async def check_operator(self, connection: HTTPConnection) -> None:
        """Raises Refused if the caller is a tenant, who must not see what others do."""
        tenant = await self.tenant(connection)
        if tenant not in (LOCAL, OPERATOR):
            raise Refused(
                403, "forbidden", "only the operator may see this", f"use a token of the tenant {OPERATOR}"
            )


def _secret(connection: HTTPConnection) -> str:
    """The token of a request, where our own clients, those of E2B or of registries, or browsers put it."""
    kind, _, secret = connection.headers.get("authorization", "").partition(" ")
    if kind.lower() == "bearer":
        return secret.strip()
    if kind.lower() == "basic":  # a user's name, which can be any, and the token as the password
        with contextlib.suppress(binascii.Error, UnicodeDecodeError):
            return base64.b64decode(secret).decode().partition(":")[2]
    for protocol in connection.scope.get("subprotocols", ()):  # all that a browser can send with a WebSocket
        if protocol.startswith(SUBPROTOCOL):
            return str(protocol.removeprefix(SUBPROTOCOL))
    return connection.headers.get("x-api-key", "")


def _check_host(connection: HTTPConnection) -> None:
    """Refuse names that a foreign site could let point to this machine (DNS rebinding). Raises Refused.

    To a browser, the pages of such a site and this server are then the same site. It has no token, though.
    """
    given = connection.headers.get("host", "")
    with contextlib.suppress(ValueError):
        if _is_here(urlsplit(f"//{given}").hostname or ""):
            return
    message = f"without a token, the server is not reached as {given[:80]!r}"
    raise Refused(403, "forbidden", message, "use 127.0.0.1, or a token")


def _is_here(host: str) -> bool:
    """Whether a host is the loopback, a name that no foreign site can have, or that of a Unix socket."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return "." not in host or host.endswith(".localhost")


def _check_origin(connection: HTTPConnection, *, any_site: bool) -> None:
    """Refuse pages of other sites, which a browser on this machine may show. Raises Refused.

    ``any_site``: they may still embed what the request returns, but neither read it nor send anything.
    """
    origin = connection.headers.get("origin")
    is_foreign = origin is not None and origin.partition("://")[2] != connection.headers.get("host", "")
    is_other_site = connection.headers.get("sec-fetch-site") in ("cross-site", "same-site")
    if is_foreign or (is_other_site and not any_site):
        raise Refused(403, "forbidden", "a page of another site may not use this server")

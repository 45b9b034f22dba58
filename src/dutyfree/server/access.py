"""Who asks: the tenant of a request, from its token."""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit

from starlette.requests import HTTPConnection

from dutyfree.server.tenant_rules import LOCAL
from dutyfree.server.tokens import PREFIX, Tokens
from dutyfree.wire.errors import WireError

OPERATOR = "operator"
"""The tenant whose tokens see what the whole server does."""


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
            raise Refused(401, "unauthorized", "this token is not valid", "see: dutyfree token --help")
        return tenant

    async def check_operator(self, connection: HTTPConnection) -> None:
        """Raises Refused if the caller is a tenant, who must not see what others do."""
        tenant = await self.tenant(connection)
        if tenant not in (LOCAL, OPERATOR):
            raise Refused(
                403, "forbidden", "only the operator may see this", f"dutyfree token create {OPERATOR}"
            )


def _secret(connection: HTTPConnection) -> str:
    """The token of a request, where our own clients or those of E2B put it."""
    kind, _, secret = connection.headers.get("authorization", "").partition(" ")
    return secret.strip() if kind.lower() == "bearer" else connection.headers.get("x-api-key", "")


def _check_origin(connection: HTTPConnection, *, any_site: bool) -> None:
    """Refuse pages of other sites, which a browser on this machine may show. Raises Refused.

    ``any_site``: they may still embed what the request returns, but neither read it nor send anything.
    """
    origin = connection.headers.get("origin")
    is_foreign = origin is not None and urlsplit(origin).netloc != connection.headers.get("host", "")
    is_other_site = connection.headers.get("sec-fetch-site") in ("cross-site", "same-site")
    if is_foreign or (is_other_site and not any_site):
        raise Refused(403, "forbidden", "a page of another site may not use this server")


def _check_host(connection: HTTPConnection) -> None:
    """Refuse names of other sites that lead to this machine (DNS rebinding). Raises Refused.

    A page of such a site has the same origin as this server. Who has no token must use an address of the
    loopback, which no site has.
    """
    if connection.scope.get("client") is None:
        return  # a Unix socket, which no browser uses
    host = urlsplit(f"//{connection.headers.get('host', '')}").hostname or ""
    try:
        is_local = ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_local = host in ("", "localhost")
    if not is_local:
        raise Refused(
            403, "forbidden", f"this server is not {host[:80]!r}", "use http://127.0.0.1, or a token"
        )

"""Tokens: who may use the server. Only their digests are stored, so a stolen database lets no one in."""

from __future__ import annotations

import asyncio
import hashlib
import re
import secrets
import sqlite3
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from dutyfree.contract.errors import UsageError
from dutyfree.server.admission import TenantLimits
from dutyfree.server.tenant_rules import LOCAL

NO_LIMITS = TenantLimits()

FRESH = 5.0
"""For how many seconds a token is valid after it was looked up: the longest that a revoked one works."""

PREFIX = "dutyfree_"
"""Begins each token, so that scanners of leaked secrets can find it."""

_SECRET_BYTES = 32
_SECRET = re.compile(rf"{PREFIX}[A-Za-z0-9_-]{{43}}")
_NAME = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,38}[a-z0-9])?")
_SCHEMA = """
CREATE TABLE IF NOT EXISTS tokens (
    digest BLOB PRIMARY KEY,
    id TEXT UNIQUE NOT NULL,
    tenant TEXT NOT NULL,
    created REAL NOT NULL
) STRICT;
CREATE TABLE IF NOT EXISTS tenants (
    name TEXT PRIMARY KEY,
    limits TEXT NOT NULL
) STRICT;
"""


class Token(msgspec.Struct, frozen=True):
    """A token, without its secret."""

    id: str
    tenant: str
    created: float
    """Unix time."""


class Tokens:
    """The tokens in a database file, which the server and the command line share."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._thread = ThreadPoolExecutor(1, "dutyfree-tokens")
        """Of its own, so that what other requests do in threads lets no client wait to be known."""
        self._known: dict[bytes, tuple[str, float]] = {}
        self._limits: dict[str, TenantLimits] = {}
        self._looked = 0.0
        self._exist = False

    def __enter__(self) -> Self:
        self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._database = sqlite3.connect(
            self._path, isolation_level=None, timeout=10, check_same_thread=False
        )
        self._path.chmod(0o600)
        self._database.execute("PRAGMA journal_mode = WAL")
        self._database.executescript(_SCHEMA)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            self._database.close()

    def create(self, tenant: str, secret: str = "") -> str:
        """A new token for a tenant, or the given one of another server; it cannot be shown again.

        Raises UsageError for a wrong name, or for what is no token.
        """
        _check_name(tenant)
        secret = secret or PREFIX + secrets.token_urlsafe(_SECRET_BYTES)
        if not _SECRET.fullmatch(secret):
            raise UsageError("this is not a token", remedy="create one with: dutyfree token create NAME")
        row = (_digest(secret), secrets.token_hex(4), tenant, time.time())
        try:
            self._database.execute("INSERT INTO tokens VALUES (?, ?, ?, ?)", row)
        except sqlite3.IntegrityError as error:
            raise UsageError("this token exists already", remedy="see: dutyfree token ls") from error
        return secret

    def set_limits(self, tenant: str, limits: TenantLimits) -> None:
        """Replace the limits of a tenant. Raises UsageError for a wrong name."""
        _check_name(tenant)
        row = (tenant, msgspec.json.encode(limits).decode())
        self._database.execute("INSERT OR REPLACE INTO tenants VALUES (?, ?)", row)

    def all_limits(self) -> dict[str, TenantLimits]:
        rows = self._database.execute("SELECT name, limits FROM tenants")
        return {name: msgspec.json.decode(limits, type=TenantLimits) for name, limits in rows}

    def limits(self, tenant: str) -> TenantLimits:
        """The limits of a tenant, as they were when its token was last looked up."""
        return self._limits.get(tenant, NO_LIMITS)

    def revoke(self, name: str) -> None:
        """Remove a token by its id. Raises UsageError."""
        removed = self._database.execute("DELETE FROM tokens WHERE id = ?", (name,))
        if removed.rowcount == 0:
            raise UsageError(f"there is no token {name!r}", remedy="see: dutyfree token ls")

    def all(self) -> list[Token]:
        rows = self._database.execute("SELECT id, tenant, created FROM tokens ORDER BY created")
        return [Token(*row) for row in rows]

    def exist(self) -> bool:
        """Whether there is a token at all."""
        with self._lock:
            return self._database.execute("SELECT 1 FROM tokens LIMIT 1").fetchone() is not None

    async def any_exist(self) -> bool:
        """Whether there is a token, or has been: to revoke the last one does not open the server."""
        now = time.monotonic()
        if not self._exist and now > self._looked + FRESH:
            self._looked = now
            self._exist = await asyncio.get_running_loop().run_in_executor(self._thread, self.exist)
        return self._exist

    async def tenant(self, secret: str) -> str | None:
        """The tenant of a token, or None. A revoked one is refused ``FRESH`` seconds later at most."""
        digest, now = _digest(secret), time.monotonic()
        known = self._known.get(digest)
        if known is not None and known[1] > now:
            return known[0]
        tenant = await asyncio.get_running_loop().run_in_executor(self._thread, self._look_up, digest)
        if tenant is None:
            self._known.pop(digest, None)
        else:
            self._known[digest] = (tenant, now + FRESH)
        return tenant

    def known_tenant(self, secret: str) -> str | None:
        """The tenant of a token that was looked up lately, also if it is about to be looked up again."""
        known = self._known.get(_digest(secret))
        return None if known is None else known[0]

    def _look_up(self, digest: bytes) -> str | None:
        with self._lock:
            found = self._database.execute("SELECT tenant FROM tokens WHERE digest = ?", (digest,))
            row = found.fetchone()
            if row is None:
                return None
            self._limits = self.all_limits()
        return str(row[0])


def _check_name(tenant: str) -> None:
    """Raises UsageError. The name is also that of a directory."""
    if not _NAME.fullmatch(tenant):
        raise UsageError(
            f"{tenant!r} is not a name for a tenant",
            remedy="use at most 40 lower-case letters, digits and hyphens",
        )
    if tenant == LOCAL:
        raise UsageError(
            f"the name {LOCAL!r} is reserved: the server uses it for callers without a token",
            remedy="choose another name for the tenant",
        )


def _digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode(errors="replace")).digest()

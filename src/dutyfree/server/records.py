"""Sandboxes on record, in a SQLite file: what the next server needs to go on with them.

Only the end of a process matters, since no sandbox survives that of the machine: so nothing is synced to
disk. All statements run in one thread, in the order in which they were asked for.
"""

from __future__ import annotations

import asyncio
import sqlite3
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

import msgspec

from dutyfree.contract.errors import Unavailable
from dutyfree.engine.layers.kept_state import KeptSnapshot
from dutyfree.engine.sandbox.kept import KeptSandbox
from dutyfree.server.admission import Demand

T = TypeVar("T")

_SCHEMA = """
CREATE TABLE IF NOT EXISTS sandboxes (
    id TEXT PRIMARY KEY,
    tenant TEXT NOT NULL,
    key TEXT NOT NULL,
    fingerprint BLOB NOT NULL,
    data BLOB,
    ended REAL
) STRICT;
CREATE TABLE IF NOT EXISTS snapshots (
    image TEXT PRIMARY KEY,
    tenant TEXT NOT NULL,
    data BLOB NOT NULL
) STRICT;
"""


class HeldRecord(msgspec.Struct, frozen=True):
    """A sandbox that a client holds, apart from its lease, which the launcher has."""

    sandbox: KeptSandbox
    created: float
    access_token: str
    template: str
    demand: Demand
    """What it counts against the limits of its tenant."""


class Row(msgspec.Struct, frozen=True):
    """One sandbox."""

    id: str
    tenant: str
    key: str
    """The idempotency key of its creation; the members of a group have the same."""
    fingerprint: bytes
    record: HeldRecord | None
    """None if it has ended: then the key must not create another one."""


class SandboxRecords:
    """The records of one server."""

    def __init__(self, path: Path, remembered: float) -> None:
        """``remembered``: for how many seconds the key of an ended sandbox is known."""
        self._path = path
        self._remembered = remembered
        self._forgot = 0.0
        """When ended sandboxes were last forgotten: ``time.time``."""
        self._thread = ThreadPoolExecutor(1, "dutyfree-records")

    def __enter__(self) -> Self:
        self._database = self._thread.submit(self._connect).result()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._thread.submit(self._database.close)
        self._thread.shutdown()

    def _connect(self) -> sqlite3.Connection:
        try:
            database = sqlite3.connect(self._path, isolation_level=None, timeout=10)
            self._path.chmod(0o600)
            database.execute("PRAGMA journal_mode = WAL")
            database.execute("PRAGMA synchronous = OFF")
            database.executescript(_SCHEMA)
        except sqlite3.Error as error:
            raise Unavailable(f"the file {self._path} cannot be used: {error}") from error
        return database

    def load(self) -> list[Row]:
        """All sandboxes that were not ended, and the keys of those that ended lately. Blocks."""
        return self._thread.submit(self._load).result()

    def _load(self) -> list[Row]:
        self._forget(time.time())
        rows = self._database.execute("SELECT id, tenant, key, fingerprint, data FROM sandboxes").fetchall()
        return [
            Row(name, tenant, key, mark, _decoded(data, HeldRecord)) for name, tenant, key, mark, data in rows
        ]

    def load_snapshots(self) -> list[tuple[str, KeptSnapshot]]:
        """The tenant of each snapshot. Forgets all of them: save those again that still exist. Blocks."""
        return self._thread.submit(self._load_snapshots).result()

    def _load_snapshots(self) -> list[tuple[str, KeptSnapshot]]:
        rows = self._database.execute("SELECT tenant, data FROM snapshots").fetchall()
        self._database.execute("DELETE FROM snapshots")
        found = [(tenant, _decoded(data, KeptSnapshot)) for tenant, data in rows]
        return [(tenant, kept) for tenant, kept in found if kept is not None]

    async def save_snapshot(self, tenant: str, kept: KeptSnapshot) -> None:
        """Write a snapshot; returns when a killed server would leave it behind."""
        await asyncio.get_running_loop().run_in_executor(self._thread, self._save_snapshot, tenant, kept)

    def _save_snapshot(self, tenant: str, kept: KeptSnapshot) -> None:
        row = (kept.image, tenant, msgspec.msgpack.encode(kept))
        self._database.execute("INSERT OR REPLACE INTO snapshots VALUES (?, ?, ?)", row)

    def forget_snapshot(self, image: str) -> None:
        self._thread.submit(self._forget_snapshot, image)

    def _forget_snapshot(self, image: str) -> None:
        self._database.execute("DELETE FROM snapshots WHERE image = ?", (image,))

    async def save(self, row: Row) -> None:
        """Write a sandbox; returns when a killed server would leave it behind."""
        await asyncio.get_running_loop().run_in_executor(self._thread, self._save, row)

    def _save(self, row: Row) -> None:
        data = msgspec.msgpack.encode(row.record)
        self._database.execute(
            "INSERT OR REPLACE INTO sandboxes VALUES (?, ?, ?, ?, ?, NULL)",
            (row.id, row.tenant, row.key, row.fingerprint, data),
        )

    async def written(self) -> None:
        """Wait until all that was asked for is written."""
        await asyncio.get_running_loop().run_in_executor(self._thread, int)

    def end(self, name: str) -> None:
        """A sandbox ends. Its key stays known for a while."""
        self._thread.submit(self._end, name, time.time())

    def _end(self, name: str, now: float) -> None:
        self._database.execute("UPDATE sandboxes SET data = NULL, ended = ? WHERE id = ?", (now, name))
        if (
            now - self._forgot > self._remembered / 60
        ):  # or the file would grow for as long as the server runs
            self._forget(now)

    def forget_key(self, tenant: str, key: str) -> None:
        """An idempotency key may create again."""
        self._thread.submit(self._forget_key, tenant, key)

    def _forget_key(self, tenant: str, key: str) -> None:
        self._database.execute("DELETE FROM sandboxes WHERE tenant = ? AND key = ?", (tenant, key))

    def _forget(self, now: float) -> None:
        self._forgot = now
        self._database.execute("DELETE FROM sandboxes WHERE ended < ?", (now - self._remembered,))


def _decoded(data: bytes | None, kind: type[T]) -> T | None:
    """None for an ended sandbox, and for what another version wrote, which cannot be adopted."""
    try:
        return None if data is None else msgspec.msgpack.decode(data, type=kind)
    except msgspec.MsgspecError:
        return None

"""Which layers and images a tenant may fetch: those of the recipes that it has itself asked for here.

A tenant who asks for a recipe has proved that it knows all of it: the image, the commands, and the contents
of the files, which it has sent. It gets a sandbox with the layers, and can read everything in them. So to
fetch them tells it nothing new. Everything else is refused, also to a tenant who knows the key of a layer:
layers of others, of the operator, and named snapshots. The operator sees everything.

A recipe counts on what its image is now. Layers on an earlier image of the same name are not seen.
"""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Sequence
from contextlib import closing, suppress
from functools import cache, lru_cache
from pathlib import Path

import anyio.to_thread

from dutyfree.contract.errors import CreateError
from dutyfree.engine.exchange.distribution import Sees
from dutyfree.engine.images import reference, rootfs
from dutyfree.engine.layers.build_request import layer_key
from dutyfree.engine.store.provenance import STAGE
from dutyfree.engine.store.store import Store

HOST = "host"
"""The image that is the server's own root file system."""
RECIPES_MAX = 10_000
"""Prefixes of recipes that are remembered for each tenant. The oldest are forgotten."""
IMAGE_MAX = 512
"""Characters of the name of an image that is remembered."""

_SCHEMA = """
CREATE TABLE IF NOT EXISTS used_layers (
    tenant TEXT NOT NULL,
    image TEXT NOT NULL,
    prefix TEXT NOT NULL,
    at REAL NOT NULL,
    PRIMARY KEY (tenant, image, prefix)
) STRICT, WITHOUT ROWID;
"""


class LayerAccess:
    """What each tenant has asked for, in the server's database."""

    def __init__(self, path: Path, store: Store) -> None:
        self._path = path
        self._store = store
        self._lock = threading.Lock()
        self._used: dict[str, set[tuple[str, str]]] = {}
        """By tenant: images as recipes name them, each with the content key of a prefix; and images as the
        store names them, with an empty key."""

    async def note(self, tenant: str, image: str, prefixes: Sequence[str]) -> None:
        """Remember that a tenant has asked for an image, and for the prefixes of a recipe on it."""
        if len(image) > IMAGE_MAX:  # no image has such a name: the request fails
            return
        wanted = {(_stored_name(image), ""), *((image, prefix) for prefix in prefixes)}
        if not wanted <= self._used.get(tenant, set()):
            await anyio.to_thread.run_sync(self._write, tenant, wanted)

    def sees(self, tenant: str) -> Sees:
        """Whether a tenant may fetch a layer, by its key. The function blocks; it is for one request."""
        with self._lock:
            used = frozenset(self._read(tenant))
        identity_of = cache(self._identity)

        @cache
        def image_keys() -> set[str]:
            images = [image for image in self._store.images() if (image.name, "") in used]
            return {key for image in images for key in image.keys}

        def sees(key: str) -> bool:
            if not key.startswith(f"{STAGE}:"):
                return key in image_keys()
            built = self._store.provenance(key)
            return (
                built is not None
                and (built.image, built.recipe) in used
                and built.identity == identity_of(built.image)
                and key == layer_key(built.recipe, built.identity)
                and all(map(sees, built.below))
            )

        return sees

    def _identity(self, image: str) -> str:
        if image == HOST:
            return rootfs.host_identity()
        found = self._store.image(_stored_name(image))
        return found.digest if found else ""

    def _read(self, tenant: str) -> set[tuple[str, str]]:
        if tenant not in self._used:
            with closing(self._database()) as database:
                rows = database.execute("SELECT image, prefix FROM used_layers WHERE tenant = ?", (tenant,))
                self._used[tenant] = set(rows)
        return self._used[tenant]

    def _write(self, tenant: str, wanted: set[tuple[str, str]]) -> None:
        with self._lock, closing(self._database()) as database:
            known = self._read(tenant)
            rows = [(tenant, image, prefix, time.time()) for image, prefix in sorted(wanted - known)]
            with database:
                database.executemany("INSERT OR REPLACE INTO used_layers VALUES (?, ?, ?, ?)", rows)
            known |= wanted
            if len(known) > RECIPES_MAX:
                with database:
                    database.execute(_FORGET, (tenant, tenant, RECIPES_MAX // 2))
                del self._used[tenant]

    def _database(self) -> sqlite3.Connection:
        database = sqlite3.connect(self._path, timeout=10)
        database.executescript(_SCHEMA)
        return database


_FORGET = """
DELETE FROM used_layers WHERE tenant = ? AND at < (
    SELECT at FROM used_layers WHERE tenant = ? ORDER BY at DESC LIMIT 1 OFFSET ?
)
"""


@lru_cache(1024)
def _stored_name(image: str) -> str:
    """The name of an image in the store. That of this host is none of a reference."""
    with suppress(CreateError):
        return image if image == HOST else str(reference.parse(image))
    return image


def everything(_key: str) -> bool:
    """What the operator sees."""
    return True

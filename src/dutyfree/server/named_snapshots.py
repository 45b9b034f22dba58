"""Named snapshots of tenants: layers of the engine's store, whose names belong to one tenant each."""

from __future__ import annotations

import anyio.to_thread

from dutyfree import layers
from dutyfree.contract.errors import RecipeError, UsageError
from dutyfree.engine.layers.memory_layers import SNAPSHOT_SCHEME
from dutyfree.engine.layers.named_snapshots import NAME
from dutyfree.substrates.native import Native

PREFIX = "served"
"""Begins the names in the store, so that no tenant gets at what the operator keeps there."""


def store_name(tenant: str, name: str) -> str:
    """The name in the store: the name of a tenant has no dot. Raises UsageError."""
    full = f"{PREFIX}.{tenant}.{name}"
    if not NAME.fullmatch(name) or not NAME.fullmatch(full):
        raise UsageError(
            f"{name[:80]!r} is no name for a snapshot",
            remedy="use letters, digits, dots, dashes and underscores",
        )
    return full


async def image_of(native: Native, tenant: str, image: str) -> str:
    """The engine's image for ``snapshot:NAME`` of a tenant. Raises RecipeError if there is none."""
    name, store = image.removeprefix(SNAPSHOT_SCHEME), native.node.images.named.store
    missing = RecipeError(f"there is no snapshot {image[:80]!r}")
    try:
        full = store_name(tenant, name)
    except UsageError:
        raise missing from None
    if store is None or await anyio.to_thread.run_sync(store.snapshots.get, full) is None:
        raise missing
    return SNAPSHOT_SCHEME + full


async def remove(native: Native, tenant: str, image: str) -> None:
    """Remove a named snapshot. Sandboxes that started from it go on. Raises RecipeError."""
    full = await image_of(native, tenant, image)
    await anyio.to_thread.run_sync(layers.remove, [full])
    native.node.images.named.forget(full.removeprefix(SNAPSHOT_SCHEME))

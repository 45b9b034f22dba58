"""Snapshots with names: layers of the store, there for every process until somebody removes them.

What a sandbox wrote becomes one layer upon those that it started from, with nothing in it that refers to
them. A chain of such snapshots stays short: before it is longer than the kernel likes, its layers become one.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

import anyio.to_thread

from dutyfree.contract import Recipe
from dutyfree.contract.errors import ActionError, CreateError, ExecError, UsageError
from dutyfree.engine.images import rootfs
from dutyfree.engine.layers.command_defaults import command_defaults
from dutyfree.engine.layers.disk_bridge import (
    DEEP,
    DEEPEST,
    DiskLayers,
    StartState,
    StoredOrigin,
    in_loop,
    measure,
)
from dutyfree.engine.layers.memory_layers import PREFIX
from dutyfree.engine.store import provenance
from dutyfree.engine.store.cancel import CancelToken, run_in_thread
from dutyfree.engine.store.layer_lease import LayerLease
from dutyfree.engine.store.provenance import Provenance
from dutyfree.engine.store.records import ImageSettings, NamedSnapshot
from dutyfree.engine.store.store import Store

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")

REMEDY = "see `dutyfree layer ls`"


class NamedSnapshots:
    """Those that one open substrate takes and starts from."""

    def __init__(self, disk: DiskLayers, image: Callable[[str], Awaitable[StartState]]) -> None:
        self.store: Store | None = None
        """None where nothing is kept on the disk."""
        self._disk = disk
        self._image = image
        self._ready: dict[str, StartState] = {}

    async def check(self, name: str) -> None:
        """Raises UsageError unless a snapshot can be taken under the name."""
        if not NAME.fullmatch(name):
            raise UsageError(
                f"{name!r} is no name for a snapshot",
                remedy="use letters, digits, dots, dashes and underscores",
            )
        if self.store is None:
            raise UsageError(
                "without root there are no snapshots with names, which lie on the disk",
                remedy="run as root, or take it without a name: it lives as long as the substrate",
            )
        known = await anyio.to_thread.run_sync(self.store.snapshots.all)
        if name in self._ready or name in {snapshot.name for snapshot in known}:
            raise _taken(name)

    async def keep(self, name: str, base: StartState) -> Recipe:
        """Write it to the disk, under a name that was checked. Raises ExecError."""
        begin = perf_counter()
        store, loop, cancel = self.store, asyncio.get_running_loop(), CancelToken()
        assert store is not None
        origin = _shortened(base.origin)

        def make(tree: Path) -> tuple[int, int, int]:
            for index, ((_, layers), (_, below)) in enumerate(zip(base.trees, origin.trees, strict=True)):
                (tree / str(index)).mkdir(mode=0o755)
                own = layers[: len(layers) - len(below)]
                in_loop(loop, self._disk.copy(own, below, tree / str(index)), cancel)
            provenance.write(tree, _described(base, origin, perf_counter() - begin))
            return measure(tree)

        def write() -> _Written:
            key = f"{provenance.SNAPSHOT}:{os.urandom(32).hex()}"
            try:
                name_it(key)
            except BaseException:
                store.remove(key)
                raise
            return _Written(store, name, key)

        def name_it(key: str) -> None:
            with store.build_lock(PREFIX + name, cancel), store.obtain(key, make, cancel) as lease:
                if store.snapshots.get(name):  # by another process, meanwhile
                    raise _taken(name)
                below = (*origin.mounted, *origin.keys)
                store.sync([*below, key])  # all that it takes, or it would not be whole after a crash
                size = lease.info.size
                store.snapshots.put(
                    NamedSnapshot(name=name, layer=key, below=below, size=size, made=time.time())
                )

        try:
            await run_in_thread(write, cancel)
        except (OSError, CreateError) as error:
            what = f"the snapshot {name} cannot be written: {error}"
            if getattr(error, "errno", None) in DEEP:
                raise ActionError(what, kind="name_too_long") from error
            raise ExecError(what) from error
        return Recipe(PREFIX + name)

    async def base(self, name: str) -> StartState:
        """What a snapshot of that name gives. Raises CreateError."""
        if name not in self._ready:
            self._ready[name] = await self._load(name)
        return self._ready[name]

    def identity(self, name: str) -> str:
        """Of one that was given: what it is, whatever its name will mean later."""
        return self._ready[name].origin.keys[-1]

    async def _load(self, name: str) -> StartState:
        leases = await anyio.to_thread.run_sync(self._leased, name)
        self._disk.hold(list(leases.values()))
        (*below, top) = leases.values()
        told = await anyio.to_thread.run_sync(provenance.read, top.tree)
        if told is None or told.settings is None:
            raise _broken(name, "its layer does not say what it is")
        settings = told.settings
        if told.mounted:
            layers = [leases[key].tree for key in told.mounted]
            trees = await rootfs.stack(self._disk.launcher, layers, settings.workdir)
            origin = StoredOrigin(told.image, told.identity, told.mounted, (), trees)
        else:
            origin = (await self._image(told.image)).origin
            if (origin.identity or "") != told.identity:
                raise CreateError(
                    f"the snapshot {name} was taken upon another {told.image}, or before that changed",
                    remedy="take it again; one upon an image of a registry stays usable",
                )
        usual = command_defaults(settings.env, settings.user, settings.workdir, settings.entrypoint)
        base = StartState(origin.trees, usual, origin)
        for lease in (*below[len(told.mounted) :], top):
            build_id = await anyio.to_thread.run_sync(_build_id, lease)
            base = await self._disk.adopt(base, lease, build_id)
        return base

    def _leased(self, name: str) -> dict[str, LayerLease]:
        """Layers that the snapshot needs: the image's, those upon it, and its own."""
        found = self.store.snapshots.get(name) if self.store else None
        if self.store is None or found is None:
            raise CreateError(f"there is no snapshot {name}", remedy=REMEDY)
        leases: dict[str, LayerLease] = {}
        with contextlib.ExitStack() as stack:
            for key in (*found.below, found.layer):
                if (lease := self.store.lease(key)) is None:
                    raise _broken(name, f"the layer {key} is gone")
                leases[key] = stack.enter_context(lease)
            if self.store.is_stale(found.layer):
                raise _broken(name, "a stage that it was taken upon was lost, and made anew since")
            stack.pop_all()
        return leases


class _Written(NamedTuple):
    """A snapshot with its name, to be taken back if nobody waits for it any more."""

    store: Store
    name: str
    key: str

    def close(self) -> None:
        self.store.snapshots.remove(self.name)
        self.store.remove(self.key)


def _broken(name: str, why: str) -> CreateError:
    return CreateError(
        f"the snapshot {name} is not whole: {why}", remedy=f"remove it: dutyfree layer rm {PREFIX}{name}"
    )


def _build_id(lease: LayerLease) -> str:
    told = provenance.read(lease.tree)
    return told.build_id if told is not None else ""


def _taken(name: str) -> UsageError:
    return UsageError(
        f"there is a snapshot {name} already", remedy=f"remove it: dutyfree layer rm {PREFIX}{name}"
    )


def _shortened(origin: StoredOrigin) -> StoredOrigin:
    """What stays below a further one: of too many layers, those down to the lowest snapshot go into it."""
    if len(origin.keys) < DEEPEST:
        return origin
    kinds = [key.partition(":")[0] for key in origin.keys]
    count = kinds.index(provenance.SNAPSHOT) if provenance.SNAPSHOT in kinds else DEEPEST - 1
    gone = len(origin.keys) - count
    trees = tuple((point, layers[gone:]) for point, layers in origin.trees)
    return origin._replace(keys=origin.keys[:count], build_ids=origin.build_ids[:count], trees=trees)


def _described(base: StartState, origin: StoredOrigin, seconds: float) -> Provenance:
    usual = base.defaults
    return Provenance(
        kind=provenance.SNAPSHOT,
        seconds=seconds,
        image=origin.image,
        identity=origin.identity or "",
        mounted=origin.mounted,
        below=origin.keys,
        parent_build=origin.build_ids[-1] if origin.build_ids else "",
        settings=ImageSettings(
            env=dict(usual.environment), user=usual.user, workdir=usual.directory, entrypoint=usual.program
        ),
    )

"""Named snapshots: layers of the store that every process can start from, until someone removes them.

The files that a sandbox wrote become one layer on the layers that the sandbox started from. That layer does
not refer to files in the lower ones. When a chain of snapshots becomes too long, its layers are merged.
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
from dutyfree.engine.layers.disk_bridge import MAX_CHAIN, TOO_DEEP, DiskLayers, measure, run_in_loop
from dutyfree.engine.layers.memory_layers import SNAPSHOT_SCHEME
from dutyfree.engine.layers.start_state import StartState, StoredOrigin
from dutyfree.engine.store import provenance
from dutyfree.engine.store.cancel import CancelToken, run_in_thread
from dutyfree.engine.store.layer_lease import LayerLease
from dutyfree.engine.store.provenance import Provenance
from dutyfree.engine.store.records import ImageSettings, NamedSnapshot
from dutyfree.engine.store.store import Store

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


class NamedSnapshots:
    """The named snapshots that one open substrate takes and starts from."""

    def __init__(self, disk: DiskLayers, open_image: Callable[[str], Awaitable[StartState]]) -> None:
        self.store: Store | None = None
        """None without root: then nothing is written to disk."""
        self._disk = disk
        self._open_image = open_image
        self._states: dict[str, StartState] = {}

    async def check(self, name: str) -> None:
        """Raises UsageError unless a snapshot can have this name."""
        if not NAME.fullmatch(name):
            raise UsageError(
                f"{name!r} is no name for a snapshot",
                remedy="use letters, digits, dots, dashes and underscores",
            )
        if self.store is None:
            raise UsageError(
                "without root or full isolation there are no named snapshots: they are stored on disk",
                remedy="run as root with full isolation, or take a snapshot without a name:"
                " it exists until the substrate closes",
            )
        known = await anyio.to_thread.run_sync(self.store.snapshots.all)
        if name in self._states or name in {snapshot.name for snapshot in known}:
            raise _taken(name)

    async def keep(self, name: str, state: StartState) -> Recipe:
        """Write a snapshot to disk, under a name that was checked. Raises ExecError, ActionError."""
        begin = perf_counter()
        store, loop, cancel = self.store, asyncio.get_running_loop(), CancelToken()
        assert store is not None
        origin = _shortened(state.origin)

        def make(tree: Path) -> tuple[int, int, int]:
            for index, ((_, layers), (_, below)) in enumerate(zip(state.trees, origin.trees, strict=True)):
                (tree / str(index)).mkdir(mode=0o755)
                own = layers[: len(layers) - len(below)]
                run_in_loop(loop, self._disk.write(own, below, tree / str(index)), cancel)
            provenance.write(tree, _provenance(state, origin, perf_counter() - begin))
            return measure(tree)

        def write() -> _Written:
            key = f"{provenance.SNAPSHOT}:{os.urandom(32).hex()}"
            try:
                write_as(key)
            except BaseException:
                store.remove(key)
                raise
            return _Written(store, name, key)

        def write_as(key: str) -> None:
            with store.build_lock(SNAPSHOT_SCHEME + name, cancel), store.obtain(key, make, cancel) as lease:
                if store.snapshots.get(name):  # another process was faster
                    raise _taken(name)
                below = (*origin.mounted, *origin.keys)
                store.sync([*below, key])  # with all layers below: a crash must not leave it incomplete
                size = lease.info.size
                store.snapshots.put(
                    NamedSnapshot(name=name, layer=key, below=below, size=size, made=time.time())
                )

        try:
            await run_in_thread(write, cancel)
        except (OSError, CreateError) as error:
            what = f"the snapshot {name} cannot be written: {error}"
            if getattr(error, "errno", None) in TOO_DEEP:
                raise ActionError(what, kind="name_too_long") from error
            raise ExecError(what) from error
        return Recipe(SNAPSHOT_SCHEME + name)

    async def state(self, name: str) -> StartState:
        """The state of the snapshot with this name. Raises CreateError."""
        if name not in self._states:
            self._states[name] = await self._load(name)
        return self._states[name]

    def forget(self, name: str) -> None:
        """Load it anew when it is used again. Whoever removes a snapshot from the store calls this."""
        self._states.pop(name, None)

    def identity(self, name: str) -> str:
        """What tells a loaded snapshot from a later one of the same name."""
        return self._states[name].origin.keys[-1]

    async def _load(self, name: str) -> StartState:
        leases = await anyio.to_thread.run_sync(self._lease, name)
        self._disk.keep(list(leases.values()))
        (*below, top) = leases.values()
        made = await anyio.to_thread.run_sync(provenance.read, top.tree)
        if made is None or made.settings is None:
            raise _broken(name, "its layer has no provenance")
        settings = made.settings
        if made.mounted:
            layers = [leases[key].tree for key in made.mounted]
            locks = [leases[key].descriptor for key in made.mounted]
            trees = await rootfs.stack(self._disk.launcher, layers, settings.workdir, locks)
            origin = StoredOrigin(made.image, made.identity, made.mounted, (), trees)
        else:
            origin = (await self._open_image(made.image)).origin
            if (origin.identity or "") != made.identity:
                raise CreateError(
                    f"the snapshot {name} was taken on another {made.image}, or the image has changed since",
                    remedy="take it again; a snapshot on an image of a registry stays usable",
                )
        defaults = command_defaults(settings.env, settings.user, settings.workdir, settings.entrypoint)
        state = StartState(origin.trees, defaults, origin)
        for lease in (*below[len(made.mounted) :], top):
            build_id = await anyio.to_thread.run_sync(_build_id, lease)
            state = await self._disk.stack(state, lease, build_id)
        return state

    def _lease(self, name: str) -> dict[str, LayerLease]:
        """Lease all layers of a snapshot: of its image, of the stages on that, and its own."""
        found = self.store.snapshots.get(name) if self.store else None
        if self.store is None or found is None:
            raise CreateError(f"there is no snapshot {name}", remedy="see `dutyfree layer ls`")
        leases: dict[str, LayerLease] = {}
        with contextlib.ExitStack() as stack:
            for key in (*found.below, found.layer):
                if (lease := self.store.lease(key)) is None:
                    raise _broken(name, f"the layer {key} is gone")
                leases[key] = stack.enter_context(lease)
            if self.store.is_stale(found.layer):
                raise _broken(name, "a stage below it was lost, and has been built again since")
            stack.pop_all()
        return leases


class _Written(NamedTuple):
    """A snapshot on disk. ``run_in_thread`` closes it, and so removes it, if the caller was cancelled."""

    store: Store
    name: str
    key: str

    def close(self) -> None:
        self.store.snapshots.remove(self.name)
        self.store.remove(self.key)


def _broken(name: str, why: str) -> CreateError:
    return CreateError(f"the snapshot {name} is not whole: {why}", remedy=_removal(name))


def _taken(name: str) -> UsageError:
    return UsageError(f"there is a snapshot {name} already", remedy=_removal(name))


def _removal(name: str) -> str:
    return f"remove it: dutyfree layer rm {SNAPSHOT_SCHEME}{name}"


def _build_id(lease: LayerLease) -> str:
    made = provenance.read(lease.tree)
    return made.build_id if made is not None else ""


def _shortened(origin: StoredOrigin) -> StoredOrigin:
    """The layers that stay below a new snapshot.

    If the chain is too long, the new snapshot replaces all layers down to the lowest snapshot.
    """
    if len(origin.keys) < MAX_CHAIN:
        return origin
    kinds = [key.partition(":")[0] for key in origin.keys]
    count = kinds.index(provenance.SNAPSHOT) if provenance.SNAPSHOT in kinds else MAX_CHAIN - 1
    gone = len(origin.keys) - count
    trees = tuple((point, layers[gone:]) for point, layers in origin.trees)
    return origin._replace(keys=origin.keys[:count], build_ids=origin.build_ids[:count], trees=trees)


def _provenance(state: StartState, origin: StoredOrigin, seconds: float) -> Provenance:
    defaults = state.defaults
    return Provenance(
        kind=provenance.SNAPSHOT,
        seconds=seconds,
        image=origin.image,
        identity=origin.identity or "",
        mounted=origin.mounted,
        below=origin.keys,
        parent_build=origin.build_ids[-1] if origin.build_ids else "",
        settings=ImageSettings(
            env=dict(defaults.environment),
            user=defaults.user,
            workdir=defaults.directory,
            entrypoint=defaults.program,
        ),
    )

"""The layers of a recipe as directories of this machine, for runtimes that mount them without our launcher.

Images are opened and stages are built as for sandboxes of ``native``: with the same keys, each once on this
machine. Layers that exist in memory only are written to disk first.
"""

from __future__ import annotations

import hashlib
import itertools
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import anyio
import anyio.to_thread

from dutyfree.contract import Recipe
from dutyfree.contract.errors import CreateError
from dutyfree.engine.images import rootfs
from dutyfree.engine.layers.command_defaults import WORKDIR, CommandDefaults
from dutyfree.engine.layers.recipe_layers import RecipeLayers
from dutyfree.engine.layers.start_state import StartState
from dutyfree.engine.store.layer_lease import LayerLease
from dutyfree.engine.store.store import Store

IDLE = 16
"""Chains without a user that stay open for the next request."""


class LowerDirectories(NamedTuple):
    """What an overlay of the recipe's files is mounted from, while its context is open."""

    paths: tuple[Path, ...]
    """The ``lowerdir`` of the overlay, the uppermost first. Do not write there. Mount with
    ``redirect_dir=on,metacopy=on``: directories may refer to lower ones."""
    defaults: CommandDefaults
    """How commands run if the caller says nothing else. The recipe's variables are included."""
    key: str
    """Names these files for ever, except for ``/etc/hosts`` and the like. "" if they can change."""
    directory: Path
    """What a caller makes of these layers can be kept here; it goes when they are closed."""


@dataclass
class _Chain:
    """The directories of one state, shared by its users."""

    paths: tuple[Path, ...]
    leases: list[LayerLease]
    directory: Path
    users: int = 0

    def close(self) -> None:
        """Blocks."""
        while self.leases:
            self.leases.pop().close()
        shutil.rmtree(self.directory, ignore_errors=True)


class DirectoryLayers:
    """Opens the layers of recipes as directories, until ``close``. Made by ``Node.directories``."""

    def __init__(self, recipes: RecipeLayers, scratch: Path) -> None:
        """``scratch``: an existing directory for files that are not in the store. The caller removes it."""
        self._recipes = recipes
        self._scratch = scratch
        self._chains: dict[object, _Chain] = {}
        """The most recently used last."""
        self._locks: dict[object, anyio.Lock] = {}
        self._count = itertools.count()

    @asynccontextmanager
    async def open(self, recipe: Recipe) -> AsyncIterator[LowerDirectories]:
        """Build what is missing, and keep all layers on disk while the context is open.

        Raises StageError, and CreateError, also without root: then there are no layers on disk.
        """
        state = await self._on_disk(recipe)
        name = (recipe.image, state.origin[:4], state.origin.build_ids, state.build_id)
        layers = self._recipes.builder.layers
        layers.hold(state.trees)
        try:
            async with self._locks.setdefault(name, anyio.Lock()):
                chain = self._chains.pop(name, None) or await self._make(state)
                self._chains[name] = chain
                chain.users += 1
        finally:
            layers.release(state.trees)
        try:
            defaults = state.defaults.with_recipe(recipe)
            yield LowerDirectories(chain.paths, defaults, _key(state), chain.directory)
        finally:
            chain.users -= 1
            with anyio.CancelScope(shield=True):
                for unused in self._unused(IDLE):
                    await anyio.to_thread.run_sync(unused.close)

    async def close(self) -> None:
        """Close the chains that nobody uses."""
        for chain in self._unused(0):
            await anyio.to_thread.run_sync(chain.close)

    def _unused(self, spare: int) -> list[_Chain]:
        idle = [name for name, chain in self._chains.items() if not chain.users]
        gone = idle[: max(0, len(idle) - spare)]
        for name in gone:
            self._locks.pop(name, None)
        return [self._chains.pop(name) for name in gone]

    async def _on_disk(self, recipe: Recipe) -> StartState:
        """The state of a recipe, which one overlay shows."""
        state = await self._recipes.on_disk(recipe)
        if len(state.trees) != 1:
            raise CreateError(
                "the image host has software outside of /usr here, so no single overlay shows it",
                remedy="name another image",
            )
        return state

    async def _make(self, state: StartState) -> _Chain:
        directory = self._scratch / str(next(self._count))
        chain = _Chain((), [], directory)
        try:
            await anyio.to_thread.run_sync(partial(directory.mkdir, mode=0o700))
            written = await self._write(state, directory)
            fill = partial(self._stored, state, directory, chain.leases)
            chain.paths = (*written, *await anyio.to_thread.run_sync(fill))
        except BaseException:
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(chain.close)
            raise
        return chain

    async def _write(self, state: StartState, directory: Path) -> tuple[Path, ...]:
        """Write the layers that are in memory only to one directory."""
        (_, layers), (_, below) = state.trees[0], state.origin.trees[0]
        own = layers[: len(layers) - len(below)]
        if not own:
            return ()
        target = directory / "written"
        await anyio.to_thread.run_sync(partial(target.mkdir, mode=0o755))
        with anyio.CancelScope(shield=True):  # else the launcher would go on while it is removed
            try:
                await self._recipes.builder.disk.write(own, below, target)
            except OSError as error:
                raise CreateError(f"layers in memory cannot be written to disk: {error}") from error
        return (target,)

    def _stored(self, state: StartState, directory: Path, leases: list[LayerLease]) -> list[Path]:
        """The directories of what is on disk. Blocks."""
        store = self._recipes.builder.store
        assert store is not None
        paths = []
        for key in reversed(state.origin.keys):
            leases.append(_lease(store, key))
            paths.append(leases[-1].tree / "0")
        return paths + _image(store, state, directory, leases)


def _image(store: Store, state: StartState, directory: Path, leases: list[LayerLease]) -> list[Path]:
    """The directories of an image: our own layer for the files that depend on the host, and those below."""
    origin = state.origin
    top = directory / "top"
    top.mkdir(mode=0o755)
    try:
        if origin.image == "host":
            rootfs.fill_above_usr(top)
            return [top, rootfs.USR]
        layers = [] if origin.mounted else [Path(origin.image)]
        for key in origin.mounted:
            leases.append(_lease(store, key))
            layers.append(leases[-1].tree)
        rootfs.fill_top(top, layers, state.defaults.directory or WORKDIR)
    except OSError as error:
        raise CreateError(f"the image's own layer cannot be created: {error}") from error
    return [top, *layers]


def _lease(store: Store, key: str) -> LayerLease:
    lease = store.lease(key)
    if lease is None:
        raise CreateError(f"the layer {key} was removed from the cache", remedy="try again")
    return lease


def _key(state: StartState) -> str:
    origin = state.origin
    if origin.identity is None or origin.trees != state.trees:
        return ""
    named = repr((origin.identity, origin.mounted, origin.keys, origin.build_ids))
    return hashlib.sha256(named.encode()).hexdigest()

"""Open images, and snapshots used as images: each once per open substrate, for the first request."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from time import perf_counter
from typing import TypeAlias

import anyio
import anyio.to_thread

from dutyfree.contract.errors import CreateError, StageError
from dutyfree.engine.images import find, rootfs
from dutyfree.engine.images.install import LeasedImage
from dutyfree.engine.images.pull import PullOptions
from dutyfree.engine.launcher.client import Launcher
from dutyfree.engine.layers.command_defaults import command_defaults
from dutyfree.engine.layers.disk_bridge import DiskLayers
from dutyfree.engine.layers.memory_layers import SNAPSHOT_SCHEME, UNNAMED, MemorySnapshots
from dutyfree.engine.layers.named_snapshots import NamedSnapshots
from dutyfree.engine.layers.start_state import StartState, StoredOrigin
from dutyfree.engine.store import overlay
from dutyfree.engine.store.store import Store

DaemonImage: TypeAlias = Callable[[str], Awaitable[LeasedImage]]
"""Copies the image ``docker-daemon:NAME`` from a Docker engine into the store. Raises CreateError."""


class OpenImages:
    """The images of one open substrate. Their layers stay on disk until ``close``."""

    def __init__(
        self,
        launcher: Launcher,
        disk: DiskLayers,
        snapshots: MemorySnapshots,
        default: str,
        registries: Callable[[], PullOptions],
        daemon_image: DaemonImage,
    ) -> None:
        self.named = NamedSnapshots(disk, self.open)
        self.rootless = False
        self.seconds: dict[str, float] = {}
        """How long it took to open each image."""
        self._launcher = launcher
        self._snapshots = snapshots
        self._registries = registries
        self._daemon_image = daemon_image
        self._default = default
        self._states: dict[str, StartState] = {}
        self._identities: dict[str, str] = {}
        self._held: list[LeasedImage] = []
        self._locks: dict[str, anyio.Lock] = {}

    def is_open(self, name: str) -> bool:
        """Whether it can be used at once."""
        return name in self._states or name.startswith(SNAPSHOT_SCHEME)

    def identity(self, name: str) -> str | None:
        """What tells an open image from another one of its name; None if it can change at any time."""
        return self._identities.get(name)

    async def open(self, name: str | None) -> StartState:
        """The state of an image, by default of the substrate's own.

        Raises StageError (number 0) if the image cannot be found or pulled, and CreateError.
        """
        name = name or self._default
        if name.startswith(SNAPSHOT_SCHEME):
            return await self._snapshot(name)
        if name not in self._states:
            async with self._locks.setdefault(name, anyio.Lock()):
                if name not in self._states:
                    begun = perf_counter()
                    self._states[name], held = await self.load(name)
                    self._held += held
                    self.seconds[name] = perf_counter() - begun
        return self._states[name]

    async def load(self, name: str) -> tuple[StartState, list[LeasedImage]]:
        """The state of an image, and the leases on its layers. Raises as ``open`` does."""
        if name == "host":
            self._identities[name] = identity = await anyio.to_thread.run_sync(rootfs.host_identity)
            trees = await rootfs.host(self._launcher, rootless=self.rootless)
            return StartState(trees, command_defaults(), StoredOrigin(name, identity, (), (), trees)), []
        path = Path(name)
        if path.is_absolute() and await anyio.to_thread.run_sync(rootfs.is_rootfs, path):
            trees = await rootfs.directory(self._launcher, path)
            return StartState(trees, command_defaults(), StoredOrigin(name, None, (), (), trees)), []
        try:
            held = await self._find(name)
        except CreateError as error:  # a StageError tells the pool that the recipe is at fault
            raise StageError(error.message, remedy=error.remedy, number=0) from error
        self._identities[name] = held.image.digest
        Store().sync_in_background(held.image.keys)
        layers = [lease.tree for lease in held.leases]
        settings = held.image.settings
        locks = [lease.descriptor for lease in held.leases]
        trees = await rootfs.stack(self._launcher, layers, settings.workdir, locks)
        home = await anyio.to_thread.run_sync(overlay.home_variable, layers, settings.user)
        defaults = command_defaults(
            {**home, **settings.env}, settings.user, settings.workdir, settings.program
        )
        mounted = tuple(lease.key for lease in held.leases)
        return StartState(trees, defaults, StoredOrigin(name, held.image.digest, mounted, (), trees)), [held]

    def close(self) -> None:
        while self._held:
            self._held.pop().close()

    async def _snapshot(self, image: str) -> StartState:
        name = image.removeprefix(SNAPSHOT_SCHEME)
        if name.startswith(UNNAMED):
            return self._snapshots.state(image)
        async with self._locks.setdefault(image, anyio.Lock()):
            state = await self.named.state(name)
        self._identities[image] = self.named.identity(name)
        return state

    async def _find(self, name: str) -> LeasedImage:
        """An image of the store, pulled or copied if it is missing there. Raises CreateError."""
        if name.startswith(find.DAEMON):
            return await self._daemon_image(name)
        return await find.find(name, self._registries())

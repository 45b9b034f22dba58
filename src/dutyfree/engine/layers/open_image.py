"""Images of the native engine, and snapshots in their place: opened once, by whoever asks first."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from time import perf_counter

import anyio
import anyio.to_thread

from dutyfree.contract.errors import CreateError, StageError
from dutyfree.engine.images import find, rootfs
from dutyfree.engine.images.install import LeasedImage
from dutyfree.engine.images.pull import PullOptions
from dutyfree.engine.launcher.client import Launcher
from dutyfree.engine.layers import memory_layers
from dutyfree.engine.layers.command_defaults import command_defaults
from dutyfree.engine.layers.disk_bridge import DiskLayers, StartState, StoredOrigin
from dutyfree.engine.layers.memory_layers import MemorySnapshots
from dutyfree.engine.layers.named_snapshots import NamedSnapshots
from dutyfree.engine.store import overlay
from dutyfree.engine.store.store import Store


class OpenImages:
    """Those of one open substrate."""

    def __init__(
        self,
        launcher: Launcher,
        disk: DiskLayers,
        nameless: MemorySnapshots,
        default: str,
        registries: Callable[[], PullOptions],
    ) -> None:
        self.named = NamedSnapshots(disk, self.opened)
        self.rootless = False
        self.seconds: dict[str, float] = {}
        """What opening each took."""
        self._launcher = launcher
        self._nameless = nameless
        self._registries = registries
        self._default = default
        self._bases: dict[str, StartState] = {}
        self._identities: dict[str, str] = {}
        self._held: list[LeasedImage] = []
        self._locks: dict[str, anyio.Lock] = {}

    def ready(self, name: str) -> bool:
        """Whether nobody needs to wait for it."""
        return name in self._bases or name.startswith(memory_layers.PREFIX)

    def identity(self, name: str) -> str | None:
        """What tells it from another of its name, once it was opened; None if nothing does."""
        return self._identities.get(name)

    async def opened(self, name: str | None) -> StartState:
        """By default the substrate's own. Raises StageError for one that cannot be had, and CreateError."""
        name = name or self._default
        if name.startswith(memory_layers.PREFIX):
            return await self._snapshot(name)
        if name not in self._bases:
            async with self._locks.setdefault(name, anyio.Lock()):
                if name not in self._bases:
                    begun = perf_counter()
                    self._bases[name], held = await self.load(name)
                    # Until the substrate is closed nobody may remove the layers.
                    self._held += held
                    self.seconds[name] = perf_counter() - begun
        return self._bases[name]

    async def load(self, name: str) -> tuple[StartState, list[LeasedImage]]:
        """An image as layers, and what keeps those on the disk. Raises as ``opened`` does."""
        if name == "host":
            self._identities[name] = identity = await anyio.to_thread.run_sync(rootfs.host_identity)
            trees = await rootfs.host(self._launcher, rootless=self.rootless)
            return StartState(trees, command_defaults(), StoredOrigin(name, identity, (), (), trees)), []
        path = Path(name)
        if path.is_absolute() and await anyio.to_thread.run_sync(rootfs.is_rootfs, path):
            trees = await rootfs.directory(self._launcher, path)
            return StartState(trees, command_defaults(), StoredOrigin(name, None, (), (), trees)), []
        try:
            held = await self._found(name)
        except CreateError as error:  # so that a pool knows whose fault it is
            raise StageError(error.message, remedy=error.remedy, number=0) from error
        self._identities[name] = held.image.digest
        Store().sync_in_background(held.image.keys)
        layers = [lease.tree for lease in held.leases]
        settings = held.image.settings
        trees = await rootfs.stack(self._launcher, layers, settings.workdir)
        home = await anyio.to_thread.run_sync(overlay.home_variable, layers, settings.user)
        usual = command_defaults({**home, **settings.env}, settings.user, settings.workdir, settings.program)
        mounted = tuple(lease.key for lease in held.leases)
        return StartState(trees, usual, StoredOrigin(name, held.image.digest, mounted, (), trees)), [held]

    def close(self) -> None:
        while self._held:
            self._held.pop().close()

    async def _snapshot(self, image: str) -> StartState:
        name = image.removeprefix(memory_layers.PREFIX)
        if name.startswith(memory_layers.NAMELESS):
            return self._nameless.base(image)
        async with self._locks.setdefault(image, anyio.Lock()):
            base = await self.named.base(name)
        self._identities[image] = self.named.identity(name)
        return base

    async def _found(self, name: str) -> LeasedImage:
        """An image that is, or comes to be, in the store. Raises CreateError."""
        if name.startswith(find.DAEMON):
            from dutyfree.substrates.docker import export

            return await export.bring(name)
        return await find.find(name, self._registries())

"""``native``: full isolation on this host, without a daemon, an account or a registry.

Each sandbox has its own namespaces (mount, pid, ipc, uts, cgroup, network, user), a root file system of
read-only layers under a private writable one, a seccomp filter, and limits. It has its own loopback
interface. A process outside of it makes the connections that ``Limits(network=…)`` allows, and refuses all
others (docs/network.md). With ``isolation="none"`` all of this is missing: for trusted code only.

Here is the contract; ``dutyfree.engine.node`` does the work.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from pathlib import Path
from types import TracebackType
from typing import ClassVar, Self, cast

import anyio.to_thread
import msgspec

from dutyfree.contract import Availability, Limits, Recipe
from dutyfree.contract.errors import CreateError, OptionError
from dutyfree.contract.substrate import refuse_second_entry, require_open
from dutyfree.engine.exchange.peers import PeerStats
from dutyfree.engine.host.features import HostFeatures
from dutyfree.engine.host.file_system import storage_fact
from dutyfree.engine.images.install import LeasedImage
from dutyfree.engine.launcher import create, network_policy, requirements
from dutyfree.engine.launcher.timeouts import DEFAULT_TIMEOUTS, Timeouts
from dutyfree.engine.layers import run_stage
from dutyfree.engine.layers.memory_layers import MemorySnapshot
from dutyfree.engine.node import EMPTY_RECIPE, NativeConfig, Node
from dutyfree.engine.pool.native_source import Warmth
from dutyfree.engine.pool.pool import Pool
from dutyfree.engine.sandbox.sandbox import NativeSandbox
from dutyfree.substrates.local.lifecycle import require

__all__ = ["Native", "NativeConfig", "NativeSandbox"]


class Native:
    """The substrate ``native``: the contract and its abilities on one ``Node``."""

    summary: ClassVar[str] = "isolated sandboxes at the speed of fork and exec: no daemon, no registry"
    Config: ClassVar[type[msgspec.Struct]] = NativeConfig
    name = "native"
    host_address = network_policy.HOST
    pool_warmth: ClassVar[Warmth | None] = None
    """The last stage that idle sandboxes and layers may have; None for all stages."""

    def __init__(
        self, config: NativeConfig, timeouts: Timeouts = DEFAULT_TIMEOUTS, keeper: Path | None = None
    ) -> None:
        """``keeper``: see ``Node.open``."""
        create.check_limits(config.limits, on_disk=config.storage == "disk")
        try:
            config.walls.refuse_limits(config.limits)
        except CreateError as error:
            raise OptionError(error.message, remedy=error.remedy) from error
        self._has_tier = config.isolation in ("gvisor", "microvm")
        if self._has_tier:
            from dutyfree.substrates import (
                native_tiers,
            )  # it needs this module's neighbours, and they this one

            if type(self) is not Native or keeper is not None:
                raise OptionError(f"{self.name} has no isolation {config.isolation!r}", remedy="use native")
            native_tiers.check(config)
        self._config = config
        self._timeouts = timeouts
        self._keeper = keeper
        self._node: Node | None = None
        self._is_open = False
        self._tier = AsyncExitStack()

    def __repr__(self) -> str:
        held = 0 if self._node is None else len(self._node.factory.held)
        return f"<{self.name}: {held} handed out, {self.pool or 'no pool'}>"

    @classmethod
    async def probe(cls, config: NativeConfig) -> Availability:
        found = await anyio.to_thread.run_sync(requirements.check, Path(config.program))
        if found.available and config.isolation in ("gvisor", "microvm"):
            from dutyfree.substrates import native_tiers

            return await native_tiers.probe(config)
        if not found.available or config.walls.full:
            return found
        if os.geteuid() != 0:
            return Availability(False, "isolation cannot be reduced without root", "run as root")
        return Availability(True, f"isolation: {config.walls.level}; for trusted code only")

    async def __aenter__(self) -> Self:
        refuse_second_entry(self._is_open, self.name)
        require(await self.probe(self._config), "native")
        self._node = await Node.open(
            self._config, _daemon_image, self.pool_warmth, self._timeouts, self._keeper
        )
        own_network = self.features.mode == "root" and not self._config.walls.shares_network
        self.host_address = network_policy.HOST if own_network else "127.0.0.1"
        if self._has_tier:
            return await self._enter_tier()
        self._is_open = True
        return self

    async def _enter_tier(self) -> Self:
        """What the caller gets has the contract, and none of the abilities of this class."""
        from dutyfree.substrates import native_tiers

        try:
            tier = await self._tier.enter_async_context(native_tiers.opened(self._config, self.node))
        except BaseException:
            await self.node.close()
            raise
        self._is_open = True
        return cast("Self", tier)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_open = False
        await self._tier.aclose()
        # After an error, layers in progress still go to disk. An interrupted program does not wait for them.
        await self.node.close(finish=kind is None or issubclass(kind, Exception))

    @property
    def node(self) -> Node:
        """The engine of this substrate, also after it was closed. Raises UsageError before it was opened."""
        require_open(self._node is not None)
        assert self._node is not None
        return self._node

    @property
    def _open_node(self) -> Node:
        require_open(self._is_open)
        return self.node

    # --- Sandboxes ------------------------------------------------------------------------------------

    def sandbox(
        self,
        recipe: Recipe | None = None,
        *,
        limits: Limits | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> AbstractAsyncContextManager[NativeSandbox]:
        return self._open_node.sandbox(recipe, limits, labels)

    def group(
        self,
        recipe: Recipe,
        count: int,
        *,
        limits: Limits | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> AbstractAsyncContextManager[tuple[NativeSandbox, ...]]:
        """``count`` sandboxes in the same state, all or none: the first is prepared, the others are copies.

        Raises UsageError; the context raises UsageError, PoolError, StageError and CreateError.
        """
        return self._open_node.group(recipe, count, limits, labels)

    async def prepare(self, recipe: Recipe | None = None) -> None:
        node = self._open_node
        await node.recipes.state(node.checked(recipe or EMPTY_RECIPE))

    async def prefetch(self, recipes: Iterable[Recipe], count: int = 1) -> None:
        """Prepare ``count`` sandboxes of each recipe, for requests that will come soon.

        Raises UsageError, CreateError and PoolError.
        """
        await (await self.pooled()).prefetch(recipes, count)

    @property
    def pool(self) -> Pool | None:
        """The pool; None until the first call of ``prefetch``, ``group`` or ``pooled``."""
        return None if self._node is None else self._node.pool.pool

    async def pooled(self) -> Pool:
        """Start the pool, if it does not run. For leases without a context, or with their own deadlines."""
        return await self._open_node.pool.start()

    async def sandboxes(self) -> Sequence[str]:
        """The ids of all sandboxes that callers hold, also by a lease; not of those that are idle."""
        return self.node.sandbox_ids()

    # --- Snapshots and layers -------------------------------------------------------------------------

    def snapshots(self) -> tuple[MemorySnapshot, ...]:
        """The snapshots without a name that were not forgotten."""
        return self.node.snapshots.all()

    def forget(self, recipe: Recipe) -> None:
        """Forget a snapshot: no new sandbox starts from it, and existing ones go on. Raises UsageError."""
        self.node.snapshots.forget(recipe)

    @property
    def stage_seconds(self) -> Mapping[str, float]:
        """Seconds that the last stage of each prepared prefix took, by the prefix's content key."""
        return self.node.builder.seconds

    @property
    def peers(self) -> Mapping[str, PeerStats]:
        """What each peer delivered."""
        peers = self.node.builder.peers
        return peers.stats if peers else {}

    # --- The host -------------------------------------------------------------------------------------

    @property
    def features(self) -> HostFeatures:
        return self.node.features

    async def probe_kernel(self) -> dict[str, int]:
        """Try each kernel feature that sandboxes use: its errno, or 0 if it works. Raises Unavailable."""
        return await self.node.probe_kernel()

    async def facts(self) -> dict[str, str]:
        host, walls = self.features, self._config.walls
        facts = {
            "isolation": requirements.ISOLATION if walls.full else walls.level,
            "mode": host.mode,
            "ids": str(host.ids),
            "limits": f"cgroup {host.cgroup}: {', '.join(host.controllers) or 'none'}",
            "enforces": ", ".join(host.controllers) or "none",
            "lost": ", ".join(host.losses()) or "nothing",
            "image": self._config.image,
            "kernel": os.uname().release,
            "storage": "memory (tmpfs)",
        }
        if (disk := self.node.storage) is not None:
            facts["storage"] = await anyio.to_thread.run_sync(storage_fact, disk.directory, "ext4 image")
        async with self.sandbox() as sandbox:
            owner = (await sandbox.exec(["stat", "-c", "%u", "/usr"])).stdout.strip()
            facts["owners"] = "mapped" if owner == b"0" else "not mapped: the file system cannot"
            if places := (*walls.plain, *walls.fixed):
                missing = [path for path in places if path not in sandbox.without_overlay]
                facts["without overlay"] = ", ".join(sandbox.without_overlay) or "none"
                facts["still overlay"] = ", ".join(missing) or "none"
            facts |= await run_stage.tools(sandbox)
        return facts


async def _daemon_image(name: str) -> LeasedImage:
    """Copy an image from the Docker engine into the store. Raises CreateError."""
    from dutyfree.substrates.docker import export

    return await export.bring(name)

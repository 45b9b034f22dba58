"""One host that runs sandboxes: its launcher, images, layers, sandbox factory and pool, wired together.

Read a request from here. A recipe that the pool can serve goes to ``NodePool.lease``, then through the
scheduler to ``NativeSource``. Every other request goes to ``Node.create``. Both take the recipe's layers from
``RecipeLayers`` and the sandbox from ``SandboxFactory``.
"""

from __future__ import annotations

import contextlib
import logging
import math
import struct
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Annotated, Literal

import anyio
import anyio.to_thread
import msgspec

from dutyfree.contract import Limits, NetworkPolicy, Recipe, limited
from dutyfree.contract.arguments import check_count
from dutyfree.contract.errors import OptionError, Unavailable, UsageError
from dutyfree.contract.recipe import checked
from dutyfree.contract.served import Served, ServedKind
from dutyfree.engine.exchange import sources
from dutyfree.engine.exchange.peers import PeerSet
from dutyfree.engine.host import capacity, features, sandbox_labels
from dutyfree.engine.host.features import HostFeatures
from dutyfree.engine.images import mirrors
from dutyfree.engine.launcher import create, disk_storage, network_policy, protocol
from dutyfree.engine.launcher.client import BINARY, Launcher, LauncherError
from dutyfree.engine.launcher.disk_storage import DiskStorage
from dutyfree.engine.launcher.isolation import WORK_DIRECTORIES, Isolation, Tier, Wall
from dutyfree.engine.launcher.isolation import isolation as make_isolation
from dutyfree.engine.launcher.protocol import Request
from dutyfree.engine.launcher.timeouts import DEFAULT_TIMEOUTS, Timeouts
from dutyfree.engine.layers.build import LayerBuilder
from dutyfree.engine.layers.build_request import BuildTrace
from dutyfree.engine.layers.disk_bridge import DiskLayers
from dutyfree.engine.layers.kept_state import KeptSnapshot
from dutyfree.engine.layers.lower_directories import DirectoryLayers
from dutyfree.engine.layers.memory_layers import SNAPSHOT_SCHEME, MemoryLayers, MemorySnapshots
from dutyfree.engine.layers.open_image import DaemonImage, OpenImages
from dutyfree.engine.layers.recipe_layers import RecipeLayers
from dutyfree.engine.layers.start_state import StartState
from dutyfree.engine.node_pool import DEFAULT_POLICY, NodePool, default_budget
from dutyfree.engine.pool.native_source import NativeSource, Warmth
from dutyfree.engine.pool.scheduler.values import Budget, Policy
from dutyfree.engine.sandbox.factory import SandboxFactory
from dutyfree.engine.sandbox.kept import KeptSandbox
from dutyfree.engine.sandbox.sandbox import NativeSandbox
from dutyfree.engine.sandbox.snapshot import enter_all
from dutyfree.engine.store.store import Store

EMPTY_RECIPE = Recipe()

_log = logging.getLogger(__name__)


Ready = Annotated[int, msgspec.Meta(ge=0, le=1000)]


class NativeConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The options of a node, and so of the substrate ``native``."""

    image: str = "host"
    """The image of recipes that name none: "host", a Docker image name, a path, … (docs/images.md)."""
    mirrors: dict[str, tuple[str, ...]] = {}
    """Mirrors by registry, tried before the registry itself. Those in DUTYFREE_MIRRORS come after these."""
    insecure: tuple[str, ...] = ()
    """Registries to use without TLS. Those on the loopback interface never use TLS."""
    ready: Ready = 4
    """The number of sandboxes whose parts the launcher prepares in advance and reuses; 0 for none."""
    storage: Literal["memory", "disk"] = "memory"
    """Where written files go: to a tmpfs, or to an ext4 image on disk (docs/engine.md)."""
    resolvers: tuple[str, ...] = ()
    """Addresses of DNS servers, with a port if it is not 53. By default those of the host."""
    kept: Annotated[int, msgspec.Meta(ge=0)] | None = None
    """The most memory for all snapshots together, in bytes. By default a quarter of the host's."""
    program: str = str(BINARY)
    """The path of the C program. By default the one in the package."""
    limits: Limits = Limits()
    """The limits of requests that have none, and of the idle sandboxes in the pool (docs/pools.md)."""
    budget: Budget = msgspec.field(default_factory=default_budget)
    """The most that the pool may hold. By default a quarter of the host's memory."""
    policy: Policy = DEFAULT_POLICY
    """How the pool decides."""
    patience: Annotated[float, msgspec.Meta(ge=0)] = 600.0
    """Seconds after which the pool refuses a request that it could not serve."""
    peers: tuple[str, ...] = ()
    """Servers (https://HOST:PORT) and directories to ask for a layer before a stage is built."""
    peer_seconds: Annotated[float, msgspec.Meta(gt=0, le=86400)] = 300.0
    """The most seconds that a fetch from a peer may take. After that, the stage is built."""
    longest_stage: Annotated[float, msgspec.Meta(gt=0)] = 3600.0
    """The most seconds that the commands of a stage may take. After that, the stage has failed."""
    stage_network: NetworkPolicy = "on"
    """What the commands of stages may reach: a network policy (docs/network.md)."""
    isolation: Tier = "full"
    """``full`` or ``namespace``, ``gvisor`` or ``microvm`` (docs/engine.md), or ``none``. ``none`` IS
    FOR TRUSTED CODE ONLY: commands run as root of the host (docs/security.md)."""
    without: tuple[Wall, ...] = ()
    """FOR MEASURING ONLY: parts of the isolation to switch off one by one. Sandboxes are then not safe."""
    plain: tuple[str, ...] = WORK_DIRECTORIES
    """Directories of the root that are no overlay while no layer has files there (docs/engine.md)."""
    fixed: tuple[str, ...] | None = None
    """Directories that are read-only and no overlay, such as /usr; by default none. Stages write there."""

    @property
    def walls(self) -> Isolation:
        """The isolation of its sandboxes."""
        return make_isolation(self.isolation, self.without, self.plain, self.fixed)

    def __post_init__(self) -> None:
        make_isolation(self.isolation, self.without, self.plain, self.fixed)  # raises ValueError
        try:
            network_policy.encode(self.limits.network, ())
        except ValueError as error:
            raise ValueError(f"limits.network: {error}") from error
        try:
            network_policy.encode(self.stage_network, ())
        except ValueError as error:
            raise ValueError(f"stage_network: {error}") from error
        for name, hosts in (("mirrors", self.mirrors), ("insecure", self.insecure)):
            for host in hosts:
                try:
                    network_policy.refuse_url(host)
                except ValueError as error:
                    raise ValueError(f"{name}: {error}") from error
        for peer in self.peers:
            try:
                sources.check(peer)
            except UsageError as error:
                raise ValueError(f"peers: {error}") from error


class Node:
    """The native engine on this host, while it is open: made by ``Node.open``, ended by ``close``."""

    def __init__(
        self,
        options: NativeConfig,
        launcher: Launcher,
        host: HostFeatures,
        resolvers: tuple[network_policy.Resolver, ...],
        daemon_image: DaemonImage,
        warmth: Warmth | None = None,
        timeouts: Timeouts = DEFAULT_TIMEOUTS,
        storage: DiskStorage | None = None,
    ) -> None:
        self.options = options
        self.storage = storage
        self.launcher = launcher
        self.features = host
        # Without root, some files in the store could not be removed again.
        # A layer that was built without isolation must not reach a sandbox that is isolated.
        self.isolation = options.walls
        store = Store() if host.mode == "root" and self.isolation.full else None
        if store is None and options.peers:
            lacking = "isolation" if host.mode == "root" else "root"
            _log.warning("without %s, no layers are kept on disk, so peers are not asked for layers", lacking)
        self.layers = MemoryLayers(
            launcher, capacity.share_of_memory() if options.kept is None else options.kept, storage
        )
        self.snapshots = MemorySnapshots(self.layers)
        self._disk = DiskLayers(launcher)
        registries = partial(mirrors.pull_options, options.mirrors, options.insecure)
        self.images = OpenImages(
            launcher, self._disk, self.snapshots, options.image, registries, daemon_image
        )
        self.images.rootless = host.mode == "rootless"
        self.images.named.store = store
        self.factory = SandboxFactory(
            launcher,
            host,
            self.snapshots,
            self.images.named,
            resolvers,
            default_image=options.image,
            stage_timeout=options.longest_stage,
            stage_network=options.stage_network,
            isolation=self.isolation,
            timeouts=timeouts,
            storage=storage,
        )
        peers = PeerSet(options.peers, options.peer_seconds) if options.peers else None
        self.builder = LayerBuilder(
            self._disk, self.layers, self.factory.build, store, options.budget.disk, peers
        )
        self.recipes = RecipeLayers(self.images, self.builder, options.image)
        self.source = NativeSource(self.recipes, self.factory, options.limits, warmth, timeouts)
        self.pool = NodePool(self.source, options.budget, options.policy, options.limits, options.patience)

    @classmethod
    async def open(
        cls,
        options: NativeConfig,
        daemon_image: DaemonImage,
        warmth: Warmth | None = None,
        timeouts: Timeouts = DEFAULT_TIMEOUTS,
        keeper: Path | None = None,
    ) -> Node:
        """Start the launcher, and prepare the parts of ``options.ready`` sandboxes.

        ``keeper``: the path of a socket. Sandboxes with a lease outlive this process, and the next node with
        the same path takes over the launcher: call ``sweep`` after it has adopted them.

        Raises Unavailable, OptionError for resolvers that cannot be used, and CreateError if what sandboxes
        write should go to disk and no file system can be made there.
        """
        resolvers = await anyio.to_thread.run_sync(_resolvers, options.resolvers)
        launcher = await _former_launcher(keeper, options) if keeper is not None else None
        is_new = launcher is None
        if launcher is None:
            spawn = partial(Launcher.spawn, Path(options.program), options.walls.flags)
            launcher = Launcher(*await anyio.to_thread.run_sync(spawn))
        if not options.walls.full:
            _log.warning("sandboxes are not isolated (%s): run trusted code only", options.walls.level)
        try:
            host = await _greet(launcher, options.program)
            if keeper is not None and is_new:
                await launcher.keep(await anyio.to_thread.run_sync(Launcher.listen, keeper))
            storage = await DiskStorage.open(launcher, host) if options.storage == "disk" else None
            node = cls(options, launcher, host, resolvers, daemon_image, warmth, timeouts, storage)
            if storage is not None:
                await storage.provide(disk_storage.limit_of(options.limits.disk))
                await storage.provide(disk_storage.LEAST_MERGE)  # for snapshots of a few files
            await launcher.ask(Request.SLOTS, options.ready)
        except LauncherError as error:
            await _end(launcher)
            raise Unavailable(f"native: {error.message}", remedy="see `dutyfree doctor`") from error
        except BaseException:
            await _end(launcher)
            raise
        return node

    async def close(self, *, finish: bool = False) -> None:
        """End the pool and the launcher. With ``finish``, wait until layers in progress are on disk."""
        with anyio.CancelScope(shield=True):
            try:
                await self.pool.close()
            finally:
                await self.builder.close(finish=finish)
                self._disk.close()
                await _end(self.launcher)
                self.factory.close()
                self.images.close()

    # --- Requests -------------------------------------------------------------------------------------

    def checked(self, recipe: object) -> Recipe:
        """Validate a recipe. Raises RecipeError, and CreateError if it asks for isolation that is missing."""
        found = checked(recipe)
        self.isolation.refuse_recipe(found.isolation)
        return found

    def limits_of(self, given: Limits | None) -> Limits:
        """The limits of a request. Raises LimitError, and CreateError for those that nothing enforces."""
        limits = limited(given, self.options.limits)
        self.isolation.refuse_limits(limits)
        return limits

    def sandbox(
        self, recipe: Recipe | None, limits: Limits | None, labels: Mapping[str, str] | None
    ) -> AbstractAsyncContextManager[NativeSandbox]:
        """One sandbox: from the pool if that has been started and can serve it, else a new one.

        Raises UsageError; the context raises PoolError, StageError and CreateError.
        """
        recipe, limits = self.checked(recipe or EMPTY_RECIPE), self.limits_of(limits)
        if self.pool.pool is not None and self._fits_pool(recipe, limits):
            return self._lease_one(recipe, limits, labels)
        sandbox_labels.check(labels)
        return self.create(recipe, limits, labels)

    @asynccontextmanager
    async def _lease_one(
        self, recipe: Recipe, limits: Limits, labels: Mapping[str, str] | None
    ) -> AsyncIterator[NativeSandbox]:
        async with self.pool.lease(recipe, 1, limits, labels) as (sandbox,):
            yield sandbox

    @asynccontextmanager
    async def group(
        self, recipe: Recipe, count: int, limits: Limits | None, labels: Mapping[str, str] | None
    ) -> AsyncIterator[tuple[NativeSandbox, ...]]:
        """``count`` sandboxes in the same state, all or none: the first is prepared, the others are copies.

        Raises UsageError, PoolError, StageError and CreateError.
        """
        recipe, count = self.checked(recipe), check_count(count, 1)
        limits = self.limits_of(limits)
        if self._fits_pool(recipe, limits):
            async with self.pool.lease(recipe, count, limits, labels) as leased:
                yield leased
            return
        sandbox_labels.check(labels)
        asked, trace = perf_counter(), BuildTrace()
        state = await self.recipes.state(recipe, trace=trace)
        # Hold the layers until all sandboxes do. A layer in memory goes as soon as it is on disk and unused.
        self.layers.hold(state.trees)
        try:
            created = [self.create(recipe, limits, labels, state) for _ in range(count)]
            async with enter_all(created) as sandboxes:
                seconds = perf_counter() - asked
                for sandbox in sandboxes:
                    served = self._served(recipe, trace, sandbox.id, seconds)
                    sandbox.served = served if sandbox is sandboxes[0] else _copied(served, recipe)
                yield tuple(sandboxes)
        finally:
            self.layers.release(state.trees)

    def _fits_pool(self, recipe: Recipe, limits: Limits) -> bool:
        """Whether an idle sandbox can serve it: only network and output limits can change after creation."""
        if recipe.image is not None and recipe.image.startswith(SNAPSHOT_SCHEME):
            return False
        default = self.options.limits
        if limits is default:
            return True
        shared = self.isolation.shares_network  # then there is one policy, which needs no change
        if (
            self.features.mode != "root"
            and not shared
            and (limits.network or "off") != (default.network or "off")
        ):
            return False
        same = (limits.cpus, limits.memory, limits.pids, limits.disk)
        return same == (default.cpus, default.memory, default.pids, default.disk)

    @asynccontextmanager
    async def create(
        self,
        recipe: Recipe,
        limits: Limits,
        labels: Mapping[str, str] | None = None,
        state: StartState | None = None,
    ) -> AsyncIterator[NativeSandbox]:
        """A new sandbox that no pool knows, with its services. Raises StageError and CreateError."""
        asked, trace = perf_counter(), BuildTrace()
        state = state or await self.recipes.state(recipe, trace=trace)
        async with self.factory.create(recipe, limits, state, asked=asked, labels=labels) as sandbox:
            sandbox.served = self._served(recipe, trace, sandbox.id, perf_counter() - asked)
            if recipe.services:
                await sandbox.start_services()
                sandbox.spans += (create.next_span(asked, sandbox.spans, "services"),)
            yield sandbox

    def _served(self, recipe: Recipe, trace: BuildTrace, sandbox: str, seconds: float) -> Served:
        """How a sandbox was served that came from no pool."""
        keys = self.recipes.keys.known(recipe) or ("",)
        there = max(trace.found, trace.fetched)
        ready = trace.image or there > 0
        kind: ServedKind = "layer" if ready else "cold"
        if trace.number > there and not trace.ran:
            kind = "joined"
        return Served(
            kind="fetched" if trace.fetched else kind,
            stage="none" if not ready else recipe.stages[there - 1].kind if there else "image",
            seconds=seconds,
            # A cold start would have taken at least as long; the seconds of an image are not always known.
            cold_seconds=max(seconds, math.fsum(self.recipes.seconds(recipe))),
            sandbox=sandbox,
            recipe=recipe.served_key(keys[-1]),
        )

    def directories(self, scratch: Path) -> DirectoryLayers:
        """The layers of recipes as directories, for another runtime. Close it before the node."""
        return DirectoryLayers(self.recipes, scratch)

    def adopt(self, kept: KeptSandbox) -> AbstractAsyncContextManager[tuple[NativeSandbox, float]]:
        """A sandbox of a former owner, and when its lease ends (``time.monotonic``).

        The context raises CreateError if it has ended.
        """
        return self.factory.adopt(kept)

    async def sweep(self, adopted: Iterable[KeptSandbox | KeptSnapshot]) -> int:
        """End the sandboxes of a former owner but these, and remove all layers that nothing here needs.

        Call it before the first request. Returns how many sandboxes were ended. Raises LauncherError.
        """
        layers = sorted(set[int]().union(*(one.layers for one in adopted)))
        body = struct.pack(f"={len(layers)}I", *layers)
        if len(body) > protocol.REQUEST_MAX - protocol.REQUEST.size:
            return (await self.launcher.ask(Request.SWEEP, 1)).value  # too many to name: all layers stay
        return (await self.launcher.ask(Request.SWEEP, 0, body)).value

    # --- What there is --------------------------------------------------------------------------------

    def sandbox_ids(self) -> list[str]:
        """The ids of all sandboxes that callers hold, also by a lease; not of those that are idle."""
        leases = self.pool.pool.leases if self.pool.pool is not None else ()
        return sorted(self.factory.held.union(one.id for lease in leases for one in lease.sandboxes))

    async def probe_kernel(self) -> dict[str, int]:
        """Try each kernel feature that sandboxes use: its errno, or 0 if it works. Raises Unavailable."""
        try:
            said = (await self.launcher.ask(Request.PROBE)).text.decode()
        except LauncherError as error:
            raise Unavailable(f"native: {error.message}") from error
        return {name: int(error) for name, error in (word.split("=") for word in said.split())}


def _copied(served: Served, recipe: Recipe) -> Served:
    """How the other members of a group were served: on the layers that the first one waited for."""
    stage = recipe.stages[-1].kind if recipe.stages else "image"
    return msgspec.structs.replace(served, kind="forked", stage=stage)


async def _former_launcher(path: Path, options: NativeConfig) -> Launcher | None:
    """The launcher that a former owner left, if it is of this version and isolates as these options say."""
    connected = await anyio.to_thread.run_sync(Launcher.connect, path)
    if connected is None:
        return None
    launcher = Launcher(None, connected)
    with contextlib.suppress(LauncherError, Unavailable):
        host = await _greet(launcher, options.program)
        launcher.pid = host.pid
        if host.without == (options.walls.flags or 0):
            return launcher
    _log.warning("sandboxes of another version or isolation stay until their leases end, without an owner")
    launcher.leave()
    return None


async def _greet(launcher: Launcher, program: str) -> HostFeatures:
    """Ask the launcher what this host offers. Raises LauncherError, and Unavailable for another version."""
    hello = await launcher.ask(Request.HELLO)
    if hello.value != protocol.VERSION:
        raise Unavailable(
            f"native: {program} speaks version {hello.value} of the protocol, not {protocol.VERSION}",
            remedy="install dutyfree again",
        )
    return features.parse(hello.text.decode())


async def _end(launcher: Launcher) -> None:
    with anyio.CancelScope(shield=True):
        await anyio.to_thread.run_sync(launcher.disconnect())


def _resolvers(addresses: tuple[str, ...]) -> tuple[network_policy.Resolver, ...]:
    try:
        return network_policy.parse_resolvers(addresses) if addresses else network_policy.host_resolvers()
    except ValueError as error:
        raise OptionError(f"native: resolvers: {error}") from error

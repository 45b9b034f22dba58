"""``native``: the rollout-native engine. Full isolation, without a daemon, an account or a registry.

Each sandbox has namespaces of its own (mount, pid, ipc, uts, cgroup, network, user), a root file system
of read-only layers under a private one in memory, a filter on system calls, and limits. It has a loopback
of its own; what ``Limits(network=…)`` allows besides is carried out by a process outside, and nothing else
is (docs/network.md).
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path
from time import perf_counter
from types import TracebackType
from typing import Annotated, ClassVar, NamedTuple, Self

import anyio
import anyio.to_thread
import msgspec

from dutyfree.contract import Availability, Limits, Recipe, Stage, limited
from dutyfree.contract.errors import CleanupError, CreateError, OptionError, Unavailable, UsageError
from dutyfree.contract.recipe import checked
from dutyfree.contract.served import Served, ServedKind
from dutyfree.contract.substrate import refuse_second_entry, require_open
from dutyfree.engine.exchange import sources
from dutyfree.engine.exchange.peers import PeerSet, PeerStats
from dutyfree.engine.host import capacity, features, requirements, sandbox_labels
from dutyfree.engine.host.sandbox_labels import LabelFile
from dutyfree.engine.images import mirrors
from dutyfree.engine.launcher import create, protocol
from dutyfree.engine.launcher import network_policy as policy
from dutyfree.engine.launcher.client import BINARY, Launcher, LauncherError
from dutyfree.engine.launcher.create import SandboxCreator
from dutyfree.engine.launcher.handle import SandboxHandle
from dutyfree.engine.launcher.network import SandboxNetwork
from dutyfree.engine.launcher.protocol import Request, Tree
from dutyfree.engine.launcher.timeouts import DEFAULT_TIMEOUTS, Timeouts
from dutyfree.engine.layers import run_stage
from dutyfree.engine.layers.build import BuildTrace, FilesChanged, LayerBuilder, StageResult
from dutyfree.engine.layers.disk_bridge import DiskLayers, StartState
from dutyfree.engine.layers.keys import RecipeKeys
from dutyfree.engine.layers.memory_layers import MemoryLayers, MemorySnapshot, MemorySnapshots
from dutyfree.engine.layers.named_snapshots import NamedSnapshots
from dutyfree.engine.layers.open_image import OpenImages
from dutyfree.engine.layers.urgency import Urgency
from dutyfree.engine.pool.scheduler.values import Budget, Policy
from dutyfree.engine.pooled import OPEN, Pooled
from dutyfree.engine.pooling import POLICY, default_budget
from dutyfree.engine.sandbox.channel import Channel
from dutyfree.engine.sandbox.sandbox import NativeSandbox, NetworkedSandbox
from dutyfree.engine.store.store import Store

NO_STAGES = Recipe()

_log = logging.getLogger(__name__)

Ready = Annotated[int, msgspec.Meta(ge=0, le=1000)]


class NativeConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    image: str = "host"
    """For recipes without one: "host", a name as Docker takes it, a path, ... (docs/images.md)."""
    mirrors: dict[str, tuple[str, ...]] = {}
    """Registry → addresses to ask before it; those of DUTYFREE_MIRRORS come after these."""
    insecure: tuple[str, ...] = ()
    """Registries that are asked without TLS; those on the loopback always are."""
    ready: Ready = 4
    """Parts of so many sandboxes are made beforehand, and used again; with 0, all is made anew each time."""
    resolvers: tuple[str, ...] = ()
    """Who is asked for names: addresses, with a port if it is not 53. Those of this machine by default."""
    kept: Annotated[int, msgspec.Meta(ge=0)] | None = None
    """Bytes of memory that snapshots may take together. A quarter of the host's by default."""
    program: str = str(BINARY)
    """The C program, where it is another than the package's own."""
    limits: Limits = Limits()
    """Of sandboxes for which none are asked; and those of the pool (docs/pools.md)."""
    budget: Budget = msgspec.field(default_factory=default_budget)
    """What the pool may take: a quarter of the host's memory by default."""
    policy: Policy = POLICY
    """How the pool decides."""
    patience: Annotated[float, msgspec.Meta(ge=0)] = 600.0
    """Seconds after which a request that the pool could not serve is refused."""
    peers: tuple[str, ...] = ()
    """Who is asked for a stage's layer before it is built: sources of `dutyfree layer import`."""
    peer_seconds: Annotated[float, msgspec.Meta(gt=0, le=86400)] = 300.0
    """The longest that a fetch from them may take; then it is built."""
    longest_stage: Annotated[float, msgspec.Meta(gt=0)] = 3600.0
    """Seconds after which a stage whose commands have not ended is stopped, and has failed."""

    def __post_init__(self) -> None:
        try:
            policy.encode(self.limits.network, ())
        except ValueError as error:
            raise ValueError(f"limits.network: {error}") from error
        for name, hosts in (("mirrors", self.mirrors), ("insecure", self.insecure)):
            for host in hosts:
                try:
                    policy.refuse_url(host)
                except ValueError as error:
                    raise ValueError(f"{name}: {error}") from error
        for peer in self.peers:
            try:
                sources.check(peer)
            except UsageError as error:
                raise ValueError(f"peers: {error}") from error


class Native(Pooled):
    """The substrate ``native``."""

    summary: ClassVar[str] = "isolated sandboxes at the speed of fork and exec: no daemon, no registry"
    Config: ClassVar[type[msgspec.Struct]] = NativeConfig
    name = "native"
    host_address = policy.HOST

    def __init__(self, config: NativeConfig, timeouts: Timeouts = DEFAULT_TIMEOUTS) -> None:
        create.check_limits(config.limits)
        self._config = config
        self._timeouts = timeouts
        self._numbers = itertools.count(1)
        self._keys = RecipeKeys()
        self._alive: set[str] = set()
        self._open_pool(config)

    def __repr__(self) -> str:
        return f"<{self.name}: {len(self._alive)} handed out, {self.pool or 'no pool'}>"

    @property
    def _options(self) -> NativeConfig:
        return self._config

    @classmethod
    async def probe(cls, config: NativeConfig) -> Availability:
        return await anyio.to_thread.run_sync(requirements.check, Path(config.program), Launcher.trial)

    async def __aenter__(self) -> Self:
        refuse_second_entry(self._is_open, self.name)
        found = await self.probe(self._config)
        if not found.available:
            raise Unavailable(f"native: {found.detail}", remedy=found.remedy)
        self._resolvers = await anyio.to_thread.run_sync(_resolvers, self._config.resolvers)
        process, connected = await anyio.to_thread.run_sync(Launcher.spawn, Path(self._config.program))
        self._launcher = Launcher(process, connected)
        self._labelling = LabelFile(process.pid)
        self._layers = MemoryLayers(
            self._launcher, capacity.share_of_memory() if self._config.kept is None else self._config.kept
        )
        self._snapshots = MemorySnapshots(self._layers)
        self._disk = DiskLayers(self._launcher)
        registries = partial(mirrors.options, self._config.mirrors, self._config.insecure)
        self._images = OpenImages(self._launcher, self._disk, self._snapshots, self._config.image, registries)
        config = self._config
        peers = PeerSet(config.peers, config.peer_seconds) if config.peers else None
        self._stages = LayerBuilder(
            self._disk, self._layers, self._build, None, self._config.budget.disk, peers
        )
        try:
            hello = await self._launcher.ask(Request.HELLO)
            if hello.value != protocol.VERSION:
                raise Unavailable(
                    f"native: {self._config.program} speaks version {hello.value}, not {protocol.VERSION}",
                    remedy="install dutyfree again",
                )
            self.features = features.parse(hello.text.decode())
            open_channel = partial(Channel, answer_timeout=self._timeouts.answer)
            self._creator = SandboxCreator(self._launcher, self.features, open_channel, self._timeouts)
            self._images.rootless = self.features.mode == "rootless"
            self.host_address = policy.HOST if self.features.mode == "root" else "127.0.0.1"
            if self.features.mode == "root":  # without, some files in the store could not be removed again
                self._stages.store = self._images.named.store = Store()
            elif self._config.peers:
                _log.warning("without root no layers are kept on the disk: peers are not asked")
            await self._launcher.ask(Request.SLOTS, self._config.ready)
        except LauncherError as error:
            await self._close()
            raise Unavailable(f"native: {error.message}", remedy="see `dutyfree doctor`") from error
        except BaseException:
            await self._close()
            raise
        self._is_open = True
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_open = False
        # What was made before an error is on its way to the disk too; who is interrupted does not wait.
        await self._close(finish=kind is None or issubclass(kind, Exception))

    async def _close(self, *, finish: bool = False) -> None:
        with anyio.CancelScope(shield=True):
            try:
                await self._keeping.close()
            finally:
                await self._stages.close(finish=finish)
                self._disk.close()
                process = self._launcher.disconnect()
                await anyio.to_thread.run_sync(process.wait)
                self._labelling.close()
                self._images.close()

    def sandbox(
        self,
        recipe: Recipe | None = None,
        *,
        limits: Limits | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> AbstractAsyncContextManager[NativeSandbox]:
        require_open(self._is_open)
        recipe, limits = checked(recipe or NO_STAGES), limited(limits, self._config.limits)
        if self._keeping.pool is not None and self._is_pooled(recipe, limits):
            return self._lease(recipe, limits, labels)
        sandbox_labels.check(labels)
        return self._made(recipe, limits, labels=labels)

    async def prepare(self, recipe: Recipe | None = None) -> None:
        require_open(self._is_open)
        await self._base(checked(recipe or NO_STAGES))

    async def sandboxes(self) -> Sequence[str]:
        """The ids of those that somebody has, also by a lease; idle ones of the pool are nobody's yet."""
        leases = self.pool.leases if self.pool is not None else ()
        return sorted(self._alive.union(one.id for lease in leases for one in lease.sandboxes))

    def snapshots(self) -> tuple[MemorySnapshot, ...]:
        """Those that were taken of its sandboxes without a name, and not forgotten."""
        return self._snapshots.all()

    @property
    def stage_seconds(self) -> Mapping[str, float]:
        """What the last stage of each prepared prefix took when it was made, by the prefix's key."""
        return self._stages.seconds

    @property
    def peers(self) -> Mapping[str, PeerStats]:
        """What became of each peer that layers can be had from."""
        return self._stages.peers.figures if self._stages.peers else {}

    def forget(self, recipe: Recipe) -> None:
        """No new sandbox starts from this snapshot; those that did go on. Raises UsageError."""
        self._snapshots.forget(recipe)

    async def facts(self) -> dict[str, str]:
        facts = {
            "isolation": "user, pid, mount, net, ipc, uts and cgroup namespaces, seccomp",
            "mode": self.features.mode,
            "ids": str(self.features.ids),
            "limits": f"cgroup {self.features.cgroup}: {', '.join(self.features.controllers) or 'none'}",
            "lost": ", ".join(self.features.losses()) or "nothing",
            "image": self._config.image,
            "kernel": os.uname().release,
        }
        async with self.sandbox() as sandbox:
            owner = (await sandbox.exec(["stat", "-c", "%u", "/usr"])).stdout.strip()
            facts["owners"] = "mapped" if owner == b"0" else "not mapped: the file system cannot"
            facts |= await run_stage.tools(sandbox)
        return facts

    async def tried(self) -> dict[str, int]:
        """What of the kernel works here, each with its errno: found by trying. Raises Unavailable."""
        try:
            said = (await self._launcher.ask(Request.PROBE)).text.decode()
        except LauncherError as error:
            raise Unavailable(f"native: {error.message}") from error
        return {name: int(error) for name, error in (word.split("=") for word in said.split())}

    # --- Sandboxes ----------------------------------------------------------------------------------

    @asynccontextmanager
    async def _made(
        self,
        recipe: Recipe,
        limits: Limits,
        *,
        reachable: bytes | None = None,
        base: StartState | None = None,
        pooled: bool = False,
        labels: Mapping[str, str] | None = None,
    ) -> AsyncIterator[NativeSandbox]:
        asked = perf_counter()
        number = next(self._numbers)
        identity = f"native-{os.getpid()}-{number}"
        image = recipe.image or self._config.image
        trace = BuildTrace()
        base = base or await self._base(recipe, trace=trace)
        label = protocol.label(number, image)

        handed_out = base.trees

        async def make(trees: tuple[Tree, ...] = handed_out) -> tuple[Channel, SandboxHandle]:
            return await self._creator.make(identity, self._creator.body(trees, limits) + label, reach)

        try:
            encoded = policy.encode(limits.network, self._resolvers) if reachable is None else reachable
        except ValueError as error:
            raise CreateError(str(error)) from error
        reach = SandboxNetwork(
            self._launcher, b"" if create.shares_network(self.features, limits) else encoded, self._timeouts
        )
        begun = perf_counter()
        if not pooled:
            self._alive.add(identity)
        if labels:
            self._labelling.put(number, labels)
        self._layers.hold(base.trees)
        try:
            channel, box = await make()
            kind = NetworkedSandbox if self.features.mode == "root" else NativeSandbox
            keeper = _Keeper(self, limits, reach, make)
            defaults = base.defaults.with_recipe(recipe)
            sandbox = kind(
                identity, limits, defaults, make, channel, box, reach, self._resolvers,
                keeper=keeper, base=base, recipe=recipe,
            )  # fmt: skip
            sandbox.spans = create.spans(asked, begun, channel.ready.result())
            if not pooled:
                sandbox.served = self._served(recipe, trace, identity, perf_counter() - asked)
            try:
                if recipe.services and not pooled:  # the pool looks at it before
                    await sandbox.serve()
                    sandbox.spans += (create.next_span(asked, sandbox.spans, "services"),)
                yield sandbox
            except BaseException:
                with contextlib.suppress(CleanupError):
                    await sandbox.close()
                raise
            await sandbox.close()
        finally:
            self._alive.discard(identity)
            self._labelling.drop(number)
            self._layers.release(base.trees)

    # --- Recipes --------------------------------------------------------------------------

    async def _base(
        self, recipe: Recipe, *, urgency: Urgency | None = None, trace: BuildTrace | None = None
    ) -> StartState:
        """The layers that give the recipe's state; made once, by whoever asks first."""
        urgency, trace = urgency or Urgency(background=False), trace or BuildTrace()
        image = recipe.image or self._config.image
        trace.image = self._images.ready(image)
        if not recipe.stages:
            return await self._images.opened(recipe.image)
        known = self._keys.known(recipe)
        if known is not None and (base := self._stages.ready.get(known[-1])) is not None:
            trace.found = trace.number = len(recipe.stages)
            return base
        below = await self._images.opened(recipe.image)
        keys = await self._keys.of(recipe)
        identity = self._images.identity(image)
        try:
            return await self._stages.base(recipe, keys, below, identity, urgency, trace)
        except FilesChanged as error:
            self._keys.forget(error.key)
            raise

    def _seconds(self, image: str | None, keys: Sequence[str]) -> list[float]:
        """What the image and each stage of a recipe with these keys took when they were made."""
        opening = self._images.seconds.get(image or self._config.image, 0.0)
        return [opening, *(self._stages.seconds.get(key, 0.0) for key in keys[1:])]

    async def _build(self, below: StartState, stage: Stage, number: int, urgency: Urgency) -> StageResult:
        """Run a stage in a sandbox with network, as image builds have it, and keep what it wrote."""
        async with self._made(NO_STAGES, OPEN, base=below, pooled=True) as builder:
            builder.give_way(urgency.background)
            with urgency.notify(partial(builder.give_way, False)):
                commit = await run_stage.apply(builder, stage, number, self._config.longest_stage)
            return StageResult(await builder.final(), commit)

    def _served(self, recipe: Recipe, trace: BuildTrace, identity: str, seconds: float) -> Served:
        """How a sandbox was handed out that came from no pool."""
        keys = self._keys.known(recipe) or ("",)
        there = max(trace.found, trace.fetched)
        ready = trace.image or there > 0
        kind: ServedKind = "layer" if ready else "cold"
        if trace.number > there and not trace.ran:
            kind = "joined"
        return Served(
            kind="fetched" if trace.fetched else kind,
            stage="none" if not ready else recipe.stages[there - 1].kind if there else "image",
            seconds=seconds,
            # With nothing at hand it would have taken no less; what images once took is not always known.
            cold_seconds=max(seconds, math.fsum(self._seconds(recipe.image, keys))),
            sandbox=identity,
            recipe=recipe.served_key(keys[-1]),
        )


class _Keeper(NamedTuple):
    """Of one sandbox."""

    substrate: Native
    limits: Limits
    reach: SandboxNetwork
    succeed: Callable[[tuple[Tree, ...]], Awaitable[tuple[Channel, SandboxHandle]]]

    @property
    def snapshots(self) -> MemorySnapshots:
        return self.substrate._snapshots

    @property
    def named(self) -> NamedSnapshots:
        return self.substrate._images.named

    def child(self, recipe: Recipe) -> AbstractAsyncContextManager[NativeSandbox]:
        # Of the parent as it is: its policy may be another than at its creation.
        return self.substrate._made(recipe, self.limits, reachable=self.reach.policy)


def _resolvers(wanted: tuple[str, ...]) -> tuple[policy.Resolver, ...]:
    try:
        return policy.servers(wanted) if wanted else policy.host_resolvers()
    except ValueError as error:
        raise OptionError(f"native: resolvers: {error}") from error

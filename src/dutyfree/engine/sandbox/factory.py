"""Create sandboxes on layers: for callers, for the pool, for forks, and to build a stage in."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from functools import partial
from time import perf_counter

import anyio
import msgspec

from dutyfree.contract import Limits, NetworkPolicy, Recipe, Stage
from dutyfree.contract.errors import CleanupError, CreateError, SubstrateError
from dutyfree.contract.served import Served
from dutyfree.engine.host.features import HostFeatures
from dutyfree.engine.host.sandbox_labels import LabelFile
from dutyfree.engine.launcher import create, network_policy, protocol
from dutyfree.engine.launcher.client import Launcher, LauncherError
from dutyfree.engine.launcher.create import SandboxCreator
from dutyfree.engine.launcher.disk_storage import DiskStorage
from dutyfree.engine.launcher.handle import SandboxHandle
from dutyfree.engine.launcher.isolation import FULL_ISOLATION, Isolation
from dutyfree.engine.launcher.network import SandboxNetwork
from dutyfree.engine.launcher.protocol import Tree
from dutyfree.engine.launcher.timeouts import DEFAULT_TIMEOUTS, Timeouts
from dutyfree.engine.layers import run_stage
from dutyfree.engine.layers.build_request import StageResult
from dutyfree.engine.layers.memory_layers import MemorySnapshots
from dutyfree.engine.layers.named_snapshots import NamedSnapshots
from dutyfree.engine.layers.start_state import StartState
from dutyfree.engine.layers.urgency import Urgency
from dutyfree.engine.sandbox.channel import Channel, ForeignCommands
from dutyfree.engine.sandbox.kept import KeptSandbox
from dutyfree.engine.sandbox.sandbox import NativeSandbox, NetworkedSandbox, SandboxHost


class SandboxFactory:
    """Creates the sandboxes of one node, and knows those that callers hold."""

    def __init__(
        self,
        launcher: Launcher,
        features: HostFeatures,
        snapshots: MemorySnapshots,
        named: NamedSnapshots,
        resolvers: tuple[network_policy.Resolver, ...],
        *,
        default_image: str,
        stage_timeout: float,
        stage_network: NetworkPolicy = "on",
        isolation: Isolation = FULL_ISOLATION,
        timeouts: Timeouts = DEFAULT_TIMEOUTS,
        storage: DiskStorage | None = None,
    ) -> None:
        self.layers = snapshots.layers
        self.held: set[str] = set()
        """Ids of the sandboxes that callers hold and no pool made."""
        self.isolation = isolation
        self._launcher = launcher
        self._features = features
        self._snapshots = snapshots
        self._named = named
        self._resolvers = resolvers
        self._default_image = default_image
        self._stage_timeout = stage_timeout
        self._stage_limits = Limits(network=stage_network)
        self._timeouts = timeouts
        self._labels = LabelFile(launcher.pid)
        self._numbers = itertools.count(1)
        self._creator = SandboxCreator(launcher, features, isolation, timeouts, storage)
        self._storage = storage
        self.networked = features.mode == "root" and not isolation.shares_network
        """Whether sandboxes have networks of their own."""
        self._kind = NetworkedSandbox if self.networked else NativeSandbox

    def close(self) -> None:
        self._labels.close()

    @asynccontextmanager
    async def create(
        self,
        recipe: Recipe,
        limits: Limits,
        state: StartState,
        *,
        asked: float | None = None,
        policy: bytes | None = None,
        pooled: bool = False,
        building: bool = False,
        labels: Mapping[str, str] | None = None,
    ) -> AsyncIterator[NativeSandbox]:
        """A sandbox of the recipe on the layers of ``state``. Its services do not run yet.

        ``asked`` is when the caller asked for it; ``policy`` an encoded network policy instead of that of the
        limits; ``building`` says that stages run in it. Raises CreateError, and CleanupError at the end.
        """
        asked = perf_counter() if asked is None else asked
        number = next(self._numbers)
        identity = f"native-{os.getpid()}-{number}"
        network = self._network(limits, policy)
        host = self._host(identity, number, recipe, limits, network, building=building)
        begun = perf_counter()
        if not pooled:
            self.held.add(identity)
        if labels:
            self._labels.put(number, labels)
        self.layers.hold(state.trees)
        try:
            channel, handle = await host.create(state.trees)
            sandbox = self._kind(identity, recipe, limits, state, channel, handle, network, host)
            ready = channel.ready.result()
            sandbox.spans = create.spans(asked, begun, ready)
            sandbox.without_overlay = self.isolation.mounted(ready, building=building)
            try:
                yield sandbox
            except BaseException:
                with contextlib.suppress(CleanupError):
                    await sandbox.close()
                raise
            await sandbox.close()
        finally:
            self.held.discard(identity)
            self._labels.drop(number)
            self.layers.release(state.trees)

    @asynccontextmanager
    async def adopt(self, kept: KeptSandbox) -> AsyncIterator[tuple[NativeSandbox, float]]:
        """A sandbox of a former owner of the launcher, and when its lease ends (``time.monotonic``).

        Raises CreateError if it has ended, and CleanupError at the end.
        """
        number = int(kept.id.rpartition("-")[2])
        self._numbers = itertools.count(max(next(self._numbers), number + 1))
        recipe, state = kept.recipe, kept.start.state
        network = SandboxNetwork(self._launcher, kept.policy, self._timeouts)
        connected, handle, until = await self._creator.adopt(kept.id, kept.number)
        channel = Channel(
            connected,
            kept.id,
            handle.give_up,
            handle.responds,
            answer_timeout=self._timeouts.answer,
            foreign=ForeignCommands(),
        )
        host = self._host(kept.id, number, recipe, kept.limits, network)
        sandbox = self._kind(kept.id, recipe, kept.limits, state, channel, handle, network, host)
        self.held.add(kept.id)
        if kept.labels:
            self._labels.put(number, kept.labels)
        self.layers.adopt((*kept.trees, *state.trees), kept.in_memory)
        self.layers.hold(state.trees)
        try:
            sandbox.adopt(kept)
            try:
                yield sandbox, until
            except BaseException:
                with contextlib.suppress(CleanupError):
                    await sandbox.close()
                raise
            await sandbox.close()
        finally:
            self.held.discard(kept.id)
            self._labels.drop(number)
            self.layers.release(state.trees)

    def _host(
        self,
        identity: str,
        number: int,
        recipe: Recipe,
        limits: Limits,
        network: SandboxNetwork,
        *,
        building: bool = False,
    ) -> SandboxHost:
        """What the engine does for this sandbox."""
        label = protocol.label(number, recipe.image or self._default_image)

        async def create_on(trees: tuple[Tree, ...]) -> tuple[Channel, SandboxHandle]:
            body = self._creator.body(trees, limits, building=building)
            connected, handle = await self._creator.start(identity, body + label, limits)
            channel = Channel(
                connected, identity, handle.give_up, handle.responds, answer_timeout=self._timeouts.answer
            )
            await _until_ready(channel, handle, network)
            return channel, handle

        def fork_child(recipe: Recipe) -> AbstractAsyncContextManager[NativeSandbox]:
            # With the present network policy, which may have changed since the creation.
            return self.fork_child(recipe, limits, network.policy)

        return SandboxHost(self._snapshots, self._named, self._resolvers, create_on, fork_child)

    def _network(self, limits: Limits, policy: bytes | None) -> SandboxNetwork:
        """Raises CreateError."""
        try:
            encoded = network_policy.encode(limits.network, self._resolvers) if policy is None else policy
        except ValueError as error:
            raise CreateError(str(error)) from error
        shared = create.shares_network(self._features, limits, self.isolation)
        return SandboxNetwork(self._launcher, b"" if shared else encoded, self._timeouts)

    @asynccontextmanager
    async def fork_child(self, recipe: Recipe, limits: Limits, policy: bytes) -> AsyncIterator[NativeSandbox]:
        """A sandbox on a snapshot in memory. Raises CreateError, and UsageError for a forgotten snapshot."""
        asked = perf_counter()
        state = self._snapshots.state(recipe.image or "")
        async with self.create(recipe, limits, state, asked=asked, policy=policy) as child:
            seconds = perf_counter() - asked
            child.served = Served("forked", "snapshot", seconds, seconds, child.id, recipe.key())
            if recipe.services:
                await child.start_services()
                child.spans += (create.next_span(asked, child.spans, "services"),)
            yield child

    def label(self, sandbox: str, labels: Mapping[str, str]) -> None:
        """Show these labels in ``dutyfree ps`` while the sandbox lives."""
        self._labels.put(int(sandbox.rpartition("-")[2]), labels)

    # --- Stages ---------------------------------------------------------------------------------------

    def builder(
        self, state: StartState, image: str | None = None
    ) -> AbstractAsyncContextManager[NativeSandbox]:
        """A sandbox in which stages run."""
        limits = self._stage_limits
        if self._storage is not None:
            limits = msgspec.structs.replace(limits, disk=self._storage.build_limit)
        return self.create(Recipe(image), limits, state, pooled=True, building=True)

    async def apply(self, builder: NativeSandbox, stage: Stage, number: int) -> str:
        """Run a stage in a sandbox. Returns the commit of a cloned repository. Raises StageError."""
        return await run_stage.apply(builder, stage, number, self._stage_timeout)

    async def build(self, below: StartState, stage: Stage, number: int, urgency: Urgency) -> StageResult:
        """Run a stage in a new sandbox, and keep what it wrote. Raises StageError and CreateError."""
        async with self.builder(below) as builder:
            with background(builder, urgency):
                commit = await self.apply(builder, stage, number)
            return StageResult(await builder.final_state(), commit)


async def _until_ready(channel: Channel, handle: SandboxHandle, network: SandboxNetwork) -> None:
    """Give a new sandbox its network, and wait for its init. If that fails, end it and raise CreateError."""
    former = network.number
    try:
        await network.enter(handle.number)
        await channel.ready
    except BaseException as error:
        network.number = former
        channel.close()
        with anyio.CancelScope(shield=True), contextlib.suppress(CleanupError):
            await handle.destroy()
        if isinstance(error, LauncherError):
            raise CreateError(f"the sandbox has no network: {error.message}") from error
        if isinstance(error, SubstrateError) and not isinstance(error, CreateError):
            raise CreateError(f"the sandbox died while it was made: {error.message}") from error
        raise


@contextmanager
def background(sandbox: NativeSandbox, urgency: Urgency) -> Iterator[None]:
    """Give the sandbox's commands the lowest CPU priority while no request waits for this work."""
    sandbox.set_background(urgency.background)
    with urgency.notify(partial(sandbox.set_background, False)):
        yield

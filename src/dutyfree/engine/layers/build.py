"""Build the layers of a recipe: each prefix once on this machine, kept in the layer store.

A stage runs in a sandbox on the prefix before it. Its files can be used at once, from memory; meanwhile a
copy is written to disk, which then replaces them. If there are peers, they are asked for the layer first.
Requests for the same prefix, in any process, wait for the one build. A builder that dies leaves nothing
behind.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import TypeAlias

import anyio
import anyio.to_thread

from dutyfree.contract import Recipe, Stage
from dutyfree.contract.errors import CreateError, SubstrateError
from dutyfree.engine.exchange.peers import PeerSet
from dutyfree.engine.host import capacity
from dutyfree.engine.layers.build_request import (
    BuildOutcome,
    BuildRequest,
    BuildTrace,
    ParentPrefix,
    StageResult,
    layer_key,
)
from dutyfree.engine.layers.disk_bridge import MAX_CHAIN, DiskLayers, measure, run_in_loop
from dutyfree.engine.layers.memory_layers import MemoryLayers
from dutyfree.engine.layers.prefix_cache import PrefixCache
from dutyfree.engine.layers.start_state import StartState
from dutyfree.engine.layers.urgency import Urgency
from dutyfree.engine.store import provenance
from dutyfree.engine.store.cancel import CancelToken, run_in_thread
from dutyfree.engine.store.layer_lease import LayerInfo, LayerLease
from dutyfree.engine.store.provenance import Provenance
from dutyfree.engine.store.store import Store

_log = logging.getLogger(__name__)


class FilesChanged(CreateError):  # noqa: N818 (says what happened)
    """The files that a stage copies in changed after its key was computed."""

    def __init__(self, stage: Stage, key: str) -> None:
        super().__init__(
            f"stage {stage.kind!r}: its files changed while it was built",
            remedy="try again; if the files keep changing, give the recipe a copy of them",
        )
        self.key = key


RunStage: TypeAlias = Callable[[StartState, Stage, int, Urgency], Awaitable[StageResult]]
"""Runs a stage, with its number in the recipe, on a state: ``SandboxFactory.build``."""


@dataclass
class _Build:
    """A build in progress: usable when ``built`` is done, on disk when ``task`` is done."""

    built: asyncio.Future[StartState]
    urgency: Urgency
    outcome: BuildOutcome = "joined"
    task: asyncio.Task[None] | None = None
    waiters: int = 0


@dataclass
class LayerBuilder:
    """Builds the layers of all recipes of one node."""

    disk: DiskLayers
    layers: MemoryLayers
    run_stage: RunStage
    store: Store | None
    """None without root: then nothing is written to disk."""
    disk_budget: int
    """Bytes of stage layers that may stay on disk; the least recently used are evicted."""
    peers: PeerSet | None = None
    """Asked for a layer before it is built."""
    seconds: dict[str, float] = field(default_factory=dict)
    """How long the last stage of each prefix took, by the prefix's key."""
    sizes: dict[str, int] = field(default_factory=dict)
    """Bytes of the last layer of each prefix, by the prefix's key."""
    _builds: dict[str, _Build] = field(default_factory=dict)
    _leases: dict[int, LayerLease] = field(default_factory=dict)
    _commits: dict[str, str] = field(default_factory=dict)
    _removals: set[asyncio.Future[bool]] = field(default_factory=set)
    _added: bool = False

    def __post_init__(self) -> None:
        self.prefixes = PrefixCache(self.layers, self.disk_budget)

    @property
    def leased(self) -> int:
        """How many layers of the store are in use."""
        return len(self._leases)

    async def state(
        self,
        recipe: Recipe,
        keys: Sequence[str],
        image: StartState,
        identity: str | None,
        urgency: Urgency,
        trace: BuildTrace,
    ) -> StartState:
        """The state of a recipe on its image; builds the missing stages. ``keys`` are those of its prefixes.

        Without an identity of the image, nothing is written to disk. Raises StageError and CreateError.
        """
        image_key, *stage_keys = keys
        room = MAX_CHAIN - len(image.origin.keys)
        at, state = await self._longest(stage_keys[:room], stage_keys, image, identity)
        trace.found, trace.number = at, len(stage_keys)
        for length in range(at + 1, len(stage_keys) + 1):
            below = stage_keys[: length - 1]
            layer_keys = tuple(layer_key(key, identity) for key in below) if identity else ()
            request = BuildRequest(
                stage_keys[length - 1],
                ParentPrefix(below[-1] if below else image_key, state, image, layer_keys),
                recipe.stages[length - 1],
                length,
                identity if length <= room else None,
                tuple(stage_keys[length - 1 : room]),
            )
            state = await self._obtain(request, trace, urgency)
        return state

    def _current(self, parent: ParentPrefix) -> StartState:
        """The parent's layers as they are now: the same build may have moved from memory to disk."""
        now = self.prefixes.get(parent.key)
        return now if now is not None and now.build_id == parent.state.build_id else parent.state

    async def _longest(
        self, stored: list[str], keys: list[str], image: StartState, identity: str | None
    ) -> tuple[int, StartState]:
        """The longest prefix that exists: first among those in the cache, from there on among those on disk.

        ``stored`` are the keys that can be on disk.
        """
        at, state = 0, image
        for length in range(len(keys), 0, -1):
            if (known := self.prefixes.get(keys[length - 1])) is not None:
                at, state = length, known
                break
        if self.store is None or identity is None:
            return at, state
        for length, key in enumerate(stored[at:], at + 1):
            lease = await run_in_thread(
                partial(self.store.lease, layer_key(key, identity), state.build_id), CancelToken()
            )
            if lease is None:
                return length - 1, state
            loaded = await self._load(key, state, lease)
            if (known := self.prefixes.get(key)) is not None:  # another task was faster
                self._unload(loaded)
                state = known
            else:
                state = self._cache(key, loaded)
        return max(at, len(stored)), state

    async def _obtain(self, request: BuildRequest, trace: BuildTrace, urgency: Urgency) -> StartState:
        """Join the build of this prefix, or start it. The last waiter that is cancelled cancels it."""
        key = request.key
        if (state := self.prefixes.get(key)) is not None:
            return state
        build = self._builds.get(key)
        is_ours = build is None
        if build is None:
            parent = request.parent.state.trees
            build = _Build(asyncio.get_running_loop().create_future(), Urgency(background=urgency.background))
            self._builds[key] = build
            self.layers.hold(parent)
            build.task = asyncio.create_task(self._build(build, request))
            build.task.add_done_callback(lambda _: self.layers.release(parent))
        build.waiters += 1
        try:
            with urgency.notify(build.urgency.escalate):
                built = await asyncio.shield(build.built)
            if is_ours:
                trace.note(build.outcome, request.number)
            # While this waiter woke up, the layer may have moved to disk.
            return self.prefixes.get(key) or built
        except asyncio.CancelledError:
            if build.waiters == 1 and not build.built.done() and build.task is not None:
                self._end(key, build)  # the next request starts a new build
                build.task.cancel()
                with anyio.CancelScope(shield=True):
                    await asyncio.wait([build.task])
            raise
        finally:
            build.waiters -= 1

    async def _build(self, build: _Build, request: BuildRequest) -> None:
        stage = request.stage
        try:
            if self.store is None or request.identity is None:
                await self._run(build, request, in_memory=True)
            else:
                stored_key = layer_key(request.key, request.identity)
                await self._build_on_disk(build, self.store, stored_key, request)
        except BaseException as error:
            if not build.built.done():
                build.built.set_exception(
                    error if isinstance(error, CreateError) else _failure(stage, request.number, error)
                )
                build.built.exception()  # all waiters may be gone
            elif isinstance(error, Exception):
                _log.warning("stage %r is not kept on disk, only in memory: %s", stage.kind, error)
            if not isinstance(error, Exception):
                raise
        finally:
            self._end(request.key, build)

    def _end(self, key: str, build: _Build) -> None:
        if self._builds.get(key) is build:
            del self._builds[key]

    async def _run(self, build: _Build, request: BuildRequest, *, in_memory: bool = False) -> StartState:
        """Run the stage, and let the waiters use its files. ``in_memory``: they will not go to disk."""
        begin, key = perf_counter(), request.key
        build.outcome = "ran"
        parent = self._current(request.parent)
        result = await self.run_stage(parent, request.stage, request.number, build.urgency)
        state, self._commits[key] = result.state._replace(build_id=secrets.token_hex(16)), result.commit
        try:
            await self._check_files(request)
            self.sizes[key] = self.layers.size_of([(point, layers[:1]) for point, layers in state.trees])
            if in_memory:
                state = state._replace(trees=await self.layers.shorten(state.trees))
        except BaseException:
            self.layers.release(state.trees)
            raise
        self.seconds[key] = perf_counter() - begin
        self.prefixes.put(key, state)
        if in_memory:
            self.prefixes.trim({key, *self._builds})
        build.built.set_result(state)
        return state

    async def _check_files(self, request: BuildRequest) -> None:
        """Raises FilesChanged if the files that were copied in are not those of the key."""
        stage = request.stage
        if stage.files and request.key != await anyio.to_thread.run_sync(stage.key, request.parent.key):
            raise FilesChanged(stage, request.key)

    async def _build_on_disk(
        self, build: _Build, store: Store, stored_key: str, request: BuildRequest
    ) -> None:
        """Take the layer from disk or fetch it from a peer, or build it under the store's lock."""
        loop = asyncio.get_running_loop()
        key, parent = request.key, request.parent
        cancel = CancelToken()

        def make(tree: Path) -> tuple[int, int, int]:
            state = run_in_loop(loop, self._run(build, request), cancel)
            run_in_loop(loop, self.wait_until_stored(parent.key), cancel)
            _check_parent(store, parent)
            for index, (_, layers) in enumerate(state.trees):
                (tree / str(index)).mkdir(mode=0o755)
                run_in_loop(loop, self.disk.write(layers[:1], layers[1:], tree / str(index)), cancel)
            provenance.write(tree, request.provenance(state.build_id, self.seconds[key], self._commits[key]))
            return measure(tree)

        def obtain() -> LayerLease:
            if found := store.lease(stored_key, parent.state.build_id):
                build.outcome = "found"
                return found
            if self.peers is not None and (missing := request.missing(self.seconds)):
                self.peers.fetch(store, missing, cancel)
            return store.obtain(stored_key, make, cancel, parent_build=parent.state.build_id)

        lease = await run_in_thread(obtain, cancel)
        if self.peers is not None and self.peers.pop_fetched(stored_key) and build.outcome != "ran":
            build.outcome = "fetched"
        await self.wait_until_stored(parent.key)  # so that no layer in memory stays below one on disk
        state = await self._load(key, self._current(parent), lease)
        self._cache(key, state)
        if not build.built.done():
            build.built.set_result(state)
        self._added = True

    async def wait_until_stored(self, key: str) -> None:
        """Wait until the build of this prefix has ended: it is on disk then, or has failed."""
        build = self._builds.get(key)
        if build is not None and build.task is not None:
            await asyncio.wait([build.task])

    async def _load(self, key: str, below: StartState, lease: LayerLease) -> StartState:
        """A layer of the store on a state, held for the caller. The cache does not have it yet."""
        try:
            made, info, is_synced = await anyio.to_thread.run_sync(_read, lease)
            own = await self.disk.open(lease, len(below.trees))
        except BaseException:
            lease.close()
            raise
        if not is_synced and self.store is not None:  # its builder may have ended too early
            self.store.sync_in_background([lease.key])
        self.seconds[key] = made.seconds
        self.sizes[key] = info.size
        self._leases[own[0]] = lease
        self.layers.lend(own, self._remove_unused)
        state = below.with_layer(own, lease.key, made.build_id)
        self.layers.hold(state.trees)
        return state

    def _cache(self, key: str, state: StartState) -> StartState:
        """Use this state from disk for all new requests. Each takes an open file, so close unused ones."""
        self.prefixes.put(key, state, max(1, self.sizes[key]))
        busy = {key, *self._builds}
        self.prefixes.trim(busy)
        for other in self.prefixes.unused_on_disk(capacity.spare_files(), busy):
            self._close_prefix(other)
        return state

    def _close_prefix(self, key: str) -> None:
        """Stop using a prefix here. It stays on disk."""
        state = self.prefixes.get(key)
        assert state is not None
        lease = self._leases.pop(state.trees[0][1][0])
        self.prefixes.forget(key)
        lease.close()

    def _unload(self, state: StartState) -> None:
        """Undo ``_load``."""
        self._leases.pop(state.trees[0][1][0]).close()
        self.layers.release(state.trees)

    def _remove_unused(self, layer: int) -> None:
        """Remove an evicted layer from disk, unless another process uses it."""
        lease = self._leases.pop(layer, None)
        if lease is None or self.store is None:
            return
        lease.close()
        removal = asyncio.get_running_loop().run_in_executor(None, self.store.discard, lease.key)
        self._removals.add(removal)
        removal.add_done_callback(self._removed)

    def _removed(self, removal: asyncio.Future[bool]) -> None:
        self._removals.discard(removal)
        if not removal.cancelled() and (error := removal.exception()) is not None:
            _log.warning("a layer could not be removed: %s", error)

    async def wait_until_idle(self) -> None:
        """Wait until all builds are on disk or have failed, and evicted layers are removed."""
        while tasks := [build.task for build in self._builds.values() if build.task is not None]:
            await asyncio.wait(tasks)
        while self._removals:
            await asyncio.wait(self._removals)

    async def close(self, *, finish: bool) -> None:
        """Wait for the builds, or cancel them unless ``finish``; end all leases."""
        tasks = [build.task for build in self._builds.values() if build.task is not None]
        for task in tasks if not finish else ():
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        if self._removals:
            await asyncio.wait(self._removals)
        if self.peers is not None:
            await anyio.to_thread.run_sync(self.peers.close)
        while self._leases:
            self._leases.popitem()[1].close()
        if self._added and self.store is not None:
            if finish:
                await anyio.to_thread.run_sync(self.store.wait_for_sync)
            await anyio.to_thread.run_sync(self.store.collect, self.disk_budget)


def _failure(stage: Stage, number: int, error: BaseException) -> CreateError:
    why, remedy = str(error) or type(error).__name__, ""
    if isinstance(error, SubstrateError):
        why, remedy = error.message, error.remedy
    return CreateError(f"stage {stage.kind!r} (number {number}) could not be made: {why}", remedy=remedy)


def _check_parent(store: Store, parent: ParentPrefix) -> None:
    """Raises CreateError unless the same build of the parent is on disk: the new layer fits no other."""
    made = provenance.read(store.path(parent.layer_keys[-1]) / "tree") if parent.layer_keys else None
    if parent.layer_keys and (made is None or made.build_id != parent.state.build_id):
        raise CreateError("the stage before it is not on disk")


def _read(lease: LayerLease) -> tuple[Provenance, LayerInfo, bool]:
    made = provenance.read(lease.tree)
    assert made is not None  # the store leases no stage layer without it
    return made, lease.info, lease.is_synced

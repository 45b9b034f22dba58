"""Recipe → layers: every prefix of a recipe is made once on this machine, and kept in the layer store.

A stage runs in a sandbox upon the prefix before it. What it wrote can be used at once, from memory; a copy
goes to the disk meanwhile, and takes its place. Peers are asked before, if there are any. Whoever wants the
same prefix at the same time, in whatever process, waits for the one who makes it; a maker who dies leaves
nothing behind.
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
from typing import Literal, NamedTuple, TypeAlias

import anyio
import anyio.to_thread

from dutyfree.contract import Recipe, Stage
from dutyfree.contract.errors import CreateError, SubstrateError
from dutyfree.engine.exchange.peers import PeerSet
from dutyfree.engine.host import capacity
from dutyfree.engine.layers.build_request import BuildRequest, ParentPrefix, name
from dutyfree.engine.layers.disk_bridge import DEEPEST, DiskLayers, StartState, in_loop, measure, upon
from dutyfree.engine.layers.memory_layers import MemoryLayers
from dutyfree.engine.layers.prefix_cache import PrefixCache
from dutyfree.engine.layers.urgency import Urgency
from dutyfree.engine.store import provenance
from dutyfree.engine.store.cancel import CancelToken, run_in_thread
from dutyfree.engine.store.layer_lease import LayerInfo, LayerLease
from dutyfree.engine.store.provenance import Provenance
from dutyfree.engine.store.store import Store

_log = logging.getLogger(__name__)


class FilesChanged(CreateError):  # noqa: N818 (says what happened)
    """What a stage copies in is no longer what its key was worked out of."""

    def __init__(self, stage: Stage, key: str) -> None:
        super().__init__(
            f"stage {stage.kind!r}: its files changed while it was made", remedy="ask again, or copy them"
        )
        self.key = key


class StageResult(NamedTuple):
    base: StartState
    commit: str = ""
    """What a repository was at when it was cloned."""


RunStage = Callable[[StartState, Stage, int, Urgency], Awaitable[StageResult]]
"""Of a prefix, the stage upon it and its number in the recipe."""


BuildOutcome: TypeAlias = Literal["ran", "fetched", "found", "joined"]
"""A stage was run, came from a peer, was on the disk after all, or was made by another process meanwhile."""


@dataclass
class BuildTrace:
    """What became of the stages of one recipe."""

    found: int = 0
    """So many were there."""
    ran: int = 0
    """So many were run for this request; the rest was under way for another, or came from a peer."""
    fetched: int = 0
    """Up to this one they need not be run, since a peer had them."""
    number: int = 0
    """All of them."""
    image: bool = True
    """Whether the image was there."""

    def note(self, how: BuildOutcome, number: int) -> None:
        """What became of one that was not in memory."""
        if how == "ran":
            self.ran += 1
        elif how == "fetched":
            self.fetched = number
        elif how == "found" and self.found == number - 1:
            self.found = number


@dataclass
class _Build:
    """A prefix under way: usable once ``built``, on the disk once ``task`` is done."""

    built: asyncio.Future[StartState]
    urgency: Urgency
    how: BuildOutcome = "joined"
    task: asyncio.Task[None] | None = None
    waiters: int = 0


@dataclass
class LayerBuilder:
    """Those of one open substrate."""

    disk: DiskLayers
    layers: MemoryLayers
    build: RunStage
    store: Store | None
    """None where nothing is kept on the disk."""
    most: int
    """Bytes of layers that no image has, which may stay on the disk: the last used ones."""
    peers: PeerSet | None = None
    """Who is asked before something is built for the disk."""
    seconds: dict[str, float] = field(default_factory=dict)
    """What each prefix's last stage took, by the prefix's key."""
    sizes: dict[str, int] = field(default_factory=dict)
    """Bytes of its layers, likewise."""
    _making: dict[str, _Build] = field(default_factory=dict)
    _leases: dict[int, LayerLease] = field(default_factory=dict)
    _commits: dict[str, str] = field(default_factory=dict)
    _removing: set[asyncio.Future[bool]] = field(default_factory=set)
    _added: bool = False

    def __post_init__(self) -> None:
        self.ready = PrefixCache(self.layers, self.most)

    async def base(
        self,
        recipe: Recipe,
        prefixes: Sequence[str],
        image: StartState,
        identity: str | None,
        urgency: Urgency,
        trace: BuildTrace,
    ) -> StartState:
        """The recipe's state upon its image; ``prefixes`` are its keys.

        Without an identity of that, no disk is used. Raises StageError if a stage fails, and CreateError.
        """
        upon, *keys = prefixes
        room = DEEPEST - len(image.origin.keys)
        at, base = await self._longest(keys[:room], keys, image, identity)
        trace.found, trace.number = at, len(keys)
        for length in range(at + 1, len(keys) + 1):
            names = tuple(name(key, identity) for key in keys[: length - 1]) if identity else ()
            below = ParentPrefix(keys[length - 2] if length > 1 else upon, base, image, names)
            wanted = BuildRequest(
                keys[length - 1],
                below,
                recipe.stages[length - 1],
                length,
                identity if length <= room else None,
                tuple(keys[length - 1 : room]),
            )
            base = await self._step(wanted, trace, urgency)
        return base

    def _present(self, below: ParentPrefix) -> StartState:
        """What lies there now of the same run: in memory first, then on the disk; or as it was."""
        now = self.ready.get(below.key)
        return now if now is not None and now.build_id == below.base.build_id else below.base

    async def _longest(
        self, kept: list[str], keys: list[str], image: StartState, identity: str | None
    ) -> tuple[int, StartState]:
        """The longest prefix that is there: in use, and from there on upwards on the disk."""
        at, base = 0, image
        for length in range(len(keys), 0, -1):
            if (known := self.ready.get(keys[length - 1])) is not None:
                at, base = length, known
                break
        if self.store is None or identity is None:
            return at, base
        for length, key in enumerate(kept[at:], at + 1):
            lease = await run_in_thread(
                partial(self.store.lease, name(key, identity), base.build_id), CancelToken()
            )
            if lease is None:
                return length - 1, base
            adopted = await self._adopt(key, base, lease)
            if (known := self.ready.get(key)) is not None:  # by another, who was quicker
                self._drop(adopted)
                base = known
            else:
                base = self._offer(key, adopted)
        return max(at, len(kept)), base

    async def _step(self, wanted: BuildRequest, trace: BuildTrace, urgency: Urgency) -> StartState:
        key = wanted.key
        if (base := self.ready.get(key)) is not None:
            return base
        making = self._making.get(key)
        is_ours = making is None
        if making is None:
            making = _Build(
                asyncio.get_running_loop().create_future(), Urgency(background=urgency.background)
            )
            self._making[key] = making
            self.layers.hold(wanted.below.base.trees)
            making.task = asyncio.create_task(self._make(making, wanted))
            making.task.add_done_callback(lambda _: self.layers.release(wanted.below.base.trees))
        making.waiters += 1
        try:
            with urgency.notify(making.urgency.escalate):
                base = await asyncio.shield(making.built)
            if is_ours:
                trace.note(making.how, wanted.number)
            return base
        except asyncio.CancelledError:
            if making.waiters == 1 and not making.built.done() and making.task is not None:
                self._over(key, making)  # who comes now begins anew
                making.task.cancel()
                with anyio.CancelScope(shield=True):
                    await asyncio.wait([making.task])
            raise
        finally:
            making.waiters -= 1

    async def _make(self, making: _Build, wanted: BuildRequest) -> None:
        stage = wanted.stage
        try:
            if self.store is None or wanted.identity is None:
                await self._run(making, wanted, flat=True)
            else:
                await self._kept(making, self.store, name(wanted.key, wanted.identity), wanted)
        except BaseException as error:
            if not making.built.done():
                making.built.set_exception(
                    error if isinstance(error, CreateError) else _failure(stage, wanted.number, error)
                )
                making.built.exception()  # there may be nobody left to hear of it
            elif isinstance(error, Exception):
                _log.warning("stage %r is not kept on the disk, only in memory: %s", stage.kind, error)
            if not isinstance(error, Exception):
                raise
        finally:
            self._over(wanted.key, making)

    def _over(self, key: str, making: _Build) -> None:
        if self._making.get(key) is making:
            del self._making[key]

    async def _run(self, making: _Build, wanted: BuildRequest, *, flat: bool = False) -> StartState:
        begin, key = perf_counter(), wanted.key
        making.how = "ran"
        built = await self.build(self._present(wanted.below), wanted.stage, wanted.number, making.urgency)
        base, self._commits[key] = built.base._replace(build_id=secrets.token_hex(16)), built.commit
        try:
            await self._check(wanted)
            self.sizes[key] = self.layers.size_of([(point, layers[:1]) for point, layers in base.trees])
            if flat:
                base = base._replace(trees=await self.layers.flattened(base.trees))
        except BaseException:
            self.layers.release(base.trees)
            raise
        self.seconds[key] = perf_counter() - begin
        self.ready.put(key, base)
        if flat:
            self.ready.trim({key, *self._making})
        making.built.set_result(base)
        return base

    async def _check(self, wanted: BuildRequest) -> None:
        """See that the files which were copied in are those of the key. Raises CreateError."""
        stage = wanted.stage
        if stage.files and wanted.key != await anyio.to_thread.run_sync(stage.key, wanted.below.key):
            raise FilesChanged(stage, wanted.key)

    async def _kept(self, making: _Build, store: Store, kept_as: str, wanted: BuildRequest) -> None:
        """Have it from a peer, or make it under the store's lock, or have it from whoever was quicker."""
        loop = asyncio.get_running_loop()
        key, below = wanted.key, wanted.below
        cancel = CancelToken()

        def make(tree: Path) -> tuple[int, int, int]:
            base = in_loop(loop, self._run(making, wanted), cancel)
            in_loop(loop, self._until_kept(below.key), cancel)
            _check_ground(store, below)
            for index, (_, layers) in enumerate(base.trees):
                (tree / str(index)).mkdir(mode=0o755)
                in_loop(loop, self.disk.copy(layers[:1], layers[1:], tree / str(index)), cancel)
            provenance.write(tree, wanted.described(base.build_id, self.seconds[key], self._commits[key]))
            return measure(tree)

        def obtain() -> LayerLease:
            if found := store.lease(kept_as, below.base.build_id):
                making.how = "found"
                return found
            if self.peers is not None and (missing := wanted.missing(self.seconds)):
                self.peers.fetch(store, missing, cancel)
            return store.obtain(kept_as, make, cancel, parent_build=below.base.build_id)

        lease = await run_in_thread(obtain, cancel)
        if self.peers is not None and self.peers.brought(kept_as) and making.how != "ran":
            making.how = "fetched"
        await self._until_kept(below.key)  # so that none stays in memory below the disk's
        base = await self._adopt(key, self._present(below), lease)
        self._offer(key, base)
        if not making.built.done():
            making.built.set_result(base)
        self._added = True

    async def _until_kept(self, key: str) -> None:
        """Until what is being made of a prefix lies on the disk, or does not come to."""
        making = self._making.get(key)
        if making is not None and making.task is not None:
            await asyncio.wait([making.task])

    async def _adopt(self, key: str, below: StartState, lease: LayerLease) -> StartState:
        """Layers of the store upon those below, held once; nobody is offered them yet."""
        try:
            told, facts, is_synced = await anyio.to_thread.run_sync(_read, lease)
            own = await self.disk.layers(lease, len(below.trees))
        except BaseException:
            lease.close()
            raise
        if not is_synced and self.store is not None:  # whoever made it may have ended too early
            self.store.sync_in_background([lease.key])
        self.seconds[key] = told.seconds
        self.sizes[key] = facts.size
        self._leases[own[0]] = lease
        self.layers.lend(own, self._unused)
        base = upon(below, own, lease.key, told.build_id)
        self.layers.hold(base.trees)
        return base

    def _offer(self, key: str, base: StartState) -> StartState:
        """Of the disk, to whoever comes from now on."""
        self.ready.put(key, base, max(1, self.sizes[key]))
        busy = {key, *self._making}
        self.ready.trim(busy)
        for other in self.ready.beyond(capacity.spare_files(), busy):
            self._let_go(other)
        return base

    def _let_go(self, key: str) -> None:
        """It stays on the disk, where it is found again: whatever is used here takes an open file."""
        base = self.ready.get(key)
        assert base is not None
        lease = self._leases.pop(base.trees[0][1][0])
        self.ready.forget(key)
        lease.close()

    def _drop(self, base: StartState) -> None:
        """Adopted, and not needed."""
        self._leases.pop(base.trees[0][1][0]).close()
        self.layers.release(base.trees)

    def _unused(self, layer: int) -> None:
        """Nobody stands on it any more, and nobody will."""
        lease = self._leases.pop(layer, None)
        if lease is None or self.store is None:
            return
        lease.close()
        # It stays if another process uses it.
        removal = asyncio.get_running_loop().run_in_executor(None, self.store.discard, lease.key)
        self._removing.add(removal)
        removal.add_done_callback(self._removed)

    def _removed(self, removal: asyncio.Future[bool]) -> None:
        self._removing.discard(removal)
        if not removal.cancelled() and (error := removal.exception()) is not None:
            _log.warning("a layer could not be removed: %s", error)

    async def close(self, *, finish: bool) -> None:
        """Wait for what is on its way to the disk, or have it stopped."""
        tasks = [making.task for making in self._making.values() if making.task is not None]
        for task in tasks if not finish else ():
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        if self._removing:
            await asyncio.wait(self._removing)
        if self.peers is not None:
            await anyio.to_thread.run_sync(self.peers.close)
        while self._leases:
            self._leases.popitem()[1].close()
        if self._added and self.store is not None:
            if finish:
                await anyio.to_thread.run_sync(self.store.wait_for_sync)
            await anyio.to_thread.run_sync(self.store.collect, self.most)


def _failure(stage: Stage, number: int, error: BaseException) -> CreateError:
    why, remedy = str(error) or type(error).__name__, ""
    if isinstance(error, SubstrateError):
        why, remedy = error.message, error.remedy
    return CreateError(f"stage {stage.kind!r} (number {number}) could not be made: {why}", remedy=remedy)


def _check_ground(store: Store, below: ParentPrefix) -> None:
    """Raises CreateError unless the disk has the very run that something was made upon: it fits no other."""
    told = provenance.read(store.path(below.names[-1]) / "tree") if below.names else None
    if below.names and (told is None or told.build_id != below.base.build_id):
        raise CreateError("the stage before it is not on the disk")


def _read(lease: LayerLease) -> tuple[Provenance, LayerInfo, bool]:
    told = provenance.read(lease.tree)
    assert told is not None  # or it was not leased
    return told, lease.info, lease.is_synced

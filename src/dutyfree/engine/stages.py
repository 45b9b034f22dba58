"""Recipe → layers: every prefix of a recipe is made once on this machine, and kept in the layer store.

A stage runs in a sandbox upon the prefix before it. What it wrote can be used at once, from memory; a copy
goes to the disk meanwhile, and takes its place. Whoever wants the same prefix at the same time, in whatever
process, waits for the one who makes it; a maker who dies leaves nothing behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple, TypeVar

import anyio
import anyio.to_thread
import msgspec

from dutyfree.contract import Recipe, Stage
from dutyfree.engine import protocol
from dutyfree.engine.images import rootfs
from dutyfree.engine.images.halting import Halt, Stopped
from dutyfree.engine.images.store import Facts, Lease, Store
from dutyfree.engine.launcher import Launcher, LauncherError
from dutyfree.engine.protocol import Request
from dutyfree.engine.snapshots import Base, Layers
from dutyfree.errors import CreateError, SubstrateError

DEEPEST = 8
"""Stages of a recipe that have a layer each; further ones are kept in memory alone, several in one."""

SPARE = 16 << 30
"""Bytes of layers that no image has, stages among them, which may stay in the store: the last used ones."""

HEARING = 0.05
"""Seconds until a thread hears that it is to halt."""

FORM = 1
"""Of what lies in the store: changed with it."""

T = TypeVar("T")


class Haste:
    """Whether somebody waits for a stage: what is made for the stock gives way to all other work."""

    def __init__(self, *, background: bool) -> None:
        self.background = background
        self.on_hurry: Callable[[], None] | None = None

    def hurry(self) -> None:
        """Now somebody does."""
        if self.background:
            self.background = False
            if self.on_hurry is not None:
                self.on_hurry()


Build = Callable[[Base, Stage, int, Haste], Awaitable[Base]]
"""Of a prefix, the stage upon it and its number in the recipe."""


@dataclass
class Trace:
    """What became of the stages of one recipe."""

    found: int = 0
    """So many were there."""
    ran: int = 0
    """So many were run for this request; the rest was under way for another."""
    number: int = 0
    """All of them."""
    image: bool = True
    """Whether the image was there."""


class Made(msgspec.Struct, frozen=True):
    """Beside a stage's layers in the store."""

    kind: str
    seconds: float


class _Below(NamedTuple):
    """The prefix that a stage is made upon, by its key; without one, the image."""

    key: str
    image: Base


class _Wanted(NamedTuple):
    """A prefix that is to be made, and the stage that makes it of the one below."""

    key: str
    below: _Below
    stage: Stage
    number: int
    identity: str | None


@dataclass
class _Making:
    """A prefix under way: usable once ``built``, on the disk once ``task`` is done."""

    built: asyncio.Future[Base]
    haste: Haste
    task: asyncio.Task[None] | None = None
    waiters: int = 0


@dataclass
class Stages:
    """Those of one open substrate."""

    launcher: Launcher
    layers: Layers
    build: Build
    store: Store | None
    """None where nothing is kept on the disk."""
    seconds: dict[str, float] = field(default_factory=dict)
    """What each prefix's last stage took, by the prefix's key."""
    sizes: dict[str, int] = field(default_factory=dict)
    """Bytes of its layers, likewise."""
    failures: list[str] = field(default_factory=list)
    """Why something is not on the disk."""
    ready: dict[str, Base] = field(default_factory=dict)
    """By the key of the prefix."""
    _making: dict[str, _Making] = field(default_factory=dict)
    _leases: dict[int, Lease] = field(default_factory=dict)
    _removing: set[asyncio.Future[bool]] = field(default_factory=set)
    _added: bool = False

    async def base(
        self,
        recipe: Recipe,
        image: Base,
        identity: str | None,
        *,
        background: bool = False,
        trace: Trace | None = None,
    ) -> tuple[tuple[str, ...], Base]:
        """The keys of the recipe's prefixes, and its state upon its image.

        Without an identity of that, no disk is used. Raises StageError if a stage fails, and CreateError.
        """
        trace = trace or Trace()
        try:
            keys = await anyio.to_thread.run_sync(_keys, recipe)
        except OSError as error:
            raise CreateError(f"the recipe names {error.filename}: {error.strerror}") from error
        at, base = await self._longest(keys, image, identity)
        trace.found, trace.number = at, len(keys)
        for length in range(at + 1, len(keys) + 1):
            below = _Below(keys[length - 2] if length > 1 else "", image)
            wanted = _Wanted(
                keys[length - 1],
                below,
                recipe.stages[length - 1],
                length,
                identity if length <= DEEPEST else None,
            )
            base = await self._step(wanted, trace, background=background)
        return tuple(keys), base

    def forget(self, key: str) -> None:
        """No new sandbox stands on this prefix; when the last one is gone, its files go too."""
        base = self.ready.pop(key, None)
        if base is not None:
            self.layers.release(base.trees)

    def _present(self, below: _Below) -> Base:
        """What lies there now: in memory first, then on the disk."""
        return self.ready.get(below.key, below.image)

    async def _longest(self, keys: list[str], image: Base, identity: str | None) -> tuple[int, Base]:
        """The longest prefix that is there: in memory, being made, or on the disk with all below it."""
        for length in range(len(keys), 0, -1):
            if keys[length - 1] in self.ready:
                return length, self.ready[keys[length - 1]]
        if self.store is None or identity is None:
            return 0, image
        base, store = image, self.store
        for length, key in enumerate(keys[:DEEPEST], 1):
            lease = await anyio.to_thread.run_sync(store.lease, _name(key, identity))
            if lease is None:
                return length - 1, base
            base = await self._adopt(key, base, lease)
        return min(len(keys), DEEPEST), base

    async def _step(self, wanted: _Wanted, trace: Trace, *, background: bool) -> Base:
        key = wanted.key
        if key in self.ready:
            return self.ready[key]
        making = self._making.get(key)
        if making is None:
            making = _Making(asyncio.get_running_loop().create_future(), Haste(background=background))
            self._making[key] = making
            making.task = asyncio.create_task(self._make(making, wanted))
            trace.ran += 1
        elif not background:
            making.haste.hurry()
        making.waiters += 1
        try:
            return await asyncio.shield(making.built)
        except asyncio.CancelledError:
            if making.waiters == 1 and not making.built.done() and making.task is not None:
                making.task.cancel()
                with anyio.CancelScope(shield=True):
                    await asyncio.wait([making.task])
            raise
        finally:
            making.waiters -= 1

    async def _make(self, making: _Making, wanted: _Wanted) -> None:
        stage = wanted.stage
        try:
            if self.store is None or wanted.identity is None:
                await self._run(making, wanted, flat=True)
            else:
                await self._kept(making, self.store, _name(wanted.key, wanted.identity), wanted)
        except BaseException as error:
            if not making.built.done():
                failure = error if isinstance(error, SubstrateError) else _failure(stage, error)
                making.built.set_exception(failure)
                making.built.exception()  # there may be nobody left to hear of it
            elif isinstance(error, Exception):
                self.failures.append(f"{stage.kind}: {error}")
            if not isinstance(error, Exception):
                raise
        finally:
            self._making.pop(wanted.key, None)

    async def _run(self, making: _Making, wanted: _Wanted, *, flat: bool = False) -> Base:
        begin, key = perf_counter(), wanted.key
        base = await self.build(self._present(wanted.below), wanted.stage, wanted.number, making.haste)
        self.sizes[key] = self.layers.size_of([(point, layers[:1]) for point, layers in base.trees])
        if flat:
            base = base._replace(trees=await self.layers.flattened(base.trees))
        self.seconds[key] = perf_counter() - begin
        self.ready[key] = base
        making.built.set_result(base)
        return base

    async def _kept(self, making: _Making, store: Store, name: str, wanted: _Wanted) -> None:
        """Make it under the store's lock, or have it from whoever was quicker."""
        loop = asyncio.get_running_loop()
        key, below, stage = wanted.key, wanted.below, wanted.stage
        halt = Halt()

        def make(tree: Path) -> tuple[int, int, int]:
            base = _in_loop(loop, self._run(making, wanted), halt)
            own = [layers[0] for _, layers in base.trees]
            for index, layer in enumerate(own):
                (tree / str(index)).mkdir(mode=0o755)
                _in_loop(loop, self._copy(layer, tree / str(index)), halt)
            (tree / "stage").write_bytes(msgspec.json.encode(Made(stage.kind, self.seconds[key])))
            return _measure(tree)

        lease = await _threaded(lambda: store.obtain(name, make, halt), halt)
        before = self._making.get(below.key)
        if before is not None and before.task is not None:  # so that none stays in memory below the disk's
            await asyncio.wait([before.task])
        former = self.ready.get(key)
        base = await self._adopt(key, self._present(below), lease)
        if former is not None:
            self.layers.release(former.trees)
        if not making.built.done():
            making.built.set_result(base)
        store.settle_behind([name])
        self._added = True

    async def _copy(self, layer: int, target: Path) -> None:
        descriptor = os.open(target, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            await self.launcher.ask(Request.MERGE, 0, protocol.merge([layer]), descriptor)
        except LauncherError as error:
            raise CreateError(f"a stage cannot be written to {target}: {error.message}") from error
        finally:
            os.close(descriptor)

    async def _adopt(self, key: str, below: Base, lease: Lease) -> Base:
        """Layers of the store upon those below."""
        made, facts = await anyio.to_thread.run_sync(_read, lease)
        if made is not None:
            self.seconds[key] = made.seconds
        self.sizes[key] = facts.size
        own = [
            await rootfs.layer(self.launcher, lease.tree / str(index)) for index in range(len(below.trees))
        ]
        self._leases[own[0]] = lease
        self.layers.lend(own, self._unused)
        trees = tuple(
            (point, (layer, *layers)) for layer, (point, layers) in zip(own, below.trees, strict=True)
        )
        # Those who stand on the ones in memory go on so; all others are upon these.
        self.layers.hold(trees)
        self.ready[key] = Base(trees, below.usual)
        return self.ready[key]

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
            self.failures.append(f"a layer could not be removed: {error}")

    async def close(self, *, finish: bool) -> None:
        """Wait for what is on its way to the disk, or have it stopped."""
        tasks = [making.task for making in self._making.values() if making.task is not None]
        for task in tasks if not finish else ():
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        if self._removing:
            await asyncio.wait(self._removing)
        while self._leases:
            self._leases.popitem()[1].close()
        if self._added and self.store is not None:
            await anyio.to_thread.run_sync(self.store.collect, SPARE)


def _keys(recipe: Recipe) -> list[str]:
    return [recipe.key(length) for length in range(1, len(recipe.stages) + 1)]


def _name(key: str, identity: str) -> str:
    return f"stage:{hashlib.sha256(f'{FORM} {identity} {key}'.encode()).hexdigest()}"


def _failure(stage: Stage, error: BaseException) -> CreateError:
    return CreateError(f"stage {stage.kind!r} could not be made: {error or type(error).__name__}")


def _read(lease: Lease) -> tuple[Made | None, Facts]:
    facts = lease.facts
    with contextlib.suppress(OSError, msgspec.DecodeError):
        return msgspec.json.decode((lease.tree / "stage").read_bytes(), type=Made), facts
    return None, facts


def _measure(tree: Path) -> tuple[int, int, int]:
    size = files = 0
    for directory, _, names in os.walk(tree):
        for name in names:
            files += 1
            size += os.lstat(os.path.join(directory, name)).st_blocks * 512
    return size, files, 0


def _in_loop(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, T], halt: Halt) -> T:
    """From a thread: have the loop do it, to its end. Raises Stopped once the halt is set."""
    ended: Future[asyncio.Task[T]] = Future()
    begun: list[asyncio.Task[T]] = []

    def begin() -> None:
        begun.append(loop.create_task(work))
        begun[0].add_done_callback(ended.set_result)

    loop.call_soon_threadsafe(begin)
    while True:
        try:
            task = ended.result(HEARING)
        except TimeoutError:
            if begun and halt.is_set():
                loop.call_soon_threadsafe(begun[0].cancel)
            continue
        if task.cancelled():
            raise Stopped
        return task.result()


async def _threaded(function: Callable[[], T], halt: Halt) -> T:
    running = asyncio.ensure_future(anyio.to_thread.run_sync(function))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        halt.set()
        with anyio.CancelScope(shield=True), contextlib.suppress(Exception):
            await running
        raise

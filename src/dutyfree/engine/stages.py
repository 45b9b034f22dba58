"""Recipe → layers: every prefix of a recipe is made once on this machine, and kept in the layer store.

A stage runs in a sandbox upon the prefix before it. What it wrote can be used at once, from memory; a copy
goes to the disk meanwhile, and takes its place. Whoever wants the same prefix at the same time, in whatever
process, waits for the one who makes it; a maker who dies leaves nothing behind.
"""

from __future__ import annotations

import asyncio
import hashlib
import shlex
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

import anyio
import anyio.to_thread

from dutyfree.contract import Recipe, Stage
from dutyfree.engine.disk import DEEPEST, Base, Disk, in_loop, measure, threaded
from dutyfree.engine.images import made
from dutyfree.engine.images.halting import Halt
from dutyfree.engine.images.made import Made
from dutyfree.engine.images.store import Lease, Store
from dutyfree.engine.snapshots import Layers
from dutyfree.errors import CreateError, SubstrateError

SPARE = 16 << 30
"""Bytes of layers that no image has, stages among them, which may stay in the store: the last used ones."""

FORM = 2
"""Of what lies in the store: changed with it."""


class Built(NamedTuple):
    base: Base
    commit: str = ""
    """What a repository was at when it was cloned."""


Build = Callable[[Base, Stage], Awaitable[Built]]


class _Below(NamedTuple):
    """The prefix that a stage is made upon, by its key; without one, the image."""

    key: str
    image: Base
    names: tuple[str, ...]
    """Keys in the store of all prefixes down to the image, the shortest first."""


@dataclass
class _Making:
    """A prefix under way: usable once ``built``, on the disk once ``task`` is done."""

    built: asyncio.Future[Base]
    task: asyncio.Task[None] | None = None
    waiters: int = 0


@dataclass
class Stages:
    """Those of one open substrate."""

    disk: Disk
    layers: Layers
    build: Build
    store: Store | None
    """None where nothing is kept on the disk."""
    seconds: dict[str, float] = field(default_factory=dict)
    """What each prefix's last stage took, by the prefix's key."""
    failures: list[str] = field(default_factory=list)
    """Why something is not on the disk."""
    ready: dict[str, Base] = field(default_factory=dict)
    """By the key of the prefix."""
    _making: dict[str, _Making] = field(default_factory=dict)
    _commits: dict[str, str] = field(default_factory=dict)
    _added: bool = False

    async def base(self, recipe: Recipe, image: Base, identity: str | None) -> tuple[str, Base]:
        """The recipe's key, and its state upon its image. Without an identity of that, no disk is used.

        Raises CreateError.
        """
        try:
            keys = await anyio.to_thread.run_sync(_keys, recipe)
        except OSError as error:
            raise CreateError(f"the recipe names {error.filename}: {error.strerror}") from error
        room = DEEPEST - len(image.origin.keys)
        at, base = await self._longest(keys[:room], keys, image, identity)
        for length in range(at + 1, len(keys) + 1):
            names = tuple(name(key, identity) for key in keys[: length - 1]) if identity else ()
            below = _Below(keys[length - 2] if length > 1 else "", image, names)
            kept = identity if length <= room else None
            base = await self._step(keys[length - 1], below, recipe.stages[length - 1], kept)
        return keys[-1], base

    def _present(self, below: _Below) -> Base:
        """What lies there now: in memory first, then on the disk."""
        return self.ready.get(below.key, below.image)

    async def _longest(
        self, kept: list[str], keys: list[str], image: Base, identity: str | None
    ) -> tuple[int, Base]:
        """The longest prefix that is there: in memory, being made, or on the disk with all below it."""
        for length in range(len(keys), 0, -1):
            if keys[length - 1] in self.ready:
                return length, self.ready[keys[length - 1]]
        if self.store is None or identity is None:
            return 0, image
        base, store = image, self.store
        for length, key in enumerate(kept, 1):
            lease = await anyio.to_thread.run_sync(store.lease, name(key, identity))
            if lease is None:
                return length - 1, base
            base = await self._adopt(key, base, lease)
        return len(kept), base

    async def _step(self, key: str, below: _Below, stage: Stage, identity: str | None) -> Base:
        if key in self.ready:
            return self.ready[key]
        making = self._making.get(key)
        if making is None:
            making = self._making[key] = _Making(asyncio.get_running_loop().create_future())
            making.task = asyncio.create_task(self._make(making, key, below, stage, identity))
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

    async def _make(
        self, making: _Making, key: str, below: _Below, stage: Stage, identity: str | None
    ) -> None:
        try:
            if self.store is None or identity is None:
                await self._run(making, key, below, stage, flat=True)
            else:
                await self._kept(making, self.store, identity, key, below, stage)
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
            self._making.pop(key, None)

    async def _run(
        self, making: _Making, key: str, below: _Below, stage: Stage, *, flat: bool = False
    ) -> Base:
        begin = perf_counter()
        base, self._commits[key] = await self.build(self._present(below), stage)
        if flat:
            base = base._replace(trees=await self.layers.flattened(base.trees))
        self.seconds[key] = perf_counter() - begin
        self.ready[key] = base
        making.built.set_result(base)
        return base

    async def _kept(
        self, making: _Making, store: Store, identity: str, key: str, below: _Below, stage: Stage
    ) -> None:
        """Make it under the store's lock, or have it from whoever was quicker."""
        loop = asyncio.get_running_loop()
        halt = Halt()

        def make(tree: Path) -> tuple[int, int, int]:
            base = in_loop(loop, self._run(making, key, below, stage), halt)
            for index, (_, layers) in enumerate(base.trees):
                (tree / str(index)).mkdir(mode=0o755)
                in_loop(loop, self.disk.copy(layers[:1], (), tree / str(index)), halt)
            made.write(tree, self._described(key, identity, below, stage))
            return measure(tree)

        lease = await threaded(lambda: store.obtain(name(key, identity), make, halt), halt)
        before = self._making.get(below.key)
        if before is not None and before.task is not None:  # so that none stays in memory below the disk's
            await asyncio.wait([before.task])
        former = self.ready.get(key)
        base = await self._adopt(key, self._present(below), lease)
        if former is not None:
            self.layers.release(former.trees)
        if not making.built.done():
            making.built.set_result(base)
        store.settle_behind([lease.key])
        self._added = True

    def _described(self, key: str, identity: str, below: _Below, stage: Stage) -> Made:
        origin = below.image.origin
        return Made(
            kind=stage.kind,
            seconds=self.seconds[key],
            image=origin.image,
            identity=identity,
            mounted=origin.mounted,
            below=(*origin.keys, *below.names),
            recipe=key,
            commands=tuple(one if isinstance(one, str) else shlex.join(one) for one in stage.commands),
            commit=self._commits[key],
        )

    async def _adopt(self, key: str, below: Base, lease: Lease) -> Base:
        """Layers of the store upon those below."""
        found = await anyio.to_thread.run_sync(made.read, lease.tree)
        if found is not None:
            self.seconds[key] = found.seconds
        # Those who stand on the ones in memory go on so; all others are upon these.
        self.ready[key] = await self.disk.adopt(below, lease)
        self.layers.hold(self.ready[key].trees)
        return self.ready[key]

    async def close(self, *, finish: bool) -> None:
        """Wait for what is on its way to the disk, or have it stopped."""
        tasks = [making.task for making in self._making.values() if making.task is not None]
        for task in tasks if not finish else ():
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        if self._added and self.store is not None:
            await anyio.to_thread.run_sync(self.store.collect, SPARE)


def _keys(recipe: Recipe) -> list[str]:
    return [recipe.key(length) for length in range(1, len(recipe.stages) + 1)]


def name(key: str, identity: str) -> str:
    """The key in the store of a recipe's prefix upon an image."""
    return f"{made.STAGE}:{hashlib.sha256(f'{FORM} {identity} {key}'.encode()).hexdigest()}"


def _failure(stage: Stage, error: BaseException) -> CreateError:
    return CreateError(f"stage {stage.kind!r} could not be made: {error or type(error).__name__}")

"""Warm sandboxes of the native engine: how they are asked for, and what their pool needs of the engine."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from time import perf_counter
from typing import ClassVar, Protocol

import msgspec

from dutyfree.contract import Limits, Recipe, Stage, limited
from dutyfree.contract.arguments import check_count
from dutyfree.contract.recipe import checked
from dutyfree.contract.served import Served
from dutyfree.contract.substrate import require_open
from dutyfree.engine.host import sandbox_labels
from dutyfree.engine.host.features import HostFeatures
from dutyfree.engine.host.sandbox_labels import LabelFile
from dutyfree.engine.layers import memory_layers, run_stage
from dutyfree.engine.layers.build import BuildTrace, LayerBuilder
from dutyfree.engine.layers.disk_bridge import StartState
from dutyfree.engine.layers.keys import RecipeKeys
from dutyfree.engine.layers.memory_layers import MemoryLayers
from dutyfree.engine.layers.urgency import Urgency
from dutyfree.engine.pool.native_source import NativeSource, Warmth
from dutyfree.engine.pool.pool import Pool
from dutyfree.engine.pool.scheduler.values import Budget, Policy
from dutyfree.engine.pooling import Keeping
from dutyfree.engine.sandbox.sandbox import NativeSandbox
from dutyfree.engine.sandbox.snapshot import entered

OPEN = Limits(network="on")
"""Of sandboxes in which stages are run, as image builds have it."""


class Options(Protocol):
    """Those of the substrate's that concern the pool."""

    @property
    def limits(self) -> Limits: ...
    @property
    def budget(self) -> Budget: ...
    @property
    def policy(self) -> Policy: ...
    @property
    def patience(self) -> float: ...
    @property
    def longest_stage(self) -> float: ...


class Pooled(ABC):
    """The part of the substrate that keeps sandboxes warm. Nothing is, until somebody wants it."""

    features: HostFeatures
    _layers: MemoryLayers
    _stages: LayerBuilder
    _keys: RecipeKeys
    _labelling: LabelFile
    _warmth: ClassVar[Warmth | None] = None
    _is_open = False

    @property
    @abstractmethod
    def _options(self) -> Options: ...

    @abstractmethod
    def _made(
        self,
        recipe: Recipe,
        limits: Limits,
        *,
        base: StartState | None = None,
        pooled: bool = False,
        labels: Mapping[str, str] | None = None,
    ) -> AbstractAsyncContextManager[NativeSandbox]: ...

    @abstractmethod
    async def _base(
        self, recipe: Recipe, *, urgency: Urgency | None = None, trace: BuildTrace | None = None
    ) -> StartState: ...

    @abstractmethod
    def _served(self, recipe: Recipe, trace: BuildTrace, identity: str, seconds: float) -> Served: ...

    @abstractmethod
    def _seconds(self, image: str | None, keys: Sequence[str]) -> list[float]: ...

    def _open_pool(self, options: Options) -> None:
        self._supply = NativeSource(Maker(self), self._warmth)
        self._keeping = Keeping(
            self._supply, options.budget, options.policy, options.limits, options.patience
        )

    @property
    def pool(self) -> Pool | None:
        """The pool, once something was asked for that wants one: ``prefetch``, ``group`` or ``pooled``."""
        return self._keeping.pool

    async def pooled(self) -> Pool:
        """The pool, for leases with terms of their own, begun if it was not."""
        require_open(self._is_open)
        return await self._keeping.started()

    async def prefetch(self, recipes: Iterable[Recipe], count: int = 1) -> None:
        """So many of each will be asked for soon, with the limits of the pool.

        Raises UsageError, CreateError and PoolError.
        """
        await (await self.pooled()).prefetch(recipes, count)

    @asynccontextmanager
    async def group(
        self,
        recipe: Recipe,
        count: int,
        *,
        limits: Limits | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> AsyncIterator[tuple[NativeSandbox, ...]]:
        """So many in the same state, all or none: one that is prepared, and copies of it.

        Raises UsageError, PoolError, StageError and CreateError.
        """
        require_open(self._is_open)
        recipe, count = checked(recipe), check_count(count, 1)
        limits = limited(limits, self._options.limits)
        if self._is_pooled(recipe, limits):
            async with self._keeping.leased(recipe, count, limits, labels) as sandboxes:
                yield sandboxes
            return
        sandbox_labels.check(labels)
        asked, trace = perf_counter(), BuildTrace()
        base = await self._base(recipe, trace=trace)
        each = [self._made(recipe, limits, base=base, labels=labels) for _ in range(count)]
        async with entered(each) as made:
            took = perf_counter() - asked
            for sandbox in made:
                served = self._served(recipe, trace, sandbox.id, took)
                sandbox.served = served if sandbox is made[0] else copied(served, recipe)
            yield tuple(made)

    @asynccontextmanager
    async def _lease(
        self, recipe: Recipe, limits: Limits, labels: Mapping[str, str] | None
    ) -> AsyncIterator[NativeSandbox]:
        async with self.group(recipe, 1, limits=limits, labels=labels) as (sandbox,):
            yield sandbox

    def _is_pooled(self, recipe: Recipe, limits: Limits) -> bool:
        """Whether a sandbox of the pool will do: what it may reach and print can still be changed."""
        if recipe.image is not None and recipe.image.startswith(memory_layers.PREFIX):
            return False
        if limits is self._options.limits:
            return True
        usual = self._options.limits
        if self.features.mode != "root" and (limits.network or "off") != (usual.network or "off"):
            return False
        same = (limits.cpus, limits.memory, limits.pids, limits.disk)
        return same == (usual.cpus, usual.memory, usual.pids, usual.disk)


class Maker:
    """What the pool's supply needs of the engine."""

    def __init__(self, substrate: Pooled) -> None:
        self._substrate = substrate

    @property
    def layers(self) -> MemoryLayers:
        return self._substrate._layers

    async def state(self, recipe: Recipe, urgency: Urgency, trace: BuildTrace) -> StartState:
        return await self._substrate._base(recipe, urgency=urgency, trace=trace)

    @property
    def keys(self) -> RecipeKeys:
        return self._substrate._keys

    def seconds(self, recipe: Recipe) -> list[float]:
        return self._substrate._seconds(recipe.image, self._substrate._keys.known(recipe) or ("",))

    def sizes(self, recipe: Recipe) -> list[int]:
        keys = self._substrate._keys.known(recipe) or ("",)
        return [0, *(self._substrate._stages.sizes.get(key, 0) for key in keys[1:])]

    def forget(self, layer: str) -> None:
        self._substrate._stages.ready.forget(layer)

    def label(self, sandbox: str, labels: Mapping[str, str]) -> None:
        self._substrate._labelling.put(number_of(sandbox), labels)

    def made(
        self,
        base: StartState,
        recipe: Recipe,
        *,
        open_network: bool = False,
    ) -> AbstractAsyncContextManager[NativeSandbox]:
        limits = OPEN if open_network else self._substrate._options.limits
        return self._substrate._made(recipe, limits, base=base, pooled=True)

    async def apply(self, builder: NativeSandbox, stage: Stage, number: int) -> None:
        await run_stage.apply(builder, stage, number, self._substrate._options.longest_stage)


def copied(served: Served, recipe: Recipe) -> Served:
    """How those of a group were that had nothing to do but to start from what the first one wanted."""
    stage = recipe.stages[-1].kind if recipe.stages else "image"
    return msgspec.structs.replace(served, kind="forked", stage=stage)


def number_of(sandbox: str) -> int:
    """That the engine gave to the sandbox of this id."""
    return int(sandbox.rpartition("-")[2])

"""The native engine at one warmth, to measure what each is worth.

``native-cold`` has nothing but files on the disk, ``native-base`` besides what all sandboxes have alike. The
others hold sandboxes ready: on the image, with the repository, with the dependencies, or wholly as the recipe
wants them. What comes after that is run for each sandbox anew.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from time import perf_counter
from typing import Annotated, ClassVar, Self

import anyio.to_thread
import msgspec

from dutyfree.contract import Limits, Recipe, limited
from dutyfree.contract.errors import CreateError
from dutyfree.contract.served import Served
from dutyfree.engine.layers import memory_layers
from dutyfree.engine.layers.disk_bridge import StartState
from dutyfree.engine.pool.native_source import Warmth, spans
from dutyfree.engine.pool.scheduler.values import Policy
from dutyfree.engine.pooled import OPEN
from dutyfree.engine.sandbox.sandbox import NativeSandbox
from dutyfree.engine.sandbox.snapshot import entered
from dutyfree.substrates.native import NO_STAGES, Native, NativeConfig, Ready

# --- Nothing is kept ----------------------------------------------------------------------------------------


class ColdConfig(NativeConfig, frozen=True, forbid_unknown_fields=True):
    ready: Ready = 0


class BaseWarm(Native):
    """The image is opened, and every stage run, for each sandbox."""

    summary: ClassVar[str] = "native with its namespaces ready: image and stages anew for each sandbox"
    Config: ClassVar[type[msgspec.Struct]] = NativeConfig
    name = "native-base"
    warmth: ClassVar[str] = "base"

    async def prepare(self, recipe: Recipe | None = None) -> None:
        """Nothing can be done before a sandbox is wanted."""

    def sandbox(
        self,
        recipe: Recipe | None = None,
        *,
        limits: Limits | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> AbstractAsyncContextManager[NativeSandbox]:
        del labels
        return self._anew(recipe or NO_STAGES, limited(limits, self._options.limits))

    @asynccontextmanager
    async def group(
        self,
        recipe: Recipe,
        count: int,
        *,
        limits: Limits | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> AsyncIterator[tuple[NativeSandbox, ...]]:
        made = [self.sandbox(recipe, limits=limits, labels=labels) for _ in range(count)]
        async with entered(made) as sandboxes:
            yield tuple(sandboxes)

    @asynccontextmanager
    async def _anew(self, recipe: Recipe, limits: Limits) -> AsyncIterator[NativeSandbox]:
        asked = perf_counter()
        async with AsyncExitStack() as stack:
            image = base = await self._opened(recipe.image, stack)
            took: list[float] = []
            if recipe.stages:
                async with self._made(NO_STAGES, OPEN, base=image, pooled=True) as builder:
                    base, took = await self._supply.run(builder, recipe, 1, len(recipe.stages) + 1, stack)
            made = self._made(msgspec.structs.replace(recipe, stages=()), limits, base=base)
            sandbox = await stack.enter_async_context(made)
            seconds = perf_counter() - asked
            sandbox.staged = tuple(zip((stage.kind for stage in recipe.stages), took, strict=True))
            sandbox.spans = spans(seconds, sandbox.staged)
            key = await anyio.to_thread.run_sync(recipe.key)
            sandbox.served = Served("cold", "none", seconds, seconds, sandbox.id, key)
            yield sandbox

    async def _opened(self, name: str | None, stack: AsyncExitStack) -> StartState:
        """An image for as long as somebody stands on it, and no longer."""
        name = name or self._options.image
        if name.startswith(memory_layers.PREFIX):
            return await self._images.opened(name)
        base, held = await self._images.load(name)
        layers = [layer for _, tree in base.trees for layer in tree]

        def unused(layer: int) -> None:
            if layer == layers[0]:
                for one in held:
                    one.close()

        self._layers.lend(layers, unused)
        self._layers.hold(base.trees)
        stack.callback(self._layers.release, base.trees)
        return base


class Cold(BaseWarm):
    summary: ClassVar[str] = "native with nothing ready: namespaces, image and stages anew for each sandbox"
    Config: ClassVar[type[msgspec.Struct]] = ColdConfig
    name = "native-cold"
    warmth: ClassVar[str] = "none"


# --- Sandboxes are ready ------------------------------------------------------------------------------------


class WarmConfig(NativeConfig, frozen=True, forbid_unknown_fields=True):
    policy: Policy = Policy(starting=64, refill=False)
    stock: Annotated[int, msgspec.Meta(ge=0)] = 4
    """Sandboxes that are kept ready of each recipe that was prepared."""


class Warm(Native):
    """The whole recipe is ready, in sandboxes that were made before anybody asked."""

    summary: ClassVar[str] = "native with sandboxes ready before the request, in the state that it wants"
    Config: ClassVar[type[msgspec.Struct]] = WarmConfig
    name = "native-warm"
    warmth: ClassVar[str] = "recipe"

    def __init__(self, config: WarmConfig) -> None:
        super().__init__(config)
        self._stock = config.stock

    async def __aenter__(self) -> Self:
        await super().__aenter__()
        await self._keeping.started()
        return self

    async def prepare(self, recipe: Recipe | None = None) -> None:
        """Layers, and sandboxes upon them, up to the warmth; back when they are ready. Raises CreateError."""
        part = self._supply.warm_part(recipe or NO_STAGES)
        await super().prepare(part)
        try:
            await self._keeping.stocked(part, self._stock)
        except TimeoutError as error:
            raise CreateError(f"{self._stock} sandboxes were not ready in time: {self.pool}") from error


class ImageWarm(Warm):
    summary: ClassVar[str] = "native with sandboxes ready on the image: every stage is run on request"
    name = "native-image"
    warmth: ClassVar[str] = "image"
    _warmth: ClassVar[Warmth | None] = "image"


class RepositoryWarm(Warm):
    summary: ClassVar[str] = "native with sandboxes ready up to the repository: the rest is run on request"
    name = "native-repository"
    warmth: ClassVar[str] = "repository"
    _warmth: ClassVar[Warmth | None] = "repository"


class DependencyWarm(Warm):
    summary: ClassVar[str] = "native with sandboxes ready up to the dependencies: set-up is run on request"
    name = "native-dependencies"
    warmth: ClassVar[str] = "dependencies"
    _warmth: ClassVar[Warmth | None] = "dependencies"

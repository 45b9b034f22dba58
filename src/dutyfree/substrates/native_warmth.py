"""The native engine at one fixed warmth, so that a study can measure what each warmth saves.

``native-cold`` starts with files on disk only; ``native-base`` also has the parts that all sandboxes share.
The others keep idle sandboxes: on the image, with the repository, with the dependencies, or with the whole
recipe. The stages after that run for each sandbox.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from time import perf_counter
from typing import Annotated, ClassVar, Self

import anyio.to_thread
import msgspec

from dutyfree.contract import Limits, Recipe
from dutyfree.contract.errors import CreateError
from dutyfree.contract.served import Served
from dutyfree.engine.layers import memory_layers
from dutyfree.engine.layers.start_state import StartState
from dutyfree.engine.node import EMPTY_RECIPE, Ready
from dutyfree.engine.pool.native_source import Warmth, spans
from dutyfree.engine.pool.scheduler.values import Policy
from dutyfree.engine.sandbox.sandbox import NativeSandbox
from dutyfree.engine.sandbox.snapshot import enter_all
from dutyfree.substrates.native import Native, NativeConfig

# --- Without idle sandboxes -------------------------------------------------------------------------------


class ColdConfig(NativeConfig, frozen=True, forbid_unknown_fields=True):
    ready: Ready = 0


class BaseWarm(Native):
    """Opens the image and runs every stage for each sandbox."""

    summary: ClassVar[str] = "native with its namespaces ready: image and stages anew for each sandbox"
    Config: ClassVar[type[msgspec.Struct]] = NativeConfig
    name = "native-base"
    warmth: ClassVar[str] = "base"

    async def prepare(self, recipe: Recipe | None = None) -> None:
        """Do nothing: at this warmth, all work belongs to the request."""

    def sandbox(
        self,
        recipe: Recipe | None = None,
        *,
        limits: Limits | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> AbstractAsyncContextManager[NativeSandbox]:
        del labels
        node = self.node
        return self._create(node.checked(recipe or EMPTY_RECIPE), node.limits_of(limits))

    @asynccontextmanager
    async def group(
        self,
        recipe: Recipe,
        count: int,
        *,
        limits: Limits | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> AsyncIterator[tuple[NativeSandbox, ...]]:
        members = [self.sandbox(recipe, limits=limits, labels=labels) for _ in range(count)]
        async with enter_all(members) as sandboxes:
            yield tuple(sandboxes)

    @asynccontextmanager
    async def _create(self, recipe: Recipe, limits: Limits) -> AsyncIterator[NativeSandbox]:
        asked, node = perf_counter(), self.node
        async with AsyncExitStack() as stack:
            state = await self._open_image(recipe.image, stack)
            took: list[float] = []
            if recipe.stages:
                async with node.factory.builder(state) as builder:
                    last = len(recipe.stages) + 1
                    state, took = await node.source.run_stages(builder, recipe, 1, last, stack)
            created = node.create(msgspec.structs.replace(recipe, stages=()), limits, state=state)
            sandbox = await stack.enter_async_context(created)
            seconds = perf_counter() - asked
            sandbox.own_stages = tuple(zip((stage.kind for stage in recipe.stages), took, strict=True))
            sandbox.spans = spans(seconds, sandbox.own_stages)
            key = await anyio.to_thread.run_sync(recipe.key)
            sandbox.served = Served("cold", "none", seconds, seconds, sandbox.id, key)
            yield sandbox

    async def _open_image(self, name: str | None, stack: AsyncExitStack) -> StartState:
        """Open the image for one sandbox, and close it with that sandbox."""
        name, node = name or self._config.image, self.node
        if name.startswith(memory_layers.SNAPSHOT_SCHEME):
            return await node.images.open(name)
        state, held = await node.images.load(name)
        layers = [layer for _, tree in state.trees for layer in tree]

        def close_image(layer: int) -> None:
            if layer == layers[0]:
                for one in held:
                    one.close()

        node.layers.lend(layers, close_image)
        node.layers.hold(state.trees)
        stack.callback(node.layers.release, state.trees)
        return state


class Cold(BaseWarm):
    summary: ClassVar[str] = "native with nothing ready: namespaces, image and stages anew for each sandbox"
    Config: ClassVar[type[msgspec.Struct]] = ColdConfig
    name = "native-cold"
    warmth: ClassVar[str] = "none"


# --- With idle sandboxes ----------------------------------------------------------------------------------


class WarmConfig(NativeConfig, frozen=True, forbid_unknown_fields=True):
    policy: Policy = Policy(starting=64, refill=False)
    stock: Annotated[int, msgspec.Meta(ge=0)] = 4
    """The number of idle sandboxes to keep of each prepared recipe."""


class RecipeWarm(Native):
    """Keeps idle sandboxes with the whole recipe."""

    summary: ClassVar[str] = "native with sandboxes ready before the request, in the state that it wants"
    Config: ClassVar[type[msgspec.Struct]] = WarmConfig
    name = "native-warm"
    warmth: ClassVar[str] = "recipe"

    def __init__(self, config: WarmConfig) -> None:
        super().__init__(config)
        self._stock = config.stock
        self._prepared: list[Recipe] = []

    async def __aenter__(self) -> Self:
        await super().__aenter__()
        await self.pooled()
        return self

    async def prepare(self, recipe: Recipe | None = None) -> None:
        """Build the layers and fill the pool, up to the warmth. Raises StageError and CreateError."""
        prefix = self.node.source.warm_prefix(recipe or EMPTY_RECIPE)
        await super().prepare(prefix)
        await self._keep_idle(prefix)
        self._prepared.append(prefix)

    async def settle(self) -> None:
        """Wait until all sandboxes are idle again. See ``abilities.Settling``."""
        for prefix in self._prepared:
            await self._keep_idle(prefix)

    async def _keep_idle(self, prefix: Recipe) -> None:
        try:
            await self.node.pool.keep_idle(prefix, self._stock)
        except TimeoutError as error:
            raise CreateError(f"{self._stock} sandboxes were not ready in time: {self.pool}") from error


class ImageWarm(RecipeWarm):
    summary: ClassVar[str] = "native with sandboxes ready on the image: every stage is run on request"
    name = "native-image"
    warmth: ClassVar[str] = "image"
    pool_warmth: ClassVar[Warmth | None] = "image"


class RepositoryWarm(RecipeWarm):
    summary: ClassVar[str] = "native with sandboxes ready up to the repository: the rest is run on request"
    name = "native-repository"
    warmth: ClassVar[str] = "repository"
    pool_warmth: ClassVar[Warmth | None] = "repository"


class DependencyWarm(RecipeWarm):
    summary: ClassVar[str] = "native with sandboxes ready up to the dependencies: set-up is run on request"
    name = "native-dependencies"
    warmth: ClassVar[str] = "dependencies"
    pool_warmth: ClassVar[Warmth | None] = "dependencies"

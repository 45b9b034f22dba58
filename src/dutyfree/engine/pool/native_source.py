"""Where the pool's sandboxes come from: the native engine, behind the protocols of ``source``.

What layers may be shared is made once, by whoever asks first (``stages``). What may not is run in a sandbox
of its own: a new one, or the idle one that is promoted. Either way a sandbox is handed out upon what its
stages left, with none of their processes; and nothing is ever used twice: a reset is another sandbox on the
same layers, which is then looked at as a whole (``verify``), and whose services are started after that.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from time import perf_counter
from typing import Literal, TypeAlias

import anyio
import msgspec

from dutyfree.contract import Limits, Recipe, Sandbox, Span
from dutyfree.contract.errors import CleanupError, CreateError, StageError, SubstrateError
from dutyfree.contract.served import Served
from dutyfree.engine.layers.build import BuildTrace
from dutyfree.engine.layers.disk_bridge import StartState
from dutyfree.engine.layers.recipe_layers import RecipeLayers
from dutyfree.engine.layers.urgency import Urgency
from dutyfree.engine.pool.scheduler.values import Budget
from dutyfree.engine.pool.source import NewSandbox
from dutyfree.engine.sandbox.factory import SandboxFactory, background
from dutyfree.engine.sandbox.sandbox import NativeSandbox, NetworkedSandbox

SANDBOX_MEMORY = Budget().sandbox_memory
"""Bytes of memory that an idle sandbox takes without what it wrote, where there are thousands of them."""

FIRST = ("/bin/sh", "-c", ":")
"""Run in what is put into stock, so that the kernel knows the way to a program when somebody's is run."""

PATIENCE = 60.0
"""Seconds that it may take: the program is the recipe's, and may be anything."""

Warmth: TypeAlias = Literal["image", "repository", "dependencies"]
"""A stage up to which state is kept, and no further."""


@dataclass
class _Unit:
    """One sandbox of the pool, and what a reset brings it back to."""

    recipe: Recipe
    """Up to its depth."""
    depth: int
    base: StartState | None
    """Of its own, held; None where it is everybody's."""
    stack: AsyncExitStack


class NativeSource:
    """A ``ForkingSource``; with a ``warmth`` every stage after that is run for each sandbox anew."""

    def __init__(
        self, recipes: RecipeLayers, factory: SandboxFactory, limits: Limits, warmth: Warmth | None = None
    ) -> None:
        self.keys = recipes.keys
        self._recipes = recipes
        self._factory = factory
        self._layers = factory.layers
        self._limits = limits
        self._warmth = warmth
        self._units: dict[str, _Unit] = {}
        self.on_lost: Callable[[Sandbox], None] | None = None
        """Told of sandboxes that end by themselves."""

    # --- NewSandbox -----------------------------------------------------------------------------------------

    async def create(
        self, recipe: Recipe, start: int, depth: int, *, keep: int, urgency: Urgency
    ) -> NewSandbox:
        shared = self._shared(recipe, max(1, start, keep), depth)
        trace = BuildTrace()
        below = self.keys.cut(recipe, shared)
        base = await self._recipes.state(below, urgency=urgency, trace=trace)
        own: StartState | None = None
        took: list[float] = []
        async with AsyncExitStack() as held:
            if depth > shared:
                async with self._factory.builder(base, recipe.image) as builder:
                    with background(builder, urgency):
                        own, took = await self.run_stages(builder, recipe, shared, depth, held)
            made = await self._made(recipe, depth, base, own, took, touch=urgency.background)
        there = max(trace.found, trace.fetched)
        found = min(1 + there, shared) if trace.image or there else 0
        joined = depth == shared and trace.number > there and not trace.ran
        return msgspec.structs.replace(
            made,
            stage_seconds=[*self._recipes.seconds(below)[start:], *took],
            layers=self._layer_sizes(below),
            found=found,
            joined=joined,
            fetched=trace.fetched > 0,
        )

    async def promote(
        self, sandbox: Sandbox, recipe: Recipe, start: int, depth: int, *, keep: int, urgency: Urgency
    ) -> NewSandbox:
        if self._shared(recipe, max(1, keep), depth) == depth:
            await self.destroy(sandbox)  # what it has, the layers have too
            made = await self.create(recipe, start, depth, keep=keep, urgency=urgency)
            return msgspec.structs.replace(made, create_seconds=None)
        idle = self._held(sandbox)
        async with AsyncExitStack() as held:
            with background(idle, urgency):
                if isinstance(idle, NetworkedSandbox):
                    await idle.set_network("on")
                own, took = await self.run_stages(idle, recipe, start, depth, held)
            await self.destroy(idle)
            made = await self._made(recipe, depth, own, own, took, touch=urgency.background)
        return msgspec.structs.replace(made, create_seconds=None)

    async def fork(self, sandbox: Sandbox, count: int) -> Sequence[NewSandbox]:
        unit, base = self._units[sandbox.id], self._held(sandbox).start_state  # not those of a later run
        begun = perf_counter()
        self._layers.hold(base.trees)
        tasks = [
            asyncio.ensure_future(self._served(unit.recipe, unit.depth, base, own=unit.base is not None))
            for _ in range(count)
        ]
        try:
            children = await asyncio.gather(*tasks)
        except BaseException:
            with anyio.CancelScope(shield=True):
                for task in tasks:
                    task.cancel()
                for came in await asyncio.gather(*tasks, return_exceptions=True):
                    if not isinstance(came, BaseException):
                        await self._discard(came)
            raise
        finally:
            self._layers.release(base.trees)
        each = (perf_counter() - begun) / max(1, count)
        return [NewSandbox(child, each, memory=self._memory(child, unit.base)) for child in children]

    async def _made(
        self,
        recipe: Recipe,
        depth: int,
        base: StartState,
        own: StartState | None,
        took: list[float],
        *,
        touch: bool,
    ) -> NewSandbox:
        begun = perf_counter()
        sandbox = await self._served(self.keys.cut(recipe, depth), depth, own or base, own=own is not None)
        create_seconds = perf_counter() - begun
        if touch:
            await self._touch(sandbox)
        ran = recipe.stages[depth - 1 - len(took) : depth - 1]
        sandbox.own_stages = tuple(zip((stage.kind for stage in ran), took, strict=True))
        return NewSandbox(sandbox, create_seconds, took, memory=self._memory(sandbox, own))

    async def _served(self, recipe: Recipe, depth: int, base: StartState, *, own: bool) -> NativeSandbox:
        """One whose services run."""
        sandbox = await self._enter(recipe, depth, base, own=own)
        await self._serve(sandbox)
        return sandbox

    async def _serve(self, sandbox: NativeSandbox) -> None:
        """Raises StageError if one does not become ready: the last thing that the recipe wants."""
        recipe = self._units[sandbox.id].recipe
        try:
            await sandbox.start_services()
            await sandbox.measure_services()
        except BaseException as error:
            alive = sandbox.alive
            with anyio.CancelScope(shield=True):
                await self._discard(sandbox)
            if isinstance(error, CreateError) and alive:
                raise StageError(error.message, remedy=error.remedy, number=len(recipe.stages)) from error
            raise

    async def _enter(self, recipe: Recipe, depth: int, base: StartState, *, own: bool) -> NativeSandbox:
        stack = AsyncExitStack()
        sandbox = await stack.enter_async_context(
            self._factory.create(recipe, self._limits, base, pooled=True)
        )
        if own:
            self._layers.hold(base.trees)
            stack.callback(self._layers.release, base.trees)
        self._units[sandbox.id] = _Unit(recipe, depth, base if own else None, stack)
        sandbox.on_death(lambda: self.on_lost(sandbox) if self.on_lost is not None else None)
        return sandbox

    async def run_stages(
        self, builder: NativeSandbox, recipe: Recipe, start: int, depth: int, held: AsyncExitStack
    ) -> tuple[StartState, list[float]]:
        """Run the stages after ``start`` in a sandbox, and keep what it then has for as long as ``held``."""
        seconds = []
        for number in range(start, depth):
            begun = perf_counter()
            await self._factory.apply(builder, recipe.stages[number - 1], number)
            seconds.append(perf_counter() - begun)
        base = await builder.final_state()
        held.callback(self._layers.release, base.trees)
        return base, seconds

    # --- Used again -----------------------------------------------------------------------------------

    async def reset(self, sandbox: Sandbox) -> tuple[Sandbox, int]:
        unit = self._units.pop(sandbox.id)
        recipe, depth, own = unit.recipe, unit.depth, unit.base
        async with AsyncExitStack() as held:
            if own is not None:
                self._layers.hold(own.trees)
                held.callback(self._layers.release, own.trees)
            await unit.stack.aclose()
            kept = self._shared(recipe, depth, depth)
            if own is not None and kept == depth:
                return await self._enter(recipe, depth, own, own=True), depth
            recipe = self.keys.cut(recipe, kept)
            base = await self._recipes.state(recipe, urgency=Urgency(background=True))
            return await self._enter(recipe, kept, base, own=False), kept

    async def verify(self, sandbox: Sandbox) -> None:
        held = self._held(sandbox)
        await held.verify()
        await self._serve(held)  # only now: they are what it has beyond its layers
        await self._touch(held)
        if not held.alive:
            raise CreateError(f"sandbox {held.id} died")

    def alive(self, sandbox: Sandbox) -> bool:
        return isinstance(sandbox, NativeSandbox) and sandbox.alive

    async def _touch(self, sandbox: NativeSandbox) -> None:
        try:
            if (await sandbox.exec(FIRST, timeout=PATIENCE)).timed_out:
                raise CreateError(f"sandbox {sandbox.id} ran no command within {PATIENCE:g} s")
        except BaseException:
            with anyio.CancelScope(shield=True):
                await self._discard(sandbox)
            raise

    def hand_out(self, sandbox: Sandbox, served: Served, recipe: Recipe, labels: Mapping[str, str]) -> None:
        held = self._held(sandbox)
        held.use_recipe(recipe)
        held.served, held.spans = served, spans(served.seconds, held.own_stages)
        if labels:
            self._factory.label(sandbox.id, labels)

    # --- Gone -----------------------------------------------------------------------------------------

    async def destroy(self, sandbox: Sandbox) -> None:
        unit = self._units.pop(sandbox.id, None)
        if unit is not None:
            await unit.stack.aclose()

    async def _discard(self, sandbox: Sandbox) -> None:
        try:
            await self.destroy(sandbox)
        except CleanupError:
            return  # there is another error to tell

    def forget(self, layer: str) -> None:
        self._recipes.forget(layer)

    def warm_prefix(self, recipe: Recipe) -> Recipe:
        """As much of it as sandboxes can be warm with."""
        depth = len(recipe.stages) + 1
        return self.keys.cut(recipe, self._shared(recipe, depth, depth))

    # --- Figures --------------------------------------------------------------------------------------

    def _shared(self, recipe: Recipe, wanted: int, depth: int) -> int:
        """Up to what depth layers serve all, of a sandbox at ``depth``."""
        return min(wanted if self._warmth is None else warm_depth(recipe, self._warmth), depth)

    def _layer_sizes(self, recipe: Recipe) -> dict[int, int]:
        """What the pool may make sandboxes on: at a fixed warmth it is to use those that wait."""
        if self._warmth is not None:
            return {}
        return dict(enumerate(self._recipes.sizes(recipe), 1))

    def _memory(self, sandbox: NativeSandbox, own: StartState | None) -> int | None:
        if own is None and not sandbox.services_memory:
            return None
        return (
            SANDBOX_MEMORY + sandbox.services_memory + (0 if own is None else self._layers.size_of(own.trees))
        )

    def _held(self, sandbox: Sandbox) -> NativeSandbox:
        if not isinstance(sandbox, NativeSandbox) or sandbox.id not in self._units:
            raise SubstrateError(f"{sandbox.id} is no sandbox of this pool")
        return sandbox


def spans(seconds: float, staged: tuple[tuple[str, float], ...]) -> tuple[Span, ...]:
    """The stages that were run for it, and what else the hand-out took."""
    at = max(0.0, seconds - math.fsum(took for _, took in staged))
    found = [Span("pool", 0.0, at)]
    for kind, took in staged:
        found.append(Span(f"stage {kind}", at, took))
        at += took
    return tuple(found)


def warm_depth(recipe: Recipe, warmth: Warmth) -> int:
    """The depth of the last stage of this kind, or of one that comes before; of the image at least."""
    kinds = {"image": (), "repository": ("repository",), "dependencies": ("repository", "dependencies")}[
        warmth
    ]
    return 1 + max(
        (number for number, stage in enumerate(recipe.stages, 1) if stage.kind in kinds), default=0
    )

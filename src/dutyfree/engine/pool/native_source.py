"""The native engine as a source of sandboxes for the pool.

Stages with a shared layer are built once (``RecipeLayers``). The other stages run in a builder sandbox, or in
the idle sandbox that is promoted. In both cases the sandbox that is handed out is a new one, on what the
stages wrote and without their processes. No sandbox is used twice: a reset is a new sandbox on the same
layers. It is verified, and its services start after that.
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
from dutyfree.engine.launcher.timeouts import DEFAULT_TIMEOUTS, Timeouts
from dutyfree.engine.layers.build_request import BuildTrace
from dutyfree.engine.layers.recipe_layers import RecipeLayers
from dutyfree.engine.layers.start_state import StartState
from dutyfree.engine.layers.urgency import Urgency
from dutyfree.engine.pool.scheduler.values import Budget
from dutyfree.engine.pool.source import NewSandbox
from dutyfree.engine.sandbox.factory import SandboxFactory, background
from dutyfree.engine.sandbox.sandbox import NativeSandbox, NetworkedSandbox

SANDBOX_MEMORY = Budget().sandbox_memory
"""Bytes of memory of an idle sandbox that has written nothing, averaged over thousands of them."""

WARM_UP = ("/bin/sh", "-c", ":")
"""Runs in each new idle sandbox, so that the kernel's caches are warm for the first action."""

Warmth: TypeAlias = Literal["image", "repository", "dependencies"]
"""The kind of the last stage that layers and idle sandboxes may have."""


@dataclass
class _PoolSandbox:
    """One sandbox of the pool, and the state that a reset gives back to it."""

    recipe: Recipe
    """The recipe, cut off at the depth."""
    depth: int
    own: StartState | None
    """Its private layers, which it holds; None if it starts from shared layers."""
    stack: AsyncExitStack
    """Closes the sandbox, and lets go of its layers."""


class NativeSource:
    """A ``ForkingSource``. With a ``warmth``, all stages after it run for each sandbox."""

    def __init__(
        self,
        recipes: RecipeLayers,
        factory: SandboxFactory,
        limits: Limits,
        warmth: Warmth | None = None,
        timeouts: Timeouts = DEFAULT_TIMEOUTS,
    ) -> None:
        self.keys = recipes.keys
        self._recipes = recipes
        self._factory = factory
        self._layers = factory.layers
        self._limits = limits
        self._warmth = warmth
        self._warm_up_timeout = timeouts.warm_up
        self._sandboxes: dict[str, _PoolSandbox] = {}
        self.on_lost: Callable[[Sandbox], None] | None = None
        """Called with each sandbox that dies by itself."""

    def check(self, recipe: Recipe) -> None:
        """Raises CreateError for a recipe that asks for isolation that sandboxes lack here."""
        self._factory.isolation.refuse_recipe(recipe.isolation)

    # --- New sandboxes --------------------------------------------------------------------------------

    async def create(
        self, recipe: Recipe, start: int, depth: int, *, keep: int, urgency: Urgency
    ) -> NewSandbox:
        shared = self._shared(recipe, max(1, start, keep), depth)
        trace = BuildTrace()
        below = self.keys.cut(recipe, shared)
        state = await self._recipes.state(below, urgency=urgency, trace=trace)
        own: StartState | None = None
        took: list[float] = []
        async with AsyncExitStack() as held:
            if depth > shared:
                async with self._factory.builder(state, recipe.image) as builder:
                    with background(builder, urgency):
                        own, took = await self.run_stages(builder, recipe, shared, depth, held)
            made = await self._new_sandbox(recipe, depth, state, own, took, warm_up=urgency.background)
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
        fixed = self._factory.isolation.fixed  # where a stage may write, and the idle sandbox cannot
        if fixed or self._shared(recipe, max(1, keep), depth) == depth:
            await self.destroy(sandbox)  # the layers have all that it has
            made = await self.create(recipe, start, depth, keep=keep, urgency=urgency)
            return msgspec.structs.replace(made, create_seconds=None)
        idle = self._native(sandbox)
        async with AsyncExitStack() as held:
            with background(idle, urgency):
                if isinstance(idle, NetworkedSandbox):
                    await idle.set_network("on")
                own, took = await self.run_stages(idle, recipe, start, depth, held)
            await self.destroy(idle)
            made = await self._new_sandbox(recipe, depth, own, own, took, warm_up=urgency.background)
        return msgspec.structs.replace(made, create_seconds=None)

    async def fork(self, sandbox: Sandbox, count: int) -> Sequence[NewSandbox]:
        # Its own state: by now, the recipe's layers may come from a later build.
        entry, state = self._sandboxes[sandbox.id], self._native(sandbox).start_state
        begun = perf_counter()
        self._layers.hold(state.trees)
        tasks = [
            asyncio.ensure_future(
                self._create_with_services(entry.recipe, entry.depth, state, own=entry.own is not None)
            )
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
            self._layers.release(state.trees)
        each = (perf_counter() - begun) / max(1, count)
        return [
            NewSandbox(child, create_seconds=each, memory=self._memory(child, entry.own))
            for child in children
        ]

    async def _new_sandbox(
        self,
        recipe: Recipe,
        depth: int,
        state: StartState,
        own: StartState | None,
        took: list[float],
        *,
        warm_up: bool,
    ) -> NewSandbox:
        begun = perf_counter()
        sandbox = await self._create_with_services(
            self.keys.cut(recipe, depth), depth, own or state, own=own is not None
        )
        create_seconds = perf_counter() - begun
        if warm_up:
            await self._warm_up(sandbox)
        ran = recipe.stages[depth - 1 - len(took) : depth - 1]
        sandbox.own_stages = tuple(zip((stage.kind for stage in ran), took, strict=True))
        memory = self._memory(sandbox, own)
        return NewSandbox(sandbox, create_seconds=create_seconds, stage_seconds=took, memory=memory)

    async def _create_with_services(
        self, recipe: Recipe, depth: int, state: StartState, *, own: bool
    ) -> NativeSandbox:
        """A sandbox whose services run. Raises StageError and CreateError."""
        sandbox = await self._create(recipe, depth, state, own=own)
        await self._start_services(sandbox)
        return sandbox

    async def _start_services(self, sandbox: NativeSandbox) -> None:
        """Start its services. Raises StageError if one does not become ready, as for a last stage."""
        recipe = self._sandboxes[sandbox.id].recipe
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

    async def _create(self, recipe: Recipe, depth: int, state: StartState, *, own: bool) -> NativeSandbox:
        stack = AsyncExitStack()
        sandbox = await stack.enter_async_context(
            self._factory.create(recipe, self._limits, state, pooled=True)
        )
        if own:
            self._layers.hold(state.trees)
            stack.callback(self._layers.release, state.trees)
        self._sandboxes[sandbox.id] = _PoolSandbox(recipe, depth, state if own else None, stack)
        sandbox.on_death(lambda: self.on_lost(sandbox) if self.on_lost is not None else None)
        return sandbox

    async def run_stages(
        self, builder: NativeSandbox, recipe: Recipe, start: int, depth: int, held: AsyncExitStack
    ) -> tuple[StartState, list[float]]:
        """Run the stages after ``start`` in a sandbox. Returns its state, held until ``held`` closes."""
        seconds = []
        for number in range(start, depth):
            begun = perf_counter()
            await self._factory.apply(builder, recipe.stages[number - 1], number)
            seconds.append(perf_counter() - begun)
        state = await builder.final_state()
        held.callback(self._layers.release, state.trees)
        return state, seconds

    # --- Reset and hand out ---------------------------------------------------------------------------

    async def reset(self, sandbox: Sandbox) -> tuple[Sandbox, int]:
        entry = self._sandboxes.pop(sandbox.id)
        recipe, depth, own = entry.recipe, entry.depth, entry.own
        async with AsyncExitStack() as held:
            if own is not None:
                self._layers.hold(own.trees)
                held.callback(self._layers.release, own.trees)
            await entry.stack.aclose()
            kept = self._shared(recipe, depth, depth)
            if own is not None and kept == depth:
                return await self._create(recipe, depth, own, own=True), depth
            recipe = self.keys.cut(recipe, kept)
            state = await self._recipes.state(recipe, urgency=Urgency(background=True))
            return await self._create(recipe, kept, state, own=False), kept

    async def verify(self, sandbox: Sandbox) -> None:
        native = self._native(sandbox)
        await native.verify()
        await self._start_services(native)  # after the check, which allows no process
        await self._warm_up(native)
        if not native.alive:
            raise CreateError(f"sandbox {native.id} died")

    def alive(self, sandbox: Sandbox) -> bool:
        return isinstance(sandbox, NativeSandbox) and sandbox.alive

    async def _warm_up(self, sandbox: NativeSandbox) -> None:
        try:
            if (await sandbox.exec(WARM_UP, timeout=self._warm_up_timeout)).timed_out:
                raise CreateError(f"sandbox {sandbox.id} ran no command within {self._warm_up_timeout:g} s")
        except BaseException:
            with anyio.CancelScope(shield=True):
                await self._discard(sandbox)
            raise

    def hand_out(self, sandbox: Sandbox, served: Served, recipe: Recipe, labels: Mapping[str, str]) -> None:
        native = self._native(sandbox)
        native.use_recipe(recipe)
        native.served, native.spans = served, spans(served.seconds, native.own_stages)
        if labels:
            self._factory.label(sandbox.id, labels)

    # --- Remove ---------------------------------------------------------------------------------------

    async def destroy(self, sandbox: Sandbox) -> None:
        entry = self._sandboxes.pop(sandbox.id, None)
        if entry is not None:
            await entry.stack.aclose()

    async def _discard(self, sandbox: Sandbox) -> None:
        try:
            await self.destroy(sandbox)
        except CleanupError:
            return  # the caller raises another error

    def forget(self, layer: str) -> None:
        self._recipes.forget(layer)

    def warm_prefix(self, recipe: Recipe) -> Recipe:
        """The longest prefix that idle sandboxes may have."""
        depth = len(recipe.stages) + 1
        return self.keys.cut(recipe, self._shared(recipe, depth, depth))

    # --- Figures --------------------------------------------------------------------------------------

    def _shared(self, recipe: Recipe, wanted: int, depth: int) -> int:
        """The depth up to which layers are shared, for a sandbox at ``depth``."""
        return min(wanted if self._warmth is None else warm_depth(recipe, self._warmth), depth)

    def _layer_sizes(self, recipe: Recipe) -> dict[int, int]:
        """The layers that the pool may count on; at a fixed warmth none, so that it uses idle sandboxes."""
        if self._warmth is not None:
            return {}
        return dict(enumerate(self._recipes.sizes(recipe), 1))

    def _memory(self, sandbox: NativeSandbox, own: StartState | None) -> int | None:
        if own is None and not sandbox.services_memory:
            return None
        return (
            SANDBOX_MEMORY + sandbox.services_memory + (0 if own is None else self._layers.size_of(own.trees))
        )

    def _native(self, sandbox: Sandbox) -> NativeSandbox:
        if not isinstance(sandbox, NativeSandbox) or sandbox.id not in self._sandboxes:
            raise SubstrateError(f"sandbox {sandbox.id} does not belong to this pool")
        return sandbox


def spans(seconds: float, staged: tuple[tuple[str, float], ...]) -> tuple[Span, ...]:
    """The spans of a hand-out: the time in the pool, then the stages that ran for this sandbox."""
    at = max(0.0, seconds - math.fsum(took for _, took in staged))
    found = [Span("pool", 0.0, at)]
    for kind, took in staged:
        found.append(Span(f"stage {kind}", at, took))
        at += took
    return tuple(found)


def warm_depth(recipe: Recipe, warmth: Warmth) -> int:
    """The depth of the last stage that this warmth includes; at least that of the image."""
    kinds = {"image": (), "repository": ("repository",), "dependencies": ("repository", "dependencies")}[
        warmth
    ]
    return 1 + max(
        (number for number, stage in enumerate(recipe.stages, 1) if stage.kind in kinds), default=0
    )

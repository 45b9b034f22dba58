"""A source of scripted sandboxes, with latencies and failures to choose."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any

import anyio
import anyio.lowlevel

from dutyfree.contract import Recipe, Sandbox
from dutyfree.contract.errors import CleanupError, CreateError, ExecError, StageError
from dutyfree.contract.served import Served
from dutyfree.engine.layers.urgency import Urgency
from dutyfree.engine.pool.source import NewSandbox
from dutyfree.substrates.scripted import Scripted


class ScriptedSource:
    """Counts the sandboxes that exist, and fails with a given probability. A layer is a set of files."""

    def __init__(
        self, substrate: Scripted | None = None, *, layered: bool = True, failures: float = 0.0
    ) -> None:
        self.substrate = substrate or Scripted(Scripted.Config(create_seconds=0.01, exec_seconds=1.0))
        self.chance = random.Random(7)
        self.failures = failures
        self.layered = layered
        self.existing: dict[str, AsyncExitStack] = {}
        self.most = 0
        self.dead: set[str] = set()
        self.layers: dict[str, Recipe] = {}
        self.depths: dict[str, int] = {}
        self.ran: list[str] = []
        self.under_way = 0
        self.handed_out: list[tuple[str, Recipe, dict[str, str]]] = []

    async def create(
        self, recipe: Recipe, start: int, depth: int, *, keep: int, urgency: Urgency
    ) -> NewSandbox:
        base = self.layers[recipe.key(start - 1)] if start else Recipe()
        begun = anyio.current_time()
        stack = AsyncExitStack()
        self.under_way += 1
        self.most = max(self.most, len(self.existing) + self.under_way)
        try:
            self._perhaps(CreateError("chance"))
            sandbox = await stack.enter_async_context(self.substrate.sandbox(base))
            made = anyio.current_time() - begun
            self._perhaps(CreateError("chance"))
            seconds, layers = await self._stages(sandbox, recipe, start, depth, keep)
        except BaseException:
            with anyio.CancelScope(shield=True):
                await stack.aclose()
            raise
        finally:
            self.under_way -= 1
        self.existing[sandbox.id] = stack
        self.depths[sandbox.id] = depth
        return NewSandbox(sandbox, create_seconds=made, stage_seconds=seconds, layers=layers)

    async def promote(
        self, sandbox: Sandbox, recipe: Recipe, start: int, depth: int, *, keep: int, urgency: Urgency
    ) -> NewSandbox:
        self._refuse_dead(sandbox)
        seconds, layers = await self._stages(sandbox, recipe, start, depth, keep)
        self.depths[sandbox.id] = depth
        return NewSandbox(sandbox, stage_seconds=seconds, layers=layers)

    async def _stages(
        self, sandbox: Any, recipe: Recipe, start: int, depth: int, keep: int
    ) -> tuple[list[float], dict[int, int]]:
        seconds, kept = [], []
        for at in range(start + 1, depth + 1):
            begun = anyio.current_time()
            for command in recipe.stages[at - 2].commands if at >= 2 else ():
                self.ran.append(str(command))
                seen = await sandbox.exec(command)
                if not seen.ok:
                    raise StageError(
                        f"{command!r} ended with {seen.exit_code}",
                        number=at - 1, command=str(command), output=seen.stderr.decode(),
                    )  # fmt: skip
            seconds.append(anyio.current_time() - begun)
            if at <= keep and self.layered:
                self.layers[recipe.key(at - 1)] = await sandbox.snapshot()
                kept.append(at)
        sandbox.initial = dict(sandbox.files.nodes)  # the state that a reset restores
        return seconds, {at: 1000 for at in kept if recipe.key(at - 1) in self.layers}

    async def fork(self, sandbox: Any, count: int) -> Sequence[NewSandbox]:
        self._refuse_dead(sandbox)
        self._perhaps(CreateError("chance"))
        state = await sandbox.snapshot()
        made: list[NewSandbox] = []
        try:
            for _ in range(count):
                stack = AsyncExitStack()
                child = await stack.enter_async_context(self.substrate.sandbox(state))
                self.existing[child.id] = stack
                self.depths[child.id] = self.depths[sandbox.id]
                made.append(NewSandbox(child, create_seconds=0.001))
        except BaseException:
            with anyio.CancelScope(shield=True):
                for one in made:
                    await self.existing.pop(one.sandbox.id).aclose()
            raise
        self.most = max(self.most, len(self.existing))
        return made

    async def reset(self, sandbox: Any) -> tuple[Sandbox, int]:
        self._refuse_dead(sandbox)
        self._perhaps(ExecError("chance"))
        await sandbox.reset()
        return sandbox, self.depths[sandbox.id]

    async def verify(self, sandbox: Any) -> None:
        self._perhaps(ExecError("chance"))
        if sandbox.files.nodes != sandbox.initial:
            raise ExecError("traces of the former use")

    def hand_out(self, sandbox: Sandbox, served: Served, recipe: Recipe, labels: Mapping[str, str]) -> None:
        self.handed_out.append((sandbox.id, recipe, dict(labels)))

    def alive(self, sandbox: Sandbox) -> bool:
        return sandbox.id not in self.dead

    async def destroy(self, sandbox: Sandbox) -> None:
        await self.existing.pop(sandbox.id).aclose()
        self._perhaps(CleanupError("chance"))

    def forget(self, layer: str) -> None:
        del self.layers[layer]

    def _perhaps(self, error: Exception) -> None:
        if self.chance.random() < self.failures:
            raise error

    def _refuse_dead(self, sandbox: Sandbox) -> None:
        if sandbox.id in self.dead:
            raise ExecError(f"{sandbox.id} is dead")

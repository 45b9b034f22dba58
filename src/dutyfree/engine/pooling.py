"""The pool of one open substrate: begun by whoever first wants something warm, and leases as sandboxes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

import anyio

from dutyfree.contract import Limits, NetworkPolicy, Recipe
from dutyfree.contract.errors import ActionError, CreateError, DispatchError, UsageError
from dutyfree.engine.host import capacity
from dutyfree.engine.pool.native_source import SANDBOX, NativeSource
from dutyfree.engine.pool.pool import Pool
from dutyfree.engine.pool.scheduler.values import Budget, Policy
from dutyfree.engine.sandbox.sandbox import NativeSandbox, NetworkedSandbox

POLICY = Policy(starting=64, idle_seconds=600.0)
"""Of the native engine: who waits for a stage that another makes holds up nobody, so many may."""


def default_budget() -> Budget:
    memory = capacity.share_of_memory()
    most = min(memory // SANDBOX, capacity.room_by_files())
    return Budget(sandboxes=most, memory=memory, sandbox_memory=SANDBOX)


class Keeping:
    """Costs nothing until ``started`` is called."""

    def __init__(
        self, supply: NativeSource, budget: Budget, policy: Policy, usual: Limits, patience: float
    ) -> None:
        self.pool: Pool | None = None
        self._supply = supply
        self._budget = budget
        self._policy = policy
        self._network = usual.network or "off"
        self._patience = patience
        self._task: asyncio.Task[None] | None = None
        self._end = asyncio.Event()

    async def started(self) -> Pool:
        """The pool, which lives until ``close``."""
        if self.pool is not None:
            return self.pool
        if self._task is None:
            self._begun: asyncio.Future[Pool] = asyncio.get_running_loop().create_future()
            pool = Pool(self._supply, budget=self._budget, policy=self._policy, keys=self._supply.keys)
            # In a task of its own: it outlives whoever wanted it first.
            self._task = asyncio.create_task(self._run(pool))
        return await asyncio.shield(self._begun)

    async def _run(self, pool: Pool) -> None:
        async with pool:
            self._supply.on_lost = pool.lost
            self.pool = pool
            self._begun.set_result(pool)
            await self._end.wait()

    async def close(self) -> None:
        """Raises what the pool itself failed with, if it did."""
        if self._task is not None:
            self._end.set()
            await asyncio.wait([self._task])
            self._task.result()

    @asynccontextmanager
    async def leased(
        self, recipe: Recipe, count: int, limits: Limits, labels: Mapping[str, str] | None
    ) -> AsyncIterator[tuple[NativeSandbox, ...]]:
        """Sandboxes for as long as the context lasts. Raises PoolError, StageError and CreateError."""
        pool = await self.started()
        lease = await pool.acquire(recipe, count, deadline=self._patience, lease_seconds=None, labels=labels)
        sandboxes = tuple(one for one in lease.sandboxes if isinstance(one, NativeSandbox))
        try:
            for sandbox in sandboxes:
                sandbox.keep_output(limits.output)
                await self._open(sandbox, limits.network or "off")
            yield sandboxes
        finally:
            for sandbox in sandboxes:  # their holder's, so that nobody can use them any more
                sandbox.abandon()
            pool.release(lease)

    async def _open(self, sandbox: NativeSandbox, network: NetworkPolicy) -> None:
        """What it may reach is another than of those in the pool. Raises CreateError."""
        if network != self._network and isinstance(sandbox, NetworkedSandbox):
            try:
                await sandbox.set_network(network)
            except (ActionError, UsageError, DispatchError) as error:
                raise CreateError(error.message, remedy=error.remedy) from error

    async def stocked(self, recipe: Recipe, count: int) -> None:
        """Keep so many idle from now on, and wait until they are. Raises TimeoutError."""
        pool = await self.started()
        await pool.keep(recipe, count)
        with anyio.fail_after(self._patience):
            await pool.until_idle(recipe, count)

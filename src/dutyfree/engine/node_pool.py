"""The pool of one node: started on first use, and its leases as contexts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

import anyio

from dutyfree.contract import Limits, NetworkPolicy, Recipe
from dutyfree.contract.errors import ActionError, CreateError, DispatchError, UsageError
from dutyfree.engine.host import capacity
from dutyfree.engine.pool.native_source import SANDBOX_MEMORY, NativeSource
from dutyfree.engine.pool.pool import Pool
from dutyfree.engine.pool.scheduler.values import Budget, Policy
from dutyfree.engine.sandbox.sandbox import NativeSandbox, NetworkedSandbox

DEFAULT_POLICY = Policy(starting=64, idle_seconds=600.0)
"""Many sandboxes start at once: a request that waits for a stage of another one uses no CPU."""


def default_budget() -> Budget:
    """A quarter of the host's memory, and as many sandboxes as fit into it and into the open files."""
    memory = capacity.share_of_memory()
    most = min(memory // SANDBOX_MEMORY, capacity.room_by_files())
    return Budget(sandboxes=most, memory=memory, sandbox_memory=SANDBOX_MEMORY)


class NodePool:
    """Starts the pool on the first call of ``start``; until then it costs nothing."""

    def __init__(
        self, source: NativeSource, budget: Budget, policy: Policy, limits: Limits, patience: float
    ) -> None:
        self.pool: Pool | None = None
        self._source = source
        self._budget = budget
        self._policy = policy
        self._network = limits.network or "off"
        self._patience = patience
        self._task: asyncio.Task[None] | None = None
        self._end = asyncio.Event()

    async def start(self) -> Pool:
        """The pool, which then runs until ``close``."""
        if self.pool is not None:
            return self.pool
        if self._task is None:
            self._started: asyncio.Future[Pool] = asyncio.get_running_loop().create_future()
            source = self._source
            pool = Pool(
                source, budget=self._budget, policy=self._policy, keys=source.keys, check=source.check
            )
            # A task of its own, since the pool outlives the call that started it.
            self._task = asyncio.create_task(self._run(pool))
        return await asyncio.shield(self._started)

    async def _run(self, pool: Pool) -> None:
        async with pool:
            self._source.on_lost = pool.lost
            self.pool = pool
            self._started.set_result(pool)
            await self._end.wait()

    async def close(self) -> None:
        """Raises the error that the pool failed with, if it did."""
        if self._task is not None:
            self._end.set()
            await asyncio.wait([self._task])
            self._task.result()

    @asynccontextmanager
    async def lease(
        self, recipe: Recipe, count: int, limits: Limits, labels: Mapping[str, str] | None
    ) -> AsyncIterator[tuple[NativeSandbox, ...]]:
        """``count`` sandboxes while the context lasts. Raises PoolError, StageError and CreateError."""
        pool = await self.start()
        lease = await pool.acquire(recipe, count, deadline=self._patience, lease_seconds=None, labels=labels)
        sandboxes = tuple(one for one in lease.sandboxes if isinstance(one, NativeSandbox))
        try:
            for sandbox in sandboxes:
                sandbox.limit_output(limits.output)
                await self._set_network(sandbox, limits.network or "off")
            yield sandboxes
        finally:
            for sandbox in sandboxes:  # the caller's objects must not reach the next lease's sandboxes
                sandbox.abandon()
            pool.release(lease)

    async def _set_network(self, sandbox: NativeSandbox, network: NetworkPolicy) -> None:
        """Apply the request's network policy where it differs from that of idle ones. Raises CreateError."""
        if network != self._network and isinstance(sandbox, NetworkedSandbox):
            try:
                await sandbox.set_network(network)
            except (ActionError, UsageError, DispatchError) as error:
                raise CreateError(error.message, remedy=error.remedy) from error

    async def keep_idle(self, recipe: Recipe, count: int) -> None:
        """Keep ``count`` sandboxes idle from now on, and wait until they are. Raises TimeoutError."""
        pool = await self.start()
        await pool.keep(recipe, count)
        with anyio.fail_after(self._patience):
            await pool.until_idle(recipe, count)

"""The pool: it takes requests, lets the scheduler decide, and has the executor carry the decisions out.

>>> async with Pool(source) as pool:
...     await pool.prefetch([recipe], 8)
...     async with pool.lease(recipe, deadline=30) as lease:
...         await lease.sandbox.exec("make test")

The pool is driven by events: a request, the end of a job, or the timer. After each event it calls
``scheduler.decide``. It never polls.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from itertools import count
from types import TracebackType
from typing import Self, Unpack

import anyio
import anyio.lowlevel
import msgspec

from dutyfree.contract import Recipe, Sandbox
from dutyfree.contract.arguments import check_count
from dutyfree.contract.errors import LeaseEnded, PoolError, RecipeError, UsageError
from dutyfree.contract.recipe import checked
from dutyfree.engine.layers.keys import RecipeCache, RecipeKeys
from dutyfree.engine.pool.executor import Executor
from dutyfree.engine.pool.leases import DEADLINE, LEASE_SECONDS, Lease, Terms, Waiter, Waiters, check_terms
from dutyfree.engine.pool.refusals import refusal
from dutyfree.engine.pool.scheduler.decide import decide, lasting_failure, wake
from dutyfree.engine.pool.scheduler.distance import Costs
from dutyfree.engine.pool.scheduler.ledger import Ledger
from dutyfree.engine.pool.scheduler.state import State
from dutyfree.engine.pool.scheduler.values import (
    Budget,
    Deliver,
    Expire,
    LeaseRequest,
    Operation,
    Policy,
    PrefixChain,
    Refuse,
)
from dutyfree.engine.pool.source import ForkingSource, SandboxSource


class Pool:
    """Idle sandboxes of a source, within a budget, and the leases of those that are handed out.

    Use it as an async context manager, in one event loop.
    """

    def __init__(
        self,
        source: SandboxSource,
        *,
        budget: Budget | None = None,
        policy: Policy | None = None,
        costs: Costs | None = None,
        keys: RecipeKeys | None = None,
        check: Callable[[Recipe], None] | None = None,
    ) -> None:
        policy = policy or Policy()
        if not isinstance(source, ForkingSource):
            policy = msgspec.structs.replace(policy, fork=False)
        self.ledger = Ledger()
        self._source = source
        self._state = State(budget, policy, costs)
        self._requests = count(1)
        self._waiters = Waiters(policy.remembered)
        self._executor = Executor(source, self._state, self.ledger, self._advance)
        self._chains = ChainCache(keys or RecipeKeys(), policy.recipes, check)
        self._closed = False
        self._armed = math.inf
        self._rearm = anyio.Event()
        self._changed = anyio.Event()

    def __repr__(self) -> str:
        state = self._state
        return (
            f"<Pool: {state.stock.idle} idle, {state.leased} leased, {len(state.jobs)} being made, "
            f"{state.resetting} being reset, {self._executor.destroying} being destroyed, "
            f"{len(state.queue)} waiting; {state.stock.alive} of {state.budget.sandboxes} sandboxes>"
        )

    def counts(self) -> dict[str, int]:
        """How many sandboxes are in each state now; ``waiting`` counts requests, ``budget`` is the most."""
        state = self._state
        return {
            "idle": state.stock.idle,
            "leased": state.leased,
            "making": len(state.jobs),
            "resetting": state.resetting,
            "destroying": self._executor.destroying,
            "waiting": len(state.queue),
            "alive": state.stock.alive,
            "budget": state.budget.sandboxes,
        }

    async def __aenter__(self) -> Self:
        self._tasks = anyio.create_task_group()
        await self._tasks.__aenter__()
        self._tasks.start_soon(self._run_timer)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, raised: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        self._closed = True
        self._tasks.cancel_scope.cancel()
        try:
            return await self._tasks.__aexit__(kind, raised, trace)
        finally:
            await self._executor.close()
            for waiter in self._waiters.all():
                waiter.lease.over = True
                waiter.error = PoolError("the pool was closed before it served this request")
                waiter.answered.set()
            self._changed.set()

    # --- Requests -----------------------------------------------------------------------------------

    @property
    def leases(self) -> tuple[Lease, ...]:
        """All leases that have not ended, with their sandboxes and labels."""
        return self._waiters.leases()

    def lease(self, recipe: Recipe, **terms: Unpack[Terms]) -> AbstractAsyncContextManager[Lease]:
        """Lease one sandbox for the time of the context. Raises as ``acquire`` does."""
        return self.group(recipe, 1, **terms)

    @asynccontextmanager
    async def group(self, recipe: Recipe, size: int, **terms: Unpack[Terms]) -> AsyncIterator[Lease]:
        """Lease ``size`` sandboxes in the same state for the time of the context. Raises as ``acquire`` does.

        If the source can fork, one is prepared and the others are copies of it.
        """
        lease = await self.acquire(recipe, size, **terms)
        try:
            yield lease
        finally:
            self.release(lease)

    async def acquire(self, recipe: Recipe, size: int = 1, **terms: Unpack[Terms]) -> Lease:
        """Lease ``size`` sandboxes, all or none, until ``release``. The same key gets the same lease.

        Raises Exhausted at the deadline, Quarantined or StageError if the recipe fails, CreateError if
        the machinery fails, LeaseEnded for the key of a lease that has ended, and UsageError.
        """
        size = check_count(size, 1)
        check_terms(terms)
        self._check_open()
        asked, key = anyio.current_time(), terms.get("idempotency_key")
        chain = await self._chains.of(recipe)
        now = anyio.current_time()
        waiter = self._waiters.matching(key, chain.recipe_key, size, now)
        is_new = waiter is None or not waiter.answered.is_set()
        if waiter is None:
            request = LeaseRequest(
                next(self._requests),
                chain,
                asked + terms.get("deadline", DEADLINE),
                size,
                terms.get("lease_seconds", LEASE_SECONDS),
                dict(terms.get("labels") or {}),
            )
            waiter = Waiter(request, asked, key)
            self._waiters.add(waiter)
            self._state.arrive(request, now)
            self._advance(now)
        waiter.callers += 1
        try:
            if waiter.answered.is_set():
                await anyio.lowlevel.checkpoint_if_cancelled()
            else:
                await waiter.answered.wait()
        except BaseException:
            if waiter.callers == 1 and is_new:  # no other caller waits for it or has it
                self._end(waiter)
            raise
        finally:
            waiter.callers -= 1
        if waiter.error is not None:
            raise waiter.error
        return waiter.lease

    def release(self, lease: Lease) -> None:
        """End the lease. Its sandboxes are reset in the background. A second release does nothing."""
        waiter = self._waiters.by_number(lease.id)
        if waiter is not None:
            self._end(waiter)

    def cancel(self, idempotency_key: str) -> None:
        """End the lease of this key. If it is still being prepared, its caller gets LeaseEnded."""
        waiter = self._waiters.by_key(idempotency_key)
        if waiter is None:  # the request may arrive after its cancellation
            self._waiters.mark_ended(idempotency_key, anyio.current_time())
            return
        if not waiter.answered.is_set():
            waiter.error = LeaseEnded(f"the lease {idempotency_key!r} was cancelled before it was ready")
            waiter.answered.set()
        self._end(waiter)

    def keep_alive(self, lease: Lease, seconds: float | None = LEASE_SECONDS) -> None:
        """Let the lease end ``seconds`` from now, never for None. Raises LeaseEnded if it has ended."""
        check_terms({"lease_seconds": seconds})
        until = None if seconds is None else anyio.current_time() + seconds
        if not self._state.keep_alive(lease.id, until):
            raise LeaseEnded(f"lease {lease.id} has ended", remedy="request a new lease")
        lease.until = until
        self._advance()

    def lost(self, sandbox: Sandbox) -> None:
        """The source saw this sandbox die. If it is idle, the pool replaces it."""
        instance = self._state.instances.get(self._executor.identity(sandbox) or "")
        if instance is not None and instance.status == "idle":
            self._state.died(instance.id, anyio.current_time())
            self._advance()

    async def prefetch(self, recipes: Iterable[Recipe], each: int = 1) -> None:
        """Prepare ``each`` sandboxes of each recipe, after all present requests.

        Raises UsageError, PoolError if the pool is closed, and CreateError if a recipe's file cannot be read.
        """
        self._check_open()
        each = check_count(each, 0)
        if isinstance(recipes, Recipe):
            raise RecipeError("prefetch takes a list of recipes, not one recipe", remedy="write [recipe]")
        for recipe in recipes:
            self._state.hint(await self._chains.of(recipe), each, anyio.current_time())
        self._advance()

    async def keep(self, recipe: Recipe, minimum: int = 0, maximum: int | None = None) -> None:
        """Keep from ``minimum`` to ``maximum`` idle sandboxes of this recipe. Raises as ``prefetch`` does."""
        self._check_open()
        minimum = check_count(minimum, 0)
        maximum = None if maximum is None else check_count(maximum, minimum)
        self._state.set_bounds(await self._chains.of(recipe), minimum, maximum)
        self._advance()

    async def until_idle(self, recipe: Recipe, count: int) -> None:
        """Wait until ``count`` sandboxes of this recipe are idle. There is no timeout.

        Raises Quarantined if a stage fails too often, CreateError if the machinery does, UsageError if the
        budget has no room for them, and PoolError if the pool is closed.
        """
        path = self._state.stock.path(await self._chains.of(recipe))
        if not self._state.stock.could_ever_fit(count, path[-1]):
            raise UsageError(
                f"the budget has no room for {count} sandboxes", remedy="raise the budget of the pool"
            )
        while len(path[-1].idle) < count:
            self._check_open()
            if (failing := lasting_failure(path, anyio.current_time())) is not None:
                raise refusal(failing)
            await self.changed()

    async def changed(self) -> None:
        """Wait until the pool has decided something."""
        await self._changed.wait()

    def _check_open(self) -> None:
        if self._closed:
            raise PoolError("the pool is closed")

    def _end(self, waiter: Waiter) -> None:
        self._waiters.end(waiter, anyio.current_time())
        self._state.withdraw(waiter.request.id, anyio.current_time())
        self._advance()

    # --- Decisions ----------------------------------------------------------------------------------

    def _advance(self, now: float | None = None) -> None:
        """Decide and carry out, until there is nothing more to do."""
        if self._closed:
            return
        now = anyio.current_time() if now is None else now
        while operations := decide(self._state, now):
            for operation in operations:
                self._carry_out(operation, now)
        self._changed.set()
        self._changed = anyio.Event()
        at = wake(self._state)
        if at is not None and at < self._armed:
            self._rearm.set()

    async def _run_timer(self) -> None:
        while True:
            at = wake(self._state)
            self._armed = math.inf if at is None else at
            self._rearm = anyio.Event()
            with anyio.CancelScope(deadline=self._armed):
                await self._rearm.wait()
            self._advance()

    def _carry_out(self, operation: Operation, now: float) -> None:
        match operation:
            case Deliver():
                self._hand_out(operation, now)
            case Refuse():
                self.ledger.events["refused"] += 1
                waiter = self._waiters.by_number(operation.request)
                if waiter is not None:
                    waiter.error = refusal(operation.reason)
                    self._waiters.drop(waiter)
                    waiter.answered.set()
            case Expire():
                waiter = self._waiters.by_number(operation.request)
                if waiter is not None:
                    self._waiters.end(waiter, now)
            case _:
                self._executor.begin(operation, self._tasks)

    def _hand_out(self, given: Deliver, now: float) -> None:
        sandboxes = {member.sandbox: self._executor.sandbox(member.sandbox) for member in given.members}
        dead = [identity for identity, sandbox in sandboxes.items() if not self._source.alive(sandbox)]
        if dead:
            self._state.undelivered(given.request, dead, now)
            return
        waiter = self._waiters.by_number(given.request)
        assert waiter is not None
        waiter.give(given, list(sandboxes.values()), now)
        for sandbox, served in zip(sandboxes.values(), waiter.lease.served, strict=True):
            self._source.hand_out(sandbox, served, waiter.request.chain.recipe, waiter.lease.labels)
            self.ledger.record(served)


class ChainCache:
    """The prefix chains of the recipes that were requested last."""

    def __init__(self, keys: RecipeKeys, most: int, check: Callable[[Recipe], None] | None = None) -> None:
        self._keys = keys
        self._check = check
        """Raises CreateError for a recipe that the source cannot serve."""
        self._known: RecipeCache[tuple[tuple[str, ...] | None, PrefixChain]] = RecipeCache(most)
        """The content keys are None for a recipe without files: those keys never change."""

    async def of(self, recipe: Recipe) -> PrefixChain:
        """Raises CreateError if a file of the recipe cannot be read, and RecipeError for a wrong type."""
        known = self._known.get(checked(recipe))
        if known is not None and known[0] is None:
            return known[1]
        if self._check is not None:
            self._check(recipe)
        keys = await self._keys.of(recipe)
        if known is None or known[0] is not keys:
            chain = PrefixChain.of(self._keys.fixed(recipe, keys), keys)
            known = self._known.put(recipe, (keys if recipe.reads_files else None, chain))
        return known[1]

"""The pool: carries out what the scheduler decides, and tells it what came of it.

>>> async with Pool(source) as pool:
...     await pool.prefetch([recipe], 8)
...     async with pool.lease(recipe, deadline=30) as lease:
...         await lease.sandbox.exec("make test")

Nothing here decides, polls or sleeps: requests, ends of jobs and one timer are the events, and each is
followed by one decision (``scheduler.decide``).
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Iterable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from itertools import count
from types import TracebackType
from typing import Self, Unpack

import anyio
import anyio.lowlevel
import msgspec

from dutyfree.contract import Recipe, Sandbox
from dutyfree.engine.answers import error
from dutyfree.engine.chains import Chains
from dutyfree.engine.haste import Haste
from dutyfree.engine.leases import DEADLINE, LEASE_SECONDS, Lease, Terms, Waiter, Waiters, check
from dutyfree.engine.scheduler import State, decide, hopeless, wake
from dutyfree.engine.scheduling.costs import Costs
from dutyfree.engine.scheduling.ledger import Ledger
from dutyfree.engine.scheduling.values import (
    Budget,
    Chain,
    Deliver,
    Destroy,
    Expire,
    Failure,
    Forget,
    Fork,
    Hurry,
    Make,
    Operation,
    Policy,
    Refuse,
    Request,
    Reset,
)
from dutyfree.engine.source import ForkingSource, Made, Source
from dutyfree.errors import LeaseEnded, PoolError, StageError, UsageError


class Pool:
    """Warm sandboxes of a source, within a budget. To be entered, and used in one event loop."""

    def __init__(
        self,
        source: Source,
        *,
        budget: Budget | None = None,
        policy: Policy | None = None,
        costs: Costs | None = None,
    ) -> None:
        policy = policy or Policy()
        if not isinstance(source, ForkingSource):
            policy = msgspec.structs.replace(policy, fork=False)
        self.ledger = Ledger()
        self._source = source
        self._policy = policy
        self._state = State(budget, policy, costs)
        self._requests = count(1)
        self._waiters = Waiters(policy.remembered)
        self._sandboxes: dict[str, Sandbox] = {}
        """By the id of the first of those that took each other's place in resets."""
        self._names: dict[str, str] = {}
        """That id, by the present one."""
        self._gone: dict[str, anyio.Event] = {}
        self._hastes: dict[int, Haste] = {}
        """Of jobs that were begun in the background."""
        self._chains = Chains(policy.recipes)
        self._layers: dict[str, str] = {}
        """Names of the source's layers, by the keys of their states."""
        self._closed = False
        self._armed = math.inf
        self._rearm = anyio.Event()
        self._moved = anyio.Event()

    def __repr__(self) -> str:
        state = self._state
        return (
            f"<Pool: {state.stock.idle} idle, {state.leased} leased, {len(state.jobs)} in the making, "
            f"{state.resetting} being reset, {len(self._gone)} going, {len(state.queue)} waiting; "
            f"{state.stock.alive} of {state.budget.sandboxes} sandboxes>"
        )

    async def __aenter__(self) -> Self:
        self._tasks = anyio.create_task_group()
        await self._tasks.__aenter__()
        self._tasks.start_soon(self._keep_time)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, raised: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        self._closed = True
        self._tasks.cancel_scope.cancel()
        try:
            return await self._tasks.__aexit__(kind, raised, trace)
        finally:
            with anyio.CancelScope(shield=True):
                async with anyio.create_task_group() as tasks:
                    for identity in list(self._sandboxes):
                        tasks.start_soon(self._remove, identity)
            for waiter in self._waiters.all():
                waiter.lease.over = True
                waiter.error = PoolError("the pool was closed")
                waiter.answered.set()
            self._moved.set()

    # --- What users ask -----------------------------------------------------------------------------

    @property
    def leases(self) -> tuple[Lease, ...]:
        """All that are given now, with their sandboxes, labels and ends."""
        return self._waiters.leases()

    def lease(self, recipe: Recipe, **terms: Unpack[Terms]) -> AbstractAsyncContextManager[Lease]:
        """One sandbox, given back when the context is left. Raises as ``acquire`` does."""
        return self.group(recipe, 1, **terms)

    @asynccontextmanager
    async def group(self, recipe: Recipe, size: int, **terms: Unpack[Terms]) -> AsyncIterator[Lease]:
        """``size`` sandboxes in the same state, all or none; copies of one where the source can fork."""
        lease = await self.acquire(recipe, size, **terms)
        try:
            yield lease
        finally:
            self.release(lease)

    async def acquire(self, recipe: Recipe, size: int = 1, **terms: Unpack[Terms]) -> Lease:
        """Sandboxes, to be released; asked for again with the same key, the same ones.

        Raises Exhausted at the deadline, Quarantined or StageError if the recipe fails, CreateError if
        the machinery does, LeaseEnded for the key of a lease that is over, and UsageError.
        """
        check(size, terms)
        if self._closed:
            raise PoolError("the pool was closed")
        asked, key = anyio.current_time(), terms.get("idempotency_key")
        chain = await self._chains.of(recipe)
        now = anyio.current_time()
        waiter = self._waiters.same(key, chain.key, size, now)
        anew = waiter is None or not waiter.answered.is_set()
        if waiter is None:
            request = Request(
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
            self._advance()
        waiter.people += 1
        try:
            if waiter.answered.is_set():
                await anyio.lowlevel.checkpoint_if_cancelled()
            else:
                await waiter.answered.wait()
        except BaseException:
            if waiter.people == 1 and anew:  # nobody else waits, or has it already
                self._end(waiter)
            raise
        finally:
            waiter.people -= 1
        if waiter.error is not None:
            raise waiter.error
        return waiter.lease

    def release(self, lease: Lease) -> None:
        """Give it back; its sandboxes are reset in the background. Once is enough, twice is no error."""
        waiter = self._waiters.of(lease.id)
        if waiter is not None:
            self._end(waiter)

    def cancel(self, idempotency_key: str) -> None:
        """End the lease of this key, also one that is still being prepared: whoever waits gets LeaseEnded."""
        waiter = self._waiters.under(idempotency_key)
        if waiter is None:  # a create that arrives after its delete finds it ended
            self._waiters.remember(idempotency_key, anyio.current_time())
            return
        if not waiter.answered.is_set():
            waiter.error = LeaseEnded(f"the lease {idempotency_key!r} was ended while it was prepared")
            waiter.answered.set()
        self._end(waiter)

    def keep_alive(self, lease: Lease, seconds: float | None = LEASE_SECONDS) -> None:
        """The lease ends so many seconds from now at the earliest. Raises LeaseEnded if it has ended."""
        check(1, {"lease_seconds": seconds})
        until = None if seconds is None else anyio.current_time() + seconds
        if not self._state.keep_alive(lease.id, until):
            raise LeaseEnded(f"lease {lease.id} is over", remedy="ask for a new one")
        lease.until = until
        self._advance()

    def lost(self, sandbox: Sandbox) -> None:
        """A source has seen it die. Whoever holds it learns by its next action; idle, it is replaced."""
        held = self._state.held.get(self._names.get(sandbox.id, ""))
        if held is not None and held.status == "idle":
            self._state.died(held.id, anyio.current_time())
            self._advance()

    async def prefetch(self, recipes: Iterable[Recipe], each: int = 1) -> None:
        """So many of each will be asked for soon: make them ready, after all that is asked for now.

        Raises UsageError, and CreateError for a recipe whose files cannot be read.
        """
        if each < 0:
            raise UsageError(f"{each} sandboxes cannot be made ready")
        for recipe in recipes:
            self._state.hint(await self._chains.of(recipe), each, anyio.current_time())
        self._advance()

    async def keep(self, recipe: Recipe, minimum: int = 0, maximum: int | None = None) -> None:
        """At least and at most so many idle. Raises UsageError, and CreateError as ``prefetch`` does."""
        if minimum < 0 or (maximum is not None and maximum < minimum):
            raise UsageError(f"at least {minimum} and at most {maximum} sandboxes cannot be kept")
        self._state.bound(await self._chains.of(recipe), minimum, maximum)
        self._advance()

    async def until_idle(self, recipe: Recipe, count: int) -> None:
        """Wait until so many are, however long that takes.

        Raises Quarantined if a stage fails too often, CreateError if the machinery does, UsageError if there
        is no room for so many, and PoolError if the pool is closed.
        """
        path = self._state.stock.nodes(await self._chains.of(recipe))
        if not self._state.stock.could_ever_fit(count, path[-1]):
            raise UsageError(f"{count} sandboxes do not fit into the pool", remedy="raise its budget")
        while len(path[-1].idle) < count:
            if self._closed:
                raise PoolError("the pool was closed")
            if (failing := hopeless(path, anyio.current_time())) is not None:
                raise error(failing)
            await self._moved.wait()

    def _end(self, waiter: Waiter) -> None:
        self._waiters.dismiss(waiter, anyio.current_time())
        self._state.withdraw(waiter.request.id, anyio.current_time())
        self._advance()

    # --- Decisions ----------------------------------------------------------------------------------

    def _advance(self) -> None:
        """Decide, and set in motion what was decided, until nothing more follows."""
        if self._closed:
            return
        now = anyio.current_time()
        while operations := decide(self._state, now):
            for operation in operations:
                self._carry_out(operation, now)
        self._moved.set()
        self._moved = anyio.Event()
        at = wake(self._state)
        if at is not None and at < self._armed:
            self._rearm.set()

    async def _keep_time(self) -> None:
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
                waiter = self._waiters.of(operation.request)
                if waiter is not None:
                    waiter.error = error(operation.reason)
                    self._waiters.forget(waiter)
                    waiter.answered.set()
            case Destroy():
                self.ledger.events[operation.reason] += 1
                self._gone[operation.sandbox] = anyio.Event()
                self._tasks.start_soon(self._destroy, operation.sandbox)
            case Make():
                self.ledger.events["refills" if operation.background else "made"] += 1
                haste = self._hastes[operation.job] = Haste(background=operation.background)
                self._tasks.start_soon(self._make, operation, haste)
            case Hurry():
                self._hastes[operation.job].hurry()
            case Expire():
                waiter = self._waiters.of(operation.request)
                if waiter is not None:
                    self._waiters.dismiss(waiter, now)
            case Fork():
                self._tasks.start_soon(self._fork, operation)
            case Reset():
                self._tasks.start_soon(self._reset, operation.sandbox)
            case Forget():
                self.ledger.events["layers forgotten"] += 1
                self._source.forget(self._layers.pop(operation.key))

    def _hand_out(self, given: Deliver, now: float) -> None:
        dead = [m.sandbox for m in given.members if not self._source.alive(self._sandboxes[m.sandbox])]
        if dead:
            self._state.undelivered(given.request, dead, now)
            return
        waiter = self._waiters.of(given.request)
        assert waiter is not None
        waiter.give(given, [self._sandboxes[member.sandbox] for member in given.members], now)
        for served in waiter.lease.served:
            self.ledger.record(served)

    # --- Work ---------------------------------------------------------------------------------------

    async def _make(self, make: Make, haste: Haste) -> None:
        await self._until_gone(make.after)
        recipe, start, depth, keep = make.chain.recipe, make.start, make.depth, make.keep
        try:
            if make.origin is None:
                made = await self._source.create(recipe, start, depth, keep=keep, haste=haste)
            else:
                origin = self._sandboxes[make.origin]
                made = await self._source.promote(origin, recipe, start, depth, keep=keep, haste=haste)
        except Exception as failed:  # noqa: BLE001 (whatever a source does, the pool goes on)
            if make.origin is not None:
                await self._remove(make.origin)
            self._failed((make.job,), failed)
        else:
            self._made(make.job, made, make.chain, make.origin)

    async def _fork(self, fork: Fork) -> None:
        await self._until_gone(fork.after)
        assert isinstance(self._source, ForkingSource)
        try:
            children = await self._source.fork(self._sandboxes[fork.origin], len(fork.jobs))
        except Exception as failed:  # noqa: BLE001
            self._failed(fork.jobs, failed)
        else:
            for job, made in zip(fork.jobs, children, strict=True):
                self._made(job, made, fork.chain)

    def _made(self, job: int, made: Made, chain: Chain, origin: str | None = None) -> None:
        identity = made.sandbox.id if origin is None else origin
        self._know(identity, made.sandbox)
        self._hastes.pop(job, None)
        for depth in made.layers:
            self._layers[chain.keys[depth]] = chain.layers[depth]
        self._state.made(
            job,
            identity,
            anyio.current_time(),
            create_seconds=made.create_seconds,
            stage_seconds=made.stage_seconds,
            layers=made.layers,
            memory=made.memory,
            found=made.found,
            joined=made.joined,
        )
        self._advance()

    def _failed(self, jobs: Iterable[int], failed: Exception) -> None:
        self.ledger.events["failures"] += 1
        failure = Failure(str(failed) or type(failed).__name__)
        if isinstance(failed, StageError):
            failure = Failure(failed.message, 1 + failed.number, failed.command, failed.output, failed.remedy)
        for job in jobs:
            self._hastes.pop(job, None)
            self._state.failed(job, failure, anyio.current_time())
        self._advance()

    async def _reset(self, identity: str) -> None:
        sandbox = self._sandboxes[identity]
        self.ledger.events["resets"] += 1
        try:
            fresh, depth = await self._source.reset(sandbox)
            if identity not in self._sandboxes:  # the pool was closed meanwhile
                await self._source.destroy(fresh)
                return
            self._know(identity, fresh)
            await self._source.verify(fresh)
        except Exception:  # noqa: BLE001 (a sandbox that cannot be verified is discarded, whatever the reason)
            self.ledger.events["discarded"] += 1
            self._state.died(identity, anyio.current_time())
        else:
            self._state.clean(identity, depth, anyio.current_time())
        self._advance()

    def _know(self, identity: str, sandbox: Sandbox) -> None:
        """One that takes the place of the former of this identity, if there is one."""
        former = self._sandboxes.get(identity)
        if former is not None:
            self._names.pop(former.id, None)
        self._sandboxes[identity] = sandbox
        self._names[sandbox.id] = identity

    async def _destroy(self, identity: str) -> None:
        await self._remove(identity)
        self._gone.pop(identity).set()
        self._state.gone(identity)
        self._advance()

    async def _remove(self, identity: str) -> None:
        sandbox = self._sandboxes.pop(identity, None)
        if sandbox is None:
            return
        self._names.pop(sandbox.id, None)
        with anyio.CancelScope(shield=True):
            try:
                await self._source.destroy(sandbox)
            except Exception:  # noqa: BLE001 (counted: there is nobody to raise it to)
                self.ledger.events["cleanup failures"] += 1

    async def _until_gone(self, sandboxes: Iterable[str]) -> None:
        for identity in sandboxes:
            if identity in self._gone:
                await self._gone[identity].wait()

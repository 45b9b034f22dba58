"""Carry out what the scheduler decided: make, fork, reset and destroy sandboxes, and report the result."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

import anyio
from anyio.abc import TaskGroup

from dutyfree.contract import Sandbox
from dutyfree.contract.errors import StageError, SubstrateError
from dutyfree.engine.layers.urgency import Urgency
from dutyfree.engine.pool.scheduler.ledger import Ledger
from dutyfree.engine.pool.scheduler.state import State
from dutyfree.engine.pool.scheduler.values import (
    Destroy,
    Forget,
    Fork,
    JobFailure,
    Make,
    Operation,
    PrefixChain,
    Prioritize,
    Reset,
)
from dutyfree.engine.pool.source import ForkingSource, NewSandbox, SandboxSource

_log = logging.getLogger(__name__)


class Executor:
    """The sandboxes of one pool, and the tasks that work on them. A failing source does not end the pool."""

    def __init__(
        self, source: SandboxSource, state: State, ledger: Ledger, advance: Callable[[], None]
    ) -> None:
        self._source = source
        self._state = state
        self._ledger = ledger
        self._advance = advance
        """Makes the next decision; called after each result."""
        self._sandboxes: dict[str, Sandbox] = {}
        """By the scheduler's id: the id of the first sandbox, which a reset replaces by another."""
        self._ids: dict[str, str] = {}
        """The scheduler's id, by the id of the present sandbox."""
        self._destroyed: dict[str, anyio.Event] = {}
        self._urgencies: dict[int, Urgency] = {}
        self._layers: dict[str, str] = {}
        """Layer keys by prefix keys; they differ where a recipe has services."""

    @property
    def destroying(self) -> int:
        return len(self._destroyed)

    def sandbox(self, identity: str) -> Sandbox:
        return self._sandboxes[identity]

    def identity(self, sandbox: Sandbox) -> str | None:
        """The scheduler's id of a sandbox."""
        return self._ids.get(sandbox.id)

    def begin(self, operation: Operation, tasks: TaskGroup) -> None:
        match operation:
            case Make():
                self._ledger.events["refills" if operation.background else "made"] += 1
                urgency = self._urgencies[operation.job] = Urgency(background=operation.background)
                tasks.start_soon(self._make, operation, urgency)
            case Prioritize():
                self._urgencies[operation.job].escalate()
            case Fork():
                tasks.start_soon(self._fork, operation)
            case Reset():
                tasks.start_soon(self._reset, operation.sandbox)
            case Destroy():
                self._ledger.events[operation.reason] += 1
                self._destroyed[operation.sandbox] = anyio.Event()
                tasks.start_soon(self._destroy, operation.sandbox)
            case Forget():
                self._ledger.events["layers forgotten"] += 1
                self._source.forget(self._layers.pop(operation.key))

    async def close(self) -> None:
        """Destroy all sandboxes."""
        with anyio.CancelScope(shield=True):
            async with anyio.create_task_group() as tasks:
                for identity in list(self._sandboxes):
                    tasks.start_soon(self._remove, identity)

    async def _make(self, make: Make, urgency: Urgency) -> None:
        await self._until_destroyed(make.after)
        recipe, start, depth, keep = make.chain.recipe, make.start, make.depth, make.keep
        try:
            if make.origin is None:
                made = await self._source.create(recipe, start, depth, keep=keep, urgency=urgency)
            else:
                origin = self._sandboxes[make.origin]
                made = await self._source.promote(origin, recipe, start, depth, keep=keep, urgency=urgency)
        except Exception as failed:  # noqa: BLE001 (an error of the source does not end the pool)
            if make.origin is not None:
                await self._remove(make.origin)
            self._failed((make.job,), failed)
        else:
            self._made(make.job, made, make.chain, make.origin)

    async def _fork(self, fork: Fork) -> None:
        await self._until_destroyed(fork.after)
        assert isinstance(self._source, ForkingSource)
        try:
            children = await self._source.fork(self._sandboxes[fork.origin], len(fork.jobs))
        except Exception as failed:  # noqa: BLE001
            self._failed(fork.jobs, failed)
        else:
            for job, made in zip(fork.jobs, children, strict=True):
                self._made(job, made, fork.chain)

    def _made(self, job: int, made: NewSandbox, chain: PrefixChain, origin: str | None = None) -> None:
        identity = made.sandbox.id if origin is None else origin
        self._record(identity, made.sandbox)
        self._urgencies.pop(job, None)
        for depth in made.layers:
            self._layers[chain.keys[depth]] = chain.layers[depth]
        self._state.made(job, identity, anyio.current_time(), made)
        self._advance()

    def _failed(self, jobs: Iterable[int], failed: Exception) -> None:
        self._ledger.events["failures"] += 1
        failure = _failure(failed)
        for job in jobs:
            if self._state.jobs[job].claim is None:  # otherwise the caller gets the error
                _log.warning("the pool could not prepare a sandbox: %s", failed)
            self._urgencies.pop(job, None)
            self._state.failed(job, failure, anyio.current_time())
        self._advance()

    async def _reset(self, identity: str) -> None:
        sandbox = self._sandboxes[identity]
        self._ledger.events["resets"] += 1
        try:
            fresh, depth = await self._source.reset(sandbox)
            if identity not in self._sandboxes:  # the pool was closed during the reset
                await self._source.destroy(fresh)
                return
            self._record(identity, fresh)
            await self._source.verify(fresh)
        except Exception as failed:  # noqa: BLE001 (a sandbox that fails verification is discarded)
            _log.warning("a sandbox was discarded, since its reset failed: %s", failed)
            self._ledger.events["discarded"] += 1
            self._state.died(identity, anyio.current_time())
        else:
            self._state.reset_done(identity, depth, anyio.current_time())
        self._advance()

    def _record(self, identity: str, sandbox: Sandbox) -> None:
        """Record a sandbox under the scheduler's id, in place of the former one."""
        former = self._sandboxes.get(identity)
        if former is not None:
            self._ids.pop(former.id, None)
        self._sandboxes[identity] = sandbox
        self._ids[sandbox.id] = identity

    async def _destroy(self, identity: str) -> None:
        await self._remove(identity)
        self._destroyed.pop(identity).set()
        self._state.destroyed(identity)
        self._advance()

    async def _remove(self, identity: str) -> None:
        sandbox = self._sandboxes.pop(identity, None)
        if sandbox is None:
            return
        self._ids.pop(sandbox.id, None)
        with anyio.CancelScope(shield=True):
            try:
                await self._source.destroy(sandbox)
            except Exception:  # noqa: BLE001 (counted, since no caller waits for it)
                self._ledger.events["cleanup failures"] += 1

    async def _until_destroyed(self, sandboxes: Iterable[str]) -> None:
        for identity in sandboxes:
            if identity in self._destroyed:
                await self._destroyed[identity].wait()


def _failure(failed: Exception) -> JobFailure:
    if isinstance(failed, StageError):
        return JobFailure(failed.message, 1 + failed.number, failed.command, failed.output, failed.remedy)
    if isinstance(failed, SubstrateError):
        return JobFailure(failed.message, remedy=failed.remedy)
    return JobFailure(str(failed) or type(failed).__name__)

"""The calls that create sandboxes: how they are admitted and what the client gets to know."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TypeVar

import msgspec

from dutyfree.contract import Limits
from dutyfree.contract.errors import LimitError
from dutyfree.engine.host import capacity
from dutyfree.engine.sandbox.sandbox import NativeSandbox, NetworkedSandbox
from dutyfree.server import tenant_rules
from dutyfree.server.admission import Demand, given_back
from dutyfree.server.handlers.registry import Context, handles
from dutyfree.server.sandboxes import Held
from dutyfree.server.service import Service
from dutyfree.wire import calls, codec
from dutyfree.wire.calls import SandboxInfo

T = TypeVar("T")

LARGEST_GROUP = 4096
"""Sandboxes that one request may ask for."""
PATIENCE = 60.0
"""Seconds that a creation waits for room, before the client is told to come back later."""


@handles
async def create(context: Context, wanted: calls.Create) -> list[SandboxInfo]:
    service = context.service
    tenant_rules.check_labels(wanted.labels)
    tenant_rules.check_key(wanted.key)
    check_patience(wanted.patience)
    limits = tenant_rules.allowed_limits(context.tenant, wanted.limits, networked=service.networked)
    recipe = await service.recipe(context.tenant, wanted.recipe)

    @asynccontextmanager
    async def one() -> AsyncIterator[Sequence[NativeSandbox]]:
        async with service.native.sandbox(recipe, limits=limits, labels=wanted.labels) as sandbox:
            yield (sandbox,)

    def several() -> AbstractAsyncContextManager[Sequence[NativeSandbox]]:
        return service.native.group(recipe, wanted.count or 0, limits=limits, labels=wanted.labels)

    demand = demand_of(service, limits, 1 if wanted.count is None else wanted.count)
    held = await in_time(
        context,
        wanted.patience,
        service.sandboxes.create(
            context.tenant,
            wanted.key,
            codec.encode(msgspec.structs.replace(wanted, patience=None)),
            admitted(context, demand, one if wanted.count is None else several, wanted.patience),
            wanted.labels,
            wanted.lease,
            demand_of(service, limits, 1),
        ),
    )
    return [info(one) for one in held]


@handles
async def fork(context: Context, wanted: calls.Fork) -> list[SandboxInfo]:
    parent = context.held
    tenant_rules.check_key(wanted.key)
    check_patience(wanted.patience)

    def children() -> AbstractAsyncContextManager[Sequence[NativeSandbox]]:
        return parent.sandbox.fork(wanted.count)

    limits = parent.sandbox.limits  # the copies have the same
    demand = demand_of(context.service, limits, wanted.count)
    held = await in_time(
        context,
        wanted.patience,
        context.service.sandboxes.create(
            context.tenant,
            wanted.key,
            parent.id.encode() + codec.encode(msgspec.structs.replace(wanted, patience=None)),
            admitted(context, demand, children, wanted.patience),
            parent.labels,
            wanted.lease,
            demand_of(context.service, limits, 1),
        ),
    )
    await context.service.sandboxes.save(parent)  # a fork may have moved its files into a layer
    return [info(one) for one in held]


def check_patience(patience: float | None) -> None:
    """Raises LimitError."""
    if patience is not None and not patience > 0:
        raise LimitError(f"patience must be > 0, not {patience:.15g}")


async def in_time(context: Context, patience: float | None, creating: Awaitable[T]) -> T:
    """What is created, if that takes no longer than the client is patient. Raises Exhausted."""
    deadline = asyncio.timeout(patience)
    try:
        async with deadline:
            return await creating
    except TimeoutError:
        if not deadline.expired():  # an error of the creation: a sandbox that cannot be frozen for a fork
            raise
        raise context.service.admission.exhausted(
            context.tenant,
            f"no sandbox within {patience:.15g} s, which is the patience of the request",
            "give the request more time, end some sandboxes",
        ) from None


Enter = Callable[[], AbstractAsyncContextManager[Sequence[NativeSandbox]]]


def demand_of(service: Service, limits: Limits | None, count: int) -> Demand:
    """What a request counts: by its limits, or by those that the engine sets. Raises LimitError."""
    if not 0 <= count <= LARGEST_GROUP:
        raise LimitError(f"a request may be for 0 to {LARGEST_GROUP} sandboxes, not {count}")
    given = limits or Limits()
    limits = limits or service.native.node.options.limits
    memory = capacity.share_of_memory() if limits.memory is None else limits.memory
    cpus = float(os.cpu_count() or 1) if limits.cpus is None else limits.cpus
    unlimited = tuple(name for name in ("memory", "cpus") if getattr(given, name) is None)
    return Demand(count, count * memory, count * cpus, unlimited)


def admitted(context: Context, demand: Demand, create: Enter, patience: float | None = None) -> Enter:
    """The same sandboxes, as soon as the tenant may have them."""
    seconds = PATIENCE if patience is None else min(patience, PATIENCE)

    @asynccontextmanager
    async def enter() -> AsyncIterator[Sequence[NativeSandbox]]:
        release = await context.service.admission.admit(context.tenant, demand, seconds)
        with given_back(release):
            async with create() as sandboxes:
                yield sandboxes

    return enter


def info(held: Held) -> SandboxInfo:
    """What a client gets to know about a sandbox."""
    sandbox = held.sandbox
    return SandboxInfo(
        id=held.id,
        workdir=sandbox.workdir,
        spans=sandbox.spans,
        program=tuple(sandbox.program),
        served=sandbox.served,
        can_set_network=isinstance(sandbox, NetworkedSandbox),
        labels=held.labels,
        created=held.created,
        expires=held.expires,
    )

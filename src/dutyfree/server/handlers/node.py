"""The calls for the whole node: leases, recipes, and the files that recipes name."""

from __future__ import annotations

from collections.abc import Sequence

from dutyfree.contract.errors import SubstrateError, UsageError
from dutyfree.server.handlers.creation import demand_of
from dutyfree.server.handlers.item_pipe import fed
from dutyfree.server.handlers.registry import Context, handles
from dutyfree.wire import calls
from dutyfree.wire.calls import Nothing
from dutyfree.wire.recipes import WireRecipe

LARGEST_LIST = 16384
"""Sandboxes, recipes or files that one request may name."""


@handles
async def keep_alive(context: Context, wanted: calls.KeepAlive) -> list[str]:
    gone = []
    _check_many(wanted.sandboxes)
    for name in wanted.sandboxes:
        try:
            held = context.service.sandboxes.get(context.tenant, name)
        except SubstrateError:
            gone.append(name)
        else:
            context.service.sandboxes.keep_alive(held, wanted.lease)
    return gone


@handles
async def sandboxes(context: Context, _: Nothing) -> list[str]:
    return [held.id for held in context.service.sandboxes.of(context.tenant)]


@handles
async def prepare(context: Context, wanted: WireRecipe) -> None:
    await context.service.native.prepare(await context.service.recipe(context.tenant, wanted))


@handles
async def prefetch(context: Context, wanted: calls.Prefetch) -> None:
    _check_many(wanted.recipes)
    demand_of(context.service, None, wanted.count)
    recipes = [await context.service.recipe(context.tenant, one) for one in wanted.recipes]
    await context.service.native.prefetch(recipes, wanted.count)


@handles
async def facts(context: Context, _: Nothing) -> dict[str, str]:
    return await context.service.facts()


@handles
async def missing(context: Context, wanted: calls.Files) -> list[str]:
    _check_many(wanted.digests)
    return await context.service.files.missing(context.tenant, wanted.digests)


def _check_many(names: Sequence[object]) -> None:
    """Raises UsageError for a list that would keep the server busy."""
    if len(names) > LARGEST_LIST:
        raise UsageError(f"a list of {len(names)}: a request may name {LARGEST_LIST}")


@handles
async def put_files(context: Context, wanted: calls.Files) -> None:
    if len(wanted.digests) != 1:
        raise UsageError("files are sent one tree at a time")
    files = context.service.files
    path = files.path(context.tenant, wanted.digests[0])
    with files.arriving(context.tenant) as arrival:
        async with fed(context, arrival.add_tree, files.stall) as descriptor:
            await files.put(path, descriptor)


@handles
async def forget(context: Context, wanted: WireRecipe) -> None:
    await context.service.forget_snapshot(context.tenant, wanted)

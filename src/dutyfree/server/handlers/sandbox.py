"""The calls about a sandbox as a whole: its end, reset, pause, snapshot and network."""

from __future__ import annotations

import msgspec

from dutyfree.contract.errors import UsageError
from dutyfree.engine.layers.memory_layers import SNAPSHOT_SCHEME
from dutyfree.engine.sandbox.sandbox import NetworkedSandbox
from dutyfree.server import named_snapshots, tenant_rules
from dutyfree.server.handlers.registry import Context, handles
from dutyfree.wire import calls
from dutyfree.wire.calls import Nothing
from dutyfree.wire.recipes import WireRecipe, to_wire


@handles
async def release(context: Context, _: Nothing) -> None:
    await context.service.sandboxes.release(context.held)


@handles
async def reset(context: Context, _: Nothing) -> None:
    held = context.held
    await held.sandbox.reset()
    await context.service.sandboxes.save(held)


@handles
async def pause(context: Context, _: Nothing) -> None:
    held = context.held
    await held.sandbox.pause()
    await context.service.sandboxes.save(held)


@handles
async def resume(context: Context, _: Nothing) -> None:
    held = context.held
    await held.sandbox.resume()
    await context.service.sandboxes.save(held)


@handles
async def snapshot(context: Context, wanted: calls.Snapshot) -> WireRecipe:
    held = context.held
    name = None if wanted.name is None else named_snapshots.store_name(context.tenant, wanted.name)
    recipe = await held.sandbox.snapshot(name)
    await context.service.sandboxes.save(held)  # its files may be in a layer now
    if wanted.name is None:
        return await context.service.own_snapshot(context.tenant, recipe)
    return msgspec.structs.replace(to_wire(recipe)[0], image=SNAPSHOT_SCHEME + wanted.name)


@handles
async def set_network(context: Context, wanted: calls.SetNetwork) -> None:
    held = context.held
    sandbox = held.sandbox
    if not isinstance(sandbox, NetworkedSandbox):
        raise UsageError(
            "the network of a sandbox cannot change on this host", remedy="run the server as root"
        )
    policy = tenant_rules.allowed_network(context.tenant, wanted.policy, networked=True)
    await sandbox.set_network(policy)
    await context.service.sandboxes.save(held)

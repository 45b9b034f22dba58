"""Make room within the budget: evict the idle sandboxes and layers that are worth least."""

from __future__ import annotations

from math import log

from dutyfree.engine.pool.scheduler.state import State
from dutyfree.engine.pool.scheduler.values import Forget

MARGIN = log(2)
"""A refill evicts only what is worth less than half of it, so that two prefixes do not evict each other."""


def evict_for(state: State, count: int, memory: int, worth: float | None = None) -> bool:
    """Evict idle sandboxes until this many fit. With ``worth``, only far less valuable ones. False if not."""
    while not state.stock.fits(count, memory):
        found = state.stock.least_worth()
        if found is None:
            return False
        instance, (promised, value) = found
        if worth is not None and (promised or value > worth - MARGIN):
            return False
        state.destroy(instance, "evicted")
    return True


def destroys_to_await(state: State) -> tuple[str, ...]:
    """Sandboxes being destroyed, the oldest first, whose room is already reserved for others."""
    stock, needed = state.stock, []
    count = stock.alive + len(state.destroying) - state.budget.sandboxes
    memory = stock.memory + state.destroying_memory - state.budget.memory
    for sandbox, charge in state.destroying.items():
        if count <= 0 and memory <= 0:
            break
        needed.append(sandbox)
        count, memory = count - 1, memory - charge
    return tuple(needed)


def room_on_disk(state: State, layers: int) -> bool:
    """Forget layers until this many more fit. False if they do not."""
    while state.stock.disk + layers * state.budget.layer_disk > state.budget.disk:
        prefix = state.stock.forget_layer()
        if prefix is None:
            return False
        state.operations.append(Forget(prefix.key))
    return True


def trim(state: State, now: float) -> None:
    """Return to the budget if sandboxes or layers became larger; end sandboxes that were idle too long."""
    while state.stock.memory > state.budget.memory and state.stock.idle:
        found = state.stock.least_worth()
        assert found is not None
        state.destroy(found[0], "evicted")
    while state.stock.disk > state.budget.disk:
        prefix = state.stock.forget_layer()
        if prefix is None:
            break
        state.operations.append(Forget(prefix.key))
    idle_seconds = state.policy.idle_seconds
    while idle_seconds is not None and (instance := state.parked.due(now - idle_seconds)) is not None:
        state.parked.drop(instance)
        if instance.status != "idle":
            continue  # it is parked again when it is returned
        prefix = state.stock.path(instance.chain)[instance.depth]
        if len(prefix.idle) > prefix.promised:
            state.destroy(instance, "stale")
        else:
            instance.parked_at = now
            state.parked.put(instance)

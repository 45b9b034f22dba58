"""Room for what is wanted, in the place of what is worth least."""

from __future__ import annotations

from math import log

from dutyfree.engine.pool.scheduler.state import State
from dutyfree.engine.pool.scheduler.values import Forget

WORTHIER = log(2)
"""A refill evicts only what is worth less than half of it, so that the two do not take turns."""


def evict_for(state: State, count: int, memory: int, worth: float | None = None) -> bool:
    """Evict the least valuable until so much fits; with ``worth`` only what is worth far less."""
    while not state.stock.fits(count, memory):
        found = state.stock.least_worth()
        if found is None:
            return False
        held, (promised, value) = found
        if worth is not None and (promised or value > worth - WORTHIER):
            return False
        state.destroy(held, "evicted")
    return True


def going(state: State) -> tuple[str, ...]:
    """Those told to go whose room is given away already, the oldest first."""
    stock, needed = state.stock, []
    count = stock.alive + len(state.going) - state.budget.sandboxes
    memory = stock.memory + state.going_memory - state.budget.memory
    for sandbox, charge in state.going.items():
        if count <= 0 and memory <= 0:
            break
        needed.append(sandbox)
        count, memory = count - 1, memory - charge
    return tuple(needed)


def room_on_disk(state: State, layers: int) -> bool:
    while state.stock.disk + layers * state.budget.layer_disk > state.budget.disk:
        node = state.stock.forget_layer()
        if node is None:
            return False
        state.operations.append(Forget(node.key))
    return True


def trim(state: State, now: float) -> None:
    """Sandboxes turned out larger, layers too; and nobody came for some."""
    while state.stock.memory > state.budget.memory and state.stock.idle:
        found = state.stock.least_worth()
        assert found is not None
        state.destroy(found[0], "evicted")
    while state.stock.disk > state.budget.disk:
        node = state.stock.forget_layer()
        if node is None:
            break
        state.operations.append(Forget(node.key))
    patience = state.policy.idle_seconds
    while patience is not None and (held := state.parked.due(now - patience)) is not None:
        state.parked.drop(held)
        if held.status != "idle":
            continue  # it is parked again when it comes back
        node = state.stock.nodes(held.chain)[held.depth]
        if len(node.idle) > node.promised:
            state.destroy(held, "stale")
        else:
            held.parked_at = now
            state.parked.put(held)

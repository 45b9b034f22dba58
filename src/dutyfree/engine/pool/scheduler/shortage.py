"""The numbers behind an Exhausted error."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dutyfree.engine.pool.scheduler.jobs import Claim
from dutyfree.engine.pool.scheduler.values import Shortage

if TYPE_CHECKING:
    from dutyfree.engine.pool.scheduler.state import State


def shortage(state: State, claim: Claim, now: float) -> Shortage:
    """What the pool had when it refused the claim, and an estimate of the wait."""
    ahead = 0
    for waiting in state.queue.values():
        ahead += waiting.missing
        if waiting is claim:
            break
    job = next(iter(claim.jobs.values()), None)
    at_once = claim.request.deadline <= claim.arrived
    return Shortage(
        waited=0.0 if at_once else now - claim.arrived,
        wanted=claim.request.count,
        idle=state.stock.idle,
        leased=state.leased,
        making=len(state.jobs),
        resetting=state.resetting,
        sandboxes=state.budget.sandboxes,
        memory=state.stock.memory,
        memory_limit=state.budget.memory,
        queue=len(state.queue),
        estimated_wait=None if job is not None else state.returns.seconds_for(ahead, now),
        preparing="" if job is None else job.top.kind,
        never=not state.stock.could_ever_fit(claim.request.count, claim.path[-1]),
    )

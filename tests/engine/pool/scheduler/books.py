"""Everything that the scheduler counts along the way, counted again from what there is."""

from __future__ import annotations

from collections import Counter

from dutyfree.engine.pool.scheduler.decide import State
from dutyfree.engine.pool.scheduler.stock import Node


def check(state: State) -> None:
    """After a decision; what is counted and never corrected would be wrong for ever."""
    _sandboxes(state)
    _requests(state)
    _layers(state)
    _nodes(state)


def _sandboxes(state: State) -> None:
    stock, held = state.stock, state.held.values()
    new = [job for job in state.jobs.values() if job.origin is None]
    idle = [one for one in held if one.status == "idle"]
    assert stock.alive == len(held) + len(new)
    assert stock.memory == sum(one.charge for one in held) + sum(job.charge for job in new)
    assert all(charge > 0 for charge in [*(one.charge for one in held), *(job.charge for job in new)])
    assert (stock.idle, stock.idle_memory) == (len(idle), sum(one.charge for one in idle))
    assert idle == [] or {one.id for one in idle} == {
        key for node in stock._nodes.values() for key in node.idle
    }
    assert state.going_memory == sum(state.going.values())
    assert state.resetting == sum(one.status == "resetting" for one in held)
    assert state.leased == sum(len(lease.claim.ready) for lease in state.leases.values())
    if state.policy.idle_seconds is not None:
        assert all(one in state.parked for one in idle)
    for one in held:
        busy = [job for job in state.jobs.values() if job.copied is one]
        assert one.copies == len(busy)
        assert not one.abandoned or busy


def _requests(state: State) -> None:
    claims, jobs = state.claims, state.jobs.values()
    assert set(state.hoarding) <= set(state.queue) <= set(claims)
    assert len(state.deadlines) == len(claims)
    assert len(state.lease_ends) == sum(lease.until is not None for lease in state.leases.values())
    for claim in claims.values():
        assert claim.missing >= 0
        assert claim.request.id in state.queue or not claim.missing
        assert all(state.jobs[number].claim is claim for number in claim.jobs)
        assert {held.status for held, _, _ in claim.ready} <= {"ready"}
    assert state.running == sum(job.started and not job.background and job.kind != "forked" for job in jobs)
    refills = state.refills
    assert refills._timely | refills._late == {job.id for job in jobs if job.background}
    assert len(refills._timely) <= state.policy.refilling


def _layers(state: State) -> None:
    nodes = [node for node in state.stock._nodes.values() if node.layer is not None]
    assert state.stock.disk == sum(node.layer.size for node in nodes if node.layer)
    pins: Counter[Node] = Counter()
    pins.update(one.stands_on for one in state.held.values() if one.stands_on is not None)
    pins.update(job.stands_on for job in state.jobs.values() if job.stands_on is not None)
    pins.update(node.layer.parent for node in nodes if node.layer and node.layer.parent is not None)
    assert all(node.layer is not None for node in pins), "what is stood upon stays"
    assert all(node.layer and node.layer.pins == pins[node] for node in nodes)


def _nodes(state: State) -> None:
    nodes, chains = state.stock._nodes, state.stock._chains
    users = Counter([claim.path[-1] for claim in state.claims.values()])
    users.update(job.top for job in state.jobs.values())
    assert all(nodes.get(node.key) is node for node in users), "what is used stays known"
    kept = Counter(node for path in chains.values() for node in path)
    children = Counter(node.path[-2] for node in nodes.values() if node.depth)
    for node in nodes.values():
        assert (node.users, node.chains, node.children) == (users[node], kept[node], children[node])
        assert node.hinted == sum(count for _, count in node.hints) >= 0
        assert set(node.making) == {
            job.id
            for job in state.jobs.values()
            if job.top is node and job.claim is None and job.kind != "forked"
        }
        assert node.chains or node.children or not node.needless, "what is of no use is forgotten"

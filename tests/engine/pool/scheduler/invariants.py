"""The invariants of the scheduler: its counters must match a count of what there is."""

from __future__ import annotations

from collections import Counter

from dutyfree.engine.pool.scheduler.state import State
from dutyfree.engine.pool.scheduler.stock import Prefix


def check(state: State) -> None:
    """Check all counters, after a decision."""
    _sandboxes(state)
    _requests(state)
    _layers(state)
    _prefixes(state)


def _sandboxes(state: State) -> None:
    stock, instances = state.stock, state.instances.values()
    new = [job for job in state.jobs.values() if job.origin is None]
    idle = [one for one in instances if one.status == "idle"]
    assert stock.alive == len(instances) + len(new)
    assert stock.memory == sum(one.charge for one in instances) + sum(job.charge for job in new)
    assert all(charge > 0 for charge in [*(one.charge for one in instances), *(job.charge for job in new)])
    assert (stock.idle, stock.idle_memory) == (len(idle), sum(one.charge for one in idle))
    assert idle == [] or {one.id for one in idle} == {
        key for prefix in stock._prefixes.values() for key in prefix.idle
    }
    assert state.destroying_memory == sum(state.destroying.values())
    assert state.resetting == sum(one.status == "resetting" for one in instances)
    assert state.leased == sum(len(claim.ready) for claim in state.leases.values())
    if state.policy.idle_seconds is not None:
        assert all(one in state.parked for one in idle)
    for one in instances:
        busy = [job for job in state.jobs.values() if job.copied is one]
        assert one.copies == len(busy)
        assert not one.abandoned or busy


def _requests(state: State) -> None:
    claims, jobs = state.claims, state.jobs.values()
    assert set(state.partly_served) <= set(state.queue) <= set(claims)
    assert len(state.deadlines) == len(claims)
    assert len(state.lease_ends) == sum(claim.until is not None for claim in state.leases.values())
    for claim in claims.values():
        assert claim.missing >= 0
        assert claim.request.id in state.queue or not claim.missing
        assert all(state.jobs[number].claim is claim for number in claim.jobs)
        assert {instance.status for instance, _, _ in claim.ready} <= {"ready"}
    assert state.running == sum(job.started and not job.background and job.kind != "forked" for job in jobs)
    refills = state.refills
    assert refills._on_time | refills._late == {job.id for job in jobs if job.background}
    assert len(refills._on_time) <= state.policy.refilling


def _layers(state: State) -> None:
    prefixes = [prefix for prefix in state.stock._prefixes.values() if prefix.layer is not None]
    assert state.stock.disk == sum(prefix.layer.size for prefix in prefixes if prefix.layer)
    pins: Counter[Prefix] = Counter()
    pins.update(one.on_layer for one in state.instances.values() if one.on_layer is not None)
    pins.update(job.on_layer for job in state.jobs.values() if job.on_layer is not None)
    pins.update(one.layer.parent for one in prefixes if one.layer and one.layer.parent is not None)
    assert all(prefix.layer is not None for prefix in pins), "what is stood upon stays"
    assert all(prefix.layer and prefix.layer.references == pins[prefix] for prefix in prefixes)


def _prefixes(state: State) -> None:
    prefixes, chains = state.stock._prefixes, state.stock._chains
    users = Counter([claim.path[-1] for claim in state.claims.values()])
    users.update(job.top for job in state.jobs.values())
    assert all(prefixes.get(prefix.key) is prefix for prefix in users), "what is used stays known"
    kept = Counter(prefix for path in chains.values() for prefix in path)
    children = Counter(prefix.path[-2] for prefix in prefixes.values() if prefix.depth)
    for prefix in prefixes.values():
        assert (prefix.users, prefix.chains, prefix.children) == (
            users[prefix],
            kept[prefix],
            children[prefix],
        )
        assert prefix.hinted == sum(count for _, count in prefix.hints) >= 0
        assert set(prefix.making) == {
            job.id
            for job in state.jobs.values()
            if job.top is prefix and job.claim is None and job.kind != "forked"
        }
        assert prefix.chains or prefix.children or not prefix.unused, "what is of no use is forgotten"

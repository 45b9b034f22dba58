"""Decide which sandbox serves which request, what to make, and what to evict.

``decide(state, now)`` returns the next operations. The caller (``pool.Pool``, or a simulation) carries them
out, reports the results to the state as events, and calls ``decide`` again. It is deterministic, with no
clock and no I/O.

A request is served by the candidate with the smallest distance, which is the estimated seconds for the stages
that are missing: an idle sandbox in exactly its state; an idle one at a shorter prefix, promoted; a refill in
progress; a new sandbox on the longest layer; or a cold start.

After every decision:

- each sandbox is idle, being made, ready for one request, leased once, or being reset; never two of these;
- sandboxes and memory, including those being destroyed, stay within the budget (``Make.after``);
- requests are admitted in the order of arrival, and none overtakes one that waits for room;
- each request is answered by its deadline, and nothing leased or being prepared is evicted;
- work for requests comes before refills.

The cost of a decision grows with the length of the recipe and the number of operations, not with the number
of sandboxes.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from math import inf

from dutyfree.engine.pool.scheduler import eviction
from dutyfree.engine.pool.scheduler.jobs import Claim, Job
from dutyfree.engine.pool.scheduler.shortage import shortage
from dutyfree.engine.pool.scheduler.state import State
from dutyfree.engine.pool.scheduler.stock import Prefix, mark_retry
from dutyfree.engine.pool.scheduler.values import (
    Candidate,
    Expire,
    Fork,
    JobFailure,
    Make,
    Operation,
    Prioritize,
    Quarantine,
)

ALIKE = 0.002
"""Candidates whose distances differ by less than this many seconds count as equal."""

_ORDER = {"warm": 0, "promoted": 1, "joined": 2, "layer": 3, "forked": 4, "cold": 5}


def place(options: Iterable[Candidate]) -> Candidate:
    """The candidate with the smallest distance; among equals, one that was not promised to others."""
    options = sorted(options, key=lambda candidate: candidate.seconds)
    alike = [candidate for candidate in options if candidate.seconds <= options[0].seconds + ALIKE]
    return min(alike, key=lambda candidate: (candidate.promised, _ORDER[candidate.kind], candidate.seconds))


def candidates(state: State, path: tuple[Prefix, ...], now: float) -> tuple[Candidate, ...]:
    """The best candidate of each kind; none if every one needs a quarantined stage."""
    policy, costs = state.policy, state.costs
    found: list[Candidate] = []
    depth = len(path) - 1
    top = path[depth]
    if policy.join and top.making:
        expected = next(iter(top.making.values()))
        found.append(Candidate("joined", depth, max(0.0, expected - now)))
    distance, idle, layer = 0.0, False, False
    for prefix in reversed(path):
        exact = prefix is top
        if prefix.idle and not idle and (exact or policy.partial):
            promised = not exact and len(prefix.idle) <= prefix.promised
            found.append(Candidate("warm" if exact else "promoted", prefix.depth, distance, promised))
            idle = True
        if prefix.layer is not None and not layer and _usable(state, prefix):
            found.append(Candidate("layer", prefix.depth, costs.create() + distance))
            layer = True
        if layer and (idle or not policy.partial):
            break
        if prefix.breaker is not None and prefix.breaker.refuses(now):
            break
        if prefix.depth:
            distance += costs.seconds(prefix.key, prefix.kind)
    else:
        if not layer:
            found.append(Candidate("cold", 0, costs.create() + distance))
    return tuple(found)


def decide(state: State, now: float) -> tuple[Operation, ...]:
    """The next operations. Call it after every event, and at the time ``wake(state)``."""
    late = _expire(state, now)
    _progress(state, now)
    _admit(state, late, now)
    _start(state, now)
    eviction.trim(state, now)
    if not state.queue and not state.pending and state.policy.park:
        _refill(state, now)
    operations, state.operations = tuple(state.operations), []
    return operations


def lasting_failure(path: tuple[Prefix, ...], now: float) -> Quarantine | JobFailure | None:
    """The failure that stops refills of this recipe, if a stage has failed too often; else None."""
    for prefix in reversed(path):
        breaker = prefix.breaker
        if breaker is not None and breaker.exhausted:
            return _quarantined(prefix, now) if breaker.tripped else breaker.last
    return None


def wake(state: State) -> float | None:
    """The next time at which ``decide`` has something to do without an event."""
    times = [state.deadlines.first, state.lease_ends.first, state.demand.next_time, state.refills.next_time]
    if state.parked.first is not None:
        times.append(state.parked.first + (state.policy.idle_seconds or 0.0))
    return min((at for at in times if at is not None), default=None)


# --- Time passes ------------------------------------------------------------------------------------


def _expire(state: State, now: float) -> list[Claim]:
    """End what has expired. Returns late claims in the queue, which may still get idle sandboxes."""
    late: list[Claim] = []
    while (claim := state.deadlines.due(now)) is not None:
        state.deadlines.drop(claim)
        if claim.request.id in state.queue:
            late.append(claim)
        elif claim.missing or claim.jobs:  # otherwise it is complete, and delivered below
            state.refuse(claim, shortage(state, claim, now), now)
    while (claim := state.lease_ends.due(now)) is not None:
        state.end_lease(claim.request.id)
        state.operations.append(Expire(claim.request.id))
        for instance, _, _ in claim.ready:
            state.leased -= 1
            state.destroy(instance, "expired")
    state.demand.expire(now)
    state.refills.expire(now)
    return late


# --- Requests ---------------------------------------------------------------------------------------


def _progress(state: State, now: float) -> None:
    changed, state.changed = state.changed, []
    for claim in changed:
        _advance(state, claim, now)


def _admit(state: State, late: list[Claim], now: float) -> None:
    while state.queue:
        claim = next(iter(state.queue.values()))
        if claim.request.deadline <= now and (claim.jobs or claim.missing > len(claim.path[-1].idle)):
            state.refuse(claim, shortage(state, claim, now), now)
        elif _serve(state, claim, now):
            state.queue.pop(claim.request.id, None)
            state.partly_served.pop(claim.request.id, None)
            claim.admitted = now if claim.admitted is None else claim.admitted
            _advance(state, claim, now)
        elif not state.stock.could_ever_fit(claim.request.count, claim.path[-1]):
            state.refuse(claim, shortage(state, claim, now), now)
        elif not _release_others(state, claim, now) and not _refuse_all(state, late, now):
            break


def _refuse_all(state: State, late: list[Claim], now: float) -> bool:
    """Refuse the late claims that still wait. False if there were none."""
    waiting = [claim for claim in late if claim.request.id in state.queue]
    for claim in waiting:
        state.refuse(claim, shortage(state, claim, now), now)
    return bool(waiting)


def _release_others(state: State, head: Claim, now: float) -> bool:
    """Take sandboxes back from partly served claims in the queue, to avoid a deadlock between them."""
    partly_served = [claim for claim in state.partly_served.values() if claim is not head and claim.ready]
    for claim in partly_served:
        state.let_go(claim, now)
    return bool(partly_served)


def _serve(state: State, claim: Claim, now: float) -> bool:
    """Give the claim a sandbox or a job for each member it misses, or nothing. False if there is no room."""
    stock, top = state.stock, claim.path[-1]
    warm = min(claim.missing, len(top.idle))
    rest = claim.missing - warm
    if rest and not _room_for(state, claim, warm, rest):
        return False
    forks = 0
    if rest and claim.forkable:
        forks = rest if warm or claim.ready else rest - 1
    if not claim.counted:
        claim.counted = True
        alike = 1 if claim.forkable else claim.missing
        stock.count_requests(top, alike, min(rest, alike), now)
        state.demand.fulfilled(top, claim.request.count)
    for _ in range(warm):
        claim.ready.append((stock.take(top), "warm", top.depth))
    engaged, start, made = True, top.depth, rest - forks
    if made > 1 and _refused(state, claim.path, now):
        state.refuse(claim, _quarantine(claim.path, now), now)
        return True
    for _ in range(made):
        options = candidates(state, claim.path, now)
        if not options:
            state.refuse(claim, _quarantine(claim.path, now), now)
            return True
        candidate = place(options)
        engaged = engaged and _engage(state, claim, candidate, now)
        start = min(start, candidate.depth)
    mark_retry(claim.path, start, retrying=True)
    for _ in range(forks):
        engaged = engaged and _engage(state, claim, Candidate("forked", top.depth, state.costs.fork()), now)
    state.demand.consider(top)
    if not engaged:
        state.partly_served[claim.request.id] = claim
    return engaged


def _engage(state: State, claim: Claim, candidate: Candidate, now: float) -> bool:
    """Start one job for the claim. False if there is no room after all: sandboxes became larger."""
    for prefix in claim.path[candidate.depth : -1]:
        state.stock.count_requests(prefix, 1, int(not prefix.idle), now)
        state.demand.consider(prefix)
    top = claim.path[-1]
    if candidate.kind == "joined":
        job = state.jobs[next(iter(top.making))]
        del top.making[job.id]
        job.kind = "joined"
        if job.background:
            state.operations.append(Prioritize(job.id))
    else:
        found = _reserved(state, claim.path, candidate, now)
        if found is None:
            return False
        job = found
        if candidate.kind == "forked":
            claim.forks.append(job)
        else:
            state.pending.append(job)
            top.queued.append(job.id)
    job.claim, claim.jobs[job.id] = claim, job
    return True


def _reserved(
    state: State, path: tuple[Prefix, ...], candidate: Candidate, now: float, worth: float | None = None
) -> Job | None:
    """A job with room for its sandbox, which may evict others. None if there is no room."""
    size = state.stock.size(path[-1])
    if candidate.kind != "promoted":
        return state.job(path, candidate, now) if eviction.evict_for(state, 1, size, worth) else None
    job = state.job(path, candidate, now)  # before the eviction, which must not take its sandbox
    assert job.origin is not None
    growth = max(0, size - job.origin.charge)
    if not eviction.evict_for(state, 0, growth, worth):
        state.cancel(job, now)
        return None
    state.stock.recharge(job.origin, job.origin.charge + growth)
    return job


def _advance(state: State, claim: Claim, now: float) -> None:
    """Start the forks when one member is ready; deliver when all are."""
    if claim.request.id not in state.claims:
        return
    if claim.forks and claim.ready and len(claim.jobs) == len(claim.forks):
        jobs, claim.forks = claim.forks, []
        origin = claim.ready[0][0]
        origin.copies = len(jobs)
        for job in jobs:
            job.started, job.copied = True, origin
        state.operations.append(
            Fork(
                origin.id,
                claim.request.chain,
                tuple(job.id for job in jobs),
                eviction.destroys_to_await(state),
            )
        )
    if not claim.jobs and not claim.missing:
        state.deliver(claim, now)


def _start(state: State, now: float) -> None:
    while state.pending and state.running < state.policy.starting:
        job = state.pending.popleft()
        if job.id in state.jobs:
            state.running += 1
            _begin(state, job, now)


def _begin(state: State, job: Job, now: float) -> None:
    job.started = True
    job.expected = now + job.seconds
    queued = job.top.queued
    while queued and (queued[0] not in state.jobs or state.jobs[queued[0]].started):
        queued.popleft()
    deepest = job.depth if state.policy.deepest_layer is None else state.policy.deepest_layer
    keep = min(deepest, job.depth)
    if keep > job.start and not eviction.room_on_disk(state, keep - job.start):
        keep = 0
    state.operations.append(
        Make(
            job=job.id,
            chain=job.top.chain if job.claim is None else job.claim.request.chain,
            start=job.start,
            depth=job.depth,
            origin=None if job.origin is None else job.origin.id,
            keep=keep,
            background=job.background,
            after=eviction.destroys_to_await(state),
        )
    )


def _room_for(state: State, claim: Claim, warm: int, rest: int) -> bool:
    """Whether the claim fits, if idle sandboxes are evicted."""
    stock, top = state.stock, claim.path[-1]
    joined = min(len(top.making), rest) if state.policy.join and not claim.forkable else 0
    if claim.forkable and not warm and not claim.ready and top.making and state.policy.join:
        joined = 1
    new = rest - joined
    taken = sum(instance.charge for instance in islice(reversed(top.idle.values()), warm))
    return stock.could_fit(warm + new, taken + new * stock.size(top))


def _refused(state: State, path: tuple[Prefix, ...], now: float) -> bool:
    """Whether a new sandbox would need a quarantined stage."""
    start = state.stock.layer_under(path) or 0
    return any(prefix.breaker is not None and prefix.breaker.refuses(now) for prefix in path[start + 1 :])


def _quarantine(path: tuple[Prefix, ...], now: float) -> Quarantine:
    return _quarantined(
        next(n for n in reversed(path) if n.breaker is not None and n.breaker.refuses(now)), now
    )


def _quarantined(prefix: Prefix, now: float) -> Quarantine:
    assert prefix.breaker is not None
    retry_in = max(0.0, prefix.breaker.retry_at - now)
    return Quarantine(prefix.kind, prefix.key, prefix.breaker.failures, retry_in, prefix.breaker.last)


def _usable(state: State, prefix: Prefix) -> bool:
    return state.policy.deepest_layer is None or prefix.depth <= state.policy.deepest_layer


# --- Refills ----------------------------------------------------------------------------------------


def _refill(state: State, now: float) -> None:
    while state.refills.has_room:
        prefix = next(state.demand.owed(now), None)
        if prefix is not None:
            if not _stock_up(state, prefix, now, None):
                state.demand.postpone(prefix)
                return
            continue
        found = next(state.demand.in_demand(now), None)
        if found is None:
            return
        prefix, worth = found
        if not _stock_up(state, prefix, now, worth):
            state.demand.requeue(prefix)
            return


def _stock_up(state: State, prefix: Prefix, now: float, worth: float | None) -> bool:
    """Start a refill. False if there is no room for it."""
    options = candidates(state, prefix.path, now)
    useful = [candidate for candidate in options if candidate.kind in {"layer", "cold"}]
    if worth is None:  # for a promise, an idle sandbox that was not promised may be promoted
        useful += [
            candidate for candidate in options if candidate.kind == "promoted" and not candidate.promised
        ]
    if not useful:
        return True
    chosen = place(useful)
    job = _reserved(state, prefix.path, chosen, now, inf if worth is None else worth)
    if job is None:
        return False
    job.background = True
    mark_retry(prefix.path, chosen.depth, retrying=True)
    state.refills.begin(job.id, chosen.seconds, now)
    prefix.making[job.id] = now + chosen.seconds
    _begin(state, job, now)
    state.demand.consider(prefix)
    return True

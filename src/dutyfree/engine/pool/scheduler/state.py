"""The state of the scheduler, and the events that change it.

``decide`` reads the state and returns operations. Both are deterministic, with no clock and no I/O: the same
events at the same times give the same operations. So a test can build any state from events.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable
from itertools import count

from dutyfree.engine.pool.scheduler.breaker import Breaker
from dutyfree.engine.pool.scheduler.demand import Demand
from dutyfree.engine.pool.scheduler.distance import Costs
from dutyfree.engine.pool.scheduler.jobs import Claim, Job, ReturnRate
from dutyfree.engine.pool.scheduler.priority_queue import PriorityQueue
from dutyfree.engine.pool.scheduler.refills import Refills
from dutyfree.engine.pool.scheduler.shortage import shortage
from dutyfree.engine.pool.scheduler.stock import Instance, Prefix, Stock, mark_retry
from dutyfree.engine.pool.scheduler.values import (
    Budget,
    Candidate,
    Deliver,
    Destroy,
    DestroyReason,
    JobFailure,
    JobResult,
    LeaseRequest,
    Member,
    Operation,
    Policy,
    PrefixChain,
    Quarantine,
    Refuse,
    Reset,
    Shortage,
)


class State:
    """Requests, leases, sandboxes and jobs of one pool, and the stock."""

    def __init__(
        self, budget: Budget | None = None, policy: Policy | None = None, costs: Costs | None = None
    ) -> None:
        self.budget = budget or Budget()
        self.policy = policy or Policy()
        self.costs = costs or Costs()
        self.stock = Stock(self.budget, self.policy, self.costs)
        self.demand = Demand(self.stock, self.policy)
        self.claims: dict[int, Claim] = {}
        """Requests that are not answered, by number."""
        self.queue: OrderedDict[int, Claim] = OrderedDict()
        """Those of them that wait for room."""
        self.partly_served: dict[int, Claim] = {}
        """Claims in the queue that may hold sandboxes, since one of theirs failed or was too large."""
        self.leases: dict[int, Claim] = {}
        """Requests that were delivered, by number."""
        self.instances: dict[str, Instance] = {}
        self.jobs: dict[int, Job] = {}
        self.pending: deque[Job] = deque()
        """Jobs for requests that have not started."""
        self.running = 0
        """Jobs for requests that have started, without forks."""
        self.refills = Refills(self.policy)
        self.leased = 0
        self.resetting = 0
        self.operations: list[Operation] = []
        self.destroying: OrderedDict[str, int] = OrderedDict()
        """Sandboxes that are being destroyed, and their memory."""
        self.destroying_memory = 0
        self.deadlines: PriorityQueue[Claim] = PriorityQueue(lambda claim: (claim.request.deadline,))
        self.lease_ends: PriorityQueue[Claim] = PriorityQueue(lambda claim: (claim.until or 0.0,))
        self.changed: list[Claim] = []
        """Claims that the next decision must look at."""
        self.parked: PriorityQueue[Instance] = PriorityQueue(lambda instance: (instance.parked_at,))
        """Sandboxes by the time they last became idle, if ``policy.idle_seconds`` ends them."""
        self.returns = ReturnRate(self.policy.half_life)
        self._numbers = count(1)

    # --- Requests and leases ------------------------------------------------------------------------

    def arrive(self, request: LeaseRequest, now: float) -> None:
        """A request came in."""
        path = self.stock.path(request.chain)
        claim = Claim(request, path, now, self.policy.fork and request.count > 1)
        self._enter(claim)
        if not self.stock.could_ever_fit(request.count, path[-1]):
            self.refuse(claim, shortage(self, claim, now), now)
            return
        self.queue[request.id] = claim
        self.deadlines.put(claim)

    def withdraw(self, request: int, now: float) -> None:
        """The caller no longer waits, or ended the lease."""
        if request in self.leases:
            self.returned(request, now)
        elif request in self.claims:
            self.dissolve(self.claims[request], now)

    def keep_alive(self, request: int, until: float | None) -> bool:
        """Set the end of a lease. False if it has ended already."""
        claim = self.leases.get(request)
        if claim is None:
            return False
        self._end_lease_at(claim, until)
        return True

    def returned(self, request: int, now: float) -> None:
        """End a lease, and reset its sandboxes for reuse."""
        claim = self.end_lease(request)
        if claim is None:
            return
        self.returns.add(len(claim.ready), now)
        for instance, _, _ in claim.ready:
            self.leased -= 1
            # While a request for another recipe waits, this sandbox would be evicted at once.
            blocked = self.queue and next(iter(self.queue.values())).path[-1].key != instance.chain.key
            if self.policy.park and not blocked and not self._is_busy(instance):
                instance.status = "resetting"
                self.resetting += 1
                self.operations.append(Reset(instance.id))
            else:
                self.destroy(instance, "returned")

    def _is_busy(self, instance: Instance) -> bool:
        """Whether to discard it instead of a reset: too many resets run, and a layer has its state."""
        prefix = self.stock.prefix(instance.chain.keys[instance.depth])
        busy = self.running and self.resetting >= self.policy.resetting
        return bool(busy and prefix is not None and prefix.layer is not None)

    def undelivered(self, request: int, dead: Iterable[str], now: float) -> None:
        """Some delivered sandboxes were dead. The request goes back to the head of the queue."""
        claim = self.end_lease(request)
        if claim is None:
            return
        self.leased -= len(claim.ready)
        for instance, _, _ in claim.ready:
            instance.status = "ready"
        claim.path = self.stock.path(claim.request.chain)
        self._enter(claim)
        self.deadlines.put(claim)
        for identity in dead:
            self.died(identity, now)
        self.changed.append(claim)

    def refuse(self, claim: Claim, reason: Shortage | Quarantine | JobFailure, now: float) -> None:
        """Answer a request with an error."""
        self.operations.append(Refuse(claim.request.id, reason))
        self.dissolve(claim, now)

    def dissolve(self, claim: Claim, now: float) -> None:
        """Drop a request. Its sandboxes, and those being made for it, become stock."""
        self._leave(claim)
        self.queue.pop(claim.request.id, None)
        self.partly_served.pop(claim.request.id, None)
        for job in list(claim.jobs.values()):
            job.claim = None
            if not job.started:
                self.cancel(job, now)
            elif job.kind != "forked":
                job.top.making[job.id] = job.expected
        claim.jobs, claim.forks = {}, []
        self.let_go(claim, now)

    def let_go(self, claim: Claim, now: float) -> None:
        """Its sandboxes become stock."""
        ready, claim.ready = claim.ready, []
        for instance, _, _ in ready:
            instance.abandoned = instance.copies > 0
            if not instance.abandoned:
                self.park(instance, now)

    def _enter(self, claim: Claim) -> None:
        self.claims[claim.request.id] = claim
        claim.path[-1].users += 1

    def _leave(self, claim: Claim) -> None:
        del self.claims[claim.request.id]
        self.deadlines.drop(claim)
        claim.path[-1].users -= 1

    def deliver(self, claim: Claim, now: float) -> None:
        """All sandboxes of the request are ready: hand them out."""
        request = claim.request
        self._leave(claim)
        until = None if request.lease_seconds is None else now + request.lease_seconds
        self.leases[request.id] = claim
        self._end_lease_at(claim, until)
        self.leased += len(claim.ready)
        for instance, _, _ in claim.ready:
            instance.status = "leased"
            instance.chain = request.chain
        members = tuple(Member(instance.id, kind, start) for instance, kind, start in claim.ready)
        waited = (now if claim.admitted is None else claim.admitted) - claim.arrived
        self.operations.append(Deliver(request.id, members, until, self.costs.cold(request.chain), waited))

    def end_lease(self, request: int) -> Claim | None:
        """Remove a lease, and leave its sandboxes as they are. None if it has ended already."""
        claim = self.leases.pop(request, None)
        if claim is not None:
            self.lease_ends.drop(claim)
        return claim

    def _end_lease_at(self, claim: Claim, until: float | None) -> None:
        claim.until = until
        if until is None:
            self.lease_ends.drop(claim)
        else:
            self.lease_ends.put(claim)

    # --- Sandboxes ----------------------------------------------------------------------------------

    def made(self, job: int, sandbox: str, now: float, result: JobResult) -> None:
        """A job has made this sandbox."""
        done = self._end(job, now)
        claim = done.claim
        chain = done.top.chain if claim is None else claim.request.chain
        path = done.path
        if result.create_seconds is not None:
            what = "fork" if done.kind == "forked" else "create"
            self.costs.learn(what, what, result.create_seconds)
        for prefix, seconds in zip(path[done.start + 1 :], result.stage_seconds, strict=False):
            self.costs.learn(prefix.key, prefix.kind, seconds)
        for prefix in path[done.start + 1 :]:
            prefix.breaker = None
        instance = done.origin
        if instance is None:
            instance = self.instances[sandbox] = Instance(
                sandbox, chain, done.depth, done.charge, done.on_layer
            )
            self.stock.adopt(instance)
        self._unpin(done)
        instance.chain, instance.depth = chain, done.depth
        if result.memory is not None:
            done.top.memory = result.memory
            self.stock.recharge(instance, result.memory)
        for depth, size in sorted(result.layers.items()):
            self.stock.keep_layer(path[depth], size)
        if claim is None:
            self.park(instance, now)
        else:
            instance.status = "ready"
            del claim.jobs[done.id]
            claim.ready.append((instance, *done.outcome(result)))
            self.changed.append(claim)
        self.demand.consider(done.top)

    def failed(self, job: int, failure: JobFailure, now: float) -> None:
        """A job failed. Nothing is left of its sandbox."""
        done = self._end(job, now)
        self._unpin(done)
        if done.origin is not None:
            self.instances.pop(done.origin.id, None)
            self.stock.drop(done.origin)
        else:
            self.stock.free(done.charge)
        mark_retry(done.path, done.start, retrying=False)
        if failure.depth is not None or done.claim is None:
            prefix = done.path[done.depth if failure.depth is None else failure.depth]
            prefix.breaker = prefix.breaker or Breaker(self.policy)
            prefix.breaker.record(prefix.key, failure, now)
        self.demand.consider(done.top)
        claim = done.claim
        if claim is None:
            return
        del claim.jobs[done.id]
        if done.kind != "forked" or claim.forkable:  # the children of one fork fail together: count once
            claim.attempts += 1
        if done.kind == "forked":
            claim.forkable = False
        if failure.depth is not None or claim.attempts >= self.policy.attempts:
            self.refuse(claim, failure, now)
        else:
            self._to_the_front(claim)

    def reset_done(self, sandbox: str, depth: int, now: float, *, memory: int | None = None) -> None:
        """A returned sandbox was reset and verified. It is now at this depth."""
        instance = self.instances.get(sandbox)
        if instance is None:
            return
        self.resetting -= 1
        instance.depth = depth
        if memory is not None:
            self.stock.recharge(instance, memory)
            self.stock.path(instance.chain)[depth].memory = memory
        self.park(instance, now)

    def died(self, sandbox: str, now: float) -> None:
        """A sandbox died, or its reset failed, whatever its status."""
        instance = self.instances.get(sandbox)
        if instance is None or instance.status == "promoting" or instance.copies:  # its job will fail
            return
        if instance.status == "resetting":
            self.resetting -= 1
        # The search for holders reads all claims, so skip it where there is none: many may die at once.
        for claim in self._holders(instance) if instance.status in ("ready", "leased") else ():
            before = len(claim.ready)
            claim.ready = [entry for entry in claim.ready if entry[0] is not instance]
            if instance.status == "leased":
                self.leased -= before - len(claim.ready)
            elif len(claim.ready) < before:
                self._to_the_front(claim)
        self.destroy(instance, "died")

    def destroyed(self, sandbox: str) -> None:
        """A sandbox that was to be destroyed is gone."""
        self.destroying_memory -= self.destroying.pop(sandbox, 0)

    def park(self, instance: Instance, now: float) -> None:
        """Make a sandbox idle; or give it to a request whose job has not started; or destroy it."""
        prefix = self.stock.path(instance.chain)[instance.depth]
        full = prefix.maximum is not None and len(prefix.idle) >= prefix.maximum
        if not self.policy.park or instance.depth < self.policy.shallowest or full:
            self.destroy(instance, "returned")
            return
        while prefix.queued:
            job = self.jobs.get(prefix.queued.popleft())
            if job is not None and not job.started and job.claim is not None:
                claim = job.claim
                self.cancel(job, now)
                del claim.jobs[job.id]
                instance.status = "ready"
                claim.ready.append((instance, "warm", instance.depth))
                self.changed.append(claim)
                return
        self.stock.park(instance, prefix, now)
        if self.policy.idle_seconds is not None:
            self.parked.put(instance)

    def destroy(self, instance: Instance, reason: DestroyReason) -> None:
        """Remove a sandbox. Its room is free at once; ``Make.after`` waits until it is gone."""
        prefix = self.stock.prefix(instance.chain.keys[instance.depth])
        self.instances.pop(instance.id, None)
        self.parked.drop(instance)
        self.stock.drop(instance)
        self.destroying[instance.id] = instance.charge
        self.destroying_memory += instance.charge
        self.operations.append(Destroy(instance.id, reason))
        if prefix is not None:
            self.demand.consider(prefix)

    # --- Demand -------------------------------------------------------------------------------------

    def hint(self, chain: PrefixChain, wanted: int, now: float) -> None:
        """``wanted`` sandboxes of this recipe will be requested soon."""
        self.demand.hint(self.stock.path(chain)[-1], wanted, now + self.policy.hint_seconds)

    def set_bounds(self, chain: PrefixChain, minimum: int, maximum: int | None) -> None:
        """Keep at least ``minimum`` and at most ``maximum`` sandboxes of this recipe idle."""
        self.demand.set_bounds(self.stock.path(chain)[-1], minimum, maximum)

    # --- Jobs ---------------------------------------------------------------------------------------

    def job(self, path: tuple[Prefix, ...], chosen: Candidate, now: float) -> Job:
        """A new job: take the sandbox to promote, or reserve room for a new one, which must be free."""
        job = Job(next(self._numbers), path, chosen.depth, chosen.kind, chosen.seconds)
        job.expected = now + chosen.seconds
        job.charge = self.stock.size(job.top)
        if chosen.kind == "promoted":
            job.origin = self.stock.take(path[chosen.depth])
            job.origin.status = "promoting"
            self.demand.consider(path[chosen.depth])
        else:
            self.stock.reserve(1, job.charge)
            job.on_layer = path[chosen.depth] if chosen.kind == "layer" else None
            if job.on_layer is not None:
                self.stock.pin(job.on_layer)
        self.jobs[job.id] = job
        job.top.users += 1
        return job

    def cancel(self, job: Job, now: float) -> None:
        """Drop a job that has not started."""
        del self.jobs[job.id]
        job.top.users -= 1
        self._unpin(job)
        mark_retry(job.path, job.start, retrying=False)
        if job.origin is None:
            self.stock.free(job.charge)
        else:
            job.origin.status = "ready"
            self.park(job.origin, now)

    def _end(self, number: int, now: float) -> Job:
        job = self.jobs.pop(number)
        job.top.users -= 1
        job.top.making.pop(number, None)
        if job.background:
            self.refills.end(number)
        elif job.kind != "forked":
            self.running -= 1
        if job.copied is not None:
            job.copied.copies -= 1
            if job.copied.abandoned and not job.copied.copies:
                job.copied.abandoned = False
                self.park(job.copied, now)
        return job

    def _unpin(self, job: Job) -> None:
        if job.on_layer is not None:
            self.stock.unpin(job.on_layer)

    def _to_the_front(self, claim: Claim) -> None:
        self.queue[claim.request.id] = claim
        self.queue.move_to_end(claim.request.id, last=False)
        self.partly_served[claim.request.id] = claim

    def _holders(self, instance: Instance) -> list[Claim]:
        """The claims that have this sandbox; reads all claims."""
        everyone = [*self.claims.values(), *self.leases.values()]
        return [claim for claim in everyone if any(entry[0] is instance for entry in claim.ready)]

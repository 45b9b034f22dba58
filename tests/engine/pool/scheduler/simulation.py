"""A simulated pool for the scheduler: it carries operations out on demand, and checks the invariants."""

from __future__ import annotations

from itertools import count
from typing import Any

from dutyfree.engine.pool.scheduler.decide import decide
from dutyfree.engine.pool.scheduler.state import State
from dutyfree.engine.pool.scheduler.values import (
    Budget,
    Deliver,
    Destroy,
    Expire,
    Forget,
    Fork,
    JobFailure,
    JobResult,
    LeaseRequest,
    Make,
    Operation,
    Policy,
    PrefixChain,
    Prioritize,
    Refuse,
    Reset,
)
from tests.engine.pool.scheduler import invariants

KINDS = ("base", "image", "repository", "dependencies", "setup")


def chain(name: str, length: int = 4) -> PrefixChain:
    """A chain: ``a/b/c`` shares its first two stages with ``a/b/d``, and all share one image."""
    parts = name.split("/")
    prefixes = ["/".join(parts[: index + 1]) for index in range(len(parts))]
    return PrefixChain(("base", "image", *prefixes), KINDS[: len(parts) + 2])


class Simulation:
    """Sandboxes and layers as the operations define them. It changes the state by events only."""

    def __init__(self, budget: Budget | None = None, policy: Policy | None = None) -> None:
        self.state = State(budget, policy)
        self.now = 0.0
        self.log: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        self.seen: list[tuple[Operation, ...]] = []
        self.existing: set[str] = set()
        self.leased: dict[int, tuple[str, ...]] = {}
        self.busy: set[str] = set()
        """Being promoted, copied from, or reset."""
        self.makes: dict[int, Make] = {}
        self.forks: list[Fork] = []
        self.resets: list[str] = []
        self.destroying: list[str] = []
        self.layers: set[str] = set()
        self.waiting: dict[int, LeaseRequest] = {}
        self.answers: dict[int, Any] = {}
        """Deliver or Refuse."""
        self._sandboxes = count(1)
        self._requests = count(1)

    # --- Events -------------------------------------------------------------------------------------

    def tell(self, event: str, *arguments: Any, **named: Any) -> tuple[Operation, ...]:
        """Report an event, then decide. Both are logged."""
        self.log.append((event, arguments, named))
        getattr(self.state, event)(*arguments, **named)
        return self.decide()

    def decide(self) -> tuple[Operation, ...]:
        operations = self._decided()
        for operation in operations:
            self._accept(operation)
        assert self._decided() == (), "a decision leaves nothing undecided"
        invariants.check(self.state)
        return operations

    def _decided(self) -> tuple[Operation, ...]:
        self.log.append(("decide", (self.now,), {}))
        self.seen.append(decide(self.state, self.now))
        return self.seen[-1]

    def request(
        self, wanted: PrefixChain, *, number: int = 1, patience: float = 100.0, lease: float | None = None
    ) -> int:
        identity = next(self._requests)
        asked = LeaseRequest(identity, wanted, self.now + patience, number, lease)
        self.waiting[identity] = asked
        self.tell("arrive", asked, self.now)
        return identity

    def pass_time(self, seconds: float) -> tuple[Operation, ...]:
        self.now += seconds
        return self.decide()

    def startable(self) -> list[Make]:
        return [make for make in self.makes.values() if not set(make.after) & set(self.destroying)]

    def copyable(self) -> list[Fork]:
        return [fork for fork in self.forks if not set(fork.after) & set(self.destroying)]

    def finish(self, make: Make, **learnt: Any) -> tuple[Operation, ...]:
        del self.makes[make.job]
        sandbox = make.origin or self.born()
        self.busy.discard(sandbox)
        kept = range(make.start + 1, make.keep + 1)
        self.layers |= {make.chain.keys[depth] for depth in kept}
        learnt.setdefault("layers", dict.fromkeys(kept, 1000))
        learnt.setdefault("create_seconds", 0.001)
        learnt.setdefault("stage_seconds", [1.0] * (make.depth - make.start))
        return self.tell("made", make.job, sandbox, self.now, JobResult(**learnt))

    def fail(self, make: Make, depth: int | None = None) -> tuple[Operation, ...]:
        del self.makes[make.job]
        if make.origin is not None:
            self.busy.discard(make.origin)
            self.existing.discard(make.origin)
        return self.tell("failed", make.job, JobFailure("no", depth, "make", "broken"), self.now)

    def finish_fork(self, fork: Fork, fails: bool = False) -> None:
        self.forks.remove(fork)
        self.busy.discard(fork.origin)
        for job in fork.jobs:
            if fails:
                self.tell("failed", job, JobFailure("no fork"), self.now)
            else:
                self.tell("made", job, self.born(), self.now, JobResult(create_seconds=0.001))

    def finish_reset(self, sandbox: str, depth: int | None) -> None:
        """Finish a reset at this depth; None if it fails."""
        self.resets.remove(sandbox)
        self.busy.discard(sandbox)
        if depth is None:
            self.tell("died", sandbox, self.now)
        else:
            self.tell("reset_done", sandbox, depth, self.now)

    def finish_destroy(self, sandbox: str) -> None:
        self.destroying.remove(sandbox)
        self.existing.discard(sandbox)
        self.tell("destroyed", sandbox)

    def stocked(self, *wanted: PrefixChain) -> None:
        """Idle sandboxes of these recipes, returned by earlier leases."""
        requests = [self.request(one) for one in wanted]
        self.settle()
        self.returned(*requests)

    def granted(self, wanted: PrefixChain, **more: Any) -> int:
        """A request after all that it caused has ended."""
        request = self.request(wanted, **more)
        self.settle()
        return request

    def returned(self, *requests: int) -> None:
        """Leases that were given back, after all that it caused has ended."""
        self.give_back(*requests)
        self.settle()

    def give_back(self, *requests: int) -> None:
        for request in requests:
            self.leased.pop(request)
            self.tell("returned", request, self.now)

    def born(self) -> str:
        sandbox = f"s{next(self._sandboxes)}"
        self.existing.add(sandbox)
        return sandbox

    # --- Operations ---------------------------------------------------------------------------------

    def _accept(self, operation: Operation) -> None:
        match operation:
            case Make():
                self.makes[operation.job] = operation
                if operation.origin is not None:
                    self._occupy(operation.origin)
                elif operation.start:
                    assert operation.chain.keys[operation.start] in self.layers
            case Fork():
                self.forks.append(operation)
                self._occupy(operation.origin)
            case Reset():
                self.resets.append(operation.sandbox)
                self._occupy(operation.sandbox)
            case Destroy():
                assert operation.sandbox in self.existing, "only what exists is destroyed"
                assert operation.sandbox not in self.destroying, "and once"
                assert operation.reason == "died" or operation.sandbox not in self.in_use()
                self.destroying.append(operation.sandbox)
            case Deliver():
                self._answer(operation)
                given = tuple(member.sandbox for member in operation.members)
                assert len(set(given)) == len(given) == self.waiting[operation.request].count
                assert not set(given) & self.in_use(), "never two leases on one sandbox"
                assert set(given) <= self.existing - set(self.destroying)
                self.leased[operation.request] = given
            case Refuse():
                self._answer(operation)
            case Expire():
                del self.leased[operation.request]
            case Prioritize():
                assert self.makes[operation.job].background
            case Forget():
                self.layers.remove(operation.key)
                starts = {make.chain.keys[make.start] for make in self.makes.values() if not make.origin}
                assert operation.key not in starts, "no layer goes that a sandbox is being made on"

    def in_use(self) -> set[str]:
        return self.busy.union(*self.leased.values())

    def _occupy(self, sandbox: str) -> None:
        assert sandbox in self.existing
        assert sandbox not in self.in_use(), f"{sandbox} is in use"
        self.busy.add(sandbox)

    def _answer(self, answer: Deliver | Refuse) -> None:
        assert answer.request in self.waiting
        assert answer.request not in self.answers, "one answer"
        self.answers[answer.request] = answer

    # --- Queries ------------------------------------------------------------------------------------

    def open(self) -> list[int]:
        return [request for request in self.waiting if request not in self.answers]

    def idle(self, wanted: PrefixChain) -> int:
        """The number of idle sandboxes in exactly this state."""
        prefix = self.state.stock.prefix(wanted.key)
        return 0 if prefix is None else len(prefix.idle)

    def check(self) -> None:
        budget = self.state.budget
        begun = sum(make.origin is None for make in self.startable())
        begun += sum(len(fork.jobs) for fork in self.copyable())
        assert len(self.existing) + begun <= budget.sandboxes, "never over budget"
        assert self.state.stock.memory <= budget.memory or not self.state.stock.idle
        assert self.state.stock.disk <= budget.disk or not self.layers
        for request in self.open():
            assert self.waiting[request].deadline > self.now, "answered by its deadline"
        idle = self.existing - self.in_use() - set(self.destroying)
        ready = {instance.id for claim in self.state.claims.values() for instance, _, _ in claim.ready}
        ready |= {job.origin.id for job in self.state.jobs.values() if job.origin is not None}
        assert self.state.stock.idle == len(idle - ready), "what nobody has is stock"
        assert self.state.leased == sum(map(len, self.leased.values()))

    def settle(self) -> None:
        """Let all work in progress succeed."""
        while self.makes or self.forks or self.resets or self.destroying:
            while self.destroying:
                self.finish_destroy(self.destroying[0])
            for make in self.startable()[:1]:
                self.finish(make)
            for fork in self.copyable()[:1]:
                self.finish_fork(fork)
            for sandbox in self.resets[:1]:
                self.finish_reset(sandbox, self.state.instances[sandbox].depth)

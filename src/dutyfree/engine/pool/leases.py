"""Leases, and the requests that wait for them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import TypedDict

import anyio

from dutyfree.contract import Sandbox
from dutyfree.contract.errors import CreateError, LeaseEnded, PoolError, UsageError
from dutyfree.contract.served import Served
from dutyfree.engine.host import sandbox_labels
from dutyfree.engine.pool.scheduler.values import Deliver, LeaseRequest

LEASE_SECONDS = 3600.0
"""After how many seconds a lease ends by default."""
DEADLINE = 60.0
"""Within how many seconds a request is answered by default."""


class Terms(TypedDict, total=False):
    """The keyword arguments of a request."""

    deadline: float
    """Seconds within which the request must be answered. By default 60; 0 takes only what is idle now."""
    lease_seconds: float | None
    """Seconds after which the lease ends, unless it is kept alive. By default an hour; None for never."""
    labels: Mapping[str, str] | None
    idempotency_key: str | None


def check_terms(terms: Terms) -> None:
    """Raises UsageError for invalid terms. The scheduler must not see them: a NaN would block its queue."""
    if unknown := terms.keys() - Terms.__annotations__.keys():
        raise UsageError(
            f"a request has no argument {', '.join(sorted(unknown))}",
            remedy=f"its arguments are {', '.join(Terms.__annotations__)}",
        )
    deadline, lease_seconds = terms.get("deadline", DEADLINE), terms.get("lease_seconds", LEASE_SECONDS)
    if not isinstance(deadline, int | float) or not deadline >= 0:  # not deadline < 0: NaN must fail too
        raise UsageError(f"deadline must be a number of seconds ≥ 0, not {deadline!r}")
    if lease_seconds is not None and (not isinstance(lease_seconds, int | float) or not lease_seconds > 0):
        raise UsageError(
            f"lease_seconds must be a number of seconds > 0, not {lease_seconds!r}",
            remedy="give None for a lease without an end",
        )
    if not isinstance(key := terms.get("idempotency_key"), str | None):
        raise UsageError(f"an idempotency key must be a str, not {key!r}")
    sandbox_labels.check(terms.get("labels"))


class Lease:
    """The sandboxes of one request, until it is released or expires. Then the pool takes them back."""

    def __init__(self, identity: int, labels: Mapping[str, str]) -> None:
        self.id = identity
        self.labels = labels
        self.sandboxes: tuple[Sandbox, ...] = ()
        self.served: tuple[Served, ...] = ()
        self.until: float | None = None
        self.over = False

    def __repr__(self) -> str:
        state = "over" if self.over else "given" if self.sandboxes else "waiting"
        return f"<Lease {self.id}: {state}, {', '.join(one.id for one in self.sandboxes) or 'no sandbox'}>"

    @property
    def sandbox(self) -> Sandbox:
        return self.sandboxes[0]


class Waiter:
    """A request, from its arrival to the end of its lease. Callers with one idempotency key share it."""

    def __init__(self, request: LeaseRequest, asked: float, key: str | None) -> None:
        self.request = request
        self.asked = asked
        self.key = key
        self.callers = 0
        self.answered = anyio.Event()
        self.lease = Lease(request.id, request.labels)
        self.error: PoolError | CreateError | None = None

    def give(self, given: Deliver, sandboxes: Sequence[Sandbox], now: float) -> None:
        """Answer with these sandboxes, in the order of the delivery's members."""
        chain, lease = self.request.chain, self.lease
        lease.sandboxes = tuple(sandboxes)
        lease.until = given.until
        lease.served = tuple(
            Served(
                kind=member.kind,
                stage=chain.kinds[member.start] if member.start or member.kind == "promoted" else "none",
                seconds=now - self.asked,
                cold_seconds=given.cold_seconds,
                waited=given.waited,
                sandbox=sandbox.id,
                recipe=chain.recipe_key,
            )
            for member, sandbox in zip(given.members, sandboxes, strict=True)
        )
        self.answered.set()


class Waiters:
    """All requests that wait or are leased, by number and idempotency key; and the keys of ended leases."""

    def __init__(self, remembered: float) -> None:
        self._remembered = remembered
        self._by_request: dict[int, Waiter] = {}
        self._by_key: dict[str, Waiter] = {}
        self._ended: OrderedDict[str, float] = OrderedDict()

    def add(self, waiter: Waiter) -> None:
        self._by_request[waiter.request.id] = waiter
        if waiter.key is not None:
            self._by_key[waiter.key] = waiter

    def by_number(self, request: int) -> Waiter | None:
        return self._by_request.get(request)

    def by_key(self, key: str) -> Waiter | None:
        return self._by_key.get(key)

    def all(self) -> list[Waiter]:
        return list(self._by_request.values())

    def leases(self) -> tuple[Lease, ...]:
        """All leases that were granted and have not ended."""
        every = (waiter.lease for waiter in self._by_request.values())
        return tuple(lease for lease in every if lease.sandboxes and not lease.over)

    def matching(self, key: str | None, recipe: str, size: int, now: float) -> Waiter | None:
        """The earlier request with this key. Raises LeaseEnded, and UsageError if it was another request."""
        if key is None:
            return None
        if key in self._ended and now - self._ended[key] < self._remembered:
            raise LeaseEnded(f"the lease {key!r} has ended", remedy="use a new key for a new lease")
        waiter = self._by_key.get(key)
        if waiter is not None and (waiter.request.chain.recipe_key, waiter.request.count) != (recipe, size):
            raise UsageError(
                f"the idempotency key {key!r} belongs to a request for another recipe or size",
                remedy="use a new key",
            )
        return waiter

    def end(self, waiter: Waiter, now: float) -> None:
        """End its lease, or its wait. Its key stays known as ended for a while."""
        waiter.lease.over = True
        if self.drop(waiter) and waiter.key is not None:
            self.mark_ended(waiter.key, now)

    def drop(self, waiter: Waiter) -> bool:
        """Drop a request that was refused: its key may be used again. False if it was dropped before."""
        if waiter.key is not None:
            self._by_key.pop(waiter.key, None)
        return self._by_request.pop(waiter.request.id, None) is not None

    def mark_ended(self, key: str, now: float) -> None:
        self._ended[key] = now
        self._ended.move_to_end(key)
        while now - next(iter(self._ended.values())) >= self._remembered:
            self._ended.popitem(last=False)

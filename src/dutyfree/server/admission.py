"""Admission: how many sandboxes each tenant may have, how fast it may ask for them, and who is next.

``Queue`` decides: it is deterministic, and has no clock and no I/O. ``Admission`` lets requests wait for its
decisions.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec

from dutyfree.contract.errors import Exhausted, LimitError


class TenantLimits(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The most that a tenant may have at once, and may ask for; None for no limit."""

    sandboxes: int | None = None
    memory: int | None = None
    """Bytes, by the limits of its sandboxes."""
    cpus: float | None = None
    creates_per_second: float | None = None


class Demand(msgspec.Struct, frozen=True):
    """What a request needs."""

    sandboxes: int
    memory: int = 0
    cpus: float = 0.0
    unlimited: tuple[str, ...] = ()
    """The limits that the request leaves open, by name. They are counted all the same."""

    def __add__(self, other: Demand) -> Demand:
        return Demand(self.sandboxes + other.sandboxes, self.memory + other.memory, self.cpus + other.cpus)

    def __sub__(self, other: Demand) -> Demand:
        return Demand(self.sandboxes - other.sandboxes, self.memory - other.memory, self.cpus - other.cpus)

    def exceeds(self, limits: TenantLimits) -> str:
        """The first limit that this is above, by name; "" for none."""
        for name in ("sandboxes", "memory", "cpus"):
            most = getattr(limits, name)
            if most is not None and getattr(self, name) > most + 1e-9:
                return name
        return ""


NOTHING = Demand(0)
_UNKNOWN_WAIT = 5.0
_LONGEST_WAIT = 60.0


class Queue:
    """Who has what, and who waits. A number stands for a request."""

    def __init__(self, most: int | None = None) -> None:
        """``most``: sandboxes of all tenants together."""
        self._most = most
        self.used: dict[str, Demand] = {}
        self._waiting: dict[str, deque[tuple[int, Demand]]] = {}

    @property
    def total(self) -> int:
        return sum(demand.sandboxes for demand in self.used.values())

    def waiting(self, tenant: str) -> int:
        return len(self._waiting.get(tenant, ()))

    def arrive(self, tenant: str, request: int, demand: Demand) -> None:
        self._waiting.setdefault(tenant, deque()).append((request, demand))

    def withdraw(self, tenant: str, request: int) -> None:
        """Forget a request that waits."""
        left = deque(one for one in self._waiting.get(tenant, ()) if one[0] != request)
        if left:
            self._waiting[tenant] = left
        else:
            self._waiting.pop(tenant, None)

    def readmit(self, tenant: str, demand: Demand) -> None:
        """Count what a tenant has already, within its limits or not."""
        self.used[tenant] = self.used.get(tenant, NOTHING) + demand

    def release(self, tenant: str, demand: Demand) -> None:
        left = self.used[tenant] - demand
        if left.sandboxes > 0:
            self.used[tenant] = left
        else:
            del self.used[tenant]

    def decide(self, limits_of: Callable[[str], TenantLimits]) -> list[int]:
        """Grant what fits: each time to the tenant with the fewest sandboxes, in the order of its requests.

        A tenant at its own limit waits for itself alone. A request that does not fit into what is left of the
        server lets no other tenant pass, so that a large group is not overtaken for ever.
        """
        granted: list[int] = []
        while candidates := self._candidates(limits_of):
            tenant = min(candidates, key=lambda name: (self.used.get(name, NOTHING).sandboxes, name))
            request, demand = self._waiting[tenant][0]
            if self._most is not None and self.total + demand.sandboxes > self._most:
                break
            self.used[tenant] = self.used.get(tenant, NOTHING) + demand
            self.withdraw(tenant, request)
            granted.append(request)
        return granted

    def _candidates(self, limits_of: Callable[[str], TenantLimits]) -> list[str]:
        """The tenants whose next request their own limits allow."""
        return [
            tenant
            for tenant, waiting in self._waiting.items()
            if not (self.used.get(tenant, NOTHING) + waiting[0][1]).exceeds(limits_of(tenant))
        ]


class Bucket:
    """Limits how often a tenant may ask: a token bucket that holds one second."""

    def __init__(self) -> None:
        self._level = 0.0
        self._at = 0.0

    def delay(self, rate: float, now: float, count: int) -> float:
        """0 if ``count`` creations may begin now; otherwise the seconds to wait, and nothing is counted."""
        size = max(1.0, rate)
        self._level = max(0.0, self._level - (now - self._at) * rate)
        self._at = now
        if self._level > 0 and self._level + count > size:
            return (self._level + count - size) / rate
        self._level += count
        return 0.0


class Admission:
    """Lets requests in, or tells them when to come back."""

    def __init__(self, limits_of: Callable[[str], TenantLimits], most: int | None = None) -> None:
        self._limits_of = limits_of
        self._queue = Queue(most)
        self._buckets: dict[str, Bucket] = {}
        self._waiting: dict[int, asyncio.Future[None]] = {}
        self._given_back: dict[str, deque[float]] = {}
        self._last = 0

    async def admit(self, tenant: str, demand: Demand, patience: float) -> Callable[[], None]:
        """Wait until the tenant may have these sandboxes. Returns the function that gives them back.

        Raises LimitError for more than the tenant may have at all. Raises Exhausted: at once for creations
        that come too fast; otherwise after ``patience`` seconds. Its ``numbers`` have the counts, and
        ``retry_after`` in seconds.
        """
        limits, loop = self._limits_of(tenant), asyncio.get_running_loop()
        if (limit := demand.exceeds(limits)) != "":
            raise _too_much(tenant, demand, limits, limit)
        if limits.creates_per_second is not None:
            bucket = self._buckets.setdefault(tenant, Bucket())
            delay = bucket.delay(limits.creates_per_second, loop.time(), demand.sandboxes)
            if delay > 0:
                numbers = self._numbers(tenant, delay)
                rate = f"{limits.creates_per_second:g} per second"
                what = f"{tenant} creates sandboxes too fast: its limit is {rate}"
                raise _exhausted(what, numbers, "create them more slowly")
        self._last += 1
        number = self._last
        granted = self._waiting[number] = loop.create_future()
        self._queue.arrive(tenant, number, demand)
        self._advance()
        try:
            await asyncio.wait_for(asyncio.shield(granted), patience)
        except BaseException as error:
            if granted.done():  # granted at the same moment
                self._give_back(tenant, demand)
            else:
                self._waiting.pop(number, None)
                self._queue.withdraw(tenant, number)
                self._advance()  # it may have been in the way of others
            if isinstance(error, TimeoutError):
                what = f"no room for {_count(demand.sandboxes)} within {patience:.15g} s"
                raise self.exhausted(tenant, what, "end some sandboxes") from None
            raise
        return _once(lambda: self._give_back(tenant, demand))

    def exhausted(self, tenant: str, what: str, remedy: str) -> Exhausted:
        """The error of a tenant who has waited in vain, with its counts."""
        used, limits = self._queue.used.get(tenant, NOTHING), self._limits_of(tenant)
        counts = [_of_limit(_count(used.sandboxes), limits.sandboxes, "{:d}")]
        if limits.memory is not None:
            counts.append(_of_limit(f"{_size(used.memory)} of memory", _size(limits.memory), "{}"))
        if limits.cpus is not None:
            counts.append(_of_limit(f"{used.cpus:g} CPUs", limits.cpus, "{:g}"))
        numbers = self._numbers(tenant, self._estimate(tenant))
        waiting = numbers["waiting"]
        queue = f"{waiting} more requests wait" if waiting != 1 else "1 more request waits"
        return _exhausted(f"{what}: {tenant} has {', '.join(counts)}; {queue}", numbers, remedy)

    def _estimate(self, tenant: str) -> float:
        """Seconds after which to ask again, from how often sandboxes were given back lately."""
        times = self._given_back.get(tenant, deque())
        if len(times) < 2:
            return _UNKNOWN_WAIT
        interval = (times[-1] - times[0]) / (len(times) - 1)
        return min(max(interval * (self._queue.waiting(tenant) + 1), 1.0), _LONGEST_WAIT)

    def readmit(self, tenant: str, demand: Demand) -> Callable[[], None]:
        """Count a sandbox that a former server has admitted. Returns the function that gives it back."""
        self._queue.readmit(tenant, demand)
        return _once(lambda: self._give_back(tenant, demand))

    def _give_back(self, tenant: str, demand: Demand) -> None:
        times = self._given_back.setdefault(tenant, deque(maxlen=16))
        times.append(asyncio.get_running_loop().time())
        self._queue.release(tenant, demand)
        self._advance()

    def _advance(self) -> None:
        for number in self._queue.decide(self._limits_of):
            granted = self._waiting.pop(number)
            if not granted.done():
                granted.set_result(None)

    def _numbers(self, tenant: str, retry_after: float | None) -> dict[str, object]:
        """What a tenant may know: its own counts."""
        used = self._queue.used.get(tenant, NOTHING)
        return {
            "sandboxes": used.sandboxes,
            "waiting": self._queue.waiting(tenant),
            **({} if retry_after is None else {"retry_after": retry_after}),
        }


def _count(sandboxes: int) -> str:
    return "1 sandbox" if sandboxes == 1 else f"{sandboxes} sandboxes"


def _of_limit(has: str, most: object, form: str) -> str:
    return has if most is None else f"{has} (its limit is {form.format(most)})"


def _size(count: float) -> str:
    return f"{count / (1 << 30):.2f} GiB"


def _too_much(tenant: str, demand: Demand, limits: TenantLimits, limit: str) -> LimitError:
    """The error for a request that ``limits`` never allow. ``limit`` names the one that it exceeds."""
    needed, most = getattr(demand, limit), getattr(limits, limit)
    if limit == "sandboxes":
        message = f"a request for {_count(needed)}: {tenant} may have {most} at most"
        return LimitError(message, remedy="ask for fewer, or ask the operator for more")
    name, shown = ("memory", _size) if limit == "memory" else ("CPUs", "{:g}".format)
    message = f"a request for {shown(needed)} of {name}: {tenant} may have {shown(most)} at most"
    if limit in demand.unlimited:
        message += f"; a sandbox without a limit of {limit} counts as {shown(needed / demand.sandboxes)}"
        remedy = f"give each sandbox a limit: {limit} of at most {_argument(limit, most / demand.sandboxes)}"
        return LimitError(message, remedy=f"{remedy}; or ask the operator for more")
    return LimitError(message, remedy="ask for less, or ask the operator for more")


def _argument(limit: str, most: float) -> str:
    return f"{int(most)} bytes ({_size(most)})" if limit == "memory" else f"{most:g}"


def _exhausted(message: str, numbers: dict[str, object], remedy: str) -> Exhausted:
    return Exhausted(message, remedy=f"{remedy}, wait, or ask the operator for more", numbers=numbers)


def _once(function: Callable[[], None]) -> Callable[[], None]:
    done = False

    def call() -> None:
        nonlocal done
        if not done:
            done = True
            function()

    return call


@contextmanager
def given_back(release: Callable[[], None]) -> Iterator[None]:
    """Give back what was admitted, at the end of a block."""
    try:
        yield
    finally:
        release()

"""Overload: refuse new calls while the machine cannot keep up, so that those that were begun end in time.

A burst is no overload: a batch of rollouts may begin a thousand commands at once, and they wait a moment. But
if for a while most calls were late, there is a standing queue (the idea of CoDel). A queue that grows all the
while is one sooner: calls arrive faster than they end, so each waits longer than the one before. One that
gets shorter is a burst that is worked off.

From then on only as many calls run at once as end within ``DELAY`` (Little's law: the rate at which they end,
times the delay), and the others are refused at once. Each tenant may have its share of that, so a greedy one
is refused first. It ends when for a while no call had to be refused.

What counts as late is the time that a call waits, or takes beyond its own work. Long commands do not add to
it, and count as running only at the beginning.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import Counter, deque
from collections.abc import AsyncIterator
from time import perf_counter

from dutyfree.contract import Observation
from dutyfree.contract.errors import Overloaded

LATE = 0.05
"""Seconds beyond its own work from which on a call is late."""
STANDING = 0.3
"""Seconds for which most calls must have been late, and the queue not become shorter."""
GROWING_LATE = 0.02
GROWING = 0.06
"""The same two for a queue that has grown in that time."""
WAITED = 0.1
"""Seconds for which most calls must have waited until they were looked at."""
MOST = 0.7
"""The share of calls that are most of them."""
DELAY = 0.005
"""Seconds that calls may take while others are refused."""
ALWAYS = 32
"""Calls that may run at once in any case."""
FEW = 128
"""Calls that are no burst: a queue of so few stands, even if it becomes shorter for a moment."""
BURST = 1024
"""Calls that may always begin together: the queue of a batch of rollouts grows for a moment, too."""
QUIET = 1.0
"""Seconds without a refusal after which all calls are taken again."""
TICK = 0.02
"""Seconds between two measurements of the event loop's own delay."""
GRACE = 0.005
"""Seconds by which a measurement may be late without a meaning."""

_BUCKET = 0.1
_BUCKETS = 10
"""For the rate at which calls end."""
_RUNNING = 2
"""Buckets in which a call counts as running: for at most 0.2 s."""
_RECENT = 32
"""Calls that are looked at to say whether most are late."""

NEVER = frozenset(("release", "keep_alive", "process_kill", "process_signal", "forget", "sandboxes"))
"""Calls that are never refused: they end something, or keep it."""


class _Window:
    """Since when most calls are late by more than a limit."""

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._recent: deque[bool] = deque(maxlen=_RECENT)
        self.since: float | None = None

    def note(self, delay: float, now: float) -> float | None:
        """A call was late by so much. Returns since when most are, if they are."""
        self._recent.append(delay >= self._limit)
        if sum(self._recent) < MOST * len(self._recent):
            self.since = None
        elif self.since is None:
            self.since = now
        return self.since

    def forget(self) -> None:
        self._recent.clear()
        self.since = None


class _Lateness(_Window):
    """The same, while not fewer calls are under way than at the beginning."""

    count = 0
    """How many were under way then."""

    def note_among(self, count: int, delay: float, now: float) -> float:
        """A call was late by so much, and ``count`` are under way. Returns for how many seconds it is so."""
        since = self.note(delay, now)
        if since is None:
            return 0.0
        if since == now or FEW < count < self.count:
            self.since, self.count = now, count
            return 0.0
        return now - since


class _Waits(_Window):
    """The same for calls that wait until they are looked at."""

    def stand(self, seconds: float, now: float) -> bool:
        """A call waited so long. Returns whether a queue stands: it came when others waited already."""
        since = self.note(seconds, now)
        return since is not None and now - since >= WAITED and now - seconds >= since


class OverloadControl:
    """Decides which calls begin. It has no clock: callers say what time it is."""

    def __init__(self) -> None:
        self._late = _Lateness(LATE)
        self._growing = _Lateness(GROWING_LATE)
        self._waits = _Waits(LATE)
        self._refused_at: float | None = None
        """When a call was last refused, or the control began; None while all calls are taken."""
        self._number = 0
        self._running: deque[Counter[str]] = deque([Counter() for _ in range(_RUNNING)], _RUNNING)
        """Calls of each tenant that have not ended, by when they began: the latest bucket is the last."""
        self.waiting = 0
        """Messages that have arrived and have not been looked at. Most are calls."""
        self._count = 0
        """All that run. The sums are kept, because a refusal must cost little: there may be many."""
        self._of_tenant: Counter[str] = Counter()
        """Those of each tenant that has any."""
        self._ended: deque[int] = deque([0] * _BUCKETS, _BUCKETS)
        self._rate = 0.0
        """Calls that ended per second."""

    @property
    def refusing(self) -> bool:
        """Whether calls may be refused now."""
        return self._refused_at is not None

    def note_wait(self, seconds: float, now: float) -> None:
        """A call waited so long until it was looked at."""
        if self._waits.stand(seconds, now) and self._refused_at is None:
            self._refused_at = now

    def note(self, delay: float, now: float) -> None:
        """A call, or the event loop, was late by so many seconds."""
        count = self._count + self.waiting
        stands = self._late.note_among(count, delay, now) >= STANDING
        grows = self._growing.note_among(count, delay, now) >= GROWING
        if self._refused_at is None and (stands or (grows and count > max(BURST, self._growing.count))):
            self._refused_at = now

    def admit(self, tenant: str, now: float, waited: float = 0.0) -> bool:
        """Whether a call of the tenant may begin that has waited so long. If so, it counts as running."""
        self._advance(now)
        if self._refused_at is not None:
            if (waited >= LATE and self._of_tenant[tenant]) or self._is_full(tenant):
                self._refused_at = now
                return False
            if now - self._refused_at > QUIET:
                self._refused_at = None
                for lateness in (self._late, self._growing, self._waits):
                    lateness.forget()
        self.take(tenant, now)
        return True

    def take(self, tenant: str, now: float) -> None:
        """A call of the tenant begins. It counts as running, until ``end``."""
        self._advance(now)
        self._running[-1][tenant] += 1
        self._count += 1
        self._of_tenant[tenant] += 1

    def _is_full(self, tenant: str) -> bool:
        """Whether all that may run at once does, and the tenant has its share of it."""
        most, tenants = self.most, self._of_tenant
        return self._count >= most and tenants[tenant] >= most / (len(tenants) + (tenant not in tenants))

    def end(self, tenant: str, begun: float, now: float) -> None:
        """A call of the tenant has ended that began then, or was admitted a moment before."""
        self._advance(now)
        self._ended[-1] += 1
        for age in range(max(0, self._number - int(begun / _BUCKET)), _RUNNING):
            if self._running[-1 - age][tenant] > 0:
                self._running[-1 - age][tenant] -= 1
                self._forget(tenant, 1)
                return

    def _forget(self, tenant: str, count: int) -> None:
        """So many calls of the tenant run no more, or count no more."""
        self._count -= count
        self._of_tenant[tenant] -= count
        if not self._of_tenant[tenant]:
            del self._of_tenant[tenant]

    @property
    def most(self) -> int:
        """How many calls may run at once while others are refused."""
        return max(ALWAYS, int(self._rate * DELAY))

    def _advance(self, now: float) -> None:
        number = int(now / _BUCKET)
        if number == self._number:
            return
        for _ in range(min(number - self._number, _BUCKETS)):
            for tenant, count in self._running[0].items():
                if count:
                    self._forget(tenant, count)
            self._running.append(Counter())
            self._ended.append(0)
        self._number = number
        self._rate = sum(self._ended) / (_BUCKETS * _BUCKET)


class Overload:
    """The control of one server, with its clock."""

    def __init__(self) -> None:
        self._control = OverloadControl()
        self.refused = 0
        """Calls that were refused since the start."""
        self._tick_due = math.inf

    @property
    def loop_is_late(self) -> bool:
        """Whether the event loop should have begun a new turn by now."""
        return perf_counter() > self._tick_due + GRACE

    @property
    def refusing(self) -> bool:
        """Whether calls may be refused now."""
        return self._control.refusing

    def admits(self, tenant: str, call: str, since: float | None = None) -> bool:
        """Whether the call may begin that came at ``since``; ``ended`` must follow then."""
        now = perf_counter()
        waited = 0.0 if since is None else now - since
        self._control.note_wait(waited, now)
        if call in NEVER:
            self._control.take(tenant, now)
        elif not self._control.admit(tenant, now, waited):
            self.refused += 1
            return False
        return True

    def check(self, tenant: str, call: str) -> None:
        """Raises Overloaded unless the call may begin."""
        if not self.admits(tenant, call):
            raise self.error()

    @staticmethod
    def error() -> Overloaded:
        """What a caller is told whose call may not begin."""
        return Overloaded(
            "the machine has more calls to carry out than it can: they would wait too long",
            remedy="try again later, with fewer calls at once; or run fewer sandboxes on this machine",
            retry_after=1.0,
        )

    def ended(self, tenant: str, begun: float, result: object, waited: float = 0.0) -> None:
        """A call has ended that began then, as ``time.perf_counter`` and the event loop count."""
        now = perf_counter()
        self._control.end(tenant, begun, now)
        if isinstance(result, Observation):
            late = sum([span.seconds for span in result.spans if span.name != "run"])
            self._control.note(waited + late, now)

    def waits(self, more: int) -> None:
        """So many more messages wait to be looked at, or fewer."""
        self._control.waiting += more

    @contextlib.asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """Also look at how late the event loop itself is."""
        ticking = asyncio.create_task(self._tick())
        try:
            yield
        finally:
            ticking.cancel()
            self._tick_due = math.inf

    async def _tick(self) -> None:
        while True:
            self._tick_due = perf_counter() + TICK
            await asyncio.sleep(TICK)
            now = perf_counter()
            self._control.note(max(0.0, now - self._tick_due), now)

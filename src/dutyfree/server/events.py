"""What happens on the server, for those who listen, and for a while for those who come back.

If nobody listens, an action costs a few microseconds: an event (``wire.events``) is a small struct in a ring
of fixed length, and is encoded when it is read. Each tenant has a ring and numbers of its own, so that the
numbers and the losses of one tenant do not tell what others do. Those who may see everything read one more
ring, which has all events.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from time import perf_counter
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from dutyfree.contract import Observation
from dutyfree.contract.errors import DutyfreeError, SandboxClosed, verdict
from dutyfree.engine.pool.scheduler.ledger import Ledger
from dutyfree.server.sandboxes import Held, Sandboxes
from dutyfree.wire.errors import WireError, describe
from dutyfree.wire.events import (
    Action,
    Began,
    Created,
    Failure,
    Kept,
    Lease,
    Outcome,
    Paused,
    Pool,
    Released,
    ServedCount,
)

if TYPE_CHECKING:
    from dutyfree.engine.pool.pool import Pool as SandboxPool
    from dutyfree.server.handlers import Context

T = TypeVar("T")

KEPT = 4096
"""Events of a ring."""
PACE = 0.05
"""Seconds in which events are collected before readers wake up."""
TICK = 1.0
"""Seconds between looks at what no call tells: leases, pauses, and how long calls have been running."""
ENDING = 10.0
"""A lease with fewer seconds left is about to end."""
LISTENERS = 32
"""Streams that a tenant may read at once."""

SHORT = 160
"""Characters of a label."""
_MESSAGE = 500
_LABELS = 16
_SPANS = 32
_LEASES = 64
"""Sandboxes in one event about leases."""

_CANCELLED = WireError(
    "cancelled", "the client cancelled the call, went away, or ended the sandbox", "program", False
)


class Ring:
    """The last events, and how many there have been."""

    def __init__(self) -> None:
        self._events: deque[Kept] = deque(maxlen=KEPT)
        self.last = 0
        self.calls = 0

    def add(self, event: Kept) -> None:
        self._events.append(event)
        self.last += 1

    def after(self, number: int) -> tuple[int, list[Kept]]:
        """How many of the events after this number are gone, and the others."""
        first = self.last - len(self._events)
        return max(0, first - number), list(islice(self._events, max(0, number - first), None))


class Running:
    """A call that runs."""

    __slots__ = ("announced", "call", "held", "label", "number", "start", "tenant")

    def __init__(self, number: int, call: str, label: str, tenant: str, held: Held | None) -> None:
        self.number = number
        self.call = call
        self.label = label
        self.tenant = tenant
        self.held = held
        self.start = perf_counter()
        self.announced = False

    @property
    def sandbox(self) -> str:
        return "" if self.held is None else self.held.id


class Events:
    """The events of one server."""

    def __init__(self, sandboxes: Sandboxes, pool: Callable[[], SandboxPool | None]) -> None:
        self.epoch = secrets.token_hex(4)
        """Begins the ids of events, so that those of an earlier server are not taken for ours."""
        self.started = time.time()
        self.sandboxes = sandboxes
        self.closed = False
        self.changed = asyncio.Event()
        """Set, and replaced, when there is something to read."""
        self._pool = pool
        self._all = Ring()
        self._rings: dict[str, Ring] = {}
        self._ledger = Ledger()
        self._ledgers: dict[str, Ledger] = {}
        self._running: dict[tuple[str, int], Running] = {}
        self._listeners: Counter[str] = Counter()
        self._wake_planned = False
        self._ticking: asyncio.TimerHandle | None = None
        self._extended: dict[str, Held] = {}
        self._paused: set[str] = set()
        self._ending: dict[str, float] = {}
        others = sandboxes.on_change

        def changed(event: str, held: Held) -> None:
            others(event, held)
            self._sandbox_changed(event, held)

        sandboxes.on_change = changed

    # --- What happens -------------------------------------------------------------------------------------

    def publish(self, event: Kept) -> None:
        self._all.add(event)
        self.ring(event.tenant).add(event)
        if self._listeners and not self._wake_planned:
            self._wake_planned = True
            asyncio.get_running_loop().call_later(PACE, self._wake)

    def begin(self, call: str, label: str, tenant: str, held: Held | None) -> Running:
        ring = self.ring(tenant)
        ring.calls += 1  # not counted over all tenants, who would learn from it how many calls others make
        running = self._running[tenant, ring.calls] = Running(ring.calls, call, label, tenant, held)
        return running

    def held(self, context: Context) -> Held | None:
        """The sandbox that a call names; None if its tenant has none of this id."""
        held = self.sandboxes.find(context.sandbox_id)
        return held if held is not None and held.tenant == context.tenant else None

    def forget(self, running: Running) -> None:
        """A call has returned that needs no event."""
        del self._running[running.tenant, running.number]

    def end(self, running: Running, result: object, outcome: Outcome) -> None:
        """A call has returned."""
        seconds = perf_counter() - running.start
        self.forget(running)
        seen = result if isinstance(result, Observation) else None
        self.publish(
            Action(
                at=time.time(),
                tenant=running.tenant,
                sandbox=running.sandbox,
                call=running.call,
                label=running.label,
                seconds=seconds,
                outcome=outcome,
                exit_code=None if seen is None else seen.exit_code,
                signal=None if seen is None else seen.signal,
                oom=seen is not None and seen.oom,
                spans=() if seen is None else seen.spans,
                number=running.number,
            )
        )

    def fail(self, running: Running, error: BaseException) -> None:
        """A call has raised an error, or was cancelled."""
        seconds = perf_counter() - running.start
        self.forget(running)
        held = running.held
        over = held is not None and held.released and isinstance(error, SandboxClosed)
        cancelled = over or not isinstance(error, Exception)
        if cancelled and held is None:
            return
        outcome: Outcome = "cancelled" if cancelled else verdict(error)
        self.publish(
            Failure(
                at=time.time(),
                tenant=running.tenant,
                sandbox=running.sandbox,
                call=running.call,
                label=running.label,
                seconds=seconds,
                outcome=outcome,
                error=_CANCELLED if cancelled else _shortened(error),
                number=running.number,
            )
        )

    def _sandbox_changed(self, event: str, held: Held) -> None:
        if event == "created":
            if (served := held.sandbox.served) is not None:
                self._ledger.record(served)
                self._ledgers.setdefault(held.tenant, Ledger()).record(served)
            self.publish(described(held))
        elif event == "released":
            self._ending.pop(held.id, None)
            self._paused.discard(held.id)
            self._extended.pop(held.id, None)
            self.publish(Released(at=time.time(), tenant=held.tenant, sandbox=held.id))
        elif event == "expired":
            self._lease("expired", [held])
        elif event == "extended":  # some clients extend all their leases at once, others one at each call
            if not self._extended:
                asyncio.get_running_loop().call_later(TICK, self._flush_extended)
            self._extended[held.id] = held

    def _flush_extended(self) -> None:
        extended, self._extended = self._extended, {}
        self._lease("extended", list(extended.values()))

    def _lease(self, change: Any, held: list[Held]) -> None:
        by_tenant: dict[str, list[Held]] = {}
        for one in held:
            by_tenant.setdefault(one.tenant, []).append(one)
        for tenant, own in by_tenant.items():
            for at in range(0, len(own), _LEASES):
                sandboxes = {one.id: one.expires for one in own[at : at + _LEASES]}
                self.publish(Lease(at=time.time(), tenant=tenant, change=change, sandboxes=sandboxes))

    # --- For readers --------------------------------------------------------------------------------------

    def ring(self, tenant: str | None) -> Ring:
        """The events of a tenant; None for all."""
        if tenant is None:
            return self._all
        ring = self._rings.get(tenant)
        if ring is None:
            ring = self._rings[tenant] = Ring()
        return ring

    @contextmanager
    def listening(self, name: str) -> Iterator[None]:
        """While it lasts, events wake readers, and leases and pauses are looked at."""
        self._listeners[name] += 1
        if self._ticking is None:
            self._tick()
        try:
            yield
        finally:
            self._listeners[name] -= 1
            self._listeners += Counter()  # without those at 0
            if not self._listeners and self._ticking is not None:
                self._ticking.cancel()
                self._ticking = None

    @property
    def ticks(self) -> bool:
        """Whether it looks at leases, pauses and long calls, once a second."""
        return self._ticking is not None

    def crowded(self, name: str) -> bool:
        return self._listeners[name] >= LISTENERS

    def close(self) -> None:
        """End all streams, so that the server can end."""
        self.closed = True
        self._wake()

    def _wake(self) -> None:
        self._wake_planned = False
        changed, self.changed = self.changed, asyncio.Event()
        changed.set()

    def _tick(self) -> None:
        loop = asyncio.get_running_loop()
        self._ticking = loop.call_later(TICK, self._tick)
        soon, ending = loop.time() + ENDING, []
        for held in self.sandboxes.all():
            if held.until < soon and self._ending.get(held.id) != held.until:
                self._ending[held.id] = held.until
                ending.append(held)
            if held.sandbox.paused != (held.id in self._paused):
                self._paused ^= {held.id}
                paused = held.sandbox.paused
                self.publish(Paused(at=time.time(), tenant=held.tenant, sandbox=held.id, paused=paused))
        self._lease("ending", ending)
        late = perf_counter() - TICK
        for running in self._running.values():
            if running.start < late and not running.announced and running.held is not None:
                running.announced = True
                self.publish(
                    Began(
                        at=time.time() - (perf_counter() - running.start),
                        tenant=running.tenant,
                        sandbox=running.held.id,
                        call=running.call,
                        label=running.label,
                        number=running.number,
                    )
                )
        self._wake()

    def pool(self, tenant: str | None) -> Pool:
        """How the sandboxes of a tenant, or of all, were served."""
        ledger = self._ledger if tenant is None else self._ledgers.get(tenant, Ledger())
        pool = self._pool() if tenant is None else None
        return Pool(
            at=time.time(),
            tenant=tenant or "",
            served=tuple(
                ServedCount(kind, stage, number, ledger.seconds[kind, stage].mean)
                for (kind, stage), number in sorted(ledger.served.items())
            ),
            saved_seconds=ledger.saved_seconds,
            waited_seconds=ledger.waited_seconds,
            sandboxes={} if pool is None else pool.counts(),
            events={} if pool is None else dict(sorted(pool.ledger.events.items())),
        )

    def living(self, tenant: str | None) -> tuple[Created, ...]:
        """The sandboxes of a tenant, or all."""
        found = self.sandboxes.all() if tenant is None else self.sandboxes.of(tenant)
        return tuple(described(held) for held in found)


def described(held: Held) -> Created:
    """A sandbox for readers. Labels come from clients, so they are shortened."""
    sandbox, members = held.sandbox, held.creation.members
    of_group = len(held.creation.sandboxes) > 1 and members
    labels = {name[:SHORT]: value[:SHORT] for name, value in islice(held.labels.items(), _LABELS)}
    return Created(
        at=held.created,
        tenant=held.tenant,
        sandbox=held.id,
        labels=labels,
        group=members[0].id if of_group else labels.get("group", ""),
        served=sandbox.served,
        spans=sandbox.spans[:_SPANS],
        expires=held.expires,
        paused=sandbox.paused,
    )


def _shortened(error: BaseException) -> WireError:
    """An error as data, without what may be large."""
    found = describe(error)
    remedy = error.remedy if isinstance(error, DutyfreeError) else ""
    return msgspec.structs.replace(
        found, message=found.message[:_MESSAGE], remedy=remedy[:_MESSAGE], arguments=(), fields={}
    )

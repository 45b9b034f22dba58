"""What operators look at: counts and times of calls, and the sandboxes that clients hold, for Prometheus."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import TypeVar

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from dutyfree.contract.errors import verdict
from dutyfree.server import logs
from dutyfree.server.overload import Overload
from dutyfree.server.sandboxes import Held, Sandboxes

T = TypeVar("T")

BUCKETS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 5, 10, 60, 600)
"""Seconds: a file takes less than a millisecond, a build minutes."""


class Metrics:
    """The figures of one server."""

    def __init__(self, sandboxes: Sandboxes, overload: Overload) -> None:
        self._overload = overload
        self._registry = CollectorRegistry()
        self._calls = Counter(
            "dutyfree_calls", "Calls by name and outcome", ("call", "outcome"), registry=self._registry
        )
        self._seconds = Histogram(
            "dutyfree_call_seconds", "Seconds of calls", ("call",), buckets=BUCKETS, registry=self._registry
        )
        self._changes = Counter(
            "dutyfree_sandbox_changes", "Sandboxes by what happened", ("event",), registry=self._registry
        )
        self._served = Counter(
            "dutyfree_sandboxes_served",
            "New sandboxes by what they came from",
            ("kind",),
            registry=self._registry,
        )
        self._series: dict[tuple[str, str], tuple[Counter, Histogram]] = {}
        self._registry.register(_Held(sandboxes))
        sandboxes.on_change = self._changed
        self._running = 0
        self._waiting: asyncio.Event | None = None

    async def idle(self) -> None:
        """Wait until no call and no request runs."""
        self._waiting = asyncio.Event()
        if self._running:
            await self._waiting.wait()

    @contextmanager
    def waited_for(self) -> Iterator[None]:
        """``idle`` also waits for what runs in this context."""
        self._running += 1
        try:
            yield
        finally:
            self._end_one()

    def _end_one(self) -> None:
        self._running -= 1
        if not self._running and self._waiting is not None:
            self._waiting.set()

    async def measured(self, call: str, tenant: str, work: Awaitable[T]) -> T:
        """Carry out a call, and count it: ``ok``, ``cancelled``, or whose fault its error is."""
        start, outcome, result = self.begun(), "cancelled", None
        try:
            result = await work
            outcome = "ok"
        except Exception as error:
            outcome = verdict(error)
            raise
        finally:
            self.ended(call, tenant, start, outcome, result)
        return result

    def begun(self) -> float:
        """A call has begun. Returns when; ``ended`` must follow."""
        self._running += 1
        return perf_counter()

    def ended(
        self, call: str, tenant: str, start: float, outcome: str, result: object, waited: float = 0.0
    ) -> None:
        """A call has ended that began at ``start``, after it had waited for so many seconds."""
        self._overload.ended(tenant, start, result, waited)
        self._end_one()
        self._count(call, outcome, perf_counter() - start + waited)

    def _count(self, call: str, outcome: str, seconds: float) -> None:
        found = self._series.get((call, outcome))
        if found is None:  # to find them by their labels takes as long as to count
            found = self._calls.labels(call, outcome), self._seconds.labels(call)
            self._series[call, outcome] = found
        found[0].inc()
        found[1].observe(seconds)

    def _changed(self, event: str, held: Held) -> None:
        self._changes.labels(event).inc()
        logs.sandbox_changed(event, held)
        if event == "created" and held.sandbox.served is not None:
            self._served.labels(held.sandbox.served.kind).inc()

    def text(self) -> bytes:
        """All figures in the format of Prometheus."""
        return generate_latest(self._registry)


class _Held(Collector):
    """How many sandboxes each tenant holds now."""

    def __init__(self, sandboxes: Sandboxes) -> None:
        self._sandboxes = sandboxes

    def collect(self) -> Iterable[GaugeMetricFamily]:
        found = GaugeMetricFamily("dutyfree_sandboxes", "Sandboxes that clients hold", labels=("tenant",))
        for tenant, count in self._sandboxes.counts().items():
            found.add_metric((tenant,), count)
        yield found

"""Which prefixes need more stock: promised ones (hints and minimums) first, then by demand."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterator

from dutyfree.engine.pool.scheduler.priority_queue import PriorityQueue, Score
from dutyfree.engine.pool.scheduler.stock import Prefix, Stock
from dutyfree.engine.pool.scheduler.values import Policy


class Demand:
    """The prefixes whose stock is short. Finding the next one takes logarithmic time."""

    def __init__(self, stock: Stock, policy: Policy) -> None:
        self._stock = stock
        self._policy = policy
        self._owed: OrderedDict[str, Prefix] = OrderedDict()
        self._in_demand: PriorityQueue[Prefix] = PriorityQueue(self._urgency)
        self._ends: list[tuple[float, str]] = []

    def _urgency(self, prefix: Prefix) -> Score:
        return (-self._stock.worth(prefix, prefix.idle_or_coming + 1),)

    # --- Events -------------------------------------------------------------------------------------

    def hint(self, prefix: Prefix, count: int, until: float) -> None:
        prefix.hints.append([until, count])
        prefix.hinted += count
        heapq.heappush(self._ends, (until, prefix.key))
        self.consider(prefix)

    def set_bounds(self, prefix: Prefix, minimum: int, maximum: int | None) -> None:
        prefix.minimum, prefix.maximum = minimum, maximum
        self._stock.reconsider(prefix)
        self.consider(prefix)

    def fulfilled(self, prefix: Prefix, count: int) -> None:
        """``count`` sandboxes were handed out: take them off the hints."""
        while count and prefix.hints:
            used = min(count, int(prefix.hints[0][1]))
            prefix.hints[0][1] -= used
            prefix.hinted -= used
            count -= used
            if not prefix.hints[0][1]:
                prefix.hints.popleft()
            self._stock.reconsider(prefix)
        self.consider(prefix)

    def expire(self, now: float) -> None:
        while self._ends and self._ends[0][0] <= now:
            _, key = heapq.heappop(self._ends)
            prefix = self._stock.prefix(key)
            while prefix is not None and prefix.hints and prefix.hints[0][0] <= now:
                prefix.hinted -= int(prefix.hints.popleft()[1])
                self._stock.reconsider(prefix)
            if prefix is not None:
                self.consider(prefix)

    @property
    def next_time(self) -> float | None:
        """When the next hint ends, or a failed stage may be retried."""
        return self._ends[0][0] if self._ends else None

    def consider(self, prefix: Prefix) -> None:
        """Queue a prefix whose stock or demand has changed, if it needs more."""
        if prefix.promised > prefix.idle_or_coming:
            self._owed[prefix.key] = prefix
        elif self._policy.refill and prefix.depth >= self._policy.shallowest and prefix.heat > float("-inf"):
            self._in_demand.put(prefix)

    # --- The next refill ----------------------------------------------------------------------------

    def owed(self, now: float) -> Iterator[Prefix]:
        """Prefixes with less stock than promised, the oldest first. Each is taken off the queue."""
        while self._owed:
            _, prefix = self._owed.popitem(last=False)
            if prefix.promised > prefix.idle_or_coming and not self._is_blocked(prefix, now):
                yield prefix

    def postpone(self, prefix: Prefix) -> None:
        """Put a prefix back to the front: there was no room for it."""
        self._owed[prefix.key] = prefix
        self._owed.move_to_end(prefix.key, last=False)

    def in_demand(self, now: float) -> Iterator[tuple[Prefix, float]]:
        """Prefixes in demand and the worth of one more sandbox, best first. Each is taken off the queue."""
        while (found := self._in_demand.least()) is not None:
            prefix, score = found
            self._in_demand.drop(prefix)
            if self.expected(prefix, now) * 2 >= prefix.idle_or_coming + 1 and not self._is_blocked(
                prefix, now
            ):
                yield prefix, -score[0]

    def requeue(self, prefix: Prefix) -> None:
        """Put a prefix back: there was no room for it."""
        self._in_demand.put(prefix)

    def expected(self, prefix: Prefix, now: float) -> float:
        """The expected number of misses until one more is ready, and ``policy.cover`` seconds longer."""
        return self._stock.misses(prefix, now) * (self._policy.cover + self._stock.saved(prefix))

    def _is_blocked(self, prefix: Prefix, now: float) -> bool:
        """Whether a refill must wait: for room below the maximum, for a retry, or for a layer being made."""
        if prefix.maximum is not None and prefix.idle_or_coming >= prefix.maximum:
            return True
        breakers = [shorter.breaker for shorter in prefix.path if shorter.breaker is not None]
        if any(breaker.delays(now) for breaker in breakers):
            retry = max(breaker.retry_at for breaker in breakers)
            heapq.heappush(self._ends, (retry if retry > now else now + self._policy.backoff, prefix.key))
            return True
        return bool(prefix.making) and prefix.layer is None and self._policy.deepest_layer is None

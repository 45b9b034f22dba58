"""What should be in stock: hints and minima first, then what demand makes worth its memory."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterator

from dutyfree.engine.pool.scheduler.ranking import Ranking, Score
from dutyfree.engine.pool.scheduler.stock import Prefix, Stock
from dutyfree.engine.pool.scheduler.values import Policy


class Demand:
    """Nodes whose stock is short. Looking at one costs the same however many there are."""

    def __init__(self, stock: Stock, policy: Policy) -> None:
        self._stock = stock
        self._policy = policy
        self._owed: OrderedDict[str, Prefix] = OrderedDict()
        self._thin: Ranking[Prefix] = Ranking(self._urgency)
        self._ends: list[tuple[float, str]] = []

    def _urgency(self, prefix: Prefix) -> Score:
        return (-self._stock.worth(prefix, prefix.idle_or_coming + 1),)

    # --- What is wished -----------------------------------------------------------------------------

    def hint(self, prefix: Prefix, count: int, until: float) -> None:
        prefix.hints.append([until, count])
        prefix.hinted += count
        heapq.heappush(self._ends, (until, prefix.key))
        self.consider(prefix)

    def bound(self, prefix: Prefix, minimum: int, maximum: int | None) -> None:
        prefix.minimum, prefix.maximum = minimum, maximum
        self._stock.reconsider(prefix)
        self.consider(prefix)

    def fulfilled(self, prefix: Prefix, count: int) -> None:
        """So many were handed out: hints for them are done."""
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
        """When a hint ends, or a failed stage may be tried again."""
        return self._ends[0][0] if self._ends else None

    def consider(self, prefix: Prefix) -> None:
        """Its stock or its demand has changed."""
        if prefix.promised > prefix.idle_or_coming:
            self._owed[prefix.key] = prefix
        elif self._policy.refill and prefix.depth >= self._policy.shallowest and prefix.heat > float("-inf"):
            self._thin.put(prefix)

    # --- What to do about it ------------------------------------------------------------------------

    def owed(self, now: float) -> Iterator[Prefix]:
        """Those promised, in the order of asking; each is taken off the list."""
        while self._owed:
            _, prefix = self._owed.popitem(last=False)
            if prefix.promised > prefix.idle_or_coming and not self._held_up(prefix, now):
                yield prefix

    def postpone(self, prefix: Prefix) -> None:
        """There was no room for what is owed; it stays first."""
        self._owed[prefix.key] = prefix
        self._owed.move_to_end(prefix.key, last=False)

    def thin(self, now: float) -> Iterator[tuple[Prefix, float]]:
        """Those that demand wants, the most urgent first, with the worth of one more. Each is taken off."""
        while (found := self._thin.least()) is not None:
            prefix, score = found
            self._thin.drop(prefix)
            if self.expected(prefix, now) * 2 >= prefix.idle_or_coming + 1 and not self._held_up(prefix, now):
                yield prefix, -score[0]

    def again(self, prefix: Prefix) -> None:
        self._thin.put(prefix)

    def expected(self, prefix: Prefix, now: float) -> float:
        """Requests that will find nothing idle here while one more is made, and for a while after."""
        return self._stock.misses(prefix, now) * (self._policy.cover + self._stock.saved(prefix))

    def _held_up(self, prefix: Prefix, now: float) -> bool:
        """A failing stage waits for its retry; what leaves a layer behind is made once, not twice at once."""
        if prefix.maximum is not None and prefix.idle_or_coming >= prefix.maximum:
            return True
        breakers = [shorter.breaker for shorter in prefix.path if shorter.breaker is not None]
        if any(breaker.delays(now) for breaker in breakers):
            retry = max(breaker.retry_at for breaker in breakers)
            heapq.heappush(self._ends, (retry if retry > now else now + self._policy.backoff, prefix.key))
            return True
        return bool(prefix.making) and prefix.layer is None and self._policy.deepest_layer is None

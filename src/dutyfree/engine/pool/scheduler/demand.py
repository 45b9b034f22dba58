"""What should be in stock: hints and minima first, then what demand makes worth its memory."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterator

from dutyfree.engine.pool.scheduler.ranking import Ranking, Score
from dutyfree.engine.pool.scheduler.stock import Node, Stock
from dutyfree.engine.pool.scheduler.values import Policy


class Wishes:
    """Nodes whose stock is short. Looking at one costs the same however many there are."""

    def __init__(self, stock: Stock, policy: Policy) -> None:
        self._stock = stock
        self._policy = policy
        self._owed: OrderedDict[str, Node] = OrderedDict()
        self._thin: Ranking[Node] = Ranking(self._urgency)
        self._ends: list[tuple[float, str]] = []

    def _urgency(self, node: Node) -> Score:
        return (-self._stock.worth(node, node.idle_or_coming + 1),)

    # --- What is wished -----------------------------------------------------------------------------

    def hint(self, node: Node, count: int, until: float) -> None:
        node.hints.append([until, count])
        node.hinted += count
        heapq.heappush(self._ends, (until, node.key))
        self.consider(node)

    def bound(self, node: Node, minimum: int, maximum: int | None) -> None:
        node.minimum, node.maximum = minimum, maximum
        self._stock.reconsider(node)
        self.consider(node)

    def fulfilled(self, node: Node, count: int) -> None:
        """So many were handed out: hints for them are done."""
        while count and node.hints:
            used = min(count, int(node.hints[0][1]))
            node.hints[0][1] -= used
            node.hinted -= used
            count -= used
            if not node.hints[0][1]:
                node.hints.popleft()
            self._stock.reconsider(node)
        self.consider(node)

    def expire(self, now: float) -> None:
        while self._ends and self._ends[0][0] <= now:
            _, key = heapq.heappop(self._ends)
            node = self._stock.node(key)
            while node is not None and node.hints and node.hints[0][0] <= now:
                node.hinted -= int(node.hints.popleft()[1])
                self._stock.reconsider(node)
            if node is not None:
                self.consider(node)

    @property
    def next_time(self) -> float | None:
        """When a hint ends, or a failed stage may be tried again."""
        return self._ends[0][0] if self._ends else None

    def consider(self, node: Node) -> None:
        """Its stock or its demand has changed."""
        if node.promised > node.idle_or_coming:
            self._owed[node.key] = node
        elif self._policy.refill and node.depth >= self._policy.shallowest and node.heat > float("-inf"):
            self._thin.put(node)

    # --- What to do about it ------------------------------------------------------------------------

    def owed(self, now: float) -> Iterator[Node]:
        """Those promised, in the order of asking; each is taken off the list."""
        while self._owed:
            _, node = self._owed.popitem(last=False)
            if node.promised > node.idle_or_coming and not self._held_up(node, now):
                yield node

    def postpone(self, node: Node) -> None:
        """There was no room for what is owed; it stays first."""
        self._owed[node.key] = node
        self._owed.move_to_end(node.key, last=False)

    def thin(self, now: float) -> Iterator[tuple[Node, float]]:
        """Those that demand wants, the most urgent first, with the worth of one more. Each is taken off."""
        while (found := self._thin.least()) is not None:
            node, score = found
            self._thin.drop(node)
            if self.expected(node, now) * 2 >= node.idle_or_coming + 1 and not self._held_up(node, now):
                yield node, -score[0]

    def again(self, node: Node) -> None:
        self._thin.put(node)

    def expected(self, node: Node, now: float) -> float:
        """Requests that will find nothing idle here while one more is made, and for a while after."""
        return self._stock.misses(node, now) * (self._policy.cover + self._stock.saved(node))

    def _held_up(self, node: Node, now: float) -> bool:
        """A failing stage waits for its retry; what leaves a layer behind is made once, not twice at once."""
        if node.maximum is not None and node.idle_or_coming >= node.maximum:
            return True
        breakers = [shorter.breaker for shorter in node.path if shorter.breaker is not None]
        if any(breaker.delays(now) for breaker in breakers):
            retry = max(breaker.retry_at for breaker in breakers)
            heapq.heappush(self._ends, (retry if retry > now else now + self._policy.backoff, node.key))
            return True
        return bool(node.making) and node.layer is None and self._policy.deepest_layer is None

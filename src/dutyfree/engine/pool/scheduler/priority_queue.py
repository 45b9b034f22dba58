"""A priority queue whose scores may rise without notice."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Generic, TypeVar

Item = TypeVar("Item")
Score = tuple[float, ...]


class PriorityQueue(Generic[Item]):
    """Finds the item with the least score in logarithmic time.

    The caller must ``put`` an item again when its score falls. A score that rises is read again only when the
    item comes to the front, so scores that rise often, such as demand, cost nothing.
    """

    def __init__(self, score: Callable[[Item], Score]) -> None:
        self._score = score
        self._heap: list[tuple[Score, int, Item]] = []
        self._current: dict[Item, int] = {}
        self._numbers = 0

    def __len__(self) -> int:
        return len(self._current)

    def __contains__(self, item: Item) -> bool:
        return item in self._current

    def put(self, item: Item) -> None:
        self._numbers += 1
        self._current[item] = self._numbers
        heapq.heappush(self._heap, (self._score(item), self._numbers, item))
        if len(self._heap) > 4 * len(self._current) + 64:
            self._heap = [entry for entry in self._heap if self._current.get(entry[2]) == entry[1]]
            heapq.heapify(self._heap)

    def drop(self, item: Item) -> None:
        self._current.pop(item, None)

    @property
    def first(self) -> float | None:
        """The least score, where scores are times."""
        found = self.least()
        return None if found is None else found[1][0]

    def due(self, now: float) -> Item | None:
        """The first item whose time has come. It stays in the queue."""
        found = self.least()
        return found[0] if found is not None and found[1][0] <= now else None

    def least(self) -> tuple[Item, Score] | None:
        """The item with the least score, and that score. It stays in the queue."""
        while self._heap:
            score, number, item = self._heap[0]
            if self._current.get(item) != number:
                heapq.heappop(self._heap)
                continue
            actual = self._score(item)
            if actual <= score:
                return item, actual
            heapq.heapreplace(self._heap, (actual, number, item))
        return None

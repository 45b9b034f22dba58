"""A heap whose scores may change behind its back."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Generic, TypeVar

Item = TypeVar("Item")
Score = tuple[float, ...]


class Ranking(Generic[Item]):
    """Gives the item with the least score, in logarithmic time.

    Whoever lowers a score must ``put`` the item again. A score that rose is noticed when the item comes
    up, so that what rises often (demand) costs nothing.
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
        """Where scores are times: the first."""
        found = self.least()
        return None if found is None else found[1][0]

    def due(self, now: float) -> Item | None:
        """Likewise: the item whose time has come first; it stays in."""
        found = self.least()
        return found[0] if found is not None and found[1][0] <= now else None

    def least(self) -> tuple[Item, Score] | None:
        """It stays in."""
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

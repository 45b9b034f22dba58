"""Cache of the prefixes whose layers can be used at once, evicted by least recent use."""

from __future__ import annotations

from collections.abc import Container
from itertools import islice

from dutyfree.engine.layers.memory_layers import MemoryLayers
from dutyfree.engine.layers.start_state import StartState


class PrefixCache:
    """Start states of prefixes by content key, the least recently used first. No state in use is evicted."""

    def __init__(self, layers: MemoryLayers, disk_budget: int) -> None:
        self._layers = layers
        self._disk_budget = disk_budget
        self._states: dict[str, StartState] = {}
        self._sizes: dict[str, int] = {}
        self._size = 0

    def __contains__(self, key: str) -> bool:
        return key in self._states

    def get(self, key: str) -> StartState | None:
        """The state of this prefix, which counts as used now."""
        state = self._states.pop(key, None)
        if state is not None:
            self._states[key] = state
        return state

    def put(self, key: str, state: StartState, size: int = 0) -> None:
        """Add or replace a state, and take over the caller's hold on its layers.

        ``size`` is its bytes on disk; 0 if it is in memory. Sandboxes on a replaced state keep its layers.
        """
        self.forget(key)
        self._states[key] = state
        self._sizes[key] = size
        self._size += size

    def forget(self, key: str) -> None:
        """Remove a prefix. Its files go when the last sandbox on them is gone."""
        state = self._states.pop(key, None)
        if state is not None:
            self._size -= self._sizes.pop(key)
            self._layers.release(state.trees)

    def unused_on_disk(self, most: int, busy: Container[str]) -> list[str]:
        """The least recently used prefixes on disk that no sandbox uses, as many as there are above ``most``.

        Without the busy ones.
        """
        unused = (
            key
            for key, state in self._states.items()
            if self._sizes[key] and key not in busy and self._layers.is_unused(state.trees)
        )
        return list(islice(unused, max(0, len(self._states) - most)))

    def trim(self, busy: Container[str]) -> None:
        """Evict unused prefixes until memory and disk are within their budgets. Spare the busy ones."""
        for key in list(self._states) if self._is_short(0) or self._is_short(1) else ():
            unused = key not in busy and self._layers.is_unused(self._states[key].trees)
            if unused and self._is_short(self._sizes[key]):
                self.forget(key)

    def _is_short(self, size: int) -> bool:
        """Whether the disk is over budget, or memory for a prefix that takes no disk."""
        return self._size > self._disk_budget if size else self._layers.size > self._layers.budget

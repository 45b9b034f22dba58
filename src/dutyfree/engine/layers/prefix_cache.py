"""The prefixes of recipes that sandboxes can stand on now: the last used ones, as far as there is room."""

from __future__ import annotations

from collections.abc import Container
from itertools import islice

from dutyfree.engine.layers.disk_bridge import StartState
from dutyfree.engine.layers.memory_layers import MemoryLayers


class PrefixCache:
    """By their keys, the longest unused first. For want of room, nothing goes that somebody stands on."""

    def __init__(self, layers: MemoryLayers, most: int) -> None:
        self._layers = layers
        self._most = most
        self._bases: dict[str, StartState] = {}
        self._sizes: dict[str, int] = {}
        self._size = 0

    def __contains__(self, key: str) -> bool:
        return key in self._bases

    def get(self, key: str) -> StartState | None:
        """It is used by that."""
        base = self._bases.pop(key, None)
        if base is not None:
            self._bases[key] = base
        return base

    def put(self, key: str, base: StartState, size: int = 0) -> None:
        """The caller's hold becomes ours. ``size`` is on the disk; 0 of what lies in memory.

        Whoever comes from now on stands on these layers; who stands on former ones goes on so.
        """
        self.forget(key)
        self._bases[key] = base
        self._sizes[key] = size
        self._size += size

    def forget(self, key: str) -> None:
        """No new sandbox stands on it; when the last one is gone, its files go too."""
        base = self._bases.pop(key, None)
        if base is not None:
            self._size -= self._sizes.pop(key)
            self._layers.release(base.trees)

    def beyond(self, most: int, busy: Container[str]) -> list[str]:
        """Of more than so many: those of the disk that nobody stands on, used longest ago, but the busy."""
        spare = (
            key
            for key, base in self._bases.items()
            if self._sizes[key] and key not in busy and self._layers.is_spare(base.trees)
        )
        return list(islice(spare, max(0, len(self._bases) - most)))

    def trim(self, busy: Container[str]) -> None:
        """Forget what was used longest ago, but for the busy ones, until the rest fits."""
        for key in list(self._bases) if self._is_short(0) or self._is_short(1) else ():
            spare = key not in busy and self._layers.is_spare(self._bases[key].trees)
            if spare and self._is_short(self._sizes[key]):
                self.forget(key)

    def _is_short(self, size: int) -> bool:
        """Of room on the disk, or in memory for what takes none there."""
        return self._size > self._most if size else self._layers.size > self._layers.most

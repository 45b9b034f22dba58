"""Which layers of the store stand on which, and whether on the very runs that they were made upon.

The key of a stage's layer tells what was run, not what came of it: run again, a stage may leave something
else. So each run has a mark, its birth, and a layer tells that of the layer which it was made upon. One whose
ground is gone, or was made anew, is loose: it fits nothing, does not count as there, and is not spared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from dutyfree.engine.store import provenance
from dutyfree.engine.store.provenance import Made


class Standing:
    """What the layers of one store say of themselves. All methods block."""

    def __init__(self, path: Callable[[str], Path]) -> None:
        self._path = path
        self._known: dict[str, tuple[tuple[int, int], Made | None]] = {}

    def told(self, key: str) -> Made | None:
        """What a layer says of itself, if it is there and of a stage or a snapshot; read once."""
        tree = self._path(key) / "tree"
        try:
            seen = provenance.seen(tree)
        except OSError:
            self._known.pop(key, None)
            return None
        known = self._known.get(key)
        if known is None or known[0] != seen:  # made anew under its key
            known = self._known[key] = seen, provenance.read(tree)
        return known[1]

    def is_loose(self, key: str) -> bool:
        told = self.told(key)
        if told is None or not told.below:
            return False
        ground = self.told(told.below[-1])
        return ground is None or ground.birth != told.upon or self.is_loose(told.below[-1])

    def needs(self, key: str) -> tuple[str, ...]:
        """The layers that it stands on, the lowest first, as far as it says so itself."""
        told = self.told(key)
        return (*reversed(told.mounted), *told.below) if told is not None else ()

    def uses(self, last: dict[str, float]) -> dict[str, tuple[float, int]]:
        """Of when each was used itself: when it or one upon it was, and how many lie above it at most."""
        uses = {key: (moment, 0) for key, moment in last.items()}
        for key, moment in last.items():
            for above, below in enumerate(reversed(self.needs(key)), 1):
                if below in uses:
                    uses[below] = max(uses[below], (moment, above))
        return uses

    def needed(self, keys: Iterable[str]) -> set[str]:
        """All that these stand on."""
        return {below for key in keys for below in self.needs(key)}

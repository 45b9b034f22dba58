"""What sandboxes wrote, kept as layers: counted, bounded, and forgotten when the last user is gone.

A layer is used by the snapshots that have it and by the sandboxes that stand on it. What a snapshot holds is
files alone: no process, no open file or socket, nothing of ``/dev/shm``.
"""

from __future__ import annotations

import itertools
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence

import msgspec

from dutyfree.contract import Recipe
from dutyfree.contract.errors import ActionError, CreateError, ExecError, UsageError
from dutyfree.engine.launcher import protocol
from dutyfree.engine.launcher.client import Launcher, layers_of
from dutyfree.engine.launcher.protocol import Request, Tree
from dutyfree.engine.layers.disk_bridge import StartState

PREFIX = "snapshot:"
"""Of the image that a snapshot's recipe names."""

NAMELESS = "#"
"""Begins what no name begins with."""

CHAIN = 6
"""So many kept layers may lie upon each other in a tree, before they become one. See disk.DEEPEST."""


class MemorySnapshot(msgspec.Struct, frozen=True):
    """One that was taken without a name, until it is forgotten."""

    recipe: Recipe
    size: int
    """Bytes of memory that its own layers take; some may be others' too."""
    made: float
    """Seconds since the epoch."""


class MemoryLayers:
    """Kept layers, and how many use each."""

    def __init__(self, launcher: Launcher, most: int) -> None:
        self._launcher = launcher
        self.most = most
        """Bytes that they may take together."""
        self._users: Counter[int] = Counter()
        self._sizes: dict[int, int] = {}
        self._weights: dict[int, int] = {}  # what lies in them at most
        self._lent: dict[int, Callable[[int], None]] = {}  # those that lie on the disk

    @property
    def size(self) -> int:
        return sum(self._sizes.values())

    def size_of(self, trees: Sequence[Tree]) -> int:
        return sum(self._sizes.get(layer, 0) for layer in self._kept(trees))

    def is_spare(self, trees: Sequence[Tree]) -> bool:
        """Whether one user alone has the uppermost of these layers: nobody stands on them."""
        return all(self._users[layers[0]] <= 1 for _, layers in trees)

    def hold(self, trees: Sequence[Tree]) -> None:
        self._users.update(self._kept(trees))

    def release(self, trees: Sequence[Tree]) -> None:
        """One user less; a layer without any is gone."""
        for layer in self._kept(trees):
            self._users[layer] -= 1
            if self._users[layer] <= 0:
                del self._users[layer]
                self._sizes.pop(layer, None)
                self._weights.pop(layer, None)
                self._launcher.tell(Request.REMOVE_LAYER, layer)
                if (unused := self._lent.pop(layer, None)) is not None:
                    unused(layer)

    def lend(self, layers: Sequence[int], unused: Callable[[int], None]) -> None:
        """Layers of the disk, whose users are counted too; told of each that is used no more."""
        self._lent.update(dict.fromkeys(layers, unused))

    async def keep(
        self, kind: Request, number: int, below: Sequence[Tree], *, final: bool = False
    ) -> tuple[Tree, ...]:
        """What the sandbox wrote upon these trees, held once for the caller; ``final`` of one that ends.

        Raises LauncherError; ExecError if there is no room for it.
        """
        reply = await self._launcher.ask(kind, number, b"\1" if final else b"")
        layers = layers_of(reply)
        size, _ = protocol.SNAPSHOT_USAGE.unpack_from(reply.text)
        for index, layer in enumerate(layers):  # they are one file system, counted once
            self._sizes[layer] = 0 if index else size
            self._weights[layer] = size
        above = tuple((point, (layer,)) for layer, (point, _) in zip(layers, below, strict=True))
        trees = tuple((point, (*new, *old)) for (_, new), (point, old) in zip(above, below, strict=True))
        self.hold(trees)
        try:
            if final:
                return trees
            if 0 < self.most < size:
                raise ActionError(
                    f"a snapshot of {size} bytes: {self.most} can be kept",
                    kind="too_large",
                    remedy="open native with a larger `kept`, or give sandboxes a smaller disk limit",
                )
            if self.size > self.most:
                raise ExecError(
                    f"a snapshot of {size} bytes: {self.size - size} of {self.most} are kept already",
                    remedy="forget snapshots that are no longer needed, or open native with a larger `kept`",
                )
            return await self.flattened(trees)
        except BaseException:
            self.release(trees)
            raise

    async def flattened(self, trees: tuple[Tree, ...]) -> tuple[Tree, ...]:
        """The same with shorter chains; what was held before is held no more then. Raises LauncherError."""
        flat: list[Tree] = []
        made: list[Tree] = []
        try:
            for point, layers in trees:
                chain = tuple(layer for layer in layers if layer in self._sizes)
                if len(chain) > CHAIN:
                    merged = chain[: worth_merging([self._weights[layer] for layer in chain])]
                    one = await self._merge(merged)
                    made.append((point, (one,)))
                    layers = (one, *layers[len(merged) :])
                flat.append((point, layers))
            if not made:
                return trees
            self.hold(flat)
            self.release(trees)
        finally:
            self.release(made)
        return tuple(flat)

    async def _merge(self, layers: tuple[int, ...]) -> int:
        """One layer of several, held once."""
        reply = await self._launcher.ask(Request.MERGE, 0, protocol.merge(layers))
        (one,) = layers_of(reply)
        self._sizes[one], _ = protocol.SNAPSHOT_USAGE.unpack_from(reply.text)
        self._weights[one] = self._sizes[one]
        self._users[one] = 1
        return one

    def _kept(self, trees: Sequence[Tree]) -> list[int]:
        return [
            layer for _, layers in trees for layer in layers if layer in self._sizes or layer in self._lent
        ]


def worth_merging(sizes: Sequence[int]) -> int:
    """How many layers, of these from the uppermost on, to make one of: two at least.

    One that is larger than all above it together stays as it is, so that no byte is copied often.
    """
    count = len(sizes)
    while count > 2 and sizes[count - 1] > sum(sizes[: count - 1]):
        count -= 1
    return count


class MemorySnapshots:
    """Those of one open substrate, by the image that their recipes name."""

    def __init__(self, layers: MemoryLayers) -> None:
        self.layers = layers
        self._numbers = itertools.count(1)
        self._known: dict[str, tuple[MemorySnapshot, StartState]] = {}

    def add(self, base: StartState) -> Recipe:
        """The caller's hold on the layers becomes the snapshot's."""
        recipe = Recipe(f"{PREFIX}{NAMELESS}{os.getpid()}-{next(self._numbers)}")
        taken = MemorySnapshot(recipe, self.layers.size_of(base.trees), time.time())
        self._known[recipe.image or ""] = taken, base
        return recipe

    def base(self, image: str) -> StartState:
        """Raises CreateError."""
        if image not in self._known:
            raise CreateError(
                f"there is no {image}", remedy="it was forgotten, or belongs to another open substrate"
            )
        return self._known[image][1]

    def all(self) -> tuple[MemorySnapshot, ...]:
        return tuple(taken for taken, _ in self._known.values())

    def forget(self, recipe: Recipe) -> None:
        """Raises UsageError if there is none of it."""
        known = self._known.pop(recipe.image or "", None)
        if known is None:
            raise UsageError(
                f"{recipe.image!r} is no snapshot that this substrate has in memory",
                remedy="those with names are removed by `dutyfree layer rm`, or dutyfree.layers.remove",
            )
        self.layers.release(known[1].trees)

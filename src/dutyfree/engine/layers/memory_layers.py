"""Layers and snapshots in memory: reference-counted, within a budget, removed with their last user.

The users of a layer are the snapshots that contain it and the sandboxes on it. A snapshot contains files
only: no process, no open file or socket, and nothing of ``/dev/shm``.
"""

from __future__ import annotations

import itertools
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import msgspec

from dutyfree.contract import Recipe
from dutyfree.contract.errors import ActionError, CreateError, ExecError, UsageError
from dutyfree.engine.launcher import disk_storage, protocol
from dutyfree.engine.launcher.client import Launcher, layers_of
from dutyfree.engine.launcher.disk_storage import DiskStorage
from dutyfree.engine.launcher.protocol import Request, Tree
from dutyfree.engine.layers.kept_state import KeptSnapshot, KeptState
from dutyfree.engine.layers.start_state import StartState

SNAPSHOT_SCHEME = "snapshot:"
"""Begins the image name in the recipe of a snapshot."""

UNNAMED = "#"
"""Begins the name of a snapshot in memory. No name that a user gives can begin with it."""

MAX_CHAIN = 6
"""The most layers in memory in one tree; above that, some are merged. See ``disk_bridge.MAX_CHAIN``."""


class MemorySnapshot(msgspec.Struct, frozen=True):
    """A snapshot without a name. It exists until ``forget``, or until the substrate is closed."""

    recipe: Recipe
    size: int
    """Bytes of memory of its layers; other snapshots may share some of them."""
    made: float
    """Seconds since the epoch."""


class MemoryLayers:
    """The layers in memory of one launcher, and how many users each has."""

    def __init__(self, launcher: Launcher, budget: int, storage: DiskStorage | None = None) -> None:
        self._launcher = launcher
        self._storage = storage
        self.budget = budget
        """The most bytes that they may take together."""
        self._users: Counter[int] = Counter()
        self._sizes: dict[int, int] = {}
        self._weights: dict[int, int] = {}  # the most that each can contain, to choose which to merge
        self._on_disk: dict[int, Callable[[int], None]] = {}

    @property
    def size(self) -> int:
        return sum(self._sizes.values())

    def size_of(self, trees: Sequence[Tree]) -> int:
        return sum(self._sizes.get(layer, 0) for layer in self._counted(trees))

    def is_unused(self, trees: Sequence[Tree]) -> bool:
        """Whether the uppermost layers have one user at most: the cache, but no sandbox."""
        return all(self._users[layers[0]] <= 1 for _, layers in trees)

    def sizes_of(self, trees: Sequence[Tree]) -> dict[int, tuple[int, int]]:
        """The size and the weight of each of these layers that is in memory."""
        counted = {layer for layer in self._counted(trees) if layer in self._sizes}
        return {layer: (self._sizes[layer], self._weights.get(layer, 0)) for layer in counted}

    def adopt(self, trees: Sequence[Tree], in_memory: Mapping[int, tuple[int, int]]) -> None:
        """Count layers that the launcher has from a former owner. They go with their last user."""
        for layer in {layer for _, layers in trees for layer in layers}:
            if layer in in_memory:
                self._sizes[layer], self._weights[layer] = in_memory[layer]
            else:
                self._on_disk.setdefault(layer, lambda _: None)

    def hold(self, trees: Sequence[Tree]) -> None:
        """Add a user to all these layers."""
        self._users.update(self._counted(trees))

    def release(self, trees: Sequence[Tree]) -> None:
        """Remove a user. A layer without users is removed."""
        for layer in self._counted(trees):
            self._users[layer] -= 1
            if self._users[layer] <= 0:
                del self._users[layer]
                self._sizes.pop(layer, None)
                self._weights.pop(layer, None)
                self._launcher.tell(Request.REMOVE_LAYER, layer)
                if (on_unused := self._on_disk.pop(layer, None)) is not None:
                    on_unused(layer)

    def lend(self, layers: Sequence[int], on_unused: Callable[[int], None]) -> None:
        """Count the users of these layers on disk too. Calls ``on_unused`` when one has no user any more."""
        self._on_disk.update(dict.fromkeys(layers, on_unused))

    async def keep(
        self, kind: Request, number: int, below: Sequence[Tree], *, final: bool = False
    ) -> tuple[Tree, ...]:
        """Keep the files that a sandbox wrote as layers on ``below``; the caller holds the result.

        ``final``: the sandbox ends, and the budget does not apply. Raises LauncherError; ActionError if they
        exceed the budget, ExecError if other snapshots have used it up.
        """
        reply = await self._launcher.ask(kind, number, b"\1" if final else b"")
        layers = layers_of(reply)
        size, _ = protocol.SNAPSHOT_USAGE.unpack_from(reply.text)
        for index, layer in enumerate(layers):  # all on one file system, so count its size once
            self._sizes[layer] = 0 if index else size
            self._weights[layer] = size
        trees = tuple((point, (new, *old)) for new, (point, old) in zip(layers, below, strict=True))
        self.hold(trees)
        try:
            if final:
                return trees
            if 0 < self.budget < size:
                raise ActionError(
                    f"a snapshot of {size} bytes is too large: {self.budget} can be kept in memory",
                    kind="too_large",
                    remedy="open native with a larger `kept`, or give sandboxes a smaller disk limit",
                )
            if self.size > self.budget:
                raise ExecError(
                    f"no room for a snapshot of {size} bytes:"
                    f" {self.size - size} of {self.budget} are kept already",
                    remedy="forget snapshots that are no longer needed, or open native with a larger `kept`",
                )
            return await self.shorten(trees)
        except BaseException:
            self.release(trees)
            raise

    async def shorten(self, trees: tuple[Tree, ...]) -> tuple[Tree, ...]:
        """Merge layers where a chain is too long. The caller's hold moves to the result.

        Raises LauncherError.
        """
        short: list[Tree] = []
        merged: list[Tree] = []
        try:
            for point, layers in trees:
                chain = tuple(layer for layer in layers if layer in self._sizes)
                if len(chain) > MAX_CHAIN:
                    upper = chain[: merge_count([self._weights[layer] for layer in chain])]
                    one = await self._merge(upper)
                    merged.append((point, (one,)))
                    layers = (one, *layers[len(upper) :])
                short.append((point, layers))
            if not merged:
                return trees
            self.hold(short)
            self.release(trees)
        finally:
            self.release(merged)
        return tuple(short)

    async def _merge(self, layers: tuple[int, ...]) -> int:
        """One layer of several, with one user."""
        disk = 0
        if self._storage is not None:
            disk = disk_storage.merge_limit(sum(self._weights[layer] for layer in layers))
            await self._storage.provide(disk)
        reply = await self._launcher.ask(Request.MERGE, 0, protocol.merge(layers, disk=disk))
        (one,) = layers_of(reply)
        self._sizes[one], _ = protocol.SNAPSHOT_USAGE.unpack_from(reply.text)
        self._weights[one] = self._sizes[one]
        self._users[one] = 1
        return one

    def _counted(self, trees: Sequence[Tree]) -> list[int]:
        """The layers whose users are counted."""
        return [
            layer for _, layers in trees for layer in layers if layer in self._sizes or layer in self._on_disk
        ]


def merge_count(sizes: Sequence[int]) -> int:
    """How many of these layers, from the uppermost on, to merge: two at least.

    A layer that is larger than all above it together stays alone, so that no byte is copied often.
    """
    count = len(sizes)
    while count > 2 and sizes[count - 1] > sum(sizes[: count - 1]):
        count -= 1
    return count


class MemorySnapshots:
    """The snapshots without names of one open substrate, by the image name in their recipes."""

    def __init__(self, layers: MemoryLayers) -> None:
        self.layers = layers
        self._numbers = itertools.count(1)
        self._known: dict[str, tuple[MemorySnapshot, StartState]] = {}

    def add(self, state: StartState) -> Recipe:
        """Add a snapshot, and take over the caller's hold on its layers."""
        recipe = Recipe(f"{SNAPSHOT_SCHEME}{UNNAMED}{os.getpid()}-{next(self._numbers)}")
        snapshot = MemorySnapshot(recipe, self.layers.size_of(state.trees), time.time())
        self._known[recipe.image or ""] = snapshot, state
        return recipe

    def kept(self, image: str) -> KeptSnapshot:
        """A snapshot on record, for a new owner of the launcher."""
        snapshot, state = self._known[image]
        return KeptSnapshot(image, KeptState.of(state), self.layers.sizes_of(state.trees), snapshot.made)

    def adopt(self, kept: KeptSnapshot) -> None:
        """A snapshot that a former owner of the launcher took."""
        state = kept.start.state
        self.layers.adopt(state.trees, kept.in_memory)
        self.layers.hold(state.trees)
        snapshot = MemorySnapshot(Recipe(kept.image), self.layers.size_of(state.trees), kept.made)
        self._known[kept.image] = snapshot, state
        # A new process may have the id of a former one, as in a container. No name is given twice.
        number = int(kept.image.rpartition("-")[2])
        self._numbers = itertools.count(max(next(self._numbers), number + 1))

    def state(self, image: str) -> StartState:
        """Raises CreateError if there is no such snapshot."""
        if image not in self._known:
            raise CreateError(
                f"there is no {image}", remedy="it was forgotten, or belongs to another open substrate"
            )
        return self._known[image][1]

    def all(self) -> tuple[MemorySnapshot, ...]:
        return tuple(snapshot for snapshot, _ in self._known.values())

    def forget(self, recipe: Recipe) -> None:
        """Remove a snapshot. Sandboxes on it go on. Raises UsageError if there is none."""
        known = self._known.pop(recipe.image or "", None)
        if known is None:
            raise UsageError(
                f"{recipe.image!r} is no snapshot that this substrate has in memory",
                remedy="to remove a named snapshot, use `dutyfree layer rm` or dutyfree.layers.remove",
            )
        self.layers.release(known[1].trees)

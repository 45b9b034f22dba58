"""Record how each layer was built, and check that it still sits on the layers that it was built on.

A layer of a stage or a snapshot holds one directory ``0``, ``1``, ... for each file system of a sandbox (an
image has one, ``host`` has one more for each directory of the machine), and the provenance as a JSON file.

The key of a stage's layer says which commands ran, not what they wrote: a second run may write other files.
So each build has its own id, and each layer records the build id of the layer below it. If that layer is gone
or was built again, the upper one is stale: it does not fit any more, and must not be used.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec

from dutyfree.engine.store.records import ImageSettings

STAGE = "stage"
SNAPSHOT = "snapshot"
"""Kinds of layer keys."""

_FILE = "stage"


class Provenance(
    msgspec.Struct, frozen=True, kw_only=True, rename={"build_id": "birth", "parent_build": "upon"}
):
    """How a layer was built."""

    kind: str
    """Kind of the stage, or ``snapshot``."""
    seconds: float
    """Duration of the build."""
    image: str
    """Name of the image at the bottom of the chain."""
    identity: str
    """What that image was: its name may mean another image later."""
    mounted: tuple[str, ...] = ()
    """Keys of the image's layers, the uppermost first; empty if the image is not in the store."""
    below: tuple[str, ...] = ()
    """Keys of the layers between the image and this one, the lowest first."""
    recipe: str = ""
    """Content key of the recipe's prefix that ends with this layer."""
    build_id: str = ""
    """Id of this build of a stage. A snapshot needs none: its key is unique."""
    parent_build: str = ""
    """Build id of the layer directly below; empty on an image."""
    commands: tuple[str, ...] = ()
    commit: str = ""
    """Commit of a cloned repository."""
    settings: ImageSettings | None = None
    """For a snapshot: how programs are run in it."""


def write(tree: Path, provenance: Provenance) -> None:
    (tree / _FILE).write_bytes(msgspec.json.encode(provenance))


def read(tree: Path) -> Provenance | None:
    """The provenance in a layer's tree, or None if there is none."""
    with contextlib.suppress(OSError, msgspec.DecodeError):
        return msgspec.json.decode((tree / _FILE).read_bytes(), type=Provenance)
    return None


class ProvenanceIndex:
    """The provenance of all layers of one store, each read once. All methods block."""

    def __init__(self, path: Callable[[str], Path]) -> None:
        self._path = path
        self._known: dict[str, tuple[tuple[int, int], Provenance | None]] = {}

    def get(self, key: str) -> Provenance | None:
        """Provenance of a layer; None if the layer is missing, or an image's."""
        tree = self._path(key) / "tree"
        try:
            found = (tree / _FILE).stat()
        except OSError:
            self._known.pop(key, None)
            return None
        version = found.st_ino, found.st_mtime_ns
        known = self._known.get(key)
        if known is None or known[0] != version:  # the layer was built again
            known = self._known[key] = version, read(tree)
        return known[1]

    def is_stale(self, key: str) -> bool:
        """Whether a layer below it is gone or was built again."""
        provenance = self.get(key)
        if provenance is None or not provenance.below:
            return False
        parent = provenance.below[-1]
        found = self.get(parent)
        return found is None or found.build_id != provenance.parent_build or self.is_stale(parent)

    def below(self, key: str) -> tuple[str, ...]:
        """Keys of the layers below, the lowest first."""
        provenance = self.get(key)
        return (*reversed(provenance.mounted), *provenance.below) if provenance is not None else ()

    def last_uses(self, own: dict[str, float]) -> dict[str, tuple[float, int]]:
        """For each layer: the last use of itself or of a layer above it, and how far that one is above.

        ``own`` has the last use of each layer itself.
        """
        uses = {key: (time, 0) for key, time in own.items()}
        for key, time in own.items():
            for distance, below in enumerate(reversed(self.below(key)), 1):
                if below in uses:
                    uses[below] = max(uses[below], (time, distance))
        return uses

    def needed(self, keys: Iterable[str]) -> set[str]:
        """All layers below these."""
        return {below for key in keys for below in self.below(key)}

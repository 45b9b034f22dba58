"""What a sandbox starts from: the layers of its file systems, and the defaults of its commands."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from dutyfree.engine.launcher.protocol import Tree
from dutyfree.engine.layers.command_defaults import CommandDefaults


class StoredOrigin(NamedTuple):
    """The part of a start state that is on disk: an image, and layers of the store on it."""

    image: str
    identity: str | None
    """Tells the image from another one of the same name; None if the image can change at any time."""
    mounted: tuple[str, ...]
    """Keys of the image's layers, the uppermost first; empty if the image is not in the store."""
    keys: tuple[str, ...]
    """Keys of the layers on the image, the lowest first."""
    trees: tuple[Tree, ...]
    """The launcher's layers for all of them."""
    build_ids: tuple[str, ...] = ()
    """The builds of the layers on the image."""


class StartState(NamedTuple):
    """The state in which sandboxes start. A recipe, a prefix of a recipe and a snapshot each have one."""

    trees: tuple[Tree, ...]
    defaults: CommandDefaults
    origin: StoredOrigin
    build_id: str = ""
    """The build of the last stage: another build of the same stage may have written other files."""

    def with_layer(self, own: Sequence[int], key: str, build_id: str) -> StartState:
        """Add a layer of the store: ``own`` has the launcher's layer for each file system."""
        trees = tuple(
            (point, (layer, *layers)) for layer, (point, layers) in zip(own, self.trees, strict=True)
        )
        origin = self.origin
        if origin.trees == self.trees:  # else a layer between them is in memory only
            keys, build_ids = (*origin.keys, key), (*origin.build_ids, build_id)
            origin = origin._replace(keys=keys, build_ids=build_ids, trees=trees)
        return StartState(trees, self.defaults, origin, build_id)

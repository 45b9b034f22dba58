"""What a layer of the store was made of: told beside it, so that it can be found, shown and sent elsewhere.

Layers of stages and snapshots hold a directory ``0``, ``1``, ... for each file system of the sandboxes that
stand on them (an image has one, ``host`` one more for each of the machine's own directories), and this.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import msgspec

from dutyfree.engine.images.manifest import Settings

STAGE = "stage"
SNAPSHOT = "snapshot"
"""Kinds of keys in the store."""

_FILE = "stage"


class Made(msgspec.Struct, frozen=True, kw_only=True):
    kind: str
    """Of the stage, or ``snapshot``."""
    seconds: float
    """That making it took."""
    image: str
    """What it stands on in the end, by name; and what that is, so that another of that name is told apart."""
    identity: str
    mounted: tuple[str, ...] = ()
    """Keys of the image's layers, the uppermost first; none of one that is not in the store."""
    below: tuple[str, ...] = ()
    """Keys of the layers between the image and this one, the lowest first."""
    recipe: str = ""
    """The key of the recipe's prefix that it ends."""
    birth: str = ""
    """Of a stage: another each time that it is run, since what it leaves may be another each time.

    A snapshot needs none: its key is another each time.
    """
    upon: str = ""
    """The birth of the layer directly below it; none of an image."""
    commands: tuple[str, ...] = ()
    commit: str = ""
    """What a repository was at when it was cloned."""
    settings: Settings | None = None
    """Of a snapshot: how programs are run in it."""

    @property
    def needs(self) -> tuple[str, ...]:
        """Keys of all that lies below it."""
        return (*self.mounted, *self.below)


def seen(tree: Path) -> tuple[int, int]:
    """What changes when another is written. Raises OSError."""
    found = (tree / _FILE).stat()
    return found.st_ino, found.st_mtime_ns


def write(tree: Path, made: Made) -> None:
    (tree / _FILE).write_bytes(msgspec.json.encode(made))


def read(tree: Path) -> Made | None:
    with contextlib.suppress(OSError, msgspec.DecodeError):
        return msgspec.json.decode((tree / _FILE).read_bytes(), type=Made)
    return None

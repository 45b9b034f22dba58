"""Directories of openings, and what is left of those whose owner is dead."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from dutyfree.substrates.owner import is_dead
from dutyfree.substrates.reaper import kill_marked, remove_tree

PREFIX = "dutyfree-bare-"
OWNER = "owner"
"""The file in an opening's directory that tells whose it is."""


def leftovers(parent: Path) -> Iterator[Path]:
    """What dead owners left in ``parent`` when even their reapers were killed.

    Whose owner cannot be judged from here (another machine, another pid namespace) is left alone.
    """
    for path in parent.glob(f"{PREFIX}*"):
        with suppress(OSError):
            if is_dead((path / OWNER).read_text()):
                yield path


def remove_leftover(path: Path) -> None:
    """And what still runs of it. Raises OSError."""
    kill_marked(f"DUTYFREE_OWNER={path.name}", strays=str(path))
    remove_tree(str(path))


def remove_leftovers(parent: Path) -> int:
    """Remove them. Returns how many."""
    removed = 0
    for path in leftovers(parent):
        with suppress(OSError):
            remove_leftover(path)
            removed += 1
    return removed

"""Directories of openings, and what is left of those whose owner is dead.

Beside a directory stands a link that tells its owner: made before it and removed after it, at one stroke
each, so that whatever is killed at any moment, no directory is without one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from dutyfree.substrates.local.owner import is_dead
from dutyfree.substrates.local.reaper import OWNER, kill_marked, remove_owned

PREFIX = "dutyfree-bare-"


def leftovers(parent: Path) -> Iterator[Path]:
    """What dead owners left in ``parent`` when even their reapers were killed.

    Whose owner cannot be judged from here (another machine, another pid namespace) is left alone.
    """
    for link in parent.glob(f"{PREFIX}*{OWNER}"):
        with suppress(OSError):
            if is_dead(str(link.readlink())):
                yield link.with_suffix("")


def remove_leftover(path: Path) -> None:
    """And what still runs of it. Raises OSError."""
    kill_marked(f"DUTYFREE_OWNER={path.name}", strays=str(path))
    remove_owned(str(path))


def remove_leftovers(parent: Path) -> int:
    """Remove them. Returns how many."""
    removed = 0
    for path in leftovers(parent):
        with suppress(OSError):
            remove_leftover(path)
            removed += 1
    return removed

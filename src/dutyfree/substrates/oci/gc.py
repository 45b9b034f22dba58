"""Find and remove what killed owners left: directories, the runtimes that use them, and control groups.

Containers end with their owner, and its reaper removes the rest. This is for reapers that were killed too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from dutyfree.substrates.local.owner import abandoned
from dutyfree.substrates.local.reaper import kill_marked, remove_groups, remove_owned

PREFIX = "dutyfree-oci-"


def leftovers(parent: Path) -> Iterator[Path]:
    """The directories in ``parent`` whose owner is certainly dead."""
    return abandoned(parent, PREFIX)


def remove_leftover(path: Path) -> None:
    """End the containers of a directory, and remove it. Raises OSError."""
    remove_groups(path.name)
    kill_marked(f"DUTYFREE_OWNER={path.name}", strays=str(path))
    remove_groups(path.name)  # a runtime that was just starting may have made them again
    remove_owned(str(path))


def remove_leftovers(parent: Path) -> int:
    """Remove all leftovers in ``parent``. Returns how many were removed."""
    removed = 0
    for path in leftovers(parent):
        with suppress(OSError):
            remove_leftover(path)
            removed += 1
    return removed

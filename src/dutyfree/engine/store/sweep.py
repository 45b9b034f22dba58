"""What killed processes left in the layer store: half made, half fetched, locks that nobody holds."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from dutyfree.engine.store import locks
from dutyfree.engine.store.locks import abandoned, locked
from dutyfree.engine.store.names import SCRATCH

PART_SECONDS = 7 * 86400.0
"""So long a cut download may wait to be taken up again, and a packed layer for the next who wants it."""


def sweep(root: Path, *, dry_run: bool) -> int:
    """Remove it, or only count it: bytes. For whoever holds the lock of the whole store."""
    making = root / "making"
    making.mkdir(exist_ok=True, mode=0o700)
    with locked(making / ".lock", fcntl.LOCK_EX):
        left = [*_left(root), *(path for path in _inside(making) if abandoned(path / "lock"))]
        half = sum(size(path) for path in left)
        for path in left if not dry_run else ():
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
    for path in _inside(root / "locks") if not dry_run else ():
        locks.remove(path)
    return half


def _left(root: Path) -> Iterator[Path]:
    yield from root.glob(f"{SCRATCH}*")  # nobody writes one while the store is locked
    for path in _inside(root / "parts"):
        if _is_old(path) and abandoned(path):
            yield path
    yield from filter(_is_old, (root / "kept").glob("*/*/packed"))


def _inside(directory: Path) -> list[Path]:
    with contextlib.suppress(FileNotFoundError):
        return [path for path in directory.iterdir() if path.name != ".lock"]
    return []


def _is_old(path: Path) -> bool:
    with contextlib.suppress(OSError):
        return time.time() - path.stat().st_mtime > PART_SECONDS
    return False


def size(path: Path) -> int:
    """Bytes on the disk, of a file or all below a directory."""
    total = 0
    for directory, _, names in os.walk(path):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(directory, name)).st_blocks * 512
    with contextlib.suppress(OSError):
        total += path.lstat().st_blocks * 512
    return total

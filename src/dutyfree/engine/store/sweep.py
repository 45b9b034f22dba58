"""Remove from the layer store what killed processes left: half-built layers, old downloads, unused locks."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from dutyfree.engine.store import locks
from dutyfree.engine.store.locks import is_abandoned, locked
from dutyfree.engine.store.names import SCRATCH

PART_SECONDS = 7 * 86400.0
"""How long an interrupted download or a packed layer stays for the next request."""


def sweep(root: Path, *, dry_run: bool) -> int:
    """Remove the leftovers, or only count them, and return their bytes. The caller holds the store's lock."""
    making = root / "making"
    making.mkdir(exist_ok=True, mode=0o700)
    with locked(making / ".lock", fcntl.LOCK_EX):
        found = [*_leftovers(root), *(path for path in _entries(making) if is_abandoned(path / "lock"))]
        total = sum(size(path) for path in found)
        for path in found if not dry_run else ():
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
    for path in _entries(root / "locks") if not dry_run else ():
        locks.remove(path)
    return total


def _leftovers(root: Path) -> Iterator[Path]:
    yield from root.glob(f"{SCRATCH}*")  # no process writes one while the store is locked
    for path in _entries(root / "parts"):
        if _is_old(path) and is_abandoned(path):
            yield path
    yield from filter(_is_old, (root / "kept").glob("*/*/packed"))


def _entries(directory: Path) -> list[Path]:
    with contextlib.suppress(FileNotFoundError):
        return [path for path in directory.iterdir() if path.name != ".lock"]
    return []


def _is_old(path: Path) -> bool:
    with contextlib.suppress(OSError):
        return time.time() - path.stat().st_mtime > PART_SECONDS
    return False


def size(path: Path) -> int:
    """Bytes on disk of a file, or of a directory with everything in it."""
    total = 0
    for directory, _, names in os.walk(path):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(directory, name)).st_blocks * 512
    with contextlib.suppress(OSError):
        total += path.lstat().st_blocks * 512
    return total

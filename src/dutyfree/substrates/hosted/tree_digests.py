"""Digests of files that are computed again only if the files may have changed.

A recipe names the files of its stages by a digest of their contents. To read them for each sandbox takes
longer than the rest of the creation. So the digest of a tree is kept with what ``lstat`` says of every entry:
type, mode, inode, size, and the times of the last change of its contents and of its inode. The kernel alone
sets the latter (ctime), at every change of contents, mode or name, and no program can set it back.

Three changes do not show there. A change within the resolution of the clock after the digest was computed: so
a tree that changed less than ``SETTLED`` seconds before is not kept. A change while the tree is read: so the
state is compared before and after. And writes to pages of a file that a process has mapped and has written
before: the kernel notes the first one, and the next after it has written the pages back. Do not use files of
which you map and write parts as the files of a stage.
"""

from __future__ import annotations

import os
import stat
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from dutyfree.contract.stage import tree_digest

SETTLED = 2.5
"""Seconds: more than the resolution of times of any file system (FAT: two seconds)."""
KEPT = 256
"""Trees whose digests are kept."""

Signature = tuple[tuple[str, int, int, int, int, int, int], ...]


class _Known(NamedTuple):
    signature: Signature
    digest: bytes


class TreeDigests:
    """A cache of ``tree_digest``. Threads may share it."""

    def __init__(self, settled: float = SETTLED, compute: Callable[[Path], bytes] = tree_digest) -> None:
        self._settled = int(settled * 1e9)
        self._compute = compute
        self._known: OrderedDict[Path, _Known] = OrderedDict()
        self._lock = threading.Lock()

    def digest(self, root: Path) -> bytes:
        """The digest of a file or a tree. Raises OSError."""
        before, newest = _signature(root)
        with self._lock:
            known = self._known.get(root)
            if known is not None and known.signature == before:
                self._known.move_to_end(root)
                return known.digest
        begin = time.time_ns()
        found = self._compute(root)
        settled = newest < begin - self._settled
        with self._lock:
            self._known.pop(root, None)
            if settled and _signature(root)[0] == before:
                self._known[root] = _Known(before, found)
                while len(self._known) > KEPT:
                    self._known.popitem(last=False)
        return found


def _signature(root: Path) -> tuple[Signature, int]:
    """What the digest depends on, without the contents, and the time of the latest change."""
    entries: list[tuple[str, int, int, int, int, int, int]] = []
    newest = 0
    pending = [(str(root), "")]
    while pending:
        path, name = pending.pop()
        found = os.lstat(path)
        newest = max(newest, found.st_ctime_ns)
        entries.append(
            (
                name,
                found.st_mode,
                found.st_dev,
                found.st_ino,
                found.st_size,
                found.st_mtime_ns,
                found.st_ctime_ns,
            )
        )
        if stat.S_ISDIR(found.st_mode):
            with os.scandir(path) as children:
                pending += [(child.path, f"{name}/{child.name}") for child in children]
    return tuple(sorted(entries)), newest

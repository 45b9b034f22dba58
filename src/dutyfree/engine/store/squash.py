"""Squash layers: merge several into one.

A lookup in an overlay searches every layer, and the kernel limits their number. The files of the merged layer
are hard links to those of its sources, so nothing is copied. It contains no whiteouts. Layers are also
squashed if one has a whiteout in a directory that no layer below it has: overlayfs would list that as a file.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
import stat
from collections.abc import Sequence
from pathlib import Path

from dutyfree.engine.store.cancel import CancelToken
from dutyfree.engine.store.overlay import ACL_ATTRIBUTES, children, lookup

LAYERS_MAX = 16
"""Layers of an image that sandboxes mount. If an image has more, they are squashed."""

_WHITEOUTS = "hiding"


def record_whiteouts(tree: Path, directories: Sequence[str]) -> None:
    """Write beside a layer which of its directories contain whiteouts."""
    if directories:
        (tree.parent / _WHITEOUTS).write_bytes("\0".join(directories).encode("utf-8", "surrogateescape"))


def has_stray_whiteouts(layers: Sequence[Path]) -> bool:
    """Whether a layer, the lowest first, has a whiteout in a directory that no layer below it has."""
    for number, tree in enumerate(layers):
        try:
            recorded = (tree.parent / _WHITEOUTS).read_bytes().decode("utf-8", "surrogateescape").split("\0")
        except FileNotFoundError:
            continue
        below = layers[:number][::-1]
        for directory in recorded:
            entry = lookup(below, directory) if below else None
            if entry is None or not entry.is_directory:
                return True
    return False


def squash_key(layers: Sequence[str]) -> str:
    """Key of the layer that these layers, the lowest first, are squashed to."""
    return f"squash:{hashlib.sha256(' '.join(layers).encode()).hexdigest()}"


def squash(layers: Sequence[Path], target: Path, cancel: CancelToken) -> tuple[int, int, int]:
    """Merge layers, the uppermost first, into the empty ``target``.

    Returns the bytes of its own, the files, and 0. Raises OSError, Cancelled.
    """
    size = files = 0
    todo = [("", tuple(layers))]
    finished = []
    while todo:
        cancel.check()
        at, sources = todo.pop()
        here = target / at
        finished.append((here, sources[0]))
        for name, entry in children(sources).items():
            files += 1
            if entry.is_directory:
                (here / name).mkdir()
                size += 4096
                todo.append((os.path.join(at, name), entry.paths))
            else:
                _link(entry.paths[0], here / name)
    # Last, since adding an entry changes a directory's times.
    for path, source in reversed(finished):
        _copy_attributes(path, source)
    return size, files, 0


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError as error:
        if error.errno != errno.EMLINK:
            raise
        shutil.copy2(source, target, follow_symlinks=False)
        found = source.lstat()
        os.chown(target, found.st_uid, found.st_gid, follow_symlinks=False)
        if not stat.S_ISLNK(found.st_mode):
            target.chmod(stat.S_IMODE(found.st_mode))


def _copy_attributes(path: Path, source: Path) -> None:
    found = source.stat()
    os.chown(path, found.st_uid, found.st_gid)
    path.chmod(stat.S_IMODE(found.st_mode))
    with contextlib.suppress(OSError):
        for name in os.listxattr(source):
            if name.startswith("user.") or name in ACL_ATTRIBUTES:
                os.setxattr(path, name, os.getxattr(source, name))
    os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))

"""Many layers become one: each lookup in an overlay asks them all, and the kernel takes only so many.

Nothing is copied: the one layer's files are hard links to those of the many. Whiteouts have done their work
in it, and are gone. So layers are also made one if overlayfs would list a whiteout as if it were a file: it
does in a directory that no layer below has.
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

from dutyfree.engine.images.unpack import ACCESS_LISTS, is_whiteout
from dutyfree.engine.store.cancel import Halt
from dutyfree.engine.store.overlay_view import lookup, opaque

MOST = 16
"""Layers that sandboxes stand on. More become one."""
_HIDING = "hiding"


def note(tree: Path, hiding: Sequence[str]) -> None:
    """Keep beside a layer which of its directories hold whiteouts."""
    if hiding:
        (tree.parent / _HIDING).write_bytes("\0".join(hiding).encode("utf-8", "surrogateescape"))


def strays(layers: Sequence[Path]) -> bool:
    """Whether a layer, of these from the lowest on, has a whiteout in a directory that none below it has."""
    for number, tree in enumerate(layers):
        try:
            hiding = (tree.parent / _HIDING).read_bytes().decode("utf-8", "surrogateescape").split("\0")
        except FileNotFoundError:
            continue
        below = layers[:number][::-1]
        for directory in hiding:
            seen = lookup(below, directory) if below else None
            if seen is None or not seen.is_directory:
                return True
    return False


def key(layers: Sequence[str]) -> str:
    """Of the layer that these make, the lowest first."""
    return f"squash:{hashlib.sha256(' '.join(layers).encode()).hexdigest()}"


def squash(layers: Sequence[Path], target: Path, halt: Halt) -> tuple[int, int, int]:
    """Merge layers, the uppermost first, into the empty ``target``. Returns the bytes of its own, files, 0.

    Raises OSError, Stopped.
    """
    size = files = 0
    todo = [("", list(layers))]
    finish = []
    while todo:
        halt.check()
        at, sources = todo.pop()
        here = target / at
        finish.append((here, sources[0]))
        for name, found in _merged(sources).items():
            files += 1
            upper, info = found[0]
            if stat.S_ISDIR(info.st_mode):
                (here / name).mkdir()
                size += 4096
                todo.append((os.path.join(at, name), [path for path, _ in found]))
            else:
                _link(upper, here / name)
    # The times of directories last, when nothing is put into them any more.
    for path, source in reversed(finish):
        _dress(path, source)
    return size, files, 0


def _merged(sources: list[Path]) -> dict[str, list[tuple[Path, os.stat_result]]]:
    """Of each name in these directories, uppermost first: what is seen, and the directories it merges."""
    seen: dict[str, list[tuple[Path, os.stat_result]]] = {}
    closed: set[str] = set()
    for source in sources:
        for entry in os.scandir(source):
            name, info = entry.name, entry.stat(follow_symlinks=False)
            directory = stat.S_ISDIR(info.st_mode)
            if name in closed:
                continue
            if directory or name not in seen:
                seen.setdefault(name, []).append((source / name, info))
            if not directory or opaque(source / name):
                closed.add(name)
    # A whiteout hides what lies below it, and is nothing itself.
    return {name: found for name, found in seen.items() if not is_whiteout(found[0][1])}


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


def _dress(path: Path, source: Path) -> None:
    found = source.stat()
    os.chown(path, found.st_uid, found.st_gid)
    path.chmod(stat.S_IMODE(found.st_mode))
    with contextlib.suppress(OSError):
        for name in os.listxattr(source):
            if name.startswith("user.") or name in ACCESS_LISTS:
                os.setxattr(path, name, os.getxattr(source, name))
    os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))

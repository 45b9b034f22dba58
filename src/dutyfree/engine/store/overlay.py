"""Read layers as overlayfs shows them, without mounting them."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

OPAQUE = "trusted.overlay.opaque"
"""Attribute of a directory that hides the directories below it."""
REDIRECT = "trusted.overlay.redirect"
METACOPY = "trusted.overlay.metacopy"
"""Attributes of files that refer to a lower layer."""
WHITEOUT_DEVICE = 0
"""Number of the character device that hides the entry of its name in lower layers."""

ACL_ATTRIBUTES = ("system.posix_acl_access", "system.posix_acl_default")
"""Attributes that layers keep besides ``user.*``."""

_READ_MAX = 4 << 20


class OverlayEntry(NamedTuple):
    """A file or directory as an overlay shows it."""

    paths: tuple[Path, ...]
    """Where it lies: for a directory all that are merged, the uppermost first; else one path."""
    is_directory: bool


def is_whiteout(info: os.stat_result) -> bool:
    return stat.S_ISCHR(info.st_mode) and info.st_rdev == WHITEOUT_DEVICE


def is_opaque(directory: Path | int) -> bool:
    """Whether a directory hides the directories below it."""
    try:
        return os.getxattr(directory, OPAQUE, follow_symlinks=isinstance(directory, int)) == b"y"
    except OSError:
        return False


def visible(candidates: Iterable[tuple[Path, os.stat_result]]) -> OverlayEntry | None:
    """What an overlay shows of the entries of one name in several layers, the uppermost first."""
    directories: list[Path] = []
    for path, info in candidates:
        if not stat.S_ISDIR(info.st_mode):
            if not directories and not is_whiteout(info):
                return OverlayEntry((path,), is_directory=False)
            break
        directories.append(path)
        if is_opaque(path):
            break
    return OverlayEntry(tuple(directories), is_directory=True) if directories else None


def children(directories: Sequence[Path]) -> dict[str, OverlayEntry]:
    """The visible entries of directories that an overlay merges, the uppermost first. Raises OSError."""
    candidates: dict[str, list[tuple[Path, os.stat_result]]] = {}
    for directory in directories:
        for entry in os.scandir(directory):
            found = directory / entry.name, entry.stat(follow_symlinks=False)
            candidates.setdefault(entry.name, []).append(found)
    entries = ((name, visible(found)) for name, found in candidates.items())
    return {name: entry for name, entry in entries if entry is not None}


def lookup(layers: Sequence[Path], name: str) -> OverlayEntry | None:
    """The entry at a path relative to the root of the layers. Symbolic links are not followed."""
    entry = OverlayEntry(tuple(layers), is_directory=True)
    for part in (part for part in name.split("/") if part):
        found = visible(_lstat_all(entry.paths, part)) if entry.is_directory else None
        if found is None:
            return None
        entry = found
    return entry


def _lstat_all(directories: Iterable[Path], name: str) -> Iterator[tuple[Path, os.stat_result]]:
    for path in (directory / name for directory in directories):
        try:
            yield path, path.lstat()
        except OSError:
            continue


@contextlib.contextmanager
def open_tree(path: Path) -> Iterator[int]:
    """Open a layer's directory. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def read(layers: Sequence[Path], name: str) -> bytes:
    """The contents of a small file; empty if there is none."""
    entry = lookup(layers, name)
    if entry is None or not stat.S_ISREG(entry.paths[0].lstat().st_mode):
        return b""
    with open(entry.paths[0], "rb") as file:
        return file.read(_READ_MAX)


def home_variable(layers: Sequence[Path], user: str) -> dict[str, str]:
    """``HOME`` of the image's user, from the image's ``/etc/passwd``; empty if the user is not in it."""
    wanted = user.partition(":")[0].encode()
    for line in read(layers, "etc/passwd").splitlines() if wanted else ():
        fields = line.split(b":")
        if len(fields) >= 6 and wanted in (fields[0], fields[2]) and fields[5]:
            return {"HOME": os.fsdecode(fields[5])}
    return {}

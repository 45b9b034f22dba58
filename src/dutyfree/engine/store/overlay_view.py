"""What an overlay of layers would show, told without mounting one."""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from dutyfree.engine.images.unpack import OPAQUE, is_whiteout

_LARGEST = 4 << 20


class Seen(NamedTuple):
    paths: tuple[Path, ...]
    """Where it lies, the uppermost first; of anything but a directory, one."""
    is_directory: bool


def lookup(layers: Sequence[Path], name: str) -> Seen | None:
    """What has the name, relative to the root; links are seen as such, and not followed."""
    seen = Seen(tuple(layers), is_directory=True)
    for part in (part for part in name.split("/") if part):
        if not seen.is_directory:
            return None
        found = _child(seen.paths, part)
        if found is None:
            return None
        seen = found
    return seen


def read(layers: Sequence[Path], name: str) -> bytes:
    """A small file of an image; nothing if it is none."""
    seen = lookup(layers, name)
    if seen is None or not stat.S_ISREG(seen.paths[0].lstat().st_mode):
        return b""
    with open(seen.paths[0], "rb") as file:
        return file.read(_LARGEST)


def home(layers: Sequence[Path], user: str) -> dict[str, str]:
    """The variable that tells where the image's user is at home, by its own ``/etc/passwd``."""
    wanted = user.partition(":")[0].encode()
    for line in read(layers, "etc/passwd").splitlines() if wanted else ():
        fields = line.split(b":")
        if len(fields) >= 6 and wanted in (fields[0], fields[2]) and fields[5]:
            return {"HOME": os.fsdecode(fields[5])}
    return {}


def opaque(path: Path) -> bool:
    """Whether a directory hides what lies below it."""
    try:
        return os.getxattr(path, OPAQUE, follow_symlinks=False) == b"y"
    except OSError:
        return False


def _child(above: tuple[Path, ...], name: str) -> Seen | None:
    directories: list[Path] = []
    for path in (directory / name for directory in above):
        try:
            found = path.lstat()
        except OSError:
            continue
        if not stat.S_ISDIR(found.st_mode):
            if not directories and not is_whiteout(found):
                return Seen((path,), is_directory=False)
            break
        directories.append(path)
        if opaque(path):
            break
    return Seen(tuple(directories), is_directory=True) if directories else None

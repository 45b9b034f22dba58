"""What stands at a path, in the contract's words."""

from __future__ import annotations

import errno
import shutil
import stat
from pathlib import Path
from typing import Literal

from dutyfree.contract import Entry

KINDS: dict[int, Literal["file", "directory", "link"]] = {
    stat.S_IFREG: "file",
    stat.S_IFDIR: "directory",
    stat.S_IFLNK: "link",
}
"""By what stat tells. What is none of these cannot be read, written or copied."""


def entry(name: str, mode: int, size: int) -> Entry:
    """``mode`` as stat has it."""
    return Entry(name, KINDS.get(stat.S_IFMT(mode), "other"), size, stat.S_IMODE(mode))


def special(path: str | Path) -> shutil.SpecialFileError:
    """The error of an operation on a pipe, a socket or a device."""
    return shutil.SpecialFileError(errno.EINVAL, "Neither a file nor a directory", str(path))

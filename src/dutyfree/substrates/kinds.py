"""What stands at a path, in the contract's words."""

from __future__ import annotations

import errno
import shutil
import stat
from pathlib import Path
from typing import Literal

from dutyfree.contract import Entry
from dutyfree.errors import CollectError, DutyfreeError, file_error

KINDS: dict[int, Literal["file", "directory", "link"]] = {
    stat.S_IFREG: "file",
    stat.S_IFDIR: "directory",
    stat.S_IFLNK: "link",
}
"""By what stat tells. What is none of these cannot be read, written or copied."""


def entry(name: str, mode: int, size: int) -> Entry:
    """``mode`` as stat has it."""
    return Entry(name, KINDS.get(stat.S_IFMT(mode), "other"), size, stat.S_IMODE(mode))


def local_special(path: Path) -> shutil.SpecialFileError:
    """A pipe, a socket or a device of this host, which the program asked to upload."""
    return shutil.SpecialFileError(errno.EINVAL, "Neither a file nor a directory", str(path))


_OWN = (errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENOMEM, errno.EACCES, errno.EPERM, errno.EROFS)


def unpackable(error: OSError, name: str) -> DutyfreeError:
    """A downloaded file cannot be written here: our fault for want of room or rights, else its name's."""
    number = error.errno or errno.EIO
    if number in _OWN:
        return CollectError(f"{name} cannot be written on this host: {error.strerror}")
    return file_error(number, name)

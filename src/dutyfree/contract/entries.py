"""Entries of directories, and the links of downloaded trees."""

from __future__ import annotations

import errno
import shutil
import stat
from pathlib import Path
from typing import Literal

from dutyfree.contract.action import Entry
from dutyfree.contract.errors import ActionError, CollectError, DutyfreeError, file_error

KINDS: dict[int, Literal["file", "directory", "link"]] = {
    stat.S_IFREG: "file",
    stat.S_IFDIR: "directory",
    stat.S_IFLNK: "link",
}
"""By file type, as in ``st_mode``. Other types cannot be read, written or copied."""


def entry(name: str, mode: int, size: int) -> Entry:
    """Make an entry; ``mode`` is the ``st_mode`` of stat."""
    return Entry(name, KINDS.get(stat.S_IFMT(mode), "other"), size, stat.S_IMODE(mode))


def local_special(path: Path) -> shutil.SpecialFileError:
    """The error for an upload of a pipe, a socket or a device of this host."""
    return shutil.SpecialFileError(errno.EINVAL, "Neither a file nor a directory", str(path))


NAMED = 10_000
"""How many omitted links a download names at most."""


class Links:
    """Decides which links of a downloaded tree are made on this host. ``left_out`` names the others."""

    def __init__(self, path: str, *, outside: bool) -> None:
        """``path`` is the downloaded path. With ``outside``, all links are made."""
        self._path = path
        self._outside = outside
        self.left_out: list[str] = []

    def admit(self, name: str, destination: str) -> bool:
        """Whether to make the link of this name in the tree. Raises ActionError for the top, named ""."""
        if self._outside or not leads_out(name, destination):
            return True
        if not name:
            raise ActionError(
                f"{self._path} is a link to {destination!r}, which would point to a file of this host",
                remedy="download the target of the link, or give outside_links=True",
            )
        if len(self.left_out) < NAMED:
            self.left_out.append(name)
        return False


def leads_out(name: str, destination: str) -> bool:
    """Whether a link of this name could point out of its tree, now or after further links are made.

    Only a ``..`` at the beginning of the target is sure to mean a directory above the link. A later one may
    follow another link.
    """
    parts = [part for part in destination.split("/") if part not in ("", ".")]
    up = next((number for number, part in enumerate(parts) if part != ".."), len(parts))
    return not name or destination.startswith("/") or up > name.count("/") or ".." in parts[up:]


_OWN = (errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENOMEM, errno.EACCES, errno.EPERM, errno.EROFS)


def unpackable(error: OSError, name: str) -> DutyfreeError:
    """The error for a downloaded file that cannot be written: CollectError if this host is the cause."""
    number = error.errno or errno.EIO
    if number in _OWN:
        return CollectError(f"{name} cannot be written on this host: {error.strerror}")
    return file_error(number, name)

"""What stands at a path, in the contract's words."""

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
"""By what stat tells. What is none of these cannot be read, written or copied."""


def entry(name: str, mode: int, size: int) -> Entry:
    """``mode`` as stat has it."""
    return Entry(name, KINDS.get(stat.S_IFMT(mode), "other"), size, stat.S_IMODE(mode))


def local_special(path: Path) -> shutil.SpecialFileError:
    """A pipe, a socket or a device of this host, which the program asked to upload."""
    return shutil.SpecialFileError(errno.EINVAL, "Neither a file nor a directory", str(path))


NAMED = 10_000
"""At most so many links are named that a download left out."""


class Links:
    """The links of a downloaded tree: which of them are made here, and which are left out."""

    def __init__(self, path: str, *, outside: bool) -> None:
        """``path`` is what is downloaded; with ``outside`` all links are made."""
        self._path = path
        self._outside = outside
        self.left_out: list[str] = []

    def admit(self, name: str, destination: str) -> bool:
        """Whether it is to be made: by its name in the tree, "" for the top, which raises ActionError."""
        if self._outside or not leads_out(name, destination):
            return True
        if not name:
            raise ActionError(
                f"{self._path} is a link to {destination!r}, which here would lead to a file of this host",
                remedy="download what it leads to, or give outside_links=True",
            )
        if len(self.left_out) < NAMED:
            self.left_out.append(name)
        return False


def leads_out(name: str, destination: str) -> bool:
    """Whether a link of this name in a tree could lead out of it, now or when others have been made there.

    Only ``..`` at the beginning are sure to be directories above the link, and not above where another leads.
    """
    parts = [part for part in destination.split("/") if part not in ("", ".")]
    up = next((number for number, part in enumerate(parts) if part != ".."), len(parts))
    return not name or destination.startswith("/") or up > name.count("/") or ".." in parts[up:]


_OWN = (errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENOMEM, errno.EACCES, errno.EPERM, errno.EROFS)


def unpackable(error: OSError, name: str) -> DutyfreeError:
    """A downloaded file cannot be written here: our fault for want of room or rights, else its name's."""
    number = error.errno or errno.EIO
    if number in _OWN:
        return CollectError(f"{name} cannot be written on this host: {error.strerror}")
    return file_error(number, name)

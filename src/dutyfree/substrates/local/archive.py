"""Tar archives of file trees: pack a local tree, and unpack an untrusted archive."""

from __future__ import annotations

import errno
import os
import posixpath
import shutil
import stat
import tarfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from dutyfree.contract.entries import Links, local_special, unpackable
from dutyfree.contract.errors import ActionError, PathForbidden, SpecialFile, file_error
from dutyfree.engine.sandbox.tree_stream import LARGEST
from dutyfree.substrates.local.reaper import remove_tree

_CHUNK = 1 << 20
_INODE = 4096  # bytes that a file takes on disk at least, besides its content
_LINK = 4095  # bytes of the longest target of a symbolic link

_NONSENSE = (ValueError, ArithmeticError, LookupError, TypeError, AttributeError, RecursionError)
"""What tarfile raises for headers that make no sense, besides its own errors."""


def pack(source: Path, name: str, target: BinaryIO) -> None:
    """Write a tar archive of ``source``, whose name in it is ``name``; root owns everything.

    Devices, sockets and pipes are left out. Raises SpecialFileError if the source itself is one.
    """

    def owned(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
        member.uid = member.gid = 0
        member.uname = member.gname = "root"
        if member.isreg() or member.isdir() or member.issym() or member.islnk():
            return member
        if member.name == name:
            raise local_special(source)
        return None

    # The GNU format keeps names as bytes, also those that are not UTF-8.
    with tarfile.open(fileobj=target, mode="w", format=tarfile.GNU_FORMAT, errors="surrogateescape") as tar:
        tar.add(source, arcname=name, filter=owned)


def unpack(source: BinaryIO, target: Path, admitted: Links, largest: int = LARGEST) -> None:
    """Unpack a seekable archive to exactly ``target``; the name of its top directory does not matter.

    Nothing is written outside of ``target``: names with ``..`` are refused; an existing link at the target or
    below is replaced, never followed; and the links of the archive are made last, so that nothing is written
    through them. Devices, sockets and pipes are left out. Holes of sparse files stay holes.

    A target that did not exist before does not exist after an error. Raises TarError if the archive makes no
    sense; SpecialFileError if the top is a device, socket or pipe; FileError of the kind ``too_large`` above
    ``largest`` bytes, in which every member counts.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    existed = os.path.lexists(target)
    try:
        _unpack(source, _Tree(source, os.fspath(target), largest), admitted)
    except BaseException:
        if not existed:
            _discard(target)
        raise


def _unpack(source: BinaryIO, tree: _Tree, admitted: Links) -> None:
    for member in _members(source):
        try:
            tree.add(member)
        except OSError as error:
            raise tree.failed(error, member.name) from error
    if not tree.found:
        raise tarfile.ReadError("it is empty")
    tree.finish(admitted)


def _members(source: BinaryIO) -> Iterator[tarfile.TarInfo]:
    """The members, of which none is kept. Raises TarError."""
    before = -1
    try:
        with tarfile.open(fileobj=source, mode="r:", errors="surrogateescape") as tar:
            while (member := tar.next()) is not None:
                if tar.offset <= before:  # by a negative size: it would come again
                    raise tarfile.ReadError("a header makes no sense: its size")
                before = tar.offset
                tar.members.clear()  # type: ignore[attr-defined]
                yield member
    except _NONSENSE as error:
        raise tarfile.ReadError(f"a header makes no sense: {error}") from error


@dataclass
class _Tree:
    """What is made at ``target``."""

    source: BinaryIO
    target: str
    left: int
    """Bytes that may still come."""
    found: bool = False
    directories: dict[str, int] = field(default_factory=dict)
    """The mode of each, which it gets at the end: it may be read-only."""
    links: list[tuple[str, str]] = field(default_factory=list)

    def add(self, member: tarfile.TarInfo) -> None:
        """Raises OSError, TarError."""
        self.found = True
        self._count(_INODE + len(member.name) + len(member.linkname))
        path = self._place(member.name)
        if member.isdir():
            _make_directory(Path(path))
            self.directories[path] = member.mode
        elif member.issym():
            _check_destination(member)
            self.links.append((path, member.linkname))
        elif member.islnk():
            self._copy(self._place(member.linkname), path, member)
        elif member.isreg():
            segments = _segments(member)
            self._count(member.size)
            _write(self.source, segments, path, member)
        elif path == self.target:
            raise SpecialFile(member.name)

    def finish(self, admitted: Links) -> None:
        """Make the links, and then set the modes of the directories. Raises OSError."""
        for path, destination in self.links:
            name = path[len(self.target) + 1 :]
            try:
                if not admitted.admit(name, destination):
                    continue
                place = Path(path)
                if place.is_symlink() or not place.is_dir():
                    place.unlink(missing_ok=True)
                place.symlink_to(destination)
            except OSError as error:
                raise self.failed(error, name) from error
        for path, mode in reversed(self.directories.items()):
            Path(path).chmod(mode & 0o777)

    def failed(self, error: OSError, name: str) -> Exception:
        if isinstance(error, ActionError) or not self.directories:
            return error  # the target itself, which the caller chose
        return unpackable(error, name)

    def _count(self, size: int) -> None:
        self.left -= size
        if self.left < 0:
            raise file_error(errno.EFBIG, self.target)

    def _place(self, name: str) -> str:
        """The path of a member: the target, or a path in a directory that this archive made."""
        normal = posixpath.normpath(name)
        if normal in (".", "") or name.startswith("/") or ".." in name.split("/"):
            raise PathForbidden(errno.EPERM, name, "the archive has a name that points out of it")
        if "\0" in name:
            raise file_error(errno.EINVAL, name)
        _, below, rest = normal.partition("/")
        if not below:
            return self.target
        path = f"{self.target}/{rest}"
        if path.rpartition("/")[0] not in self.directories:
            raise PathForbidden(
                errno.EPERM, name, "the archive has a name that is in none of its directories"
            )
        return path

    def _copy(self, original: str, path: str, member: tarfile.TarInfo) -> None:
        """Make a hard link: a copy, whose size counts."""
        try:
            found = os.lstat(original)
        except OSError as error:
            raise unpackable(error, member.linkname) from error
        if not stat.S_ISREG(found.st_mode):
            raise file_error(errno.EINVAL, member.linkname)
        if original == path:
            return
        self._count(found.st_size)
        _unlink(path)
        shutil.copy2(original, path, follow_symlinks=False)


def _check_destination(member: tarfile.TarInfo) -> None:
    """Refuse what no symbolic link can have as its target. Raises FileError."""
    destination = member.linkname
    if not destination or "\0" in destination:
        raise file_error(errno.EINVAL, member.name)
    if len(os.fsencode(destination)) > _LINK:
        raise file_error(errno.ENAMETOOLONG, member.name)


def _segments(member: tarfile.TarInfo) -> list[tuple[int, int]]:
    """Where the file has data: offsets and sizes. Between them are holes. Raises TarError."""
    sparse: list[tuple[int, int]] | None = member.sparse  # type: ignore[assignment]
    segments = [(0, member.size)] if sparse is None else [one for one in sparse if one[1]]
    end = 0
    for offset, size in segments:
        if size < 0 or offset < end:
            raise tarfile.ReadError(f"the data of {member.name} makes no sense")
        end = offset + size
    if end > member.size:
        raise tarfile.ReadError(f"the data of {member.name} makes no sense")
    return segments


def _make_directory(path: Path) -> None:
    try:
        path.mkdir()
    except FileExistsError:
        if path.is_symlink():
            path.unlink()
            path.mkdir()
        elif not path.is_dir():
            raise


def _discard(target: Path) -> None:
    with suppress(OSError):
        if target.is_dir() and not target.is_symlink():
            remove_tree(str(target))
        else:
            target.unlink(missing_ok=True)


def _unlink(path: str) -> None:
    Path(path).unlink(missing_ok=True)


def _write(source: BinaryIO, segments: list[tuple[int, int]], path: str, member: tarfile.TarInfo) -> None:
    """Write the data, which follows the header without its holes, to where it belongs."""
    _unlink(path)
    source.seek(member.offset_data)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    with open(os.open(path, flags, 0o600), "wb") as file:
        for offset, left in segments:
            file.seek(offset)
            while left > 0:
                data = source.read(min(left, _CHUNK))
                if not data:
                    raise tarfile.ReadError("unexpected end of data")
                file.write(data)
                left -= len(data)
        file.truncate(member.size)
        os.fchmod(file.fileno(), member.mode & 0o777)

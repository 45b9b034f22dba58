"""Tar archives of file trees: pack a local tree, and unpack an untrusted archive."""

from __future__ import annotations

import errno
import os
import posixpath
import shutil
import tarfile
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import IO, BinaryIO

from dutyfree.contract.entries import Links, local_special, unpackable
from dutyfree.contract.errors import ActionError, PathForbidden, SpecialFile


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


def unpack(source: BinaryIO, target: Path, admitted: Links) -> None:
    """Unpack an archive to exactly ``target``; the name of its top directory does not matter.

    Nothing is written outside of ``target``: names with ``..`` are refused; an existing link at the target or
    below is replaced, never followed; and the links of the archive are made last, so that nothing is written
    through them. Devices, sockets and pipes are left out. Raises SpecialFileError if the top is one.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    links: list[tuple[Path, str]] = []
    directories: dict[Path, int] = {}
    with tarfile.open(fileobj=source, mode="r|", errors="surrogateescape") as tar:
        for member in tar:
            try:
                _unpack_member(tar, member, target, directories, links)
            except OSError as error:
                if isinstance(error, ActionError) or not directories:
                    raise  # the target itself, which the caller chose
                raise unpackable(error, member.name) from error
    for path, mode in reversed(directories.items()):
        path.chmod(mode & 0o777)
    for path, destination in links:
        name = "" if path == target else str(path.relative_to(target))
        if not admitted.admit(name, destination):
            continue
        if path.is_symlink() or not path.is_dir():
            path.unlink(missing_ok=True)
        path.symlink_to(destination)


def _unpack_member(
    tar: tarfile.TarFile,
    member: tarfile.TarInfo,
    target: Path,
    directories: dict[Path, int],
    links: list[tuple[Path, str]],
) -> None:
    path = _place(member.name, target, directories)
    if member.isdir():
        _make_directory(path)
        directories[path] = member.mode
    elif member.issym():
        links.append((path, member.linkname))
    elif member.islnk():
        original = _place(member.linkname, target, directories)
        path.unlink(missing_ok=True)
        shutil.copy2(original, path, follow_symlinks=False)
    elif member.isreg():
        content = tar.extractfile(member)
        assert content is not None
        _write(content, path, member.mode)
    elif path == target:
        raise SpecialFile(member.name)


def _place(name: str, target: Path, directories: Mapping[Path, int]) -> Path:
    """The path of a member: the target, or a path in a directory that this archive made."""
    parts = PurePosixPath(posixpath.normpath(name)).parts
    if not parts or name.startswith("/") or ".." in PurePosixPath(name).parts:
        raise PathForbidden(errno.EPERM, name, "the archive has a name that points out of it")
    path = target.joinpath(*parts[1:])
    if path != target and path.parent not in directories:
        raise PathForbidden(errno.EPERM, name, "the archive has a name that is in none of its directories")
    return path


def _make_directory(path: Path) -> None:
    try:
        path.mkdir()
    except FileExistsError:
        if path.is_symlink():
            path.unlink()
            path.mkdir()
        elif not path.is_dir():
            raise


def _write(content: IO[bytes], path: Path, mode: int) -> None:
    path.unlink(missing_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    with open(os.open(path, flags, 0o600), "wb") as file:
        shutil.copyfileobj(content, file, 1 << 20)
        os.fchmod(file.fileno(), mode & 0o777)

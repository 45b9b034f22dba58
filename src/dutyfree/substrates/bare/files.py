"""File operations on the host itself. All of them block."""

from __future__ import annotations

import errno
import os
import shutil
import stat
from contextlib import suppress
from functools import partial
from pathlib import Path

from dutyfree.contract import Entry
from dutyfree.errors import SpecialFile
from dutyfree.substrates.kinds import KINDS, entry


def read(path: Path) -> bytes:
    with open(_opened(path, os.O_RDONLY), "rb", buffering=0) as file:
        return file.read()


def write(path: Path, data: bytes, mode: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    fd = _opened(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    with os.fdopen(fd, "wb") as file:
        file.write(data)
        os.fchmod(fd, mode)


def _opened(path: Path, flags: int, mode: int = 0o666) -> int:
    """A descriptor of a regular file; what a task left in its place, such as a pipe, is not waited for."""
    try:
        fd = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, mode)
    except OSError as error:
        if error.errno != errno.ENXIO:  # a pipe that nobody reads, a socket
            raise
        raise SpecialFile(str(path)) from error
    kind = stat.S_IFMT(os.fstat(fd).st_mode)
    if kind == stat.S_IFREG:
        return fd
    os.close(fd)
    if kind == stat.S_IFDIR:
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise SpecialFile(str(path))


def entries(path: Path) -> tuple[Entry, ...]:
    with os.scandir(path) as items:
        stats = sorted((item.name, item.stat(follow_symlinks=False)) for item in items)
    return tuple(entry(name, found.st_mode, found.st_size) for name, found in stats)


def remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def copy(source: Path, target: Path) -> None:
    """Copy to exactly ``target``: a link that stands there, or below, is replaced and not followed."""
    found = source.lstat()
    kind = stat.S_IFMT(found.st_mode)
    if kind not in KINDS:
        raise SpecialFile(str(source))
    with suppress(FileNotFoundError, NotADirectoryError):
        if os.path.samestat(found, target.lstat()):
            raise shutil.SameFileError(f"{source} is {target}")
    target.parent.mkdir(parents=True, exist_ok=True)
    _make_way(target)
    if kind == stat.S_IFDIR:
        shutil.copytree(
            source, target, symlinks=True, ignore=partial(_enter, source, target), dirs_exist_ok=True
        )
    elif target.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(target))
    elif kind == stat.S_IFLNK:
        target.symlink_to(os.readlink(source))
    else:
        shutil.copy2(source, target, follow_symlinks=False)


def _enter(source: Path, target: Path, directory: str, names: list[str]) -> list[str]:
    """Before a directory is copied: make way in the target, and leave out pipes, sockets and devices."""
    for name in names:
        _make_way(target / os.path.relpath(directory, source) / name)
    return [name for name in names if not _copyable(os.path.join(directory, name))]


def _make_way(target: Path) -> None:
    with suppress(FileNotFoundError):
        if not stat.S_ISDIR(target.lstat().st_mode):
            target.unlink()


def _copyable(path: str) -> bool:
    return stat.S_IFMT(os.lstat(path).st_mode) in KINDS

"""Blocking file operations on the host, for ``bare``."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import threading
from contextlib import suppress
from pathlib import Path

from dutyfree.contract import Entry
from dutyfree.contract.entries import KINDS, Links, entry
from dutyfree.contract.errors import SpecialFile
from dutyfree.contract.perform import edited


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
    """Open a regular file. Anything else at that path, such as a pipe, is refused without waiting."""
    try:
        fd = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, mode)
    except OSError as error:
        if error.errno != errno.ENXIO:  # a pipe without a reader, or a socket
            raise
        raise SpecialFile(str(path)) from error
    kind = stat.S_IFMT(os.fstat(fd).st_mode)
    if kind == stat.S_IFREG:
        return fd
    os.close(fd)
    if kind == stat.S_IFDIR:
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise SpecialFile(str(path))


def edit(path: Path, name: str, old: bytes, new: bytes) -> None:
    """Replace the file as a whole, or not at all. Raises OSError, and EditError with ``name`` as the path."""
    real = Path(os.path.realpath(path))
    text = edited(name, read(real), old, new)
    found = real.stat()
    scratch = real.with_name(f".dutyfree-{os.getpid()}-{threading.get_ident()}")
    try:
        scratch.write_bytes(text)
        os.chown(scratch, found.st_uid, found.st_gid)
        scratch.chmod(stat.S_IMODE(found.st_mode))
        scratch.replace(real)
    except BaseException:
        scratch.unlink(missing_ok=True)
        raise


def entries(path: Path) -> tuple[Entry, ...]:
    with os.scandir(path) as items:
        stats = sorted((item.name, item.stat(follow_symlinks=False)) for item in items)
    return tuple(entry(name, found.st_mode, found.st_size) for name, found in stats)


def remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def copy(source: Path, target: Path, links: Links) -> None:
    """Copy to exactly ``target``. A link at ``target`` or below it is replaced, not followed."""
    found = source.lstat()
    kind = stat.S_IFMT(found.st_mode)
    if kind not in KINDS:
        raise SpecialFile(str(source))
    with suppress(FileNotFoundError, NotADirectoryError):
        if os.path.samestat(found, target.lstat()):
            raise shutil.SameFileError(f"{source} is {target}")
    target.parent.mkdir(parents=True, exist_ok=True)
    _unlink_file(target)
    if kind == stat.S_IFDIR:
        _copy_tree(source, target, "", links)
    elif target.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(target))
    elif kind == stat.S_IFLNK:
        destination = os.readlink(source)
        if links.admit("", destination):
            target.symlink_to(destination)
    else:
        _copy_file(str(source), str(target))


def _copy_file(source: str, target: str) -> None:
    """Copy one file without set-id bits, and without following a link that has replaced the source."""
    with open(_opened(Path(source), os.O_RDONLY | os.O_NOFOLLOW), "rb") as content:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with open(os.open(target, flags, 0o600), "wb") as copied:
            shutil.copyfileobj(content, copied, 1 << 20)
            os.fchmod(copied.fileno(), stat.S_IMODE(os.fstat(content.fileno()).st_mode) & 0o1777)


def _copy_tree(source: Path, target: Path, name: str, links: Links) -> None:
    """Copy a directory tree without its pipes, sockets and devices."""
    target.mkdir(exist_ok=True)
    with os.scandir(source) as items:
        for item in items:
            kind = stat.S_IFMT(item.stat(follow_symlinks=False).st_mode)
            below, there = os.path.join(name, item.name), target / item.name
            _unlink_file(there)
            if kind == stat.S_IFDIR:
                _copy_tree(source / item.name, there, below, links)
            elif kind == stat.S_IFREG:
                _copy_file(item.path, str(there))
            elif kind == stat.S_IFLNK and links.admit(below, destination := os.readlink(item.path)):
                there.symlink_to(destination)
    target.chmod(stat.S_IMODE(source.stat().st_mode) & 0o1777)


def _unlink_file(target: Path) -> None:
    """Remove what is at ``target`` unless it is a directory."""
    with suppress(FileNotFoundError):
        if not stat.S_ISDIR(target.lstat().st_mode):
            target.unlink()

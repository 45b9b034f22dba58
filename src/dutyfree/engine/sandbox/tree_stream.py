"""Send and receive a tree of files through a pipe, in the format of ``struct member`` (``init/protocol.h``).

``pack`` and ``unpack`` block, so they run in a thread. A tree from a sandbox is hostile input: no name may
lead out of the target, and nothing is written through a link.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from dutyfree.contract.entries import Links, unpackable
from dutyfree.contract.errors import CollectError, file_error
from dutyfree.engine.launcher.protocol import MEMBER

LARGEST = 64 << 30
"""Bytes of the largest tree that we accept: sparse files and hard links in a sandbox can claim any size."""

_CHUNK = 1 << 18
_LINK = 4096
_INODE = 4096  # bytes that a file takes on disk at least, besides its content
_HOLE = bytes(_CHUNK)


def pack(source: Path, pipe: int) -> None:
    """Write ``source``, which is a file, link or directory, to the pipe, and close the pipe."""
    with open(pipe, "wb", buffering=_CHUNK) as stream:
        for path, name in _walk(source):
            _pack_member(path, name, stream)
        stream.write(MEMBER.pack(0, 0, 0))


def _walk(source: Path) -> Iterator[tuple[str, bytes]]:
    yield str(source), b""
    if source.is_symlink() or not source.is_dir():
        return
    root = os.fspath(source)
    for directory, directories, files in os.walk(root):
        for name in sorted(directories) + sorted(files):
            path = os.path.join(directory, name)
            yield path, os.fsencode(os.path.relpath(path, root))


def _pack_member(path: str, name: bytes, stream: BinaryIO) -> None:
    found = os.lstat(path)
    kind = stat.S_IFMT(found.st_mode)
    if kind == stat.S_IFLNK:
        target = os.fsencode(os.readlink(path))
        stream.write(MEMBER.pack(len(target), found.st_mode, len(name)) + name + target)
    elif kind == stat.S_IFDIR:
        stream.write(MEMBER.pack(0, found.st_mode, len(name)) + name)
    elif kind == stat.S_IFREG:
        with open(path, "rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            stream.write(MEMBER.pack(size, found.st_mode, len(name)) + name)
            while size > 0 and (data := file.read(min(size, _CHUNK))):
                stream.write(data)
                size -= len(data)
            stream.write(bytes(size))  # the file became shorter while we read it


def unpack(pipe: int, target: Path, links: Links) -> None:
    """Read a tree from the pipe, and create it at ``target``.

    Raises CollectError if the data makes no sense or this host has no room for it; FileError for names that
    cannot be used here; OSError for the target itself.
    """
    with open(pipe, "rb", buffering=_CHUNK) as stream:
        directories: dict[Path, int] = {}
        left = LARGEST
        while True:
            size, mode, length = MEMBER.unpack(_exactly(stream, MEMBER.size))
            if mode == 0:
                break
            left -= size + length + _INODE
            if left < 0:
                raise file_error(errno.EFBIG, str(target))
            name = os.fsdecode(_exactly(stream, length))
            try:
                path = _place(target, name, directories)
                if stat.S_ISLNK(mode):
                    _unpack_link(stream, path, name, size, links)
                else:
                    _unpack_member(stream, path, size, mode, directories)
            except OSError as error:
                if not name:
                    raise  # the target itself, which the caller chose
                raise unpackable(error, name) from error
        # Modes of directories last: a directory may be read-only.
        for path, mode in reversed(directories.items()):
            path.chmod(mode)


def _place(target: Path, name: str, directories: dict[Path, int]) -> Path:
    path = target
    if name:
        parts = name.split("/")
        # A directory comes before its content, so a parent that we did not create is an attack.
        parent = target.joinpath(*parts[:-1])
        if any(part in ("", ".", "..") for part in parts) or "\0" in name or parent not in directories:
            raise CollectError(f"the sandbox sent a file with the name {name!r}")
        path = parent / parts[-1]
    else:
        target.parent.mkdir(parents=True, exist_ok=True)
    if path.is_symlink() or path.is_file():
        path.unlink()  # it existed before: do not write through it
    return path


def _unpack_link(stream: BinaryIO, path: Path, name: str, size: int, links: Links) -> None:
    if size > _LINK:
        raise CollectError("the sandbox sent a link that is too long")
    destination = os.fsdecode(_exactly(stream, size))
    if "\0" in destination:
        raise CollectError(f"the sandbox sent a link to {destination!r}")
    if links.admit(name, destination):
        path.symlink_to(destination)


def _unpack_member(stream: BinaryIO, path: Path, size: int, mode: int, directories: dict[Path, int]) -> None:
    kind = stat.S_IFMT(mode)
    if kind == stat.S_IFDIR:
        path.mkdir(exist_ok=True)
        directories[path] = stat.S_IMODE(mode) & 0o1777
    else:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        with open(os.open(path, flags, 0o600), "wb", buffering=0) as file:
            left = size
            while left > 0:
                data = _exactly(stream, min(left, _CHUNK))
                # Keep holes, so that a small sparse file in the sandbox does not fill our disk.
                if data == _HOLE:
                    file.seek(len(data), os.SEEK_CUR)
                else:
                    file.write(data)
                left -= len(data)
            file.truncate(size)
            # Never set-id, because the file now belongs to the caller.
            os.fchmod(file.fileno(), stat.S_IMODE(mode) & 0o1777)


def _exactly(stream: BinaryIO, size: int) -> bytes:
    if size > _CHUNK:
        raise CollectError("the sandbox sent a name that is too long")
    data = stream.read(size)
    if len(data) != size:
        raise CollectError("the sandbox sent an incomplete tree")
    return data


def discard(target: Path) -> None:
    """Remove what a failed download has created."""
    if target.is_dir() and not target.is_symlink():
        shutil.rmtree(target, ignore_errors=True)
    else:
        target.unlink(missing_ok=True)

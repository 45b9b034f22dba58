"""Resolve the paths of a layer's members inside its directory. They come from untrusted archives."""

from __future__ import annotations

import ctypes
import errno
import os
import posixpath
from collections.abc import Iterator

from dutyfree.engine.images.streams import InvalidLayer

DEPTH_MAX = 200
PATH_BYTES_MAX = 3000
DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC

_ODD = ("//", "./", "/.", "\0")
_SHORT = 255
_SYS_OPENAT2 = 437
_TRIES = 1000
"""openat2 fails with EAGAIN whenever anything on the host is renamed during the lookup."""
_RESOLVE_NO_MAGICLINKS, _RESOLVE_NO_SYMLINKS, _RESOLVE_IN_ROOT = 0x02, 0x04, 0x10

_libc = ctypes.CDLL(None, use_errno=True)


def normalize(name: str) -> str:
    """The path relative to the root; "" is the root. Raises InvalidLayer if the path leads out of it."""
    # A fast path for ordinary names.
    plain = name.removeprefix("./")
    short = 0 < len(plain) <= _SHORT
    if short and plain[0] not in "/." and plain[-1] not in "/." and not any(odd in plain for odd in _ODD):
        return plain
    if "\0" in name:
        raise InvalidLayer(f"the name {name!r} contains a null byte")
    depth = 0
    for part in name.split("/"):
        depth += -1 if part == ".." else part not in ("", ".")
        if depth < 0:
            raise InvalidLayer(f"the path {name!r} leads out of it")
    normal = posixpath.normpath("/" + name.lstrip("/"))[1:]
    if len(encode(normal)) > PATH_BYTES_MAX:
        raise InvalidLayer(f"the path {normal[:200]!r}… is too long")
    return normal


def parents(name: str) -> Iterator[str]:
    """The directories above a path, the root ("") last."""
    while name:
        name = name.rpartition("/")[0]
        yield name


class _OpenHow(ctypes.Structure):
    _fields_ = (("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64))


_WITHOUT_LINKS = _OpenHow(DIRECTORY, 0, _RESOLVE_IN_ROOT | _RESOLVE_NO_MAGICLINKS | _RESOLVE_NO_SYMLINKS)
_WITH_LINKS = _OpenHow(DIRECTORY, 0, _RESOLVE_IN_ROOT | _RESOLVE_NO_MAGICLINKS)


def open_directory(root: int, path: bytes) -> int:
    """Open a directory; symbolic links in its path are resolved inside ``root``.

    Raises OSError, InvalidLayer.
    """
    try:
        return _openat2(root, path, _WITHOUT_LINKS)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
    directory = _openat2(root, path, _WITH_LINKS)
    # Through links, short paths can reach directories of any depth.
    there = os.readlink(f"/proc/self/fd/{directory}")
    if there.count("/") > 2 * DEPTH_MAX or len(os.fsencode(there)) > PATH_BYTES_MAX:
        os.close(directory)
        raise InvalidLayer(f"the path {os.fsdecode(path)[:200]!r} leads too deep")
    return directory


def _openat2(root: int, path: bytes, how: _OpenHow) -> int:
    for _ in range(_TRIES):
        descriptor = _libc.syscall(
            _SYS_OPENAT2, ctypes.c_int(root), ctypes.c_char_p(path), ctypes.byref(how), ctypes.c_size_t(24)
        )
        if descriptor >= 0:
            return int(descriptor)
        number = ctypes.get_errno()
        if number != errno.EAGAIN:
            break
    raise OSError(number, os.strerror(number), os.fsdecode(path))


def encode(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")

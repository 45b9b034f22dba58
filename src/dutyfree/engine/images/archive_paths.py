"""The names in a layer, which come from strangers: what they mean, resolved by the kernel inside of it."""

from __future__ import annotations

import ctypes
import errno
import os
import posixpath
from collections.abc import Iterator

from dutyfree.engine.images.streams import InvalidLayer

DEPTH = 200
NAME_BYTES = 3000
DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC

_ODD = ("//", "./", "/.", "\0")
_SHORT = 255
_SYS_OPENAT2 = 437
_TRIES = 1000
"""The kernel asks for another one whenever anything on the host was renamed during the look-up."""
_RESOLVE_NO_MAGICLINKS, _RESOLVE_NO_SYMLINKS, _RESOLVE_IN_ROOT = 0x02, 0x04, 0x10

_libc = ctypes.CDLL(None, use_errno=True)


def inside(name: str) -> str:
    """The name relative to the root, "" for it. Raises InvalidLayer if it leads out."""
    # Most names are what they look like; the rest is looked at part by part.
    plain = name.removeprefix("./")
    short = 0 < len(plain) <= _SHORT
    if short and plain[0] not in "/." and plain[-1] not in "/." and not any(odd in plain for odd in _ODD):
        return plain
    if "\0" in name:
        raise InvalidLayer(f"{name!r} is no possible name")
    depth = 0
    for part in name.split("/"):
        depth += -1 if part == ".." else part not in ("", ".")
        if depth < 0:
            raise InvalidLayer(f"{name!r} leads out of it")
    normal = posixpath.normpath("/" + name.lstrip("/"))[1:]
    if len(encode(normal)) > NAME_BYTES:
        raise InvalidLayer(f"{normal[:200]!r}… is too long")
    return normal


def above(name: str) -> Iterator[str]:
    """The directories that a name lies in, the root ("") last."""
    while name:
        name = name.rpartition("/")[0]
        yield name


class _How(ctypes.Structure):
    _fields_ = (("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64))


_PLAIN = _How(DIRECTORY, 0, _RESOLVE_IN_ROOT | _RESOLVE_NO_MAGICLINKS | _RESOLVE_NO_SYMLINKS)
_LINKED = _How(DIRECTORY, 0, _RESOLVE_IN_ROOT | _RESOLVE_NO_MAGICLINKS)


def resolve(root: int, path: bytes) -> int:
    """Open a directory inside of the root, whatever its name leads through. Raises OSError, InvalidLayer."""
    try:
        return _openat2(root, path, _PLAIN)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
    directory = _openat2(root, path, _LINKED)
    # Through links, short names reach ever deeper directories.
    there = os.readlink(f"/proc/self/fd/{directory}")
    if there.count("/") > 2 * DEPTH or len(os.fsencode(there)) > NAME_BYTES:
        os.close(directory)
        raise InvalidLayer(f"{os.fsdecode(path)[:200]!r} leads too deep")
    return directory


def _openat2(root: int, path: bytes, how: _How) -> int:
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

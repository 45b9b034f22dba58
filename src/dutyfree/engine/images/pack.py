"""Pack a layer's directory into a tar that ``unpack`` and every OCI tool can read.

The same tree gives the same bytes on every machine: names are sorted, times have nanoseconds, and nothing
depends on the disk. Sparse files stay sparse, hard links are stored once, and whiteouts become those of OCI.
Sockets are left out: they are useless without their process.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from typing import NamedTuple

from dutyfree.engine.images.streams import CHUNK, InvalidLayer
from dutyfree.engine.images.unpack import OPAQUE_MARK, WHITEOUT
from dutyfree.engine.store.overlay import ACL_ATTRIBUTES, METACOPY, REDIRECT, is_opaque, is_whiteout

_BLOCK = 512
_RECORD = 20 * _BLOCK
_OCTAL_MAX = 0o7777777
_SIZE_MAX = 0o77777777777
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_REFERENCES = (REDIRECT, METACOPY)
_WHITEOUT = WHITEOUT.encode()


def pack(root: int) -> Iterator[bytes]:
    """The tar of the directory that the descriptor ``root`` has open, in pieces of bounded size.

    Raises OSError, and InvalidLayer for what a tar cannot express: files named like whiteouts, references to
    lower layers.
    """
    yield from _Packer().tree(root)


class _Metadata(NamedTuple):
    """Metadata of a whiteout's header."""

    st_mode: int = 0o644
    st_uid: int = 0
    st_gid: int = 0
    st_mtime_ns: int = 0


class _Entry(NamedTuple):
    name: bytes
    kind: bytes
    info: os.stat_result | _Metadata = _Metadata()
    size: int = 0
    link: bytes = b""
    more: tuple[tuple[bytes, bytes], ...] = ()


class _Packer:
    def __init__(self) -> None:
        self._written = 0
        self._names: dict[tuple[int, int], bytes] = {}

    def tree(self, root: int) -> Iterator[bytes]:
        for piece in self._directory(root, b""):
            self._written += len(piece)
            yield piece
        end = 2 * _BLOCK
        yield bytes(end + -(self._written + end) % _RECORD)

    def _directory(self, directory: int, name: bytes) -> Iterator[bytes]:
        info = os.fstat(directory)
        yield _header(_Entry(name + b"/" if name else b"./", b"5", info, more=_attributes(directory, name)))
        if name and is_opaque(directory):
            yield _header(_Entry(name + b"/" + OPAQUE_MARK.encode(), b"0"))
        for base in sorted(os.fsencode(entry) for entry in os.listdir(directory)):
            yield from self._member(directory, base, name + b"/" + base if name else base)

    def _member(self, parent: int, base: bytes, name: bytes) -> Iterator[bytes]:
        info = os.stat(base, dir_fd=parent, follow_symlinks=False)
        if base.startswith(_WHITEOUT):
            raise InvalidLayer(f"{os.fsdecode(name)!r} would be read as a whiteout: rename it")
        if is_whiteout(info):
            above, _, last = name.rpartition(b"/")
            yield _header(_Entry((above + b"/" if above else b"") + _WHITEOUT + last, b"0"))
        elif stat.S_ISDIR(info.st_mode):
            directory = os.open(base, _DIRECTORY, dir_fd=parent)
            try:
                yield from self._directory(directory, name)
            finally:
                os.close(directory)
        elif info.st_nlink > 1 and (info.st_dev, info.st_ino) in self._names:
            yield _header(_Entry(name, b"1", info, link=self._names[info.st_dev, info.st_ino]))
        elif not stat.S_ISSOCK(info.st_mode):
            self._names[info.st_dev, info.st_ino] = name
            yield from _single(parent, base, name, info)


def _single(parent: int, base: bytes, name: bytes, info: os.stat_result) -> Iterator[bytes]:
    if stat.S_ISLNK(info.st_mode):
        yield _header(_Entry(name, b"2", info, link=os.readlink(base, dir_fd=parent)))
    elif stat.S_ISFIFO(info.st_mode):
        yield _header(_Entry(name, b"6", info))
    elif stat.S_ISREG(info.st_mode):
        file = os.open(base, _FILE, dir_fd=parent)
        try:
            yield from _file(file, name, os.fstat(file))
        finally:
            os.close(file)
    else:
        raise InvalidLayer(f"{os.fsdecode(name)!r} is a device")


def _file(file: int, name: bytes, info: os.stat_result) -> Iterator[bytes]:
    more = _attributes(file, name)
    parts = _data_parts(file, info)
    if parts == [(0, info.st_size)] or not info.st_size:
        yield _header(_Entry(name, b"0", info, info.st_size, more=more))
    else:
        # GNU's sparse format 1.0: a map of the data, then the data.
        listed = "".join(f"{number}\n" for number in (len(parts), *(n for part in parts for n in part)))
        table = listed.encode() + bytes(-len(listed) % _BLOCK)
        sparse = (
            (b"GNU.sparse.major", b"1"),
            (b"GNU.sparse.minor", b"0"),
            (b"GNU.sparse.name", name),
            (b"GNU.sparse.realsize", str(info.st_size).encode()),
        )
        size = len(table) + sum(length for _, length in parts)
        yield _header(_Entry(name, b"0", info, size, more=(*more, *sparse)))
        yield table
    written = 0
    for offset, length in parts:
        for piece in _read(file, offset, length):
            written += len(piece)
            yield piece
    yield bytes(-written % _BLOCK)


def _data_parts(file: int, info: os.stat_result) -> list[tuple[int, int]]:
    """Where the file has data, as (offset, length). A hole at the end becomes a last part of length 0."""
    if info.st_blocks * 512 >= info.st_size:
        return [(0, info.st_size)]
    parts = []
    at = 0
    while at < info.st_size:
        try:
            begin = os.lseek(file, at, os.SEEK_DATA)
        except OSError:  # only a hole is left
            break
        at = min(os.lseek(file, begin, os.SEEK_HOLE), info.st_size)
        parts.append((begin, at - begin))
    if not parts or sum(parts[-1]) < info.st_size:
        parts.append((info.st_size, 0))
    return parts


def _read(file: int, offset: int, length: int) -> Iterator[bytes]:
    while length:
        piece = os.pread(file, min(CHUNK, length), offset)
        if not piece:
            raise OSError(f"a file of the layer was truncated at {offset} while it was packed")
        yield piece
        offset += len(piece)
        length -= len(piece)


def _attributes(file: int, name: bytes) -> tuple[tuple[bytes, bytes], ...]:
    kept = []
    for attribute in sorted(os.listxattr(file)):
        if attribute in _REFERENCES:
            raise InvalidLayer(
                f"{os.fsdecode(name)!r} refers to others in a lower layer, which the tar does not contain"
            )
        if attribute.startswith("user.") or attribute in ACL_ATTRIBUTES:
            kept.append((b"SCHILY.xattr." + os.fsencode(attribute), os.getxattr(file, attribute)))
    return tuple(kept)


def _header(entry: _Entry) -> bytes:
    info, extended = entry.info, list(entry.more)
    if len(entry.name) > 100:
        extended.append((b"path", entry.name))
    if len(entry.link) > 100:
        extended.append((b"linkpath", entry.link))
    for field, value, most in (
        (b"size", entry.size, _SIZE_MAX),
        (b"uid", info.st_uid, _OCTAL_MAX),
        (b"gid", info.st_gid, _OCTAL_MAX),
    ):
        if value > most:
            extended.append((field, str(value).encode()))
    seconds, rest = divmod(info.st_mtime_ns, 1_000_000_000)
    if rest or not 0 <= seconds <= _SIZE_MAX:
        extended.append((b"mtime", f"{seconds}.{rest:09}".encode()))
    if not extended:
        return _block(entry, seconds)
    records = b"".join(_record(name, value) for name, value in extended)
    about = _Entry(b"././@PaxHeader", b"x", size=len(records))
    return _block(about, 0) + records + bytes(-len(records) % _BLOCK) + _block(entry, max(0, seconds))


def _block(entry: _Entry, seconds: int) -> bytes:
    info = entry.info
    head = b"".join(
        (
            entry.name[:100].ljust(100, b"\0"),
            _octal(stat.S_IMODE(info.st_mode), 8),
            _octal(info.st_uid if info.st_uid <= _OCTAL_MAX else 0, 8),
            _octal(info.st_gid if info.st_gid <= _OCTAL_MAX else 0, 8),
            _octal(entry.size if entry.size <= _SIZE_MAX else 0, 12),
            _octal(seconds if seconds <= _SIZE_MAX else 0, 12),
            b" " * 8,
            entry.kind,
            entry.link[:100].ljust(100, b"\0"),
            b"ustar\00000",
        )
    ).ljust(_BLOCK, b"\0")
    return head[:148] + f"{sum(head):06o}\0 ".encode() + head[156:]


def _octal(number: int, width: int) -> bytes:
    return f"{number:0{width - 1}o}\0".encode()


def _record(name: bytes, value: bytes) -> bytes:
    """``LENGTH NAME=VALUE``. The length includes its own digits."""
    rest = b" " + name + b"=" + value + b"\n"
    length = len(rest)
    while len(rest) + len(str(length)) != length:
        length = len(rest) + len(str(length))
    return str(length).encode() + rest

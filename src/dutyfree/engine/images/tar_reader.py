"""Read the members of a tar from a stream.

Nearly all members have plain headers: a name, octal numbers, no extended header. This module parses those in
half the time that tarfile needs, and leaves all others to tarfile.
"""

from __future__ import annotations

import struct
import tarfile
from collections.abc import Iterator

from dutyfree.engine.images.streams import InvalidLayer
from dutyfree.engine.store.cancel import CancelToken

HEADER_MAX = 1 << 20
"""Limit for the headers of one member. Contents are read in smaller pieces."""

_BLOCK = 512
_FIELDS = struct.Struct("100s8s8s8s12s12s8s1s100s6s82x155s12x")
_PLAIN = (tarfile.REGTYPE, tarfile.LNKTYPE, tarfile.SYMTYPE, tarfile.DIRTYPE)
_MAGIC = (b"ustar\0", b"ustar ")


class ForwardReader:
    """A file object for tarfile that reads pieces, forwards only, up to a limit.

    Raises InvalidLayer for headers that would fill the memory, and for contents beyond the limit.
    """

    def __init__(self, pieces: Iterator[bytes], limit: int, cancel: CancelToken) -> None:
        self._pieces = pieces
        self._limit = limit
        self._cancel = cancel
        self._rest = memoryview(b"")
        self._at = 0

    def _more(self) -> bool:
        self._cancel.check()
        piece = next(self._pieces, b"")
        self._rest = memoryview(piece)
        if self._at + len(piece) > self._limit:
            raise InvalidLayer(f"it grows beyond {self._limit} bytes when it is unpacked")
        return bool(piece)

    def has_more(self) -> bool:
        return bool(self._rest) or self._more()

    def peek(self, size: int) -> bytes:
        """The next bytes, without consuming them; fewer at the end of a piece."""
        return bytes(self._rest[:size])

    def tell(self) -> int:
        return self._at

    def seek(self, to: int, whence: int = 0) -> int:
        if whence or to < self._at:
            raise InvalidLayer("its members overlap")
        while to > self._at and (self._rest or self._more()):
            self.take(to - self._at)
        return self._at

    def read(self, size: int = -1) -> bytes:
        if not 0 <= size <= HEADER_MAX:
            raise InvalidLayer("one of its headers is too large")
        parts = []
        while size and (part := self.take(size)):
            size -= len(part)
            parts.append(part)
        return bytes(parts[0]) if len(parts) == 1 else b"".join(parts)

    def take(self, size: int) -> memoryview:
        """The next bytes, without a copy; fewer at the end of a piece, none at the end."""
        if not self._rest:
            self._more()
        part, self._rest = self._rest[:size], self._rest[size:]
        self._at += len(part)
        return part

    def drain(self) -> None:
        """Read to the end."""
        while self._rest or self._more():
            self.take(len(self._rest))


def members(stream: ForwardReader) -> Iterator[tarfile.TarInfo]:
    """The members of a tar. Skips contents that the caller did not read. Raises the errors of tarfile."""
    with tarfile.open(fileobj=stream, mode="r:", errorlevel=2) as tar:  # type: ignore[call-overload]
        member = tar.next()
        while member is not None:
            tar.members.clear()  # tarfile would keep all of them in memory
            yield member
            stream.seek(tar.offset)
            member = None if tar.pax_headers else _plain(stream, tar)
            member = member or tar.next()


def _plain(stream: ForwardReader, tar: tarfile.TarFile) -> tarfile.TarInfo | None:
    """The next member, if its header is plain and complete in the current piece. Else consumes nothing."""
    block = stream.peek(_BLOCK)
    if len(block) < _BLOCK:
        return None
    name, mode, uid, gid, size, mtime, checksum, kind, target, magic, prefix = _FIELDS.unpack(block)
    if kind not in _PLAIN or magic not in _MAGIC:
        return None
    member = tarfile.TarInfo()
    try:
        if sum(block) - sum(checksum) + 8 * 0x20 != _octal(checksum):
            return None
        member.mode, member.uid, member.gid = _octal(mode), _octal(uid), _octal(gid)
        member.size, member.mtime = _octal(size), _octal(mtime)
    except ValueError:  # not octal, or broken: tarfile decides
        return None
    if member.size < 0:
        return None
    member.name = _text(prefix) + "/" + _text(name) if prefix[0] else _text(name)
    if kind == tarfile.DIRTYPE:
        member.name = member.name.rstrip("/")
    member.type, member.linkname = kind, _text(target)
    stream.seek(stream.tell() + _BLOCK)
    member.offset_data = stream.tell()
    blocks = (member.size + _BLOCK - 1) // _BLOCK if kind == tarfile.REGTYPE else 0
    tar.offset = member.offset_data + blocks * _BLOCK
    return member


def _octal(field: bytes) -> int:
    return int(field.partition(b"\0")[0].strip() or b"0", 8)


def _text(field: bytes) -> str:
    return field.partition(b"\0")[0].decode("utf-8", "surrogateescape")

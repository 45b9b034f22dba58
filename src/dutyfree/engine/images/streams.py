"""A layer's bytes on their way: decompressed, hashed, and read forwards only."""

from __future__ import annotations

import bz2
import lzma
import sys
import zlib
from collections.abc import Callable, Generator, Iterator
from typing import TYPE_CHECKING, Any, Protocol

from dutyfree.engine.store.cancel import Halt

if TYPE_CHECKING:
    from hashlib import _Hash

CHUNK = 1 << 20
HEADER_MAX = 1 << 20
"""More than a member's headers may take. Contents are read in smaller pieces."""


class Refused(Exception):  # noqa: N818 (what became of the layer)
    """The layer is broken or hostile; the message says how."""


class Readable(Protocol):
    def read(self, size: int, /) -> bytes: ...


class _Decompressor(Protocol):
    eof: bool
    needs_input: bool
    unused_data: bytes

    def decompress(self, data: bytes, max_length: int = -1) -> bytes: ...


class _Gunzip:
    """zlib's object with the interface of the other ones; that of isal, where it is installed, is faster."""

    def __init__(self) -> None:
        try:
            from isal import isal_zlib
        except ImportError:
            self._inner: Any = zlib.decompressobj(wbits=31)
        else:
            self._inner = isal_zlib.decompressobj(wbits=31)

    def decompress(self, data: bytes, max_length: int = -1) -> bytes:
        out: bytes = self._inner.decompress(self._inner.unconsumed_tail + data, max_length)
        return out

    @property
    def eof(self) -> bool:
        return bool(self._inner.eof)

    @property
    def needs_input(self) -> bool:
        return not self._inner.unconsumed_tail

    @property
    def unused_data(self) -> bytes:
        return bytes(self._inner.unused_data)


def zstd() -> Any:
    if sys.version_info >= (3, 14):
        from compression import zstd
    else:
        from backports import zstd
    return zstd


_FORMATS: dict[bytes, Callable[[], Any]] = {
    b"\x1f\x8b": _Gunzip,
    b"\x28\xb5\x2f\xfd": lambda: zstd().ZstdDecompressor(),
    b"\xfd7zXZ\x00": lzma.LZMADecompressor,
    b"BZh": bz2.BZ2Decompressor,
}


def decompressed(source: Readable) -> Generator[bytes, None, None]:
    """What the source holds, told by its first bytes; in pieces of bounded size. Raises Refused."""
    head = source.read(CHUNK)
    make = next((make for magic, make in _FORMATS.items() if head.startswith(magic)), None)
    # A frame of zstd may be one to be skipped.
    if make is None and len(head) > 4 and head[1:4] == b"\x2a\x4d\x18" and head[0] & 0xF0 == 0x50:
        make = _FORMATS[b"\x28\xb5\x2f\xfd"]
    if make is None:
        while head:
            yield head
            head = source.read(CHUNK)
        return
    yield from _expand(source, head, make)


def _expand(source: Readable, data: bytes, make: Callable[[], _Decompressor]) -> Iterator[bytes]:
    """One compressed stream after another, as pigz, estargz and zstd:chunked write them."""
    while data:
        stream = make()
        while not stream.eof:
            try:
                piece = stream.decompress(data, CHUNK)
            except Exception as error:
                raise Refused(f"it cannot be decompressed: {error}") from error
            data = b""
            if piece:
                yield piece
            if not stream.eof and stream.needs_input:
                data = source.read(CHUNK)
                if not data:
                    raise Refused("it ends in the middle")
        data = stream.unused_data or source.read(CHUNK)
        while data and not data.strip(b"\0"):  # padding, as tapes have it
            data = source.read(CHUNK)


def hashed(pieces: Iterator[bytes], digest: _Hash) -> Iterator[bytes]:
    """The same pieces, and the digest of those that were taken."""
    for piece in pieces:
        digest.update(piece)
        yield piece


class Forward:
    """A file for tarfile, out of pieces: forwards only, and no longer than it may be.

    Raises Refused for a header that would fill the memory, and for what grows beyond the limit.
    """

    def __init__(self, pieces: Iterator[bytes], limit: int, halt: Halt) -> None:
        self._pieces = pieces
        self._limit = limit
        self._halt = halt
        self._rest = memoryview(b"")
        self._at = 0

    def _more(self) -> bool:
        self._halt.check()
        piece = next(self._pieces, b"")
        self._rest = memoryview(piece)
        if self._at + len(piece) > self._limit:
            raise Refused(f"it grows beyond {self._limit} bytes when it is unpacked")
        return bool(piece)

    def peek(self) -> bool:
        """Whether anything is left."""
        return bool(self._rest) or self._more()

    def at_hand(self, size: int) -> bytes:
        """What comes next, without taking it: so much, or less at the end of a piece."""
        return bytes(self._rest[:size])

    def tell(self) -> int:
        return self._at

    def seek(self, to: int, whence: int = 0) -> int:
        if whence or to < self._at:
            raise Refused("its members overlap")
        while to > self._at and (self._rest or self._more()):
            self.take(to - self._at)
        return self._at

    def read(self, size: int = -1) -> bytes:
        if not 0 <= size <= HEADER_MAX:
            raise Refused("one of its headers is larger than any honest one")
        parts = []
        while size and (part := self.take(size)):
            size -= len(part)
            parts.append(part)
        return bytes(parts[0]) if len(parts) == 1 else b"".join(parts)

    def take(self, size: int) -> memoryview:
        """What comes next, without a copy: so much, or less at the end of a piece; nothing at the end."""
        if not self._rest:
            self._more()
        part, self._rest = self._rest[:size], self._rest[size:]
        self._at += len(part)
        return part

    def finish(self) -> None:
        """Read to the end."""
        while self._rest or self._more():
            self.take(len(self._rest))

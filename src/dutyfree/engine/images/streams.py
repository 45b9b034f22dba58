"""A layer's bytes on their way: decompressed, counted, hashed, and read forwards only."""

from __future__ import annotations

import bz2
import hashlib
import lzma
import sys
import zlib
from collections.abc import Callable, Generator, Iterator
from typing import Any, Protocol

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
    """zlib's object with the interface of the other ones."""

    def __init__(self) -> None:
        self._inner = zlib.decompressobj(wbits=31)

    def decompress(self, data: bytes, max_length: int = -1) -> bytes:
        return self._inner.decompress(self._inner.unconsumed_tail + data, max_length)

    @property
    def eof(self) -> bool:
        return self._inner.eof

    @property
    def needs_input(self) -> bool:
        return not self._inner.unconsumed_tail

    @property
    def unused_data(self) -> bytes:
        return self._inner.unused_data


def _zstd() -> Any:
    if sys.version_info >= (3, 14):
        from compression import zstd
    else:
        from backports import zstd
    return zstd


_FORMATS: dict[bytes, Callable[[], Any]] = {
    b"\x1f\x8b": _Gunzip,
    b"\x28\xb5\x2f\xfd": lambda: _zstd().ZstdDecompressor(),
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
    try:
        yield from _expand(source, head, make)
    except Exception as error:
        if isinstance(error, (OSError, Refused)):
            raise
        raise Refused(f"it cannot be decompressed: {error}") from error


def _expand(source: Readable, data: bytes, make: Callable[[], _Decompressor]) -> Iterator[bytes]:
    """One compressed stream after another, as pigz, estargz and zstd:chunked write them."""
    while data:
        stream = make()
        while not stream.eof:
            piece = stream.decompress(data, CHUNK)
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


class Forward:
    """A file for tarfile, out of pieces: forwards only, hashed, and no longer than it may be.

    Raises Refused for a header that would fill the memory, and for what grows beyond the limit.
    """

    def __init__(self, pieces: Iterator[bytes], limit: int, stop: Callable[[], None]) -> None:
        self._pieces = pieces
        self._limit = limit
        self._stop = stop
        self._hash = hashlib.sha256()
        self._rest = memoryview(b"")
        self._at = 0

    def _more(self) -> bool:
        self._stop()
        piece = next(self._pieces, b"")
        self._hash.update(piece)
        self._rest = memoryview(piece)
        if self._at + len(piece) > self._limit:
            raise Refused(f"it grows beyond {self._limit} bytes when it is unpacked")
        return bool(piece)

    def peek(self) -> bool:
        """Whether anything is left."""
        return bool(self._rest) or self._more()

    def tell(self) -> int:
        return self._at

    def seek(self, to: int, whence: int = 0) -> int:
        if whence or to < self._at:
            raise Refused("its members overlap")
        while to > self._at and (self._rest or self._more()):
            self._take(to - self._at)
        return self._at

    def read(self, size: int = -1) -> bytes:
        if not 0 <= size <= HEADER_MAX:
            raise Refused("one of its headers is larger than any honest one")
        parts = []
        while size and (self._rest or self._more()):
            part = self._take(size)
            size -= len(part)
            parts.append(part)
        return bytes(parts[0]) if len(parts) == 1 else b"".join(parts)

    def _take(self, size: int) -> memoryview:
        part, self._rest = self._rest[:size], self._rest[size:]
        self._at += len(part)
        return part

    def finish(self) -> str:
        """Read to the end; the digest of all of it."""
        while self._rest or self._more():
            self._take(len(self._rest))
        return f"sha256:{self._hash.hexdigest()}"

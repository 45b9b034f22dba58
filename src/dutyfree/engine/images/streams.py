"""A layer's bytes on their way: decompressed, hashed, and read forwards only."""

from __future__ import annotations

import bz2
import contextlib
import lzma
import queue
import sys
import threading
import zlib
from collections.abc import Callable, Generator, Iterator
from typing import TYPE_CHECKING, Any, Protocol

from dutyfree.engine.store.cancel import CancelToken

if TYPE_CHECKING:
    from hashlib import _Hash

CHUNK = 1 << 20
QUEUE_LENGTH = 8
"""Pieces that the other thread may be ahead."""


class InvalidLayer(Exception):  # noqa: N818 (what became of the layer)
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
    """What the source holds, told by its first bytes; in pieces of bounded size. Raises InvalidLayer."""
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
                raise InvalidLayer(f"it cannot be decompressed: {error}") from error
            data = b""
            if piece:
                yield piece
            if not stream.eof and stream.needs_input:
                data = source.read(CHUNK)
                if not data:
                    raise InvalidLayer("it ends in the middle")
        data = stream.unused_data or source.read(CHUNK)
        while data and not data.strip(b"\0"):  # padding, as tapes have it
            data = source.read(CHUNK)


def hashed(pieces: Iterator[bytes], digest: _Hash) -> Iterator[bytes]:
    """The same pieces, and the digest of those that were taken."""
    for piece in pieces:
        digest.update(piece)
        yield piece


@contextlib.contextmanager
def ahead(pieces: Iterator[bytes], cancel: CancelToken) -> Iterator[Iterator[bytes]]:
    """The same pieces, made by another thread; what making them raises comes in their place.

    Left before the last piece was taken, it halts whoever makes them, and waits for the thread.
    """
    line: queue.Queue[Any] = queue.Queue(QUEUE_LENGTH)
    left = threading.Event()

    def make() -> None:
        last: BaseException | None = None
        try:
            for piece in pieces:
                line.put(piece)
                if left.is_set():
                    return
        except BaseException as error:  # noqa: BLE001 (raised where the pieces are used)
            last = error
        line.put(last)

    thread = threading.Thread(target=make, name="dutyfree-ahead", daemon=True)
    thread.start()
    done = False

    def taken() -> Iterator[bytes]:
        nonlocal done
        while isinstance(piece := line.get(), bytes):
            yield piece
        done = True
        if piece is not None:
            raise piece

    try:
        yield taken()
    finally:
        if not done:
            left.set()
            cancel.set()
            while thread.is_alive():
                with contextlib.suppress(queue.Empty):
                    line.get(timeout=0.01)
        thread.join()

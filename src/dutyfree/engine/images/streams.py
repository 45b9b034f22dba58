"""The bytes of a layer as pieces: decompress and hash them, in a thread of their own."""

from __future__ import annotations

import bz2
import contextlib
import lzma
import os
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
"""How many pieces ``read_ahead`` may be ahead."""


class InvalidLayer(Exception):  # noqa: N818 (names the layer's state)
    """The layer is broken or hostile. The message says how, and reads on from "the layer is refused:"."""


class Readable(Protocol):
    def read(self, size: int, /) -> bytes: ...


class _Decompressor(Protocol):
    eof: bool
    needs_input: bool
    unused_data: bytes

    def decompress(self, data: bytes, max_length: int = -1) -> bytes: ...


class _Gunzip:
    """zlib with the interface of the other decompressors. Uses isal, which is faster, if it is installed."""

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


def write_all(file: int, data: bytes | memoryview) -> None:
    """Write to a descriptor until everything is written."""
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(file, rest) :]


def zstd() -> Any:
    """The zstd module, imported when it is first needed."""
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


def decompress(source: Readable) -> Generator[bytes, None, None]:
    """The decompressed contents in pieces of bounded size. The first bytes say the format.

    Raises InvalidLayer.
    """
    head = source.read(CHUNK)
    make = next((make for magic, make in _FORMATS.items() if head.startswith(magic)), None)
    # A zstd file may begin with a skippable frame.
    if make is None and len(head) > 4 and head[1:4] == b"\x2a\x4d\x18" and head[0] & 0xF0 == 0x50:
        make = _FORMATS[b"\x28\xb5\x2f\xfd"]
    if make is None:
        while head:
            yield head
            head = source.read(CHUNK)
        return
    yield from _expand(source, head, make)


def _expand(source: Readable, data: bytes, make: Callable[[], _Decompressor]) -> Iterator[bytes]:
    """Decompress several concatenated streams, as pigz, estargz and zstd:chunked write them."""
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
                    raise InvalidLayer("it is truncated")
        data = stream.unused_data or source.read(CHUNK)
        while data and not data.strip(b"\0"):  # padding at the end
            data = source.read(CHUNK)


def hash_pieces(pieces: Iterator[bytes], digest: _Hash) -> Iterator[bytes]:
    """The same pieces. Updates the digest with each."""
    for piece in pieces:
        digest.update(piece)
        yield piece


@contextlib.contextmanager
def read_ahead(pieces: Iterator[bytes], cancel: CancelToken) -> Iterator[Iterator[bytes]]:
    """The same pieces, produced by another thread. Its exceptions are raised where the pieces are read.

    If the caller leaves before the last piece, sets ``cancel`` and waits for the thread.
    """
    line: queue.Queue[Any] = queue.Queue(QUEUE_LENGTH)
    left = threading.Event()

    def produce() -> None:
        last: BaseException | None = None
        try:
            for piece in pieces:
                line.put(piece)
                if left.is_set():
                    return
        except BaseException as error:  # noqa: BLE001 (raised where the pieces are read)
            last = error
        line.put(last)

    thread = threading.Thread(target=produce, name="dutyfree-read-ahead", daemon=True)
    thread.start()
    done = False

    def consume() -> Iterator[bytes]:
        nonlocal done
        while isinstance(piece := line.get(), bytes):
            yield piece
        done = True
        if piece is not None:
            raise piece

    try:
        yield consume()
    finally:
        if not done:
            left.set()
            cancel.set()
            while thread.is_alive():
                with contextlib.suppress(queue.Empty):
                    line.get(timeout=0.01)
        thread.join()

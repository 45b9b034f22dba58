"""Who has layers to give: a store, or whoever is at the other end of a stream of bytes.

Each answers three questions, in this order, and so can whatever else carries bytes:

1. ``offer``: which of the wanted chains are there, and of which layers are they?
2. ``pack``: which blobs do those layers consist of that are missing here?
3. ``send``: these blobs, each from a position on, one after another, as one stream.
"""

from __future__ import annotations

import contextlib
import os
import select
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import IO, NamedTuple, Protocol

import msgspec

from dutyfree.engine.images.archives import Slice
from dutyfree.engine.images.halting import Halt
from dutyfree.engine.images.manifest import DOCUMENT_MAX
from dutyfree.engine.images.store import Store
from dutyfree.engine.images.streams import CHUNK, Readable
from dutyfree.engine.travel import chains, packing
from dutyfree.engine.travel.chains import Blob, Chain
from dutyfree.errors import CreateError, DutyfreeError

PATIENCE = 0.1
"""Seconds between two looks whether anybody still wants what is waited for."""


class Want(NamedTuple):
    digest: str
    position: int


class Peer(Protocol):
    """All methods block, and raise CreateError."""

    def offer(self, wanted: Sequence[str]) -> list[Chain]: ...

    def pack(self, keys: Sequence[str]) -> dict[str, tuple[Blob, ...]]: ...

    def send(self, blobs: Sequence[Want]) -> AbstractContextManager[Readable]: ...


class StorePeer:
    """A store that can be reached as a directory."""

    def __init__(self, store: Store, halt: Halt | None = None) -> None:
        self._store = store
        self._halt = halt or Halt()
        self._places: dict[str, str] = {}

    def offer(self, wanted: Sequence[str]) -> list[Chain]:
        return chains.find(self._store, wanted)

    def pack(self, keys: Sequence[str]) -> dict[str, tuple[Blob, ...]]:
        try:
            blobs = {key: packing.packed(self._store, key, self._halt) for key in keys}
        except (OSError, ValueError) as error:
            raise CreateError(f"layers cannot be packed in {self._store.root}: {error}") from error
        self._places |= {blob.digest: key for key, several in blobs.items() for blob in several}
        return blobs

    def send(self, blobs: Sequence[Want]) -> AbstractContextManager[Readable]:
        return joined(blobs, self._open)

    def left(self, want: Want) -> int:
        """Bytes that will be sent of it."""
        with contextlib.closing(self._open(want.digest)) as blob:
            blob.skip(want.position)
            return blob.left

    def _open(self, digest: str) -> Slice:
        if digest not in self._places:
            raise CreateError(f"{digest} was not packed")
        path = packing.blob_path(self._store, self._places[digest], digest)
        try:
            return Slice(path, 0, path.stat().st_size)
        except OSError as error:
            raise CreateError(f"the blob {digest} cannot be read: {error.strerror}") from error


@contextlib.contextmanager
def joined(blobs: Sequence[Want], open_blob: Callable[[str], Slice]) -> Iterator[Readable]:
    """One stream of several blobs, each from a position on."""
    reader = _Joined(list(blobs), open_blob)
    try:
        yield reader
    finally:
        reader.close()


class _Joined:
    def __init__(self, blobs: list[Want], open_blob: Callable[[str], Slice]) -> None:
        self._blobs = blobs[::-1]
        self._open_blob = open_blob
        self._current: Slice | None = None

    def read(self, size: int, /) -> bytes:
        while True:
            if self._current is None:
                if not self._blobs:
                    return b""
                self._current = self._begin(self._blobs.pop())
            data = self._current.read(size)
            if data:
                return data
            self.close()

    def _begin(self, want: Want) -> Slice:
        blob = self._open_blob(want.digest)
        blob.skip(want.position)
        return blob

    def close(self) -> None:
        if self._current is not None:
            self._current.close()
            self._current = None


# --- Over a stream of bytes ----------------------------------------------------------------------------


class Question(msgspec.Struct, frozen=True, omit_defaults=True):
    """A line; exactly one of the three."""

    offer: tuple[str, ...] | None = None
    pack: tuple[str, ...] | None = None
    send: tuple[Want, ...] | None = None


class Answer(msgspec.Struct, frozen=True, omit_defaults=True):
    """A line; after that of ``send`` so many bytes."""

    chains: tuple[Chain, ...] = ()
    blobs: dict[str, tuple[Blob, ...]] = {}
    bytes: int = 0
    error: str = ""
    remedy: str = ""


class Reader(Protocol):
    """A file as far as it is needed here: nothing is read of it twice."""

    def read(self, size: int, /) -> bytes: ...

    def readline(self, size: int, /) -> bytes: ...


class Patient:
    """A pipe or a socket that may be silent for long: whoever reads it can be halted meanwhile."""

    def __init__(self, descriptor: int, halt: Halt) -> None:
        self._descriptor = descriptor
        self._halt = halt
        self._rest = b""

    def read(self, size: int, /) -> bytes:
        if not self._rest:
            self._rest = self._more()
        data, self._rest = self._rest[:size], self._rest[size:]
        return data

    def readline(self, size: int, /) -> bytes:
        while b"\n" not in self._rest and len(self._rest) < size and (more := self._more()):
            self._rest += more
        end = self._rest.find(b"\n") + 1 or size
        data, self._rest = self._rest[:end], self._rest[end:]
        return data

    def _more(self) -> bytes:
        while not select.select([self._descriptor], [], [], PATIENCE)[0]:
            self._halt.check()
        return os.read(self._descriptor, CHUNK)


class StreamPeer:
    """One who answers by ``serve`` at the other end."""

    def __init__(self, reader: Reader, writer: IO[bytes]) -> None:
        self._reader = reader
        self._writer = writer

    def offer(self, wanted: Sequence[str]) -> list[Chain]:
        return list(self._ask(Question(offer=tuple(wanted))).chains)

    def pack(self, keys: Sequence[str]) -> dict[str, tuple[Blob, ...]]:
        return self._ask(Question(pack=tuple(keys))).blobs

    @contextlib.contextmanager
    def send(self, blobs: Sequence[Want]) -> Iterator[Readable]:
        coming = self._ask(Question(send=tuple(blobs))).bytes
        yield _Bounded(self._reader, coming)

    def _ask(self, question: Question) -> Answer:
        try:
            self._writer.write(msgspec.json.encode(question) + b"\n")
            self._writer.flush()
            line = self._reader.readline(DOCUMENT_MAX)
            if not line.endswith(b"\n"):
                raise CreateError("the peer has hung up", remedy="see what it printed, and try again")
            answer = msgspec.json.decode(line, type=Answer)
        except (OSError, msgspec.DecodeError) as error:
            raise CreateError(f"the peer is no `dutyfree layer serve`: {error}") from error
        if answer.error:
            raise CreateError(f"the peer says: {answer.error}", remedy=answer.remedy)
        return answer


class _Bounded:
    """So much of a stream, and no more."""

    def __init__(self, reader: Reader, left: int) -> None:
        self._reader = reader
        self._left = left

    def read(self, size: int, /) -> bytes:
        data = self._reader.read(min(size, self._left))
        self._left -= len(data)
        return data


def serve(store: Store, reader: Reader, writer: IO[bytes], halt: Halt) -> None:
    """Answer until the other end hangs up. Raises Stopped; what goes wrong is told to the other end."""
    peer = StorePeer(store, halt)
    while (line := reader.readline(DOCUMENT_MAX)).endswith(b"\n"):
        halt.check()
        try:
            question = msgspec.json.decode(line, type=Question)
            if question.send is not None:
                _send(peer, question.send, writer)
                continue
            if question.pack is not None:
                answer = Answer(blobs=peer.pack(question.pack))
            else:
                answer = Answer(chains=tuple(peer.offer(question.offer or ())))
        except DutyfreeError as error:
            answer = Answer(error=error.message, remedy=error.remedy)
        except msgspec.DecodeError as error:
            answer = Answer(error=f"that is no question: {error}")
        writer.write(msgspec.json.encode(answer) + b"\n")
        writer.flush()


def _send(peer: StorePeer, wanted: Sequence[Want], writer: IO[bytes]) -> None:
    total = sum(peer.left(want) for want in wanted)
    writer.write(msgspec.json.encode(Answer(bytes=total)) + b"\n")
    with peer.send(wanted) as stream:
        while piece := stream.read(CHUNK):
            writer.write(piece)
    writer.flush()

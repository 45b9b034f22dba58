"""Who has layers to give: a store, or whoever is at the other end of a stream of bytes.

Each answers three questions, in this order, and so can whatever else carries bytes:

1. ``offer``: which of the wanted chains are there, and of which layers are they?
2. ``pack``: which blobs do those layers consist of that are missing here?
3. ``send``: these blobs, each from a position on, one after another, as one stream.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Annotated, Any, NamedTuple, Protocol

import msgspec

from dutyfree.contract.errors import CreateError, DutyfreeError
from dutyfree.engine.exchange import chains, packer
from dutyfree.engine.exchange.chains import Blob, LayerChain
from dutyfree.engine.exchange.messages import ByteReader, MessageStream
from dutyfree.engine.images.archives import FileSlice
from dutyfree.engine.images.streams import CHUNK, Readable
from dutyfree.engine.store.cancel import CancelToken
from dutyfree.engine.store.store import Store

MANY = 1024
"""Names in one question: no recipe has more prefixes."""


class BlobRequest(NamedTuple):
    digest: str
    position: Annotated[int, msgspec.Meta(ge=0)]


class Peer(Protocol):
    """All methods block, and raise CreateError."""

    def offer(self, wanted: Sequence[str]) -> list[LayerChain]: ...

    def pack(self, keys: Sequence[str]) -> dict[str, tuple[Blob, ...]]: ...

    def send(self, blobs: Sequence[BlobRequest]) -> AbstractContextManager[Readable]: ...


class StorePeer:
    """A store that can be reached as a directory."""

    def __init__(
        self, store: Store, cancel: CancelToken | None = None, turn: AbstractContextManager[Any] | None = None
    ) -> None:
        self._store = store
        self._cancel = cancel or CancelToken()
        self._turn = turn or contextlib.nullcontext()
        """Taken while layers are packed, where many ask."""
        self._places: dict[str, str] = {}

    def offer(self, wanted: Sequence[str]) -> list[LayerChain]:
        return chains.find(self._store, wanted)

    def pack(self, keys: Sequence[str]) -> dict[str, tuple[Blob, ...]]:
        try:
            with self._turn:
                blobs = {key: packer.packed(self._store, key, self._cancel) for key in keys}
        except (OSError, ValueError) as error:
            raise CreateError(f"layers cannot be packed in {self._store.root}: {error}") from error
        self._places |= {blob.digest: key for key, several in blobs.items() for blob in several}
        return blobs

    def send(self, blobs: Sequence[BlobRequest]) -> AbstractContextManager[Readable]:
        return joined(blobs, self._open)

    def left(self, want: BlobRequest) -> int:
        """Bytes that will be sent of it."""
        with contextlib.closing(self._open(want.digest)) as blob:
            blob.skip(want.position)
            return blob.left

    def _open(self, digest: str) -> FileSlice:
        if digest not in self._places:
            raise CreateError(f"{digest} was not packed")
        path = packer.blob_path(self._store, self._places[digest], digest)
        try:
            return FileSlice(path, 0, path.stat().st_size)
        except OSError as error:
            raise CreateError(f"the blob {digest} cannot be read: {error.strerror}") from error


@contextlib.contextmanager
def joined(blobs: Sequence[BlobRequest], open_blob: Callable[[str], FileSlice]) -> Iterator[Readable]:
    """One stream of several blobs, each from a position on."""
    reader = _Joined(list(blobs), open_blob)
    try:
        yield reader
    finally:
        reader.close()


class _Joined:
    def __init__(self, blobs: list[BlobRequest], open_blob: Callable[[str], FileSlice]) -> None:
        self._blobs = blobs[::-1]
        self._open_blob = open_blob
        self._current: FileSlice | None = None

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

    def _begin(self, want: BlobRequest) -> FileSlice:
        blob = self._open_blob(want.digest)
        blob.skip(want.position)
        return blob

    def close(self) -> None:
        if self._current is not None:
            self._current.close()
            self._current = None


# --- Over a stream of bytes ----------------------------------------------------------------------------


Names = Annotated[tuple[str, ...], msgspec.Meta(max_length=MANY)]


class PeerRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """A line; exactly one of the three."""

    offer: Names | None = None
    pack: Names | None = None
    send: Annotated[tuple[BlobRequest, ...], msgspec.Meta(max_length=MANY)] | None = None


class PeerResponse(msgspec.Struct, frozen=True, omit_defaults=True):
    """A line; after that of ``send`` so many bytes."""

    chains: tuple[LayerChain, ...] = ()
    blobs: dict[str, tuple[Blob, ...]] = {}
    bytes: int = 0
    error: str = ""
    remedy: str = ""


class StreamPeer:
    """One who answers by ``serve`` at the other end."""

    def __init__(self, lines: MessageStream, why: Callable[[], str] = lambda: "") -> None:
        self._lines = lines
        self._why = why
        """What else it said, for when it hangs up."""

    def offer(self, wanted: Sequence[str]) -> list[LayerChain]:
        return list(self._ask(PeerRequest(offer=tuple(wanted))).chains)

    def pack(self, keys: Sequence[str]) -> dict[str, tuple[Blob, ...]]:
        return self._ask(PeerRequest(pack=tuple(keys))).blobs

    @contextlib.contextmanager
    def send(self, blobs: Sequence[BlobRequest]) -> Iterator[Readable]:
        coming = self._ask(PeerRequest(send=tuple(blobs))).bytes
        yield _Bounded(self._lines.reader, coming)

    def _ask(self, question: PeerRequest) -> PeerResponse:
        try:
            with contextlib.suppress(ConnectionError):  # what it said before it hung up tells more
                self._lines.put(question)
            line = self._lines.get()
            if line is None:
                raise _gone(self._why())
            answer = msgspec.json.decode(line, type=PeerResponse)
        except ConnectionError as error:
            raise _gone(self._why()) from error
        except OSError as error:
            raise CreateError(f"the peer cannot be asked: {error}") from error
        except (msgspec.DecodeError, RecursionError) as error:
            raise CreateError(f"the peer is no `dutyfree layer serve`: {error}") from error
        if answer.error:
            raise CreateError(f"the peer says: {answer.error}", remedy=answer.remedy)
        return answer


def _gone(why: str) -> CreateError:
    return CreateError(
        f"the peer has hung up{': ' if why else ''}{why}", remedy="see what it printed, and try again"
    )


class _Bounded:
    """So much of a stream, and no more."""

    def __init__(self, reader: ByteReader, left: int) -> None:
        self._reader = reader
        self._left = left

    def read(self, size: int, /) -> bytes:
        if (
            self._left <= 0
        ):  # who announced less than it was asked for sends nothing more, and is not waited for
            return b""
        try:
            data = self._reader.read(min(size, self._left))
        except OSError as error:
            raise CreateError(
                f"the transfer was cut: {error}", remedy="try again: what has come is kept"
            ) from error
        self._left -= len(data)
        return data


def serve(peer: StorePeer, lines: MessageStream, cancel: CancelToken) -> int:
    """Answer until the other end hangs up: the bytes of layers that were sent. Raises Cancelled, OSError.

    What goes wrong otherwise is told to the other end. Nothing is packed but what was asked for by its name
    before, so that none can have all that is here.
    """
    offered: set[str] = set()
    sent = 0
    while (line := lines.get()) is not None:
        cancel.check()
        try:
            question = msgspec.json.decode(line, type=PeerRequest)
            if question.send is not None:
                sent += _send(peer, question.send, lines)
                continue
            if question.pack is not None:
                if not offered.issuperset(question.pack):
                    raise CreateError("a layer is asked for that was not offered")
                answer = PeerResponse(blobs=peer.pack(question.pack))
            else:
                found = peer.offer(question.offer or ())
                offered.update(layer.key for chain in found for layer in chain.layers)
                answer = PeerResponse(chains=tuple(found))
        except DutyfreeError as error:
            answer = PeerResponse(error=error.message, remedy=error.remedy)
        except (msgspec.DecodeError, RecursionError) as error:
            answer = PeerResponse(error=f"that is no question: {error}")
        lines.put(answer)
    return sent


def _send(peer: StorePeer, wanted: Sequence[BlobRequest], lines: MessageStream) -> int:
    total = sum(peer.left(want) for want in wanted)
    lines.put(PeerResponse(bytes=total))
    with peer.send(wanted) as stream:
        while piece := stream.read(CHUNK):
            lines.writer.write(piece)
    lines.writer.flush()
    return total

"""The protocol between a node that fetches layers and a peer that has them.

A peer answers three requests, in this order, over any transport:

1. ``offer``: which of the wanted chains do you have, and of which layers do they consist?
2. ``pack``: which blobs do these layers consist of?
3. ``send``: send these blobs, each from a position on, as one stream.
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

NAMES_MAX = 1024
"""Names in one request. No recipe has more prefixes."""


class BlobRequest(NamedTuple):
    """A blob from a position on."""

    digest: str
    position: Annotated[int, msgspec.Meta(ge=0)]


class Peer(Protocol):
    """A source of layers. All methods block, and raise CreateError."""

    def offer(self, wanted: Sequence[str]) -> list[LayerChain]: ...

    def pack(self, keys: Sequence[str]) -> dict[str, tuple[Blob, ...]]: ...

    def send(self, blobs: Sequence[BlobRequest]) -> AbstractContextManager[Readable]: ...


class StorePeer:
    """A store in a directory of this machine."""

    def __init__(
        self,
        store: Store,
        cancel: CancelToken | None = None,
        pack_limit: AbstractContextManager[Any] | None = None,
    ) -> None:
        self._store = store
        self._cancel = cancel or CancelToken()
        self._pack_limit = pack_limit or contextlib.nullcontext()
        """Held while layers are packed."""
        self._keys: dict[str, str] = {}
        """Layers by the digests of their packed blobs."""

    def offer(self, wanted: Sequence[str]) -> list[LayerChain]:
        return chains.find(self._store, wanted)

    def pack(self, keys: Sequence[str]) -> dict[str, tuple[Blob, ...]]:
        try:
            with self._pack_limit:
                blobs = {key: packer.pack_layer(self._store, key, self._cancel) for key in keys}
        except (OSError, ValueError) as error:
            raise CreateError(f"layers cannot be packed in {self._store.root}: {error}") from error
        self._keys |= {blob.digest: key for key, several in blobs.items() for blob in several}
        return blobs

    def send(self, blobs: Sequence[BlobRequest]) -> AbstractContextManager[Readable]:
        return join_blobs(blobs, self._open)

    def size_left(self, wanted: BlobRequest) -> int:
        """Bytes that ``send`` sends of a blob."""
        with contextlib.closing(self._open(wanted.digest)) as blob:
            blob.skip(wanted.position)
            return blob.left

    def _open(self, digest: str) -> FileSlice:
        if digest not in self._keys:
            raise CreateError(f"the blob {digest} was not packed")
        path = packer.blob_path(self._store, self._keys[digest], digest)
        try:
            return FileSlice(path, 0, path.stat().st_size)
        except OSError as error:
            raise CreateError(f"the blob {digest} cannot be read: {error.strerror}") from error


@contextlib.contextmanager
def join_blobs(blobs: Sequence[BlobRequest], open_blob: Callable[[str], FileSlice]) -> Iterator[Readable]:
    """Several blobs, each from a position on, as one stream."""
    reader = _JoinedReader(list(blobs), open_blob)
    try:
        yield reader
    finally:
        reader.close()


class _JoinedReader:
    def __init__(self, blobs: list[BlobRequest], open_blob: Callable[[str], FileSlice]) -> None:
        self._blobs = blobs[::-1]
        self._open_blob = open_blob
        self._current: FileSlice | None = None

    def read(self, size: int, /) -> bytes:
        while True:
            if self._current is None:
                if not self._blobs:
                    return b""
                wanted = self._blobs.pop()
                self._current = self._open_blob(wanted.digest)
                self._current.skip(wanted.position)
            data = self._current.read(size)
            if data:
                return data
            self.close()

    def close(self) -> None:
        if self._current is not None:
            self._current.close()
            self._current = None


# --- Over a stream of bytes ----------------------------------------------------------------------------


Names = Annotated[tuple[str, ...], msgspec.Meta(max_length=NAMES_MAX)]


class PeerRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """A request line. Exactly one field is set."""

    offer: Names | None = None
    pack: Names | None = None
    send: Annotated[tuple[BlobRequest, ...], msgspec.Meta(max_length=NAMES_MAX)] | None = None


class PeerResponse(msgspec.Struct, frozen=True, omit_defaults=True):
    """A response line. After that of ``send`` follow ``bytes`` bytes."""

    chains: tuple[LayerChain, ...] = ()
    blobs: dict[str, tuple[Blob, ...]] = {}
    bytes: int = 0
    error: str = ""
    remedy: str = ""


class StreamPeer:
    """A peer that answers with ``serve`` at the other end of a stream."""

    def __init__(self, stream: MessageStream, diagnostics: Callable[[], str] = lambda: "") -> None:
        self._stream = stream
        self._diagnostics = diagnostics
        """What the peer printed, for the error if it closes the stream."""

    def offer(self, wanted: Sequence[str]) -> list[LayerChain]:
        return list(self._request(PeerRequest(offer=tuple(wanted))).chains)

    def pack(self, keys: Sequence[str]) -> dict[str, tuple[Blob, ...]]:
        return self._request(PeerRequest(pack=tuple(keys))).blobs

    @contextlib.contextmanager
    def send(self, blobs: Sequence[BlobRequest]) -> Iterator[Readable]:
        size = self._request(PeerRequest(send=tuple(blobs))).bytes
        yield _BoundedReader(self._stream.reader, size)

    def _request(self, request: PeerRequest) -> PeerResponse:
        try:
            with contextlib.suppress(ConnectionError):  # read what it sent before it closed the stream
                self._stream.send(request)
            line = self._stream.receive()
            if line is None:
                raise _closed(self._diagnostics())
            response = msgspec.json.decode(line, type=PeerResponse)
        except ConnectionError as error:
            raise _closed(self._diagnostics()) from error
        except OSError as error:
            raise CreateError(f"the request to the peer failed: {error}") from error
        except (msgspec.DecodeError, RecursionError) as error:
            raise CreateError(f"the peer is not a `dutyfree layer serve`: {error}") from error
        if response.error:
            raise CreateError(f"the peer reports: {response.error}", remedy=response.remedy)
        return response


def _closed(diagnostics: str) -> CreateError:
    return CreateError(
        f"the peer closed the connection{': ' if diagnostics else ''}{diagnostics}",
        remedy="check the peer's output, and try again",
    )


class _BoundedReader:
    """The next ``left`` bytes of a stream."""

    def __init__(self, reader: ByteReader, left: int) -> None:
        self._reader = reader
        self._left = left

    def read(self, size: int, /) -> bytes:
        if self._left <= 0:  # a peer that announced too little sends no more: do not wait for it
            return b""
        try:
            data = self._reader.read(min(size, self._left))
        except OSError as error:
            raise CreateError(
                f"the transfer was interrupted: {error}",
                remedy="try again: it continues from what has arrived",
            ) from error
        self._left -= len(data)
        return data


def serve(peer: StorePeer, stream: MessageStream, cancel: CancelToken) -> int:
    """Answer requests until the other end closes the stream. Returns the bytes of layers that were sent.

    Raises Cancelled, OSError. All other errors are sent to the other end. Packs only layers that it offered
    before by name, so a client cannot get everything that is here.
    """
    offered: set[str] = set()
    sent = 0
    while (line := stream.receive()) is not None:
        cancel.check()
        try:
            request = msgspec.json.decode(line, type=PeerRequest)
            if request.send is not None:
                sent += _send(peer, request.send, stream)
                continue
            if request.pack is not None:
                if not offered.issuperset(request.pack):
                    raise CreateError("a requested layer was not offered before")
                response = PeerResponse(blobs=peer.pack(request.pack))
            else:
                found = peer.offer(request.offer or ())
                offered.update(layer.key for chain in found for layer in chain.layers)
                response = PeerResponse(chains=tuple(found))
        except DutyfreeError as error:
            response = PeerResponse(error=error.message, remedy=error.remedy)
        except (msgspec.DecodeError, RecursionError) as error:
            response = PeerResponse(error=f"the request is invalid: {error}")
        stream.send(response)
    return sent


def _send(peer: StorePeer, wanted: Sequence[BlobRequest], stream: MessageStream) -> int:
    total = sum(peer.size_left(one) for one in wanted)
    stream.send(PeerResponse(bytes=total))
    with peer.send(wanted) as blobs:
        while piece := blobs.read(CHUNK):
            stream.writer.write(piece)
    stream.writer.flush()
    return total

"""What a node that fetches layers asks of a peer that has them.

A peer answers three requests, in this order:

1. ``offer``: which of the wanted chains do you have, and of which layers do they consist?
2. ``pack``: which blobs do these layers consist of?
3. ``open_blob``: send a blob, from a position on.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from dutyfree.contract.errors import CreateError
from dutyfree.engine.exchange import chains, packer
from dutyfree.engine.exchange.chains import Blob, LayerChain
from dutyfree.engine.images.archives import FileSlice
from dutyfree.engine.images.streams import Readable
from dutyfree.engine.store.cancel import CancelToken
from dutyfree.engine.store.store import Store


class Peer(Protocol):
    """A source of layers. All methods block, and raise CreateError."""

    def offer(self, wanted: Sequence[str]) -> list[LayerChain]: ...

    def pack(self, keys: Sequence[str]) -> dict[str, tuple[Blob, ...]]: ...

    def open_blob(self, digest: str, position: int) -> AbstractContextManager[Readable]: ...


class StorePeer:
    """A store in a directory of this machine."""

    def __init__(self, store: Store, cancel: CancelToken | None = None) -> None:
        self._store = store
        self._cancel = cancel or CancelToken()
        self._keys: dict[str, str] = {}
        """Layers by the digests of their packed blobs."""

    def offer(self, wanted: Sequence[str]) -> list[LayerChain]:
        return chains.find(self._store, wanted)

    def pack(self, keys: Sequence[str]) -> dict[str, tuple[Blob, ...]]:
        try:
            blobs = {key: packer.pack_layer(self._store, key, self._cancel) for key in keys}
        except (OSError, ValueError) as error:
            raise CreateError(f"layers cannot be packed in {self._store.root}: {error}") from error
        self._keys |= {blob.digest: key for key, several in blobs.items() for blob in several}
        return blobs

    @contextlib.contextmanager
    def open_blob(self, digest: str, position: int) -> Iterator[Readable]:
        path = packer.blob_path(self._store, self._keys[digest], digest)
        try:
            blob = FileSlice(path, 0, path.stat().st_size)
        except OSError as error:
            raise CreateError(f"the blob {digest} cannot be read: {error.strerror}") from error
        with contextlib.closing(blob):
            blob.skip(position)
            yield blob

"""Layers and images of a store as a registry has them: manifests and blobs (OCI distribution). Blocks.

====================== ============= ===================================================================
repository             tag           what it is
====================== ============= ===================================================================
``dutyfree/layers``    ``KIND-HEX``  one layer as an artifact: what nodes fetch from each other
``dutyfree/stage``     ``HEX``       the layer of a stage with all below it, as an image to run elsewhere
``dutyfree/snapshot``  ``NAME``      the same for a named snapshot
an image's             its own       the image; a name without a registry is one of Docker Hub
====================== ============= ===================================================================

A layer is packed when its manifest is requested. So a blob exists only after that, and a client must get the
manifest first, as all clients do. The manifest of an image is a new one, with another digest than that of the
registry from which the image came: a store keeps unpacked files, not the compressed blobs of others.

The caller says which layers a client may see. All others are as absent as those that do not exist.
"""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import msgspec

from dutyfree.contract.errors import CreateError
from dutyfree.engine.exchange import chains, layout, packer
from dutyfree.engine.exchange.chains import Blob, ChainLayer, LayerChain
from dutyfree.engine.exchange.layout import ARTIFACT, LAYER, LayoutDocument
from dutyfree.engine.images import manifest, reference
from dutyfree.engine.images.reference import DIGEST
from dutyfree.engine.store import provenance
from dutyfree.engine.store.cancel import CancelToken
from dutyfree.engine.store.records import StoredImage
from dutyfree.engine.store.store import Store

ARTIFACTS = "dutyfree/layers"
STAGES = f"dutyfree/{provenance.STAGE}"
SNAPSHOTS = f"dutyfree/{provenance.SNAPSHOT}"

NAMES_MAX = 64
"""Names in one request for chains."""
PACKING_MAX = 2
"""Layers that are packed at the same time: each takes a processor."""
DOCUMENTS_SIZE = 64 << 20
"""Bytes of manifests and configurations that stay in memory for the request that follows."""

_DIFF_ID = "dev.dutyfree.diff-id"
_TAR_SIZE = "dev.dutyfree.tar-size"
_EMPTY = LayoutDocument(b"{}", "application/vnd.oci.empty.v1+json")

Sees: TypeAlias = Callable[[str], bool]
"""Whether a client may see the layer with this key."""


class Offer(msgspec.Struct, frozen=True):
    """The answer to a request for chains."""

    chains: tuple[LayerChain, ...]


class _Document(NamedTuple):
    document: LayoutDocument
    keys: tuple[str, ...]
    """The layers that it describes. Only a client that sees all of them gets it."""


class Distribution:
    """The layers and images of one store. Threads may share it. Every method blocks."""

    def __init__(self, store: Store, cancel: CancelToken | None = None) -> None:
        self.store = store
        self._cancel = cancel or CancelToken()
        self._packing = threading.Semaphore(PACKING_MAX)
        self._lock = threading.Lock()
        self._documents: OrderedDict[str, _Document] = OrderedDict()
        self._size = 0

    def close(self) -> None:
        """Stop packing."""
        self._cancel.set()

    def offer(self, names: Sequence[str], sees: Sees) -> Offer:
        """The chains with these names that the client sees completely."""
        found = [chain for chain in chains.find(self.store, names) if _sees_all(chain, sees)]
        return Offer(tuple(map(_without_source, found)))

    def tags(self, repository: str, sees: Sees) -> list[str]:
        """The tags of an image's repository that the client sees."""
        named = [(image, name) for image in self.store.images() if (name := _reference(image.name))]
        wanted = _reference(f"{repository}:latest")
        return sorted(
            name.tag
            for image, name in named
            if wanted and name[:2] == wanted[:2] and name.tag and all(map(sees, image.mounted))
        )

    def manifest(self, repository: str, tag_or_digest: str, sees: Sees) -> LayoutDocument | None:
        """A manifest; None if there is none that the client sees. Packs its layers.

        Raises CreateError, Cancelled, and OSError of the disk.
        """
        if DIGEST.fullmatch(tag_or_digest):
            return self._known(tag_or_digest, sees)
        if repository == ARTIFACTS:
            return self._artifact(tag_or_digest.replace("-", ":", 1), sees)
        chain = self._chain(repository, tag_or_digest)
        if chain is None or not _sees_all(chain, sees):
            return None
        packed = self._packed(chain)
        config, found = layout.chain_documents(_without_source(packed))
        self._remember([layer.key for layer in chain.layers], config, found)
        return found

    def blob(self, digest: str, sees: Sees) -> Path | bytes | None:
        """The file of a blob, or a small document; None if there is none that the client sees."""
        if document := self._known(digest, sees):
            return document.data
        for path in (self.store.root / "kept").glob(f"*/*/packed/{digest.removeprefix('sha256:')}"):
            layer = path.parent.parent
            if sees(f"{layer.parent.name}:{layer.name}"):
                return path
        return None

    def _known(self, digest: str, sees: Sees) -> LayoutDocument | None:
        if digest == _EMPTY.descriptor["digest"]:
            return _EMPTY
        with self._lock:
            found = self._documents.get(digest)
        return found.document if found and all(map(sees, found.keys)) else None

    def _remember(self, keys: Iterable[str], *documents: LayoutDocument) -> None:
        described = tuple(keys)
        with self._lock:
            for document in documents:
                digest = document.descriptor["digest"]
                if digest not in self._documents:
                    self._size += len(document.data)
                self._documents[digest] = _Document(document, described)
                self._documents.move_to_end(digest)
            while self._size > DOCUMENTS_SIZE:
                self._size -= len(self._documents.popitem(last=False)[1].document.data)

    def _artifact(self, key: str, sees: Sees) -> LayoutDocument | None:
        if not chains.is_key(key) or not sees(key) or not self.store.path(key).exists():
            return None
        found = artifact(self._pack(key))
        self._remember([key], found)
        return found

    def _chain(self, repository: str, tag: str) -> LayerChain | None:
        """The chain or the image that a tag names."""
        names = {STAGES: f"{provenance.STAGE}:{tag}", SNAPSHOTS: chains.SNAPSHOT + tag}
        if repository in names:
            return next(iter(chains.find(self.store, [names[repository]])), None)
        name = _reference(f"{repository}:{tag}")
        image = self.store.image(str(name)) if name else None
        return _image_chain(image) if image else None

    def _packed(self, chain: LayerChain) -> LayerChain:
        layers = [msgspec.structs.replace(layer, blobs=self._pack(layer.key)) for layer in chain.layers]
        return msgspec.structs.replace(chain, layers=tuple(layers))

    def _pack(self, key: str) -> tuple[Blob, ...]:
        return packer.pack_layer(self.store, key, self._cancel, self._packing)


def artifact_tag(key: str) -> str:
    """The tag of a layer in the repository of artifacts."""
    return key.replace(":", "-", 1)


def artifact(blobs: Sequence[Blob]) -> LayoutDocument:
    """The manifest of one layer. It does not say how the layer was made: the chain does."""
    layers = [
        {
            "mediaType": LAYER,
            "digest": blob.digest,
            "size": blob.size,
            "annotations": {_DIFF_ID: blob.diff_id, _TAR_SIZE: str(blob.tar_size)},
        }
        for blob in blobs
    ]
    found = {
        "schemaVersion": 2,
        "mediaType": manifest.MANIFESTS[0],
        "artifactType": ARTIFACT,
        "config": _EMPTY.descriptor,
        "layers": layers,
    }
    return LayoutDocument(msgspec.json.encode(found), manifest.MANIFESTS[0])


def artifact_blobs(data: bytes) -> tuple[Blob, ...]:
    """The blobs in a manifest of ``artifact``. Raises CreateError: the sender is not trusted."""
    try:
        layers: list[Any] = msgspec.json.decode(data)["layers"]
        return tuple(
            msgspec.convert(
                {
                    "digest": layer["digest"],
                    "size": layer["size"],
                    "diff_id": layer["annotations"][_DIFF_ID],
                    "whole": int(layer["annotations"][_TAR_SIZE]),
                },
                Blob,
            )
            for layer in layers
        )
    except (msgspec.MsgspecError, RecursionError, LookupError, TypeError, ValueError) as error:
        raise CreateError(
            f"the manifest of a layer is malformed: {error!r}", remedy="the peer is broken or hostile"
        ) from error


def _image_chain(image: StoredImage) -> LayerChain:
    layers = tuple(ChainLayer(key) for key in reversed(image.mounted))
    return LayerChain(
        name=image.name, image=image.name, identity=image.digest, layers=layers, stored_image=image
    )


def _sees_all(chain: LayerChain, sees: Sees) -> bool:
    return all(sees(layer.key) for layer in chain.layers)


def _without_source(chain: LayerChain) -> LayerChain:
    """Without the path of a file of this host from which the image came."""
    image = chain.stored_image and msgspec.structs.replace(chain.stored_image, source="")
    return msgspec.structs.replace(chain, stored_image=image)


def _reference(name: str) -> reference.Reference | None:
    with contextlib.suppress(CreateError):
        return reference.parse(name)
    return None

"""Describe chains of layers, from an image up to a recipe's prefix or a snapshot, and check received ones."""

from __future__ import annotations

import re
from collections.abc import Iterable

import msgspec

from dutyfree.contract.errors import CreateError
from dutyfree.engine.images.reference import DIGEST
from dutyfree.engine.launcher.protocol import LAYERS_MAX, TREES_MAX
from dutyfree.engine.store import provenance
from dutyfree.engine.store.provenance import Provenance
from dutyfree.engine.store.records import StoredImage
from dutyfree.engine.store.store import Store

SNAPSHOT = f"{provenance.SNAPSHOT}:"
RECIPE = "recipe:"
"""Prefixes of a wanted name: a snapshot's name, or the content key of a recipe's prefix. A name without one
is the key of a layer."""

TAR = "tar"
"""Kind of the key of an image's layer that was fetched: the key is the digest of its tar."""

FORMAT_VERSION = 2

_BUILD_SECONDS_MAX = 1e7

_UPPER_KEY = re.compile(rf"({provenance.STAGE}|{provenance.SNAPSHOT}):[0-9a-f]{{64}}")
_LOWER_KEY = re.compile(r"[a-z0-9]{1,16}:[0-9a-f]{64}")
_SNAPSHOT_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


class Blob(msgspec.Struct, frozen=True, rename={"tar_size": "whole"}):
    """One file system of a layer, as a compressed tar."""

    digest: str
    size: int
    diff_id: str
    """Digest of the tar."""
    tar_size: int
    """Bytes of the tar."""

    @property
    def is_valid(self) -> bool:
        """Whether the digests and sizes are well-formed."""
        digests = DIGEST.fullmatch(self.digest) and DIGEST.fullmatch(self.diff_id)
        return bool(digests) and self.size >= 0 and self.tar_size >= 0


class ChainLayer(msgspec.Struct, frozen=True, rename={"provenance": "made"}):
    """One layer of a chain."""

    key: str
    provenance: Provenance | None = None
    """None for a layer of the image."""
    blobs: tuple[Blob, ...] = ()
    """Empty until the layer is packed."""


class LayerChain(
    msgspec.Struct, frozen=True, kw_only=True, rename={"version": "form", "stored_image": "known"}
):
    """A layer with all layers below it."""

    version: int = FORMAT_VERSION
    name: str
    """``snapshot:NAME``, or the key of the uppermost layer."""
    image: str
    identity: str
    layers: tuple[ChainLayer, ...]
    """The lowest first: the image's layers, if they are included, then the layers above the image."""
    stored_image: StoredImage | None = None
    """The image as the sender's store has it; None if it is in no store, such as ``host``."""

    @property
    def lower(self) -> tuple[ChainLayer, ...]:
        """The layers of the image."""
        return tuple(layer for layer in self.layers if layer.provenance is None)

    @property
    def upper(self) -> tuple[ChainLayer, ...]:
        """The layers above the image."""
        return tuple(layer for layer in self.layers if layer.provenance is not None)

    @property
    def snapshot(self) -> str:
        """The snapshot's name; empty if the chain is not a named snapshot."""
        is_snapshot = bool(self.upper) and self.upper[-1].key.startswith(SNAPSHOT)
        return self.name.removeprefix(SNAPSHOT) if is_snapshot else ""


def is_key(text: str) -> bool:
    """Whether this is the key of a layer, whether it exists or not."""
    return bool(_LOWER_KEY.fullmatch(text))


def find(store: Store, wanted: Iterable[str]) -> list[LayerChain]:
    """The wanted chains that the store has completely, without their blobs."""
    tops: dict[str, str] = {}
    wanted = tuple(wanted)
    known = stage_layers(store) if any(name.startswith(RECIPE) for name in wanted) else {}
    for name in wanted:
        if name.startswith(RECIPE):
            tops |= {key: key for key, found in known.items() if RECIPE + found.recipe == name}
        elif name.startswith(SNAPSHOT):
            snapshot = store.snapshots.get(name.removeprefix(SNAPSHOT))
            tops |= {name: snapshot.layer} if snapshot else {}
        elif _UPPER_KEY.fullmatch(name):
            tops[name] = name
    chains = (_chain(store, name, key) for name, key in tops.items())
    return [chain for chain in chains if chain]


def stage_layers(store: Store) -> dict[str, Provenance]:
    """The provenance of all usable layers of stages, by key."""
    keys = [info.key for info in store.layers() if info.key.startswith(f"{provenance.STAGE}:")]
    found = {key: store.provenance(key) for key in keys if not store.is_stale(key)}
    return {key: one for key, one in found.items() if one}


def _chain(store: Store, name: str, top: str) -> LayerChain | None:
    found = store.provenance(top)
    if found is None or store.is_stale(top):
        return None
    upper = [(key, store.provenance(key)) for key in (*found.below, top)]
    if not all(one for _, one in upper):
        return None
    image = next((image for image in store.images() if image.digest == found.identity), None)
    lower = [ChainLayer(key) for key in reversed(found.mounted)] if image or top.startswith(SNAPSHOT) else []
    layers = (*lower, *(ChainLayer(key, one) for key, one in upper))
    return LayerChain(
        name=name, image=found.image, identity=found.identity, layers=layers, stored_image=image
    )


def other_builds(store: Store, chain: LayerChain) -> list[str]:
    """Keys of the chain's layers that the store has from another build: the rest does not fit on these."""
    return [
        layer.key
        for layer in chain.upper
        if (found := store.provenance(layer.key))
        and layer.provenance
        and found.build_id != layer.provenance.build_id
    ]


def shorten(chain: LayerChain, key: str) -> LayerChain | None:
    """The part of a chain that ends with this layer; None if the layer is not in it."""
    keys = [layer.key for layer in chain.upper]
    if key not in keys:
        return None
    layers = (*chain.lower, *chain.upper[: keys.index(key) + 1])
    return msgspec.structs.replace(chain, name=key, layers=layers)


def check(chain: LayerChain) -> None:
    """Check a received chain. Raises CreateError if it is inconsistent: the sender is not trusted."""
    if chain.version != FORMAT_VERSION:
        raise CreateError(
            f"{chain.name!r} has the format version {chain.version}; this dutyfree reads {FORMAT_VERSION}",
            remedy="use the same version of dutyfree at both ends",
        )
    lower, upper = chain.lower, chain.upper
    trees = {len(layer.blobs) for layer in upper if layer.blobs}
    is_consistent = (
        bool(upper)
        and chain.layers == (*lower, *upper)
        and len(chain.layers) <= LAYERS_MAX
        and all(_UPPER_KEY.fullmatch(layer.key) for layer in upper)
        and all(_LOWER_KEY.fullmatch(layer.key) and len(layer.blobs) <= 1 for layer in lower)
        and len(trees) <= 1
        and all(count <= TREES_MAX for count in trees)
        and all(blob.is_valid for layer in chain.layers for blob in layer.blobs)
        and all(_is_layer_consistent(chain, number) for number in range(len(upper)))
        and (chain.stored_image is None or chain.stored_image.digest == chain.identity)
        and (_SNAPSHOT_NAME.fullmatch(chain.snapshot) if chain.snapshot else chain.name == upper[-1].key)
    )
    if not is_consistent:
        raise CreateError(
            f"the description of {chain.name[:100]!r} is inconsistent, and refused",
            remedy="it is broken or hostile: export it again",
        )


def _is_layer_consistent(chain: LayerChain, number: int) -> bool:
    """Whether a layer's provenance agrees with the chain."""
    upper = chain.upper
    found = upper[number].provenance
    assert found is not None
    parent = upper[number - 1].provenance if number else None
    is_snapshot = upper[number].key.startswith(SNAPSHOT)
    return (
        found.below == tuple(layer.key for layer in upper[:number])
        and found.parent_build == (parent.build_id if parent else "")
        and (found.image, found.identity) == (chain.image, chain.identity)
        and is_snapshot == (found.settings is not None)
        and 0 <= found.seconds < _BUILD_SECONDS_MAX
    )

"""What travels: a chain of layers from an image up to a recipe's prefix or a snapshot, told as data."""

from __future__ import annotations

import re
from collections.abc import Iterable

import msgspec

from dutyfree.contract.errors import CreateError
from dutyfree.engine.images.manifest import DIGEST
from dutyfree.engine.launcher.protocol import LAYERS_MAX, TREES_MAX
from dutyfree.engine.store import provenance as made
from dutyfree.engine.store.provenance import Provenance
from dutyfree.engine.store.records import StoredImage
from dutyfree.engine.store.store import Store

SNAPSHOT = f"{made.SNAPSHOT}:"
RECIPE = "recipe:"
"""Before what is wanted: a snapshot's name, or the key of a recipe's prefix. Or it is the key of a layer."""

TAR = "tar"
"""The kind of an image's layer that came by this way: its key is the digest of its tar."""

FORM = 2

_LONGEST = 1e7
"""Seconds: nobody waited longer for a layer."""

_UPPER = re.compile(rf"({made.STAGE}|{made.SNAPSHOT}):[0-9a-f]{{64}}")
_LOWER = re.compile(r"[a-z0-9]{1,16}:[0-9a-f]{64}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


class Blob(msgspec.Struct, frozen=True):
    """One file system of a layer: a tar, compressed."""

    digest: str
    size: int
    diff_id: str
    """The digest of the tar."""
    whole: int
    """Its bytes."""


class ChainLayer(msgspec.Struct, frozen=True):
    key: str
    made: Provenance | None = None
    """None of an image's own."""
    blobs: tuple[Blob, ...] = ()
    """None yet where it was not asked for."""


class LayerChain(msgspec.Struct, frozen=True, kw_only=True):
    form: int = FORM
    name: str
    """``snapshot:NAME``, or the key of the uppermost layer."""
    image: str
    identity: str
    layers: tuple[ChainLayer, ...]
    """The lowest first: those of the image, if they are in it, then those upon it."""
    known: StoredImage | None = None
    """The image as its store has it; None of one that is in no store, as ``host``."""

    @property
    def lower(self) -> tuple[ChainLayer, ...]:
        return tuple(layer for layer in self.layers if layer.made is None)

    @property
    def upper(self) -> tuple[ChainLayer, ...]:
        return tuple(layer for layer in self.layers if layer.made is not None)

    @property
    def snapshot(self) -> str:
        """Its name, if it is one."""
        is_one = bool(self.upper) and self.upper[-1].key.startswith(SNAPSHOT)
        return self.name.removeprefix(SNAPSHOT) if is_one else ""


def find(store: Store, wanted: Iterable[str]) -> list[LayerChain]:
    """Those of the wanted ones that the store has whole, without their blobs."""
    tops: dict[str, str] = {}
    wanted = tuple(wanted)
    known = stages(store) if any(one.startswith(RECIPE) for one in wanted) else {}
    for one in wanted:
        if one.startswith(RECIPE):
            tops |= {key: key for key, told in known.items() if RECIPE + told.recipe == one}
        elif one.startswith(SNAPSHOT):
            named = store.snapshots.get(one.removeprefix(SNAPSHOT))
            tops |= {one: named.layer} if named else {}
        elif _UPPER.fullmatch(one):
            tops[one] = one
    chains = (_chain(store, name, key) for name, key in tops.items())
    return [chain for chain in chains if chain]


def stages(store: Store) -> dict[str, Provenance]:
    """What layers of stages there are that can be used, by key."""
    keys = [facts.key for facts in store.layers() if facts.key.startswith(f"{made.STAGE}:")]
    told = {key: read(store, key) for key in keys if not store.is_stale(key)}
    return {key: found for key, found in told.items() if found}


def read(store: Store, key: str) -> Provenance | None:
    """What the layer is made of, if it is there."""
    return made.read(store.path(key) / "tree")


def _chain(store: Store, name: str, top: str) -> LayerChain | None:
    told = read(store, top)
    if told is None or store.is_stale(top):
        return None
    upper = [(key, read(store, key)) for key in (*told.below, top)]
    if not all(found for _, found in upper):
        return None
    known = next((image for image in store.images() if image.digest == told.identity), None)
    lower = [ChainLayer(key) for key in reversed(told.mounted)] if known or top.startswith(SNAPSHOT) else []
    layers = (*lower, *(ChainLayer(key, found) for key, found in upper))
    return LayerChain(name=name, image=told.image, identity=told.identity, layers=layers, known=known)


def strange(store: Store, chain: LayerChain) -> list[str]:
    """Layers that the store has of another run of their stages: upon these the rest was not made."""
    here = [(layer, read(store, layer.key)) for layer in chain.upper]
    return [
        layer.key for layer, found in here if found and layer.made and found.build_id != layer.made.build_id
    ]


def upto(chain: LayerChain, key: str) -> LayerChain | None:
    """The part of a chain that ends with this layer upon its image, if it is in it."""
    keys = [layer.key for layer in chain.upper]
    if key not in keys:
        return None
    shorter = (*chain.lower, *chain.upper[: keys.index(key) + 1])
    return msgspec.structs.replace(chain, name=key, layers=shorter)


def check(chain: LayerChain) -> None:
    """Raises CreateError for one that no honest store has: it comes from strangers."""
    if chain.form != FORM:
        raise CreateError(
            f"{chain.name!r} is told in form {chain.form}", remedy="use the same dutyfree at both ends"
        )
    lower, upper = chain.lower, chain.upper
    trees = {len(layer.blobs) for layer in upper if layer.blobs}
    makes_sense = (
        bool(upper)
        and chain.layers == (*lower, *upper)
        and len(chain.layers) <= LAYERS_MAX
        and all(_UPPER.fullmatch(layer.key) for layer in upper)
        and all(_LOWER.fullmatch(layer.key) and len(layer.blobs) <= 1 for layer in lower)
        and len(trees) <= 1
        and all(count <= TREES_MAX for count in trees)
        and all(sound(blob) for layer in chain.layers for blob in layer.blobs)
        and all(_fits(chain, number) for number in range(len(upper)))
        and (chain.known is None or chain.known.digest == chain.identity)
        and (_NAME.fullmatch(chain.snapshot) if chain.snapshot else chain.name == upper[-1].key)
    )
    if not makes_sense:
        raise CreateError(
            f"{chain.name[:100]!r} is told in a way that makes no sense: it is refused",
            remedy="it is broken or hostile: export it again",
        )


def _fits(chain: LayerChain, number: int) -> bool:
    """Whether a layer says of itself what the chain says of it."""
    upper = chain.upper
    told = upper[number].made
    assert told is not None
    below = tuple(layer.key for layer in upper[:number])
    ground = upper[number - 1].made if number else None
    is_snapshot = upper[number].key.startswith(SNAPSHOT)
    return (
        told.below == below
        and told.parent_build == (ground.build_id if ground else "")
        and (told.image, told.identity) == (chain.image, chain.identity)
        and is_snapshot == (told.settings is not None)
        and 0 <= told.seconds < _LONGEST
    )


def sound(blob: Blob) -> bool:
    """Whether it can be verified at all."""
    digests = DIGEST.fullmatch(blob.digest) and DIGEST.fullmatch(blob.diff_id)
    return bool(digests) and blob.size >= 0 and blob.whole >= 0

"""List, remove, export and import the layers of recipes and named snapshots (docs/layers.md).

A layer is named by ``snapshot:NAME``, by the first digits of its key, or by a recipe, which means its longest
prefix that is on this machine. All functions block.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

import msgspec

from dutyfree.contract import Recipe
from dutyfree.contract.errors import CreateError, UsageError
from dutyfree.engine.exchange import chains, layout, sources
from dutyfree.engine.exchange.chains import LayerChain
from dutyfree.engine.exchange.fetcher import Fetcher, FetchResult
from dutyfree.engine.exchange.protocol import Peer
from dutyfree.engine.images import find, reference, rootfs
from dutyfree.engine.images.install import Progress
from dutyfree.engine.images.unpack import UNPACKED_MAX
from dutyfree.engine.layers.build_request import layer_key
from dutyfree.engine.store.cancel import CancelToken
from dutyfree.engine.store.store import Store

What: TypeAlias = str | Recipe

DIGITS_MIN = 6
"""The fewest digits that name a layer."""

REMEDY = "list the layers: `dutyfree layer ls`"


class LayerEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A layer of a stage, or a named snapshot."""

    name: str
    """``snapshot:NAME``, or the layer's key."""
    key: str
    kind: str
    image: str
    identity: str
    """What the image was: its name may mean another image later."""
    recipe: str
    """Content key of the recipe's prefix that ends with this layer; empty for a snapshot."""
    below: int
    """Number of layers between this one and the image."""
    parent: str
    """Key of the next listed layer below; empty if that is the image."""
    size: int
    """Bytes of this layer alone."""
    seconds: float
    """Duration of the build."""
    made: float
    used: float
    in_use: bool
    """Whether an open substrate uses it now."""
    commit: str = ""
    """Commit of a cloned repository."""
    commands: tuple[str, ...] = ()


class ExportResult(msgspec.Struct, frozen=True):
    names: tuple[str, ...]
    digests: tuple[str, ...]
    """Digests of the exported contents, one for each name."""
    size: int
    """Bytes that were written."""


def ls() -> list[LayerEntry]:
    """All layers, grouped by image, each after those below it."""
    store = Store()
    named = {snapshot.layer: snapshot.name for snapshot in store.snapshots.all()}
    there = {info.key: (info, built) for info in store.layers() if (built := store.provenance(info.key))}
    listed = [
        key for key in there if key in named or not (key.startswith(chains.SNAPSHOT) or store.is_stale(key))
    ]
    keys = set(listed)
    found = []
    for key in listed:
        info, built = there[key]
        found.append(
            LayerEntry(
                name=chains.SNAPSHOT + named[key] if key in named else key,
                key=key,
                kind=built.kind,
                image=built.image,
                identity=built.identity,
                recipe=built.recipe,
                below=len(built.below),
                parent=next((below for below in reversed(built.below) if below in keys), ""),
                size=info.size,
                seconds=built.seconds,
                made=info.made,
                used=store.last_use(key) or info.made,
                in_use=store.is_in_use(key),
                commit=built.commit,
                commands=built.commands,
            )
        )
    return sorted(found, key=lambda entry: (entry.image, entry.identity, entry.below, entry.made))


def export(
    what: Sequence[What], target: Path | str, *, image: bool = True, cancel: CancelToken | None = None
) -> ExportResult:
    """Write chains of layers to an archive (``-`` is standard output), or add them to a directory.

    If ``image`` is false, the layers of the image are left out: the importing machine must have it.
    Raises UsageError, CreateError.
    """
    store = Store()
    found = {chain.name: chain for one in what for chain in [_one(store, one)]}
    if not found:
        raise UsageError("no layers are named to export", remedy=REMEDY)
    try:
        contents = layout.pack_chains(store, list(found.values()), cancel or CancelToken(), image=image)
        size = _write(contents, target)
    except OSError as error:
        raise CreateError(f"{target} cannot be written: {error.strerror or error}") from error
    return ExportResult(tuple(found), tuple(one["digest"] for one in contents.manifests), size)


def bring(
    source: str | Path,
    what: Sequence[What] = (),
    *,
    digest: str | None = None,
    largest: int | None = None,
    progress: Progress | None = None,
    cancel: CancelToken | None = None,
) -> list[FetchResult]:
    """Import the missing layers of chains.

    ``source`` is an archive or a directory of ``export``, the cache directory of another machine, or the URL
    of a server (``dutyfree serve``). Without ``what``, everything in an export is imported. If ``digest`` is
    given, it must be that of the export.
    Raises UsageError, CreateError.
    """
    store, cancel = Store(), cancel or CancelToken()
    with sources.open_peer(str(source), store, cancel) as peer:
        is_export = isinstance(peer, layout.LayoutPeer)
        if not what and not is_export:
            raise UsageError(
                f"{source} is not an export: name the layers to import", remedy="name recipes or snapshots"
            )
        if digest and not (isinstance(peer, layout.LayoutPeer) and set(peer.digests.values()) == {digest}):
            raise CreateError(f"{source} is not the export with the digest {digest}")
        fetcher = Fetcher(store, peer, progress, cancel, largest or UNPACKED_MAX)
        offered = [_offered(peer, one) for one in what] if what else peer.offer(())
        if not offered:
            raise CreateError(f"{source} contains no layers of dutyfree")
        return [fetcher.fetch(chain) for chain in offered]


def remove(what: Sequence[What]) -> list[str]:
    """Remove named snapshots, and layers of stages together with the layers above them.

    If a stage is built again, the layers above it no longer fit: it may write other files. A layer that is in
    use is removed by a later `dutyfree gc`. Raises UsageError.
    """
    store = Store()
    found = [_top(store, one) for one in what]
    for name, top in found:
        is_snapshot = name.startswith(chains.SNAPSHOT)
        if is_snapshot:
            store.snapshots.remove(name.removeprefix(chains.SNAPSHOT))
        needed = [snapshot.name for snapshot in store.snapshots.all() if top in snapshot.keys]
        if needed and not is_snapshot:
            raise UsageError(
                f"{name} is needed by the snapshot {needed[0]}",
                remedy=f"remove that first: dutyfree layer rm {chains.SNAPSHOT}{needed[0]}",
            )
        above = [key for key, built in chains.stage_layers(store).items() if top in built.below]
        for key in (*above, top) if not needed else ():
            store.remove(key)
    return [name for name, _ in found]


def _top(store: Store, what: What) -> tuple[str, str]:
    """The full name, and the key of the uppermost layer. A snapshot may be incomplete. Raises UsageError."""
    if isinstance(what, str) and what.startswith(chains.SNAPSHOT):
        snapshot = store.snapshots.get(what.removeprefix(chains.SNAPSHOT))
        if snapshot is not None:
            return what, snapshot.layer
    chain = _one(store, what)
    return chain.name, chain.upper[-1].key


def _write(contents: layout.LayoutContents, target: Path | str) -> int:
    if target == "-":
        layout.write_archive(contents, sys.stdout.buffer)
        return contents.size
    path = Path(target)
    if path.is_dir() or str(target).endswith("/"):
        return layout.write_directory(contents, path)
    if path.exists() and not path.is_file():  # a pipe or a device: do not replace it
        with open(path, "wb") as file:
            layout.write_archive(contents, file)
        return contents.size
    with layout.replace_file(path) as file:
        layout.write_archive(contents, file)
    return path.stat().st_size


def _wanted(what: What) -> list[str]:
    """The names to request from a peer. Raises UsageError."""
    if isinstance(what, str):
        return [what]
    if not what.stages:
        raise UsageError("a recipe without stages has no layers", remedy="name a recipe with stages")
    return [chains.RECIPE + key for key in reversed(what.keys()[1:])]


def _offered(peer: Peer, what: What) -> LayerChain:
    """The chain that a peer offers. Raises CreateError if the peer offers something else.

    Without this check a peer could deliver other layers under any name.
    """
    found = peer.offer(_wanted(what))
    if not all(_matches(chain, what) for chain in found):
        raise CreateError(
            "the peer offers layers that it was not asked for", remedy="it is broken or hostile"
        )
    return _rename_image(_longest(found, what), what)


def _rename_image(chain: LayerChain, what: What) -> LayerChain:
    """Let the image have the name that it has in the recipe, and no other."""
    name = None if isinstance(what, str) else what.image
    if chain.stored_image is None or name is None:
        return msgspec.structs.replace(chain, stored_image=None)
    if not name.startswith(("/", find.LAYOUT, find.DAEMON)):
        name = str(reference.parse(name))
    image = msgspec.structs.replace(chain.stored_image, name=name)
    return msgspec.structs.replace(chain, stored_image=image)


def _matches(chain: LayerChain, what: What) -> bool:
    built = [layer.provenance for layer in chain.upper if layer.provenance]
    tops = {chain.name} | {chains.RECIPE + last.recipe for last in built[-1:] if last.recipe}
    if isinstance(what, str):
        return what in tops
    keys = {what.key(length) for length in range(1, len(what.stages) + 1)}
    keys_built = {layer_key(one.recipe, one.identity) for one in built if one.recipe in keys}
    same_image = what.image is None or chain.image == what.image
    return bool(built) and same_image and {layer.key for layer in chain.upper} == keys_built


def _one(store: Store, what: What) -> LayerChain:
    """The chain of this machine that ``what`` names. Raises UsageError."""
    if isinstance(what, str) and not what.startswith(chains.SNAPSHOT):
        digits = what.rpartition(":")[2]
        fitting = [
            key
            for key, built in chains.stage_layers(store).items()
            if len(digits) >= DIGITS_MIN
            and (key.partition(":")[2].startswith(digits) or built.recipe.startswith(digits))
        ]
        if len(fitting) > 1:
            raise UsageError(f"{what} matches {len(fitting)} layers", remedy="give more digits")
        what = fitting[0] if fitting else what
    return _longest(chains.find(store, _wanted(what)), what)


def _longest(found: Sequence[LayerChain], what: What) -> LayerChain:
    """The longest chain; if there are several, the one on the image that is here now."""
    if not found:
        name = what if isinstance(what, str) else "the recipe"
        raise UsageError(
            f"there are no layers of {name}", remedy=f"{REMEDY}; or build them: `dutyfree layer build`"
        )
    return max(found, key=lambda chain: (len(chain.upper), _is_current(chain)))


def _is_current(chain: LayerChain) -> bool:
    """Whether the chain's image is the one that is here now."""
    if chain.image == "host":
        return chain.identity == rootfs.host_identity()
    known = Store().image(chain.stored_image.name) if chain.stored_image else None
    return known is not None and known.digest == chain.identity

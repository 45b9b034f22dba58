"""Layers of recipes and snapshots on this machine: listed, removed, exported, imported (docs/layers.md).

What is meant is named as ``snapshot:NAME``, by the first digits of a layer's key, or by a recipe: of that it
is the longest prefix that is there. All functions block.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import msgspec

from dutyfree.contract import Recipe
from dutyfree.contract.errors import CreateError, UsageError

if TYPE_CHECKING:
    from dutyfree.engine.exchange.chains import LayerChain
    from dutyfree.engine.exchange.fetcher import FetchResult
    from dutyfree.engine.exchange.protocol import Peer
    from dutyfree.engine.images.install import Progress
    from dutyfree.engine.store.cancel import CancelToken
    from dutyfree.engine.store.store import Store

What: TypeAlias = str | Recipe

SHORTEST = 6
"""Digits of a key that can be enough."""

REMEDY = "see `dutyfree layer ls`"


class LayerEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One layer with what it stands for."""

    name: str
    """``snapshot:NAME``, or the layer's key."""
    key: str
    kind: str
    image: str
    identity: str
    """What the image is: its name may mean another later."""
    recipe: str
    """The key of the recipe's prefix that ends with it, if it is of one."""
    below: int
    """Layers between it and the image."""
    parent: str
    """The key of the next one below it that is listed; none if it stands upon the image."""
    size: int
    """Bytes of its own."""
    seconds: float
    """That making it took."""
    made: float
    used: float
    in_use: bool
    """Whether an open substrate uses it just now."""
    commit: str = ""
    """What a repository was at when it was cloned."""
    commands: tuple[str, ...] = ()


class ExportResult(msgspec.Struct, frozen=True):
    names: tuple[str, ...]
    digests: tuple[str, ...]
    """One for each name: who knows it knows what was exported."""
    size: int
    """Bytes that were written."""


def ls() -> list[LayerEntry]:
    """All of them, those upon the same image together, each after what it stands on."""
    from dutyfree.engine.exchange import chains

    store = _store()
    named = {snapshot.layer: snapshot.name for snapshot in store.snapshots.all()}
    there = {facts.key: (facts, told) for facts in store.layers() if (told := store.provenance(facts.key))}
    listed = [
        key for key in there if key in named or not (key.startswith(chains.SNAPSHOT) or store.is_stale(key))
    ]
    keys = set(listed)
    found = []
    for key in listed:
        facts, told = there[key]
        found.append(
            LayerEntry(
                name=chains.SNAPSHOT + named[key] if key in named else key,
                key=key,
                kind=told.kind,
                image=told.image,
                identity=told.identity,
                recipe=told.recipe,
                below=len(told.below),
                parent=next((below for below in reversed(told.below) if below in keys), ""),
                size=facts.size,
                seconds=told.seconds,
                made=facts.made,
                used=store.last_use(key) or facts.made,
                in_use=store.is_in_use(key),
                commit=told.commit,
                commands=told.commands,
            )
        )
    return sorted(found, key=lambda kept: (kept.image, kept.identity, kept.below, kept.made))


def export(
    what: Sequence[What], target: Path | str, *, image: bool = True, cancel: CancelToken | None = None
) -> ExportResult:
    """Write chains of layers to an archive (``-`` for standard output), or add them to a directory.

    Without ``image`` the layers of the image itself stay here: whoever imports it must have it.
    Raises UsageError, CreateError.
    """
    from dutyfree.engine.exchange import layout
    from dutyfree.engine.store.cancel import CancelToken

    store = _store()
    found = {chain.name: chain for one in what for chain in [_one(store, one)]}
    if not found:
        raise UsageError("nothing is named that could be exported", remedy=REMEDY)
    try:
        contents = layout.contents(store, list(found.values()), cancel or CancelToken(), image=image)
        size = _written(contents, target)
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
    """Import chains of layers: what is missing here of them.

    ``source`` is an archive or a directory of ``export``, the cache of another machine as a directory,
    ``tcp://HOST:PORT``, or ``exec:COMMAND``, such as ``exec:ssh node dutyfree layer serve``. Without
    ``what``, all that an export holds. ``digest`` must be that of the export, if given. Raises UsageError,
    CreateError.
    """
    from dutyfree.engine.exchange import layout, sources
    from dutyfree.engine.exchange.fetcher import Fetcher
    from dutyfree.engine.images.unpack import UNPACKED_MAX
    from dutyfree.engine.store.cancel import CancelToken

    store, cancel = _store(), cancel or CancelToken()
    with sources.opened(str(source), store, cancel) as peer:
        is_export = isinstance(peer, layout.LayoutPeer)
        if not what and not is_export:
            raise UsageError(f"{source} has many layers: say which", remedy="name recipes or snapshots")
        if digest and not (isinstance(peer, layout.LayoutPeer) and set(peer.digests.values()) == {digest}):
            raise CreateError(f"{source} is not the export with the digest {digest}")
        fetcher = Fetcher(store, peer, progress, cancel, largest or UNPACKED_MAX)
        offered = [_offered(peer, one) for one in what] if what else peer.offer(())
        if not offered:
            raise CreateError(f"{source} holds no layers of dutyfree")
        return [fetcher.fetch(chain) for chain in offered]


def remove(what: Sequence[What]) -> list[str]:
    """Remove snapshots by name, and layers of stages with all stages that were made upon them.

    Made again, a stage may leave something else: nothing of before fits upon that. What is in use goes with
    a later `dutyfree gc`. Raises UsageError.
    """
    from dutyfree.engine.exchange import chains

    store = _store()
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
        upon = [key for key, told in chains.stages(store).items() if top in told.below]
        for key in (*upon, top) if not needed else ():
            store.remove(key)
    return [name for name, _ in found]


def _top(store: Store, what: What) -> tuple[str, str]:
    """What is meant, and its uppermost layer; a snapshot need not be whole. Raises UsageError."""
    from dutyfree.engine.exchange import chains

    if isinstance(what, str) and what.startswith(chains.SNAPSHOT):
        snapshot = store.snapshots.get(what.removeprefix(chains.SNAPSHOT))
        if snapshot is not None:
            return what, snapshot.layer
    chain = _one(store, what)
    return chain.name, chain.upper[-1].key


def _store() -> Store:
    from dutyfree.engine.store.store import Store

    return Store()


def _written(contents: object, target: Path | str) -> int:
    from dutyfree.engine.exchange import layout

    assert isinstance(contents, layout.LayoutContents)
    if target == "-":
        layout.write_archive(contents, sys.stdout.buffer)
        return contents.size
    path = Path(target)
    if path.is_dir() or str(target).endswith("/"):
        return layout.write_directory(contents, path)
    if path.exists() and not path.is_file():  # a pipe or a device, which must stay what it is
        with open(path, "wb") as file:
            layout.write_archive(contents, file)
        return contents.size
    with layout.renamed(path) as file:
        layout.write_archive(contents, file)
    return path.stat().st_size


def _wanted(what: What) -> list[str]:
    """What to ask a peer for. Raises UsageError."""
    from dutyfree.engine.exchange import chains

    if isinstance(what, str):
        return [what]
    if not what.stages:
        raise UsageError("a recipe without stages has no layers", remedy="name a recipe with stages")
    return [chains.RECIPE + key for key in reversed(what.keys()[1:])]


def _offered(peer: Peer, what: What) -> LayerChain:
    """What a peer has of it. Raises CreateError if it offers something else.

    Else who is asked for one thing could bring in another, under whatever name it likes.
    """
    found = peer.offer(_wanted(what))
    if not all(_is(chain, what) for chain in found):
        raise CreateError("the peer offers what it was not asked for", remedy="it is broken or hostile")
    return _named(_longest(found, what), what)


def _named(chain: LayerChain, what: What) -> LayerChain:
    """Its image comes under the name that the recipe has for it, and under no other."""
    from dutyfree.engine.images import find, reference

    wanted = None if isinstance(what, str) else what.image
    if chain.known is None or wanted is None:
        return msgspec.structs.replace(chain, known=None)
    if not wanted.startswith(("/", find.LAYOUT, find.DAEMON)):
        wanted = str(reference.parse(wanted))
    return msgspec.structs.replace(chain, known=msgspec.structs.replace(chain.known, name=wanted))


def _is(chain: LayerChain, what: What) -> bool:
    from dutyfree.engine.exchange import chains
    from dutyfree.engine.layers.build_request import layer_key

    told = [layer.made for layer in chain.upper if layer.made]
    tops = {chain.name} | {chains.RECIPE + last.recipe for last in told[-1:] if last.recipe}
    if isinstance(what, str):
        return what in tops
    keys = {what.key(length) for length in range(1, len(what.stages) + 1)}
    made = {layer_key(one.recipe, one.identity) for one in told if one.recipe in keys}
    is_upon = what.image is None or chain.image == what.image
    return bool(told) and is_upon and {layer.key for layer in chain.upper} == made


def _one(store: Store, what: What) -> LayerChain:
    """The chain that is meant. Raises UsageError."""
    from dutyfree.engine.exchange import chains

    if isinstance(what, str) and not what.startswith(chains.SNAPSHOT):
        digits = what.rpartition(":")[2]
        fitting = [
            key
            for key, told in chains.stages(store).items()
            if len(digits) >= SHORTEST
            and (key.partition(":")[2].startswith(digits) or told.recipe.startswith(digits))
        ]
        if len(fitting) > 1:
            raise UsageError(f"{what} could be any of {len(fitting)} layers", remedy="give more digits")
        what = fitting[0] if fitting else what
    return _longest(chains.find(store, _wanted(what)), what)


def _longest(found: Sequence[LayerChain], what: What) -> LayerChain:
    """The longest of them; of several upon images that changed since, the one upon the present."""
    if not found:
        told = what if isinstance(what, str) else "the recipe"
        raise UsageError(
            f"there are no layers of {told}", remedy=f"{REMEDY}; `dutyfree layer build` makes them"
        )
    return max(found, key=lambda chain: (len(chain.upper), _present(chain)))


def _present(chain: LayerChain) -> bool:
    from dutyfree.engine.images import rootfs

    if chain.image == "host":
        return chain.identity == rootfs.host_identity()
    known = _store().image(chain.known.name) if chain.known else None
    return known is not None and known.digest == chain.identity

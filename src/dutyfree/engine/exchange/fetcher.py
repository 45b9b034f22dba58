"""Chains into a store: only what is missing there, verified before it is unpacked, whole or not at all.

A blob on its way lies among the store's parts and is taken up again where it was cut. A layer is made aside
and renamed, so whoever is killed leaves nothing that could be taken for one.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import time
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path

import msgspec

from dutyfree.contract.errors import CreateError, UsageError
from dutyfree.engine.exchange import chains
from dutyfree.engine.exchange.chains import Blob, ChainLayer, LayerChain
from dutyfree.engine.exchange.protocol import BlobRequest, Peer
from dutyfree.engine.images import rootfs, streams
from dutyfree.engine.images.archives import FileSlice
from dutyfree.engine.images.install import LayerProgress, Progress, disk_error
from dutyfree.engine.images.streams import CHUNK, Readable
from dutyfree.engine.images.unpack import UNPACKED_MAX, unpack
from dutyfree.engine.store import provenance, squash
from dutyfree.engine.store.cancel import CancelToken
from dutyfree.engine.store.layer_lease import LayerLease
from dutyfree.engine.store.locks import locked
from dutyfree.engine.store.records import NamedSnapshot, StoredImage
from dutyfree.engine.store.store import Store


class FetchResult(msgspec.Struct, frozen=True):
    chain: LayerChain
    layers: int
    """That were missing."""
    size: int
    """Bytes that came."""


class LayerBusy(CreateError):  # noqa: N818 (names the state)
    """Somebody else makes it at this moment."""


class Fetcher:
    """Fills a store from a peer. Blocks; raises CreateError, UsageError, and Cancelled once it is halted.

    An eager one, for who would build the layers otherwise, takes none of images. It waits neither for the
    disk nor for others who make the same, so that no two wait for each other: it raises LayerBusy.
    """

    def __init__(
        self,
        store: Store,
        peer: Peer,
        progress: Progress | None = None,
        cancel: CancelToken | None = None,
        largest: int = UNPACKED_MAX,
        *,
        eager: bool = False,
    ) -> None:
        self._store = store
        self._peer = peer
        self._progress = progress or (lambda _: None)
        self._cancel = cancel or CancelToken()
        self._largest = largest
        self._eager = eager
        self._claim = ""
        """The uppermost layer that nobody else makes meanwhile."""
        self.brought: list[str] = []
        """Keys of the layers that are here by this."""

    def fetch(self, chain: LayerChain) -> FetchResult:
        """A chain that the peer offers."""
        chains.check(chain)
        try:
            with contextlib.ExitStack() as leases:
                return self._fetch(chain, leases)
        except BlockingIOError as error:
            raise LayerBusy(f"{chain.name} is on its way already") from error
        except OSError as error:
            raise disk_error(error) from error

    def _fetch(self, chain: LayerChain, leases: contextlib.ExitStack) -> FetchResult:
        self._check_names(chain)
        known = self._image(chain, leases)
        lower = () if known else chain.lower
        if not (known or lower):
            _check_here(chain)
        for layer in chain.upper:
            if self._store.is_stale(layer.key):  # of no use here, and in the way
                self._store.remove(layer.key)
        wanted = self._missing(chain.upper, leases)
        if wanted and (strange := chains.strange(self._store, chain)):
            raise CreateError(
                f"{wanted[-1].key} stands on another run of a stage than the one here, {strange[0]}",
                remedy=f"remove that, if it is to come from there too: dutyfree layer rm {strange[0]}",
            )
        trees = rootfs.host_trees() if chain.image == "host" else 1
        described = self._described([*lower, *wanted], trees)
        mounted = known.mounted if known else tuple(layer.key for layer in reversed(described[: len(lower)]))
        missing = [layer for layer in described if not self._lease(layer.key, leases)]
        size = self._bring(missing, mounted, leases)
        if missing:
            settle = self._store.sync_in_background if self._eager else self._store.sync
            settle([layer.key for layer in missing])
        self._name(chain, mounted, known)
        return FetchResult(chain, len(missing), size)

    def _lease(self, key: str, leases: contextlib.ExitStack) -> LayerLease | None:
        lease = self._store.lease(key)
        return leases.enter_context(lease) if lease else None

    def _missing(self, layers: Sequence[ChainLayer], leases: contextlib.ExitStack) -> list[ChainLayer]:
        """Those that are not here; of an eager one nobody else makes them from now on."""
        missing = [layer for layer in layers if not self._lease(layer.key, leases)]
        if not self._eager:
            return missing
        for layer in missing:
            leases.enter_context(self._store.build_lock(layer.key, wait=False))
            self._claim = layer.key
        return [layer for layer in missing if not self._lease(layer.key, leases)]

    # --- What is here already -----------------------------------------------------------------------

    def _check_names(self, chain: LayerChain) -> None:
        taken = self._store.snapshots.get(chain.snapshot) if chain.snapshot else None
        if taken and taken.layer != chain.upper[-1].key:
            raise UsageError(
                f"there is another snapshot {chain.snapshot} here",
                remedy=f"remove it first: dutyfree layer rm {chain.name}",
            )
        image = self._store.image(chain.known.name) if chain.known else None
        if image and image.digest != chain.identity and not chain.snapshot:
            raise CreateError(
                f"{image.name} is another image here ({image.digest}) than where this was made",
                remedy="name images by digest; or remove the one that is here: dutyfree image rm",
            )

    def _image(self, chain: LayerChain, leases: contextlib.ExitStack) -> StoredImage | None:
        """The chain's image, if it is here under whatever name."""
        for image in self._store.images():
            if image.digest == chain.identity and all(self._lease(key, leases) for key in image.mounted):
                return image
        return None

    def _name(self, chain: LayerChain, mounted: tuple[str, ...], known: StoredImage | None) -> None:
        here = known or chain.known
        if chain.known and here and not self._store.image(chain.known.name):
            layers = known.layers if known else tuple(reversed(mounted))
            self._store.put_image(
                msgspec.structs.replace(
                    here, name=chain.known.name, layers=layers, mounted=mounted, source="", added=time.time()
                )
            )
        if not chain.snapshot:
            return
        *below, top = [layer.key for layer in chain.upper]
        lease = self._store.lease(top)
        if lease is None:
            raise CreateError(f"the layer {top} was removed while it came", remedy="try again")
        with lease:
            self._store.snapshots.put(
                NamedSnapshot(
                    name=chain.snapshot,
                    layer=top,
                    below=(*mounted, *below),
                    size=lease.info.size,
                    made=time.time(),
                )
            )

    # --- What is not --------------------------------------------------------------------------------

    def _described(self, layers: Sequence[ChainLayer], trees: int) -> list[ChainLayer]:
        """With their blobs, and the keys that they have here."""
        told = self._peer.pack([layer.key for layer in layers]) if layers else {}
        described = []
        for layer in layers:
            blobs = told.get(layer.key, ())
            if len(blobs) != (trees if layer.made else 1) or not all(chains.sound(blob) for blob in blobs):
                raise CreateError(
                    f"the layer {layer.key} has {len(blobs)} parts that could be used here, not {trees}",
                    remedy="it is broken, or of a machine whose directories are other ones",
                )
            key = layer.key if layer.made else f"{chains.TAR}:{blobs[0].diff_id.removeprefix('sha256:')}"
            described.append(ChainLayer(key, layer.made, blobs))
        return described

    def _bring(
        self, missing: Sequence[ChainLayer], mounted: tuple[str, ...], leases: contextlib.ExitStack
    ) -> int:
        blobs = {blob.digest: blob for layer in missing for blob in layer.blobs}
        if missing and os.geteuid() != 0:
            raise CreateError(
                "only root can import layers, whose files have many owners",
                remedy="run as root; without, recipes are made in memory by each process",
            )
        self._check_room(sum(blob.whole + blob.size for layer in missing for blob in layer.blobs))
        with contextlib.ExitStack() as stack:
            # In one order, so that no two wait for each other.
            parts = {
                digest: stack.enter_context(locked(self._part(digest), fcntl.LOCK_EX, self._cancel))
                for digest in sorted(blobs)
            }
            stack.callback(self._forget_empty, parts)
            missing = [
                layer for layer in missing if not self._lease(layer.key, leases)
            ]  # another was quicker
            wanted = [want for blob in _each(missing) if (want := _want(blob, parts[blob.digest]))]
            stream = stack.enter_context(self._peer.send(wanted)) if wanted else None
            received: set[str] = set()
            for number, layer in enumerate(missing):
                for blob in layer.blobs:
                    if blob.digest not in received:
                        self._receive(layer, blob, parts[blob.digest], stream)
                        received.add(blob.digest)
                make = partial(self._make, layer, mounted)
                try:
                    if self._eager:
                        leases.enter_context(self._store.add(layer.key, make))
                    else:
                        leases.enter_context(self._store.obtain(layer.key, make, self._cancel))
                except CreateError:  # it came whole, and is wrong: it would be so again
                    self._forget(blob.digest for blob in layer.blobs)
                    raise
                self.brought.append(layer.key)
                self._progress(LayerProgress(layer.key, "done"))
                later = {blob.digest for blob in _each(missing[number + 1 :])}
                self._forget({blob.digest for blob in layer.blobs} - later)
            self._forget(blobs.keys() - received)  # of what another made meanwhile
        return sum(blobs[want.digest].size - want.position for want in wanted)

    def _part(self, digest: str) -> Path:
        """Where a blob comes to. Two eager ones may want the same, and neither is to wait for the other."""
        own = hashlib.sha256(f"{self._claim} {digest}".encode()).hexdigest() if self._claim else digest
        return self._store.download_path(own)

    def _forget(self, digests: Iterable[str]) -> None:
        for digest in digests:
            self._part(digest).unlink(missing_ok=True)

    def _forget_empty(self, parts: dict[str, int]) -> None:
        self._forget(digest for digest, part in parts.items() if os.fstat(part).st_size == 0)

    def _check_room(self, size: int) -> None:
        if size > self._largest:
            raise CreateError(
                f"it would take {size} bytes, and {self._largest} are allowed",
                remedy="allow more, if you trust where it comes from: --largest",
            )
        self._store.root.mkdir(parents=True, exist_ok=True, mode=0o700)
        free = shutil.disk_usage(self._store.root).free
        if size > free:
            raise CreateError(
                f"it would take {size} bytes, and {free} are free on the disk",
                remedy="`dutyfree gc --spare 0`, or set DUTYFREE_CACHE to a directory on a larger disk",
            )

    def _receive(self, layer: ChainLayer, blob: Blob, part: int, stream: Readable | None) -> None:
        """The rest of a blob; then all of it is verified."""
        digest, at = hashlib.sha256(), 0
        while piece := os.pread(part, CHUNK, at):
            digest.update(piece)
            at += len(piece)
        os.lseek(part, at, os.SEEK_SET)
        while at < blob.size:
            self._cancel.check()
            piece = stream.read(min(CHUNK, blob.size - at)) if stream else b""
            if not piece:
                raise CreateError(
                    f"the transfer was cut after {at} of {blob.size} bytes of {blob.digest}",
                    remedy="try again: what has come is kept",
                )
            _write(part, piece)
            digest.update(piece)
            at += len(piece)
            self._progress(LayerProgress(layer.key, "downloading", at, blob.size))
        found = f"sha256:{digest.hexdigest()}"
        if found != blob.digest:
            os.ftruncate(part, 0)
            raise CreateError(
                f"a blob is not what was announced: it should be {blob.digest}, and is {found}",
                remedy="its source, or what lies between, is broken or hostile; or try again",
            )

    def _make(self, layer: ChainLayer, mounted: tuple[str, ...], tree: Path) -> tuple[int, int, int]:
        size = files = left_out = 0
        for index, blob in enumerate(layer.blobs):
            target = tree if layer.made is None else tree / str(index)
            target.mkdir(mode=0o755, exist_ok=True)
            root = os.open(target, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            self._progress(LayerProgress(layer.key, "unpacking", index, len(layer.blobs)))
            with contextlib.closing(FileSlice(self._part(blob.digest), 0, blob.size)) as file:
                try:
                    done = unpack(
                        streams.decompress(file), root, limit=blob.whole, cancel=self._cancel.child()
                    )
                except streams.InvalidLayer as error:
                    raise CreateError(
                        f"the layer {layer.key} is refused: {error}", remedy="it is broken or hostile"
                    ) from error
                finally:
                    os.close(root)
            if done.diff_id != blob.diff_id:
                raise CreateError(
                    f"a layer is not what was announced: unpacked it is {done.diff_id}, not {blob.diff_id}",
                    remedy="it is broken or hostile",
                )
            if layer.made is None:
                squash.record_whiteouts(tree, done.whiteout_directories)
            size, files, left_out = size + done.size, files + done.files, left_out + done.left_out
        if layer.made is not None:
            provenance.write(tree, msgspec.structs.replace(layer.made, mounted=mounted))
        return size, files, left_out


def _check_here(chain: LayerChain) -> None:
    """Raises CreateError unless what the chain stands on, and does not bring, is what is here."""
    if chain.image == "host":
        if rootfs.host_identity() != chain.identity:
            raise CreateError(
                f"{chain.name} was made upon the software of another machine (the image `host`)",
                remedy="make recipes that are to travel upon an image; see docs/layers.md",
            )
    elif not (Path(chain.image).is_absolute() and rootfs.is_rootfs(Path(chain.image))):
        raise CreateError(
            f"{chain.name} stands on {chain.image} ({chain.identity}), which is neither here nor in it",
            remedy=f"dutyfree image pull {chain.image}, or export it with its image",
        )


def _each(layers: Sequence[ChainLayer]) -> Iterator[Blob]:
    yield from {blob.digest: blob for layer in layers for blob in layer.blobs}.values()


def _want(blob: Blob, part: int) -> BlobRequest | None:
    at = os.fstat(part).st_size
    if at > blob.size:
        os.ftruncate(part, 0)
        at = 0
    return BlobRequest(blob.digest, at) if at < blob.size else None


def _write(file: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(file, rest) :]

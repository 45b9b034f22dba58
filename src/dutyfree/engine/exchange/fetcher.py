"""Fetch chains of layers into a store: only missing layers, verified before they are unpacked.

A blob is downloaded to a file of the store, and resumed from there after an interruption. A layer is unpacked
elsewhere and renamed, so a process that is killed leaves no half layer.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import msgspec

from dutyfree.contract.errors import CreateError, UsageError
from dutyfree.engine.exchange import chains
from dutyfree.engine.exchange.chains import Blob, ChainLayer, LayerChain
from dutyfree.engine.exchange.protocol import Peer
from dutyfree.engine.images import rootfs, streams
from dutyfree.engine.images.archives import FileSlice
from dutyfree.engine.images.install import LayerProgress, Progress, disk_error
from dutyfree.engine.images.streams import CHUNK, write_all
from dutyfree.engine.images.unpack import UNPACKED_MAX, unpack
from dutyfree.engine.store import provenance, squash
from dutyfree.engine.store.cancel import CancelToken
from dutyfree.engine.store.layer_lease import LayerLease
from dutyfree.engine.store.locks import locked
from dutyfree.engine.store.overlay import open_tree
from dutyfree.engine.store.records import NamedSnapshot, StoredImage
from dutyfree.engine.store.store import Store


class FetchResult(msgspec.Struct, frozen=True):
    """What was fetched of a chain."""

    chain: LayerChain
    layers: int
    """Number of layers that were missing."""
    size: int
    """Bytes that were transferred."""


class LayerBusy(CreateError):  # noqa: N818 (names the state)
    """Another process builds or fetches the layer now."""


class Fetcher:
    """Fetches chains from a peer into a store. Blocks; raises CreateError, UsageError, Cancelled.

    An eager fetcher is for a caller that would build the layers otherwise. It fetches no layers of images,
    does not wait for the disk, and raises LayerBusy instead of waiting for another process, so that no two
    processes wait for each other.
    """

    def __init__(
        self,
        store: Store,
        peer: Peer,
        progress: Progress | None = None,
        cancel: CancelToken | None = None,
        size_max: int = UNPACKED_MAX,
        *,
        eager: bool = False,
    ) -> None:
        self._store = store
        self._peer = peer
        self._progress = progress or (lambda _: None)
        self._cancel = cancel or CancelToken()
        self._size_max = size_max
        self._eager = eager
        self._locked_key = ""
        """The uppermost layer of which an eager fetcher holds the build lock."""
        self.fetched: list[str] = []
        """Keys of the layers that this fetcher has added to the store."""

    def fetch(self, chain: LayerChain) -> FetchResult:
        """Fetch a chain that the peer offered."""
        chains.check(chain)
        try:
            with contextlib.ExitStack() as leases:
                return self._fetch(chain, leases)
        except BlockingIOError as error:
            raise LayerBusy(f"another process builds or fetches {chain.name} now") from error
        except OSError as error:
            raise disk_error(error) from error

    def _fetch(self, chain: LayerChain, leases: contextlib.ExitStack) -> FetchResult:
        self._check_names(chain)
        image = self._find_image(chain, leases)
        lower = () if image else chain.lower
        if not (image or lower):
            _check_image_here(chain)
        for layer in chain.upper:
            if self._store.is_stale(layer.key):
                self._store.remove(layer.key)
        wanted = self._missing(chain.upper, leases)
        if wanted and (others := chains.other_builds(self._store, chain)):
            raise CreateError(
                f"{wanted[-1].key} was made on another build of a layer than the one here: {others[0]}",
                remedy=f"to fetch that layer too, remove it here first: dutyfree layer rm {others[0]}",
            )
        trees = rootfs.host_trees() if chain.image == "host" else 1
        packed = self._pack([*lower, *wanted], trees)
        mounted = image.mounted if image else tuple(layer.key for layer in reversed(packed[: len(lower)]))
        missing = [layer for layer in packed if not self._lease(layer.key, leases)]
        size = self._transfer(missing, mounted, leases)
        if missing:
            sync = self._store.sync_in_background if self._eager else self._store.sync
            sync([layer.key for layer in missing])
        self._write_names(chain, mounted, image)
        return FetchResult(chain, len(missing), size)

    def _lease(self, key: str, leases: contextlib.ExitStack) -> LayerLease | None:
        lease = self._store.lease(key)
        return leases.enter_context(lease) if lease else None

    def _missing(self, layers: Sequence[ChainLayer], leases: contextlib.ExitStack) -> list[ChainLayer]:
        """The layers that are not here. An eager fetcher locks them, so that no other process builds them."""
        missing = [layer for layer in layers if not self._lease(layer.key, leases)]
        if not self._eager:
            return missing
        for layer in missing:
            leases.enter_context(self._store.build_lock(layer.key, wait=False))
            self._locked_key = layer.key
        return [layer for layer in missing if not self._lease(layer.key, leases)]

    # --- Images and names ---------------------------------------------------------------------------

    def _check_names(self, chain: LayerChain) -> None:
        existing = self._store.snapshots.get(chain.snapshot) if chain.snapshot else None
        if existing and existing.layer != chain.upper[-1].key:
            raise UsageError(
                f"there is another snapshot {chain.snapshot} here",
                remedy=f"remove it first: dutyfree layer rm {chain.name}",
            )
        image = self._store.image(chain.stored_image.name) if chain.stored_image else None
        if image and image.digest != chain.identity and not chain.snapshot:
            raise CreateError(
                f"{image.name} is another image here ({image.digest}) than where the layers were built",
                remedy="name images by digest, or remove the one here: dutyfree image rm",
            )

    def _find_image(self, chain: LayerChain, leases: contextlib.ExitStack) -> StoredImage | None:
        """The chain's image, if it is here under any name."""
        for image in self._store.images():
            if image.digest == chain.identity and all(self._lease(key, leases) for key in image.mounted):
                return image
        return None

    def _write_names(self, chain: LayerChain, mounted: tuple[str, ...], image: StoredImage | None) -> None:
        found = image or chain.stored_image
        if chain.stored_image and found and not self._store.image(chain.stored_image.name):
            self._store.put_image(
                msgspec.structs.replace(
                    found,
                    name=chain.stored_image.name,
                    layers=image.layers if image else tuple(reversed(mounted)),
                    mounted=mounted,
                    source="",
                    added=time.time(),
                )
            )
        if not chain.snapshot:
            return
        *below, top = [layer.key for layer in chain.upper]
        lease = self._store.lease(top)
        if lease is None:
            raise CreateError(f"the layer {top} was removed during the fetch", remedy="try again")
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

    # --- Transfer -----------------------------------------------------------------------------------

    def _pack(self, layers: Sequence[ChainLayer], trees: int) -> list[ChainLayer]:
        """Let the peer pack layers. Returns them with their blobs, and with the keys that they get here."""
        blobs_of = self._peer.pack([layer.key for layer in layers]) if layers else {}
        packed = []
        for layer in layers:
            blobs = blobs_of.get(layer.key, ())
            expected = trees if layer.provenance else 1
            if len(blobs) != expected or not all(blob.is_valid for blob in blobs):
                raise CreateError(
                    f"the layer {layer.key} has {len(blobs)} file systems; {expected} are expected here",
                    remedy="it is broken, or was built on a machine with other directories",
                )
            tar_key = f"{chains.TAR}:{blobs[0].diff_id.removeprefix('sha256:')}"
            packed.append(ChainLayer(layer.key if layer.provenance else tar_key, layer.provenance, blobs))
        return packed

    def _transfer(
        self, missing: Sequence[ChainLayer], mounted: tuple[str, ...], leases: contextlib.ExitStack
    ) -> int:
        """Download and unpack layers. Returns the bytes that were transferred."""
        blobs = {blob.digest: blob for layer in missing for blob in layer.blobs}
        if missing and os.geteuid() != 0:
            raise CreateError(
                "only root can import layers, because their files have several owners",
                remedy="run as root; without root, each process builds its layers in memory",
            )
        self._check_space(sum(blob.tar_size + blob.size for layer in missing for blob in layer.blobs))
        with contextlib.ExitStack() as stack:
            # In sorted order, so that no two processes wait for each other.
            parts = {
                digest: stack.enter_context(locked(self._part(digest), fcntl.LOCK_EX, self._cancel))
                for digest in sorted(blobs)
            }
            stack.callback(self._remove_empty, parts)
            # Another process may have fetched them while we waited for the locks.
            missing = [layer for layer in missing if not self._lease(layer.key, leases)]
            size = 0
            received: set[str] = set()
            for number, layer in enumerate(missing):
                for blob in layer.blobs:
                    if blob.digest not in received:
                        size += self._receive(layer, blob, parts[blob.digest])
                        received.add(blob.digest)
                make = partial(self._unpack, layer, mounted)
                try:
                    if self._eager:
                        leases.enter_context(self._store.add(layer.key, make))
                    else:
                        leases.enter_context(self._store.obtain(layer.key, make, self._cancel))
                except CreateError:  # the blob is complete, but wrong: do not resume it
                    self._remove_parts(blob.digest for blob in layer.blobs)
                    raise
                self.fetched.append(layer.key)
                self._progress(LayerProgress(layer.key, "done"))
                later = {blob.digest for blob in _unique(missing[number + 1 :])}
                self._remove_parts({blob.digest for blob in layer.blobs} - later)
            self._remove_parts(blobs.keys() - received)  # of layers that another process added
        return size

    def _part(self, digest: str) -> Path:
        """The file of a partial download. Eager fetchers have files of their own, to not wait for others."""
        own = f"{self._locked_key} {digest}"
        return self._store.download_path(
            hashlib.sha256(own.encode()).hexdigest() if self._locked_key else digest
        )

    def _remove_parts(self, digests: Iterable[str]) -> None:
        for digest in digests:
            self._part(digest).unlink(missing_ok=True)

    def _remove_empty(self, parts: dict[str, int]) -> None:
        self._remove_parts(digest for digest, part in parts.items() if os.fstat(part).st_size == 0)

    def _check_space(self, size: int) -> None:
        if size > self._size_max:
            raise CreateError(
                f"the layers need {size} bytes; {self._size_max} are allowed",
                remedy="if you trust the source, allow more: --largest",
            )
        self._store.root.mkdir(parents=True, exist_ok=True, mode=0o700)
        free = shutil.disk_usage(self._store.root).free
        if size > free:
            raise CreateError(
                f"the layers need {size} bytes; {free} are free on the disk",
                remedy="run `dutyfree gc --spare 0`, or set DUTYFREE_CACHE to a directory on a larger disk",
            )

    def _receive(self, layer: ChainLayer, blob: Blob, part: int) -> int:
        """Download the rest of a blob, and verify all of it. Returns the bytes that were transferred."""
        if os.fstat(part).st_size > blob.size:
            os.ftruncate(part, 0)
        digest, at = hashlib.sha256(), 0
        while piece := os.pread(part, CHUNK, at):
            digest.update(piece)
            at += len(piece)
        os.lseek(part, at, os.SEEK_SET)
        begin = at
        with self._peer.open_blob(blob.digest, at) if at < blob.size else nullcontext() as stream:
            while at < blob.size:
                self._cancel.check()
                piece = stream.read(min(CHUNK, blob.size - at)) if stream else b""
                if not piece:
                    raise CreateError(
                        f"the transfer was cut after {at} of {blob.size} bytes of {blob.digest}",
                        remedy="try again: it continues from what has arrived",
                    )
                write_all(part, piece)
                digest.update(piece)
                at += len(piece)
                self._progress(LayerProgress(layer.key, "downloading", at, blob.size))
        found = f"sha256:{digest.hexdigest()}"
        if found != blob.digest:
            os.ftruncate(part, 0)
            raise CreateError(
                f"a blob does not match its digest: expected {blob.digest}, got {found}",
                remedy="try again; if it fails again, the source or a proxy is broken or hostile",
            )
        return at - begin

    def _unpack(self, layer: ChainLayer, mounted: tuple[str, ...], tree: Path) -> tuple[int, int, int]:
        size = files = left_out = 0
        for index, blob in enumerate(layer.blobs):
            target = tree if layer.provenance is None else tree / str(index)
            target.mkdir(mode=0o755, exist_ok=True)
            self._progress(LayerProgress(layer.key, "unpacking", index, len(layer.blobs)))
            blob_file = FileSlice(self._part(blob.digest), 0, blob.size)
            cancel = self._cancel.child()
            try:
                with contextlib.closing(blob_file) as file, open_tree(target) as root:
                    done = unpack(streams.decompress(file), root, limit=blob.tar_size, cancel=cancel)
            except streams.InvalidLayer as error:
                raise CreateError(
                    f"the layer {layer.key} is refused: {error}", remedy="it is broken or hostile"
                ) from error
            if done.diff_id != blob.diff_id:
                raise CreateError(
                    f"the layer {layer.key} is refused: its tar has the digest {done.diff_id}, "
                    f"not {blob.diff_id}",
                    remedy="it is broken or hostile",
                )
            if layer.provenance is None:
                squash.record_whiteouts(tree, done.whiteout_directories)
            size, files, left_out = size + done.size, files + done.files, left_out + done.left_out
        if layer.provenance is not None:
            provenance.write(tree, msgspec.structs.replace(layer.provenance, mounted=mounted))
        return size, files, left_out


def _check_image_here(chain: LayerChain) -> None:
    """Check the image of a chain that does not include it. Raises CreateError unless the image is here."""
    if chain.image == "host":
        if rootfs.host_identity() != chain.identity:
            raise CreateError(
                f"{chain.name} was built on the software of another machine (the image `host`)",
                remedy="to copy layers to other machines, build them on an OCI image; see docs/layers.md",
            )
    elif not (Path(chain.image).is_absolute() and rootfs.is_rootfs(Path(chain.image))):
        raise CreateError(
            f"{chain.name} needs the image {chain.image} ({chain.identity}), which is not here and not "
            "included",
            remedy=f"run `dutyfree image pull {chain.image}`, or export the layers with their image",
        )


def _unique(layers: Sequence[ChainLayer]) -> Iterator[Blob]:
    yield from {blob.digest: blob for layer in layers for blob in layer.blobs}.values()

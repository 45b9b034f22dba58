"""Install an image into the store: unpack its layers in parallel, each once, and write its name."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

from dutyfree.contract.errors import CreateError
from dutyfree.engine.images import streams
from dutyfree.engine.images.manifest import Configuration
from dutyfree.engine.images.unpack import UNPACKED_MAX, unpack
from dutyfree.engine.store import squash
from dutyfree.engine.store.cancel import Cancelled, CancelToken
from dutyfree.engine.store.layer_lease import LayerLease
from dutyfree.engine.store.overlay import is_opaque, open_tree
from dutyfree.engine.store.records import StoredImage
from dutyfree.engine.store.store import Store

PARALLEL_LAYERS = 4
"""Layers that are fetched and unpacked at the same time."""


class LayerProgress(NamedTuple):
    """How far one layer is."""

    layer: str
    phase: Literal["waiting", "downloading", "unpacking", "done"]
    done: int = 0
    total: int = 0


Progress = Callable[[LayerProgress], None]


class LeasedImage(NamedTuple):
    """An image in the store, with the leases that keep its layers there."""

    image: StoredImage
    leases: tuple[LayerLease, ...]
    """Of the layers that sandboxes mount, the uppermost first."""

    def close(self) -> None:
        for lease in self.leases:
            lease.close()


class LayerSource(NamedTuple):
    """Where a layer comes from."""

    key: str
    size: int
    """Bytes that are read."""
    open: Callable[[Progress, CancelToken], contextlib.AbstractContextManager[streams.Readable]]
    digest: str = ""
    """Digest of these bytes, if ``open`` does not verify them."""
    whiteouts: bool = True


class ImageInstaller:
    """Installs images into one store. Blocks; raises CreateError, Cancelled."""

    def __init__(self, store: Store, progress: Progress, unpacked_max: int = UNPACKED_MAX) -> None:
        self._store = store
        self._progress = progress
        self._unpacked_max = unpacked_max

    def install(
        self,
        name: str,
        digest: str,
        configuration: Configuration,
        sources: Sequence[LayerSource],
        cancel: CancelToken,
        source: str = "",
    ) -> LeasedImage:
        """Unpack the layers that the store does not have, and write the image under its name.

        ``source`` identifies a local file or a daemon's image, which may change under its name.
        """
        with contextlib.ExitStack() as stack:
            leases = self._obtain_layers(sources, cancel, stack)
            visible = _visible(leases)
            if len(visible) > squash.LAYERS_MAX or squash.has_stray_whiteouts([one.tree for one in visible]):
                key = squash.squash_key([lease.key for lease in visible])
                trees = [lease.tree for lease in reversed(visible)]
                make = partial(_squash, trees, cancel)
                visible = [stack.enter_context(self._store.obtain(key, make, cancel))]
            image = StoredImage(
                name=name,
                digest=digest,
                layers=tuple(lease.key for lease in leases),
                mounted=tuple(lease.key for lease in reversed(visible)),
                settings=configuration.settings,
                size=sum(lease.info.size for lease in {lease.key: lease for lease in leases}.values()),
                source=source,
                created=configuration.created,
                added=time.time(),
            )
            self._store.put_image(image)
            stack.pop_all()
        held = {id(lease) for lease in visible}
        for lease in leases:
            if id(lease) not in held:
                lease.close()
        return LeasedImage(image, tuple(reversed(visible)))

    def _obtain_layers(
        self, sources: Sequence[LayerSource], cancel: CancelToken, stack: contextlib.ExitStack
    ) -> list[LayerLease]:
        for source in sources:
            self._progress(LayerProgress(source.key, "waiting", 0, source.size))
        with ThreadPoolExecutor(PARALLEL_LAYERS, thread_name_prefix="dutyfree-layer") as threads:
            futures = [threads.submit(self._obtain_layer, source, cancel) for source in sources]
            errors = []
            leases = []
            try:
                for future in futures:
                    error = future.exception()
                    if error is None:
                        leases.append(stack.enter_context(future.result()))
                    else:
                        errors.append(error)
                        cancel.set()
            except BaseException:
                cancel.set()
                raise
        # Raise the error that cancelled the other layers.
        for error in sorted(errors, key=lambda error: isinstance(error, Cancelled)):
            raise error
        return leases

    def _obtain_layer(self, source: LayerSource, cancel: CancelToken) -> LayerLease:
        try:
            lease = self._store.obtain(source.key, partial(self._unpack, source, cancel), cancel)
        except OSError as error:
            raise disk_error(error) from error
        self._progress(LayerProgress(source.key, "done", source.size, source.size))
        return lease

    def _unpack(self, source: LayerSource, cancel: CancelToken, tree: Path) -> tuple[int, int, int]:
        cancel = cancel.child()
        progress = self._layer_progress(source)
        with source.open(progress, cancel) as file:
            counted = _CountingReader(
                file,
                lambda at: progress(LayerProgress(source.key, "unpacking", at, source.size)),
                bool(source.digest),
            )
            try:
                with open_tree(tree) as root:
                    done = unpack(
                        streams.decompress(counted),
                        root,
                        limit=self._unpacked_max,
                        whiteouts=source.whiteouts,
                        cancel=cancel,
                    )
            except streams.InvalidLayer as error:
                raise CreateError(
                    f"the layer {source.key} is refused: {error}", remedy="the image is broken or hostile"
                ) from error
            if source.digest and counted.digest() != source.digest:
                raise CreateError(
                    f"the layer {source.key} does not match the manifest: its digest is not {source.digest}",
                    remedy="the image is broken or hostile",
                )
        if source.key.startswith("sha256:") and done.diff_id != source.key:
            raise CreateError(
                f"a layer is not what the image's configuration tells: unpacked it is {done.diff_id}, "
                f"not {source.key}",
                remedy="the image is broken or hostile",
            )
        squash.record_whiteouts(tree, done.whiteout_directories)
        return done.size, done.files, done.left_out

    def _layer_progress(self, source: LayerSource) -> Progress:
        """Report under the layer's key. While a layer is unpacked during its download, report the latter."""
        is_downloading = False

        def report(event: LayerProgress) -> None:
            nonlocal is_downloading
            if event.phase == "downloading":
                is_downloading = event.done < event.total
            elif is_downloading:
                return
            self._progress(event._replace(layer=source.key))

        return report


class _CountingReader:
    """A file that reports how many bytes were read, and hashes them if asked."""

    def __init__(self, file: streams.Readable, on_bytes: Callable[[int], None], hashed: bool) -> None:
        self._file = file
        self._on_bytes = on_bytes
        self._at = 0
        self._hash = hashlib.sha256() if hashed else None

    def read(self, size: int, /) -> bytes:
        data = self._file.read(size)
        self._at += len(data)
        if self._hash:
            self._hash.update(data)
        self._on_bytes(self._at)
        return data

    def digest(self) -> str:
        """Read to the end, and return the digest."""
        while self.read(streams.CHUNK):
            pass
        return f"sha256:{self._hash.hexdigest()}" if self._hash else ""


def _visible(leases: list[LayerLease]) -> list[LayerLease]:
    """The layers of an image that an overlay shows, the lowest first."""
    visible: list[LayerLease] = []
    for lease in reversed(leases):
        if lease.key not in {above.key for above in visible}:
            visible.insert(0, lease)
        # Overlayfs ignores that the root of a layer is opaque.
        if is_opaque(lease.tree):
            break
    return visible


def _squash(layers: list[Path], cancel: CancelToken, tree: Path) -> tuple[int, int, int]:
    return squash.squash(layers, tree, cancel)


def disk_error(error: OSError) -> CreateError:
    """The error for a failure to write into the store."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return CreateError(
            "the disk is full: the image's layers do not fit into the cache",
            remedy="run `dutyfree image gc`, or set DUTYFREE_CACHE to a directory on a larger disk",
        )
    if error.errno == errno.EPERM and os.geteuid() != 0:
        return CreateError(
            "only root can unpack an image, because its files have several owners",
            remedy='run as root; or use "host", or the directory of a root file system',
        )
    return CreateError(f"the image cannot be written to the cache: {error}")

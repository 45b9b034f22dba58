"""From a name to layers in the store: fetched and unpacked beside each other, each once."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple
from urllib.parse import urlsplit

import msgspec

from dutyfree.contract.errors import CreateError
from dutyfree.engine.images import archives, credentials, manifest, streams
from dutyfree.engine.images.manifest import Configuration
from dutyfree.engine.images.reference import Reference
from dutyfree.engine.images.unpack import LARGEST, unpack
from dutyfree.engine.store import squash
from dutyfree.engine.store.cancel import Cancelled, CancelToken
from dutyfree.engine.store.layer_lease import LayerLease
from dutyfree.engine.store.overlay import is_opaque
from dutyfree.engine.store.records import ImageSettings, StoredImage
from dutyfree.engine.store.store import Store

if TYPE_CHECKING:
    from dutyfree.engine.images.registry import RegistryClient

AT_ONCE = 4
"""Layers that are fetched and unpacked beside each other."""


class LayerProgress(NamedTuple):
    """What happens to a layer."""

    layer: str
    phase: Literal["waiting", "downloading", "unpacking", "done"]
    done: int = 0
    total: int = 0


Progress = Callable[[LayerProgress], None]


class PullOptions(msgspec.Struct, frozen=True):
    mirrors: dict[str, tuple[str, ...]] = {}
    insecure: tuple[str, ...] = ()
    largest: int = LARGEST


class LeasedImage(NamedTuple):
    """An image, and the leases that keep its layers."""

    image: StoredImage
    leases: tuple[LayerLease, ...]
    """Of the layers that sandboxes stand on, the uppermost first."""

    def close(self) -> None:
        for lease in self.leases:
            lease.close()


class LayerSource(NamedTuple):
    """A layer that can be had: its key, the bytes it comes as, and how to open it."""

    key: str
    size: int
    open: Callable[[Progress, CancelToken], contextlib.AbstractContextManager[streams.Readable]]
    digest: str = ""
    """Of the bytes, if they are yet to be verified."""
    whiteouts: bool = True


class Puller:
    """Fills a store. Blocks; every method raises CreateError, and Cancelled once it is halted."""

    def __init__(
        self,
        store: Store,
        options: PullOptions | None = None,
        progress: Progress | None = None,
        cancel: CancelToken | None = None,
    ) -> None:
        self.store = store
        self._options = options or PullOptions()
        self._progress = progress or (lambda _: None)
        self._cancel = cancel or CancelToken()

    def held(self, name: str, source: str | None = None) -> LeasedImage | None:
        """The image that the store has under the name, made of that source, if all of it is there."""
        image = self.store.image(name)
        if image is None or (source is not None and image.source != source):
            return None
        with contextlib.ExitStack() as stack:
            leases = []
            for key in image.mounted:
                lease = self.store.lease(key)
                if lease is None:
                    return None
                leases.append(stack.enter_context(lease))
            stack.pop_all()
        return LeasedImage(image, tuple(leases))

    def pull(self, reference: Reference) -> LeasedImage:
        """The image as its registry has it now, asked at its mirrors first. Raises CreateError, Cancelled.

        A name with a digest means the same for ever: nobody is asked if the store has it.
        """
        if reference.digest and (held := self.held(str(reference))):
            return held
        # HTTP takes its time to load, and most sandboxes need no registry.
        from dutyfree.engine.images.registry import RegistryClient, bases

        places = bases(reference, self._options.mirrors, self._options.insecure)
        for number, base in enumerate(places, 1):
            cancel = self._cancel.child()
            host = reference.registry if number == len(places) else urlsplit(base).netloc
            try:
                with RegistryClient(base, reference, credentials.find(host), cancel) as registry:
                    return self._from_registry(registry, reference, cancel)
            except CreateError:
                if number == len(places):
                    raise
            except OSError as error:
                raise disk_error(error) from error
        raise AssertionError("there is always the registry itself")

    def _from_registry(
        self, registry: RegistryClient, reference: Reference, cancel: CancelToken
    ) -> LeasedImage:
        data, kind = registry.manifest(reference.wanted)
        found = manifest.read(data, kind)
        for _ in range(4):
            if isinstance(found, manifest.Manifest):
                break
            entry = manifest.choose(found)
            data, kind = registry.manifest(entry.digest)
            found = manifest.read(data, entry.media_type or kind)
        if not isinstance(found, manifest.Manifest):
            raise CreateError(f"{reference} leads from index to index, and to no image")
        held = self.held(str(reference))
        if held and held.image.digest == found.digest:
            return held  # nothing has changed: neither fetched nor written
        if held:
            held.close()
        configuration = manifest.configuration(registry.config(found.config), len(found.layers))

        def opened(
            wanted: manifest.BlobDescriptor, progress: Progress, cancel: CancelToken
        ) -> contextlib.AbstractContextManager[streams.Readable]:
            def told(at: int) -> None:
                progress(LayerProgress(wanted.digest, "downloading", at, wanted.size))

            from dutyfree.engine.images.download import fetched

            return fetched(registry, wanted, self.store.download_path(wanted.digest), told, cancel)

        sources = [
            LayerSource(diff_id, wanted.size, partial(opened, wanted))
            for wanted, diff_id in zip(found.layers, configuration.diff_ids, strict=True)
        ]
        return self._install(str(reference), found.digest, configuration, sources, cancel)

    def archive(self, path: Path, name: str, source: str) -> LeasedImage:
        """An image from a tar of one. Raises CreateError, Cancelled."""
        with contextlib.ExitStack() as stack:
            if archives.is_compressed(path):
                scratch = stack.enter_context(self.store.scratch()) / "image.tar"
                try:
                    archives.expand(path, scratch, self._cancel)
                except streams.InvalidLayer as error:
                    raise CreateError(f"{path}: {error}") from error
                except OSError as error:
                    raise disk_error(error) from error
                return self.files(archives.ImageTar(scratch), str(path), name, source)
            return self.files(archives.ImageTar(path), str(path), name, source)

    def files(
        self, files: archives.ImageFiles, what: str, name: str, source: str, tag: str = ""
    ) -> LeasedImage:
        """An image from its pieces. Raises CreateError, Cancelled."""
        found = archives.find(files, what, tag)

        @contextlib.contextmanager
        def opened(
            layer: archives.ArchiveLayer, progress: Progress, cancel: CancelToken
        ) -> Iterator[streams.Readable]:
            del progress, cancel
            with contextlib.closing(files.open(layer.name)) as file:
                yield file

        sources = [
            LayerSource(diff_id, layer.size, partial(opened, layer), layer.digest)
            for layer, diff_id in zip(found.layers, found.configuration.diff_ids, strict=True)
        ]
        return self._install(name, found.digest, found.configuration, sources, self._cancel.child(), source)

    def rootfs(self, path: Path, name: str, source: str) -> LeasedImage:
        """A root file system, a tar or a directory, as an image of one layer without settings."""
        key = f"rootfs:{hashlib.sha256(f'{path} {source}'.encode()).hexdigest()}"

        @contextlib.contextmanager
        def opened(progress: Progress, cancel: CancelToken) -> Iterator[streams.Readable]:
            del progress, cancel
            if path.is_file():
                with open(path, "rb", buffering=0) as file:
                    yield file
                return
            command = [
                "tar",
                "--create",
                "--numeric-owner",
                "--format=pax",
                "--xattrs",
                f"--directory={path}",
                ".",
            ]
            with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as packing:
                assert packing.stdout is not None
                try:
                    yield packing.stdout
                finally:
                    packing.stdout.close()
                    packing.wait()

        size = path.stat().st_size if path.is_file() else 0
        configuration = Configuration(ImageSettings(), (), "")
        layer = LayerSource(key, size, opened, whiteouts=False)
        return self._install(name, key, configuration, [layer], self._cancel.child(), source)

    # --- Layers -------------------------------------------------------------------------------------

    def _install(
        self,
        name: str,
        digest: str,
        configuration: Configuration,
        sources: Sequence[LayerSource],
        cancel: CancelToken,
        source: str = "",
    ) -> LeasedImage:
        with contextlib.ExitStack() as stack:
            leases = self._obtain(sources, cancel, stack)
            layers = tuple(lease.key for lease in leases)
            seen = _seen(leases)
            if len(seen) > squash.LAYERS_MAX or squash.has_stray_whiteouts([lease.tree for lease in seen]):
                below = [lease.tree for lease in reversed(seen)]
                make = partial(_squashed, below, cancel)
                seen = [
                    stack.enter_context(
                        self.store.obtain(squash.squash_key([x.key for x in seen]), make, cancel)
                    )
                ]
            image = StoredImage(
                name=name,
                digest=digest,
                layers=layers,
                mounted=tuple(lease.key for lease in reversed(seen)),
                settings=configuration.settings,
                size=sum(lease.info.size for lease in {lease.key: lease for lease in leases}.values()),
                source=source,
                created=configuration.created,
                added=time.time(),
            )
            self.store.put_image(image)
            stack.pop_all()
        held = {id(lease) for lease in seen}
        for lease in leases:
            if id(lease) not in held:
                lease.close()
        return LeasedImage(image, tuple(reversed(seen)))

    def _obtain(
        self, sources: Sequence[LayerSource], cancel: CancelToken, stack: contextlib.ExitStack
    ) -> list[LayerLease]:
        for source in sources:
            self._progress(LayerProgress(source.key, "waiting", 0, source.size))
        with ThreadPoolExecutor(AT_ONCE, thread_name_prefix="dutyfree-layer") as threads:
            futures = [threads.submit(self._layer, source, cancel) for source in sources]
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
        # Those that stopped did so because of another.
        for error in sorted(errors, key=lambda error: isinstance(error, Cancelled)):
            raise error
        return leases

    def _layer(self, source: LayerSource, cancel: CancelToken) -> LayerLease:
        try:
            lease = self.store.obtain(source.key, partial(self._unpack, source, cancel), cancel)
        except OSError as error:
            raise disk_error(error) from error
        self._progress(LayerProgress(source.key, "done", source.size, source.size))
        return lease

    def _unpack(self, source: LayerSource, cancel: CancelToken, tree: Path) -> tuple[int, int, int]:
        cancel = cancel.child()
        progress = self._relabelled(source)
        with source.open(progress, cancel) as file:
            counted = _Counted(
                file,
                lambda at: progress(LayerProgress(source.key, "unpacking", at, source.size)),
                bool(source.digest),
            )
            root = os.open(tree, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                done = unpack(
                    streams.decompressed(counted),
                    root,
                    limit=self._options.largest,
                    whiteouts=source.whiteouts,
                    cancel=cancel,
                )
            except streams.InvalidLayer as error:
                raise CreateError(
                    f"the layer {source.key} is refused: {error}", remedy="the image is broken or hostile"
                ) from error
            finally:
                os.close(root)
            if source.digest and counted.finish() != source.digest:
                raise CreateError(f"a layer is not what its manifest tells: it is not {source.digest}")
        if source.key.startswith("sha256:") and done.diff_id != source.key:
            raise CreateError(
                f"a layer is not what the image's configuration tells: unpacked it is {done.diff_id}, "
                f"not {source.key}",
                remedy="the image is broken or hostile",
            )
        squash.record_whiteouts(tree, done.hiding)
        return done.size, done.files, done.left_out

    def _relabelled(self, source: LayerSource) -> Progress:
        """Of a layer that is unpacked while it comes, the coming is told until it is over."""
        coming = False

        def told(event: LayerProgress) -> None:
            nonlocal coming
            if event.phase == "downloading":
                coming = event.done < event.total
            elif coming:
                return
            self._progress(event._replace(layer=source.key))

        return told


class _Counted:
    """A file that tells how far it was read, and what it was if that is asked."""

    def __init__(self, file: streams.Readable, told: Callable[[int], None], hashed: bool) -> None:
        self._file = file
        self._told = told
        self._at = 0
        self._hash = hashlib.sha256() if hashed else None

    def read(self, size: int, /) -> bytes:
        data = self._file.read(size)
        self._at += len(data)
        if self._hash:
            self._hash.update(data)
        self._told(self._at)
        return data

    def finish(self) -> str:
        while self.read(streams.CHUNK):
            pass
        return f"sha256:{self._hash.hexdigest()}" if self._hash else ""


def _seen(leases: list[LayerLease]) -> list[LayerLease]:
    """The layers of an image that can be seen at all, the lowest first."""
    seen: list[LayerLease] = []
    for lease in reversed(leases):
        if lease.key not in {above.key for above in seen}:
            seen.insert(0, lease)
        # Overlayfs does not ask the roots of layers whether they hide what lies below: we do.
        if is_opaque(lease.tree):
            break
    return seen


def _squashed(below: list[Path], cancel: CancelToken, tree: Path) -> tuple[int, int, int]:
    return squash.squash(below, tree, cancel)


def disk_error(error: OSError) -> CreateError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return CreateError(
            "the disk is full: the image's layers do not fit into the cache",
            remedy="`dutyfree image gc`, or set DUTYFREE_CACHE to a directory on a larger disk",
        )
    if error.errno == errno.EPERM and os.geteuid() != 0:
        return CreateError(
            "only root can unpack an image, whose files have many owners",
            remedy='run as root; or use "host", or the directory of a root file system',
        )
    return CreateError(f"the image cannot be put into the cache: {error}")

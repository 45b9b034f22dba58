"""Get an image into the store: from a registry, an archive, an OCI layout, or a root file system."""

from __future__ import annotations

import contextlib
import hashlib
import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import msgspec

from dutyfree.contract.errors import CreateError
from dutyfree.engine.images import archives, credentials, manifest, streams
from dutyfree.engine.images.install import (
    ImageInstaller,
    LayerProgress,
    LayerSource,
    LeasedImage,
    Progress,
    disk_error,
)
from dutyfree.engine.images.manifest import Configuration
from dutyfree.engine.images.reference import Reference
from dutyfree.engine.images.unpack import UNPACKED_MAX
from dutyfree.engine.store.cancel import CancelToken
from dutyfree.engine.store.records import ImageSettings
from dutyfree.engine.store.store import Store

if TYPE_CHECKING:
    from dutyfree.engine.images.registry import RegistryClient

_TAR = ("tar", "--create", "--numeric-owner", "--format=pax", "--xattrs")


class PullOptions(msgspec.Struct, frozen=True):
    """Where and how to fetch images."""

    mirrors: dict[str, tuple[str, ...]] = {}
    """Mirrors to try first, by registry."""
    insecure: tuple[str, ...] = ()
    """Registries that are accessed without TLS."""
    largest: int = UNPACKED_MAX
    """Limit for the bytes of an unpacked layer."""
    first_wait: float = 0.25
    """Seconds before the first retry."""


class Puller:
    """Gets images into a store. Blocks; every method raises CreateError, and Cancelled."""

    def __init__(
        self,
        store: Store,
        options: PullOptions | None = None,
        progress: Progress | None = None,
        cancel: CancelToken | None = None,
    ) -> None:
        self.store = store
        self._options = options or PullOptions()
        self._cancel = cancel or CancelToken()
        self._installer = ImageInstaller(store, progress or (lambda _: None), self._options.largest)

    def lease(self, name: str, source: str | None = None) -> LeasedImage | None:
        """Lease an image that is in the store; None if it is missing, incomplete, or from another source."""
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
        """Fetch an image as its registry has it now. Tries the mirrors first.

        A reference with a digest never changes: if the store has that image, no registry is asked.
        """
        if reference.digest and (found := self.lease(str(reference))):
            return found
        # Imported late: HTTP takes long to load, and most sandboxes need no registry.
        from dutyfree.engine.images.registry import RegistryClient, bases

        urls = bases(reference, self._options.mirrors, self._options.insecure)
        for number, base in enumerate(urls, 1):
            cancel = self._cancel.child()
            host = reference.registry if number == len(urls) else urlsplit(base).netloc
            login = credentials.find(host)
            try:
                with RegistryClient(
                    base, reference, login, cancel, first_wait=self._options.first_wait
                ) as registry:
                    return self._from_registry(registry, reference, cancel)
            except CreateError:
                if number == len(urls):
                    raise
            except OSError as error:
                raise disk_error(error) from error
        raise AssertionError("the last URL is the registry itself")

    def _from_registry(
        self, registry: RegistryClient, reference: Reference, cancel: CancelToken
    ) -> LeasedImage:
        data, kind = registry.manifest(reference.tag_or_digest)
        found = manifest.read(data, kind)
        for _ in range(4):
            if isinstance(found, manifest.Manifest):
                break
            entry = manifest.choose(found)
            data, kind = registry.manifest(entry.digest)
            found = manifest.read(data, entry.media_type or kind)
        if not isinstance(found, manifest.Manifest):
            raise CreateError(f"{reference} has nested indexes, but no image")
        known = self.lease(str(reference))
        if known and known.image.digest == found.digest:
            return known  # unchanged
        if known:
            known.close()
        configuration = manifest.configuration(registry.config(found.config), len(found.layers))

        def open_layer(
            wanted: manifest.BlobDescriptor, progress: Progress, cancel: CancelToken
        ) -> contextlib.AbstractContextManager[streams.Readable]:
            def report(at: int) -> None:
                progress(LayerProgress(wanted.digest, "downloading", at, wanted.size))

            from dutyfree.engine.images.download import open_download

            return open_download(registry, wanted, self.store.download_path(wanted.digest), report, cancel)

        sources = [
            LayerSource(diff_id, wanted.size, partial(open_layer, wanted))
            for wanted, diff_id in zip(found.layers, configuration.diff_ids, strict=True)
        ]
        return self._installer.install(str(reference), found.digest, configuration, sources, cancel)

    def import_archive(self, path: Path, name: str, source: str) -> LeasedImage:
        """Import an image from a tar, compressed or not."""
        with contextlib.ExitStack() as stack:
            if archives.is_compressed(path):
                scratch = stack.enter_context(self.store.scratch()) / "image.tar"
                try:
                    archives.expand(path, scratch, self._cancel)
                except streams.InvalidLayer as error:
                    raise CreateError(f"{path}: {error}") from error
                except OSError as error:
                    raise disk_error(error) from error
                return self.import_files(archives.ImageTar(scratch), str(path), name, source)
            return self.import_files(archives.ImageTar(path), str(path), name, source)

    def import_files(
        self, files: archives.ImageFiles, what: str, name: str, source: str, tag: str = ""
    ) -> LeasedImage:
        """Import an image from the files of a layout. ``what`` names the layout in errors."""
        found = archives.find(files, what, tag)

        @contextlib.contextmanager
        def open_layer(
            layer: archives.ArchiveLayer, progress: Progress, cancel: CancelToken
        ) -> Iterator[streams.Readable]:
            del progress, cancel
            with contextlib.closing(files.open(layer.name)) as file:
                yield file

        sources = [
            LayerSource(diff_id, layer.size, partial(open_layer, layer), layer.digest)
            for layer, diff_id in zip(found.layers, found.configuration.diff_ids, strict=True)
        ]
        cancel = self._cancel.child()
        return self._installer.install(name, found.digest, found.configuration, sources, cancel, source)

    def import_rootfs(self, path: Path, name: str, source: str) -> LeasedImage:
        """Import a root file system, a tar or a directory, as an image of one layer without settings."""
        key = f"rootfs:{hashlib.sha256(f'{path} {source}'.encode()).hexdigest()}"

        @contextlib.contextmanager
        def open_layer(progress: Progress, cancel: CancelToken) -> Iterator[streams.Readable]:
            del progress, cancel
            if path.is_file():
                with open(path, "rb", buffering=0) as file:
                    yield file
                return
            command = [*_TAR, f"--directory={path}", "."]
            with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
                assert process.stdout is not None
                try:
                    yield process.stdout
                finally:
                    process.stdout.close()
                    process.wait()

        size = path.stat().st_size if path.is_file() else 0
        configuration = Configuration(ImageSettings(), (), "")
        layer = LayerSource(key, size, open_layer, whiteouts=False)
        return self._installer.install(name, key, configuration, [layer], self._cancel.child(), source)

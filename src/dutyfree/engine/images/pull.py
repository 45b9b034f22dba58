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
from dutyfree.engine.images.manifest import Configuration, Settings
from dutyfree.engine.images.reference import Reference
from dutyfree.engine.images.unpack import LARGEST, unpack
from dutyfree.engine.store import squash
from dutyfree.engine.store.cancel import Halt, Stopped
from dutyfree.engine.store.layer_lease import Lease
from dutyfree.engine.store.overlay_view import opaque
from dutyfree.engine.store.store import Image, Store

if TYPE_CHECKING:
    from dutyfree.engine.images.registry import Registry

AT_ONCE = 4
"""Layers that are fetched and unpacked beside each other."""


class Event(NamedTuple):
    """What happens to a layer."""

    layer: str
    phase: Literal["waiting", "downloading", "unpacking", "done"]
    done: int = 0
    total: int = 0


Progress = Callable[[Event], None]


class Options(msgspec.Struct, frozen=True):
    mirrors: dict[str, tuple[str, ...]] = {}
    insecure: tuple[str, ...] = ()
    largest: int = LARGEST


class Held(NamedTuple):
    """An image, and the leases that keep its layers."""

    image: Image
    leases: tuple[Lease, ...]
    """Of the layers that sandboxes stand on, the uppermost first."""

    def close(self) -> None:
        for lease in self.leases:
            lease.close()


class Source(NamedTuple):
    """A layer that can be had: its key, the bytes it comes as, and how to open it."""

    key: str
    size: int
    open: Callable[[Progress, Halt], contextlib.AbstractContextManager[streams.Readable]]
    digest: str = ""
    """Of the bytes, if they are yet to be verified."""
    whiteouts: bool = True


class Puller:
    """Fills a store. Blocks; every method raises CreateError, and Stopped once it is halted."""

    def __init__(
        self,
        store: Store,
        options: Options | None = None,
        progress: Progress | None = None,
        halt: Halt | None = None,
    ) -> None:
        self.store = store
        self._options = options or Options()
        self._progress = progress or (lambda _: None)
        self._halt = halt or Halt()

    def held(self, name: str, source: str | None = None) -> Held | None:
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
        return Held(image, tuple(leases))

    def pull(self, reference: Reference) -> Held:
        """The image as its registry has it now, asked at its mirrors first. Raises CreateError, Stopped.

        A name with a digest means the same for ever: nobody is asked if the store has it.
        """
        if reference.digest and (held := self.held(str(reference))):
            return held
        # HTTP takes its time to load, and most sandboxes need no registry.
        from dutyfree.engine.images.registry import Registry, bases

        places = bases(reference, self._options.mirrors, self._options.insecure)
        for number, base in enumerate(places, 1):
            halt = self._halt.inner()
            host = reference.registry if number == len(places) else urlsplit(base).netloc
            try:
                with Registry(base, reference, credentials.find(host), halt) as registry:
                    return self._from_registry(registry, reference, halt)
            except CreateError:
                if number == len(places):
                    raise
            except OSError as error:
                raise disk_error(error) from error
        raise AssertionError("there is always the registry itself")

    def _from_registry(self, registry: Registry, reference: Reference, halt: Halt) -> Held:
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
            wanted: manifest.Descriptor, progress: Progress, halt: Halt
        ) -> contextlib.AbstractContextManager[streams.Readable]:
            def told(at: int) -> None:
                progress(Event(wanted.digest, "downloading", at, wanted.size))

            from dutyfree.engine.images.download import fetched

            return fetched(registry, wanted, self.store.part(wanted.digest), told, halt)

        sources = [
            Source(diff_id, wanted.size, partial(opened, wanted))
            for wanted, diff_id in zip(found.layers, configuration.diff_ids, strict=True)
        ]
        return self._install(str(reference), found.digest, configuration, sources, halt)

    def archive(self, path: Path, name: str, source: str) -> Held:
        """An image from a tar of one. Raises CreateError, Stopped."""
        with contextlib.ExitStack() as stack:
            if archives.is_compressed(path):
                scratch = stack.enter_context(self.store.scratch()) / "image.tar"
                try:
                    archives.expand(path, scratch, self._halt)
                except streams.Refused as error:
                    raise CreateError(f"{path}: {error}") from error
                except OSError as error:
                    raise disk_error(error) from error
                return self.files(archives.Tar(scratch), str(path), name, source)
            return self.files(archives.Tar(path), str(path), name, source)

    def files(self, files: archives.Files, what: str, name: str, source: str, tag: str = "") -> Held:
        """An image from its pieces. Raises CreateError, Stopped."""
        found = archives.find(files, what, tag)

        @contextlib.contextmanager
        def opened(layer: archives.Layer, progress: Progress, halt: Halt) -> Iterator[streams.Readable]:
            del progress, halt
            with contextlib.closing(files.open(layer.name)) as file:
                yield file

        sources = [
            Source(diff_id, layer.size, partial(opened, layer), layer.digest)
            for layer, diff_id in zip(found.layers, found.configuration.diff_ids, strict=True)
        ]
        return self._install(name, found.digest, found.configuration, sources, self._halt.inner(), source)

    def rootfs(self, path: Path, name: str, source: str) -> Held:
        """A root file system, a tar or a directory, as an image of one layer without settings."""
        key = f"rootfs:{hashlib.sha256(f'{path} {source}'.encode()).hexdigest()}"

        @contextlib.contextmanager
        def opened(progress: Progress, halt: Halt) -> Iterator[streams.Readable]:
            del progress, halt
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
        configuration = Configuration(Settings(), (), "")
        layer = Source(key, size, opened, whiteouts=False)
        return self._install(name, key, configuration, [layer], self._halt.inner(), source)

    # --- Layers -------------------------------------------------------------------------------------

    def _install(
        self,
        name: str,
        digest: str,
        configuration: Configuration,
        sources: Sequence[Source],
        halt: Halt,
        source: str = "",
    ) -> Held:
        with contextlib.ExitStack() as stack:
            leases = self._obtain(sources, halt, stack)
            layers = tuple(lease.key for lease in leases)
            seen = _seen(leases)
            if len(seen) > squash.MOST or squash.strays([lease.tree for lease in seen]):
                below = [lease.tree for lease in reversed(seen)]
                make = partial(_squashed, below, halt)
                seen = [stack.enter_context(self.store.obtain(squash.key([x.key for x in seen]), make, halt))]
            image = Image(
                name=name,
                digest=digest,
                layers=layers,
                mounted=tuple(lease.key for lease in reversed(seen)),
                settings=configuration.settings,
                size=sum(lease.facts.size for lease in {lease.key: lease for lease in leases}.values()),
                source=source,
                created=configuration.created,
                added=time.time(),
            )
            self.store.name(image)
            stack.pop_all()
        held = {id(lease) for lease in seen}
        for lease in leases:
            if id(lease) not in held:
                lease.close()
        return Held(image, tuple(reversed(seen)))

    def _obtain(self, sources: Sequence[Source], halt: Halt, stack: contextlib.ExitStack) -> list[Lease]:
        for source in sources:
            self._progress(Event(source.key, "waiting", 0, source.size))
        with ThreadPoolExecutor(AT_ONCE, thread_name_prefix="dutyfree-layer") as threads:
            futures = [threads.submit(self._layer, source, halt) for source in sources]
            errors = []
            leases = []
            try:
                for future in futures:
                    error = future.exception()
                    if error is None:
                        leases.append(stack.enter_context(future.result()))
                    else:
                        errors.append(error)
                        halt.set()
            except BaseException:
                halt.set()
                raise
        # Those that stopped did so because of another.
        for error in sorted(errors, key=lambda error: isinstance(error, Stopped)):
            raise error
        return leases

    def _layer(self, source: Source, halt: Halt) -> Lease:
        try:
            lease = self.store.obtain(source.key, partial(self._unpack, source, halt), halt)
        except OSError as error:
            raise disk_error(error) from error
        self._progress(Event(source.key, "done", source.size, source.size))
        return lease

    def _unpack(self, source: Source, halt: Halt, tree: Path) -> tuple[int, int, int]:
        halt = halt.inner()
        progress = self._relabelled(source)
        with source.open(progress, halt) as file:
            counted = _Counted(
                file,
                lambda at: progress(Event(source.key, "unpacking", at, source.size)),
                bool(source.digest),
            )
            root = os.open(tree, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                done = unpack(
                    streams.decompressed(counted),
                    root,
                    limit=self._options.largest,
                    whiteouts=source.whiteouts,
                    halt=halt,
                )
            except streams.Refused as error:
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
        squash.note(tree, done.hiding)
        return done.size, done.files, done.left_out

    def _relabelled(self, source: Source) -> Progress:
        """Of a layer that is unpacked while it comes, the coming is told until it is over."""
        coming = False

        def told(event: Event) -> None:
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


def _seen(leases: list[Lease]) -> list[Lease]:
    """The layers of an image that can be seen at all, the lowest first."""
    seen: list[Lease] = []
    for lease in reversed(leases):
        if lease.key not in {above.key for above in seen}:
            seen.insert(0, lease)
        # Overlayfs does not ask the roots of layers whether they hide what lies below: we do.
        if opaque(lease.tree):
            break
    return seen


def _squashed(below: list[Path], halt: Halt, tree: Path) -> tuple[int, int, int]:
    return squash.squash(below, tree, halt)


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

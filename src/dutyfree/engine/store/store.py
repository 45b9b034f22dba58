"""The layer store: immutable directories by key, shared by all images and processes of this machine.

::

    <cache>/layers/kept/<kind>/<hex>/tree the files; never changed once the directory has its name
                              /facts      size, number of files, time (JSON: ``LayerInfo``)
                              /settled    exists once all of the layer is known to be on disk
                              /lease      users hold a shared lock on it; its mtime is the last use
                              /packed     the layer as blobs for other machines, if one asked recently
                  /images/<hex>           an image: name, layers, settings (JSON: ``StoredImage``)
                  /snapshots/<hex>        a named snapshot and its layers (JSON: ``NamedSnapshot``)
                  /parts/<hex>            a blob during its download
                  /making/<random>        a layer during its build, under an exclusive lock
                  /locks/<hex>            the lock for building the layer of that key

A key is ``kind:hex``: ``sha256`` is an image's layer by its diff id, ``squash`` several layers in one, and so
on. A key names one content for ever. The exception is a stage, which may write other files each time that it
runs: ``provenance`` tells its builds apart.

A layer is built under another name and renamed, so a half-built layer is never visible. It is removed only
under an exclusive lock on its lease, so never while it is in use. Locks end with their process.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

import msgspec

from dutyfree import paths
from dutyfree.contract.errors import CreateError
from dutyfree.engine.host.proc import boot_id
from dutyfree.engine.store import durability, provenance
from dutyfree.engine.store.cancel import CancelToken
from dutyfree.engine.store.durability import SYNCED, BackgroundSync
from dutyfree.engine.store.layer_lease import LayerInfo, LayerLease
from dutyfree.engine.store.locks import is_same_file, locked
from dutyfree.engine.store.names import NameEntry, NameTable
from dutyfree.engine.store.provenance import Provenance, ProvenanceIndex
from dutyfree.engine.store.records import NamedSnapshot, StoredImage
from dutyfree.engine.store.sweep import sweep

_KEY = re.compile(r"[a-z0-9]+:[0-9a-f]{64}")


class CollectResult(msgspec.Struct, frozen=True):
    """What a garbage collection removed."""

    layers: int
    size: int
    in_use: int
    """Layers without a name that stay because a process uses them."""
    half: int = 0
    """Bytes of half-built layers and old interrupted downloads."""


class Store:
    """The store in one directory. All methods block, and may be called from any thread and process."""

    def __init__(self, root: Path | None = None) -> None:
        self.root = root or paths.cache() / "layers"
        self._images = NameTable(StoredImage, partial(self._directory, "images"))
        self.snapshots = NameTable(NamedSnapshot, partial(self._directory, "snapshots"))
        self._sync = BackgroundSync()
        self._provenance = ProvenanceIndex(self.path)

    # --- Layers -------------------------------------------------------------------------------------

    def lease(self, key: str, parent_build: str | None = None) -> LayerLease | None:
        """Lease a layer; None if the store does not have it.

        With ``parent_build``, only a layer that was built on that build of the layer below.
        """
        path = self.path(key)
        while True:
            try:
                descriptor = os.open(path / "lease", os.O_RDWR | os.O_CLOEXEC)
            except (FileNotFoundError, NotADirectoryError):
                return None
            fcntl.flock(descriptor, fcntl.LOCK_SH)
            if not (path / SYNCED).exists() and not self._is_of_this_boot(path):
                os.close(descriptor)
                self.remove(key)
                return None
            # The layer may have been removed before we got the lock: then try again.
            with contextlib.suppress(OSError):
                if is_same_file(descriptor, path / "lease"):
                    if parent_build is not None and not self._is_built_on(key, parent_build):
                        os.close(descriptor)
                        return None
                    os.utime(descriptor)
                    return LayerLease(key, path, descriptor)
            os.close(descriptor)

    def _is_built_on(self, key: str, build_id: str) -> bool:
        found = self._provenance.get(key)
        return found is not None and found.parent_build == build_id

    def _is_of_this_boot(self, path: Path) -> bool:
        """Whether the layer was added since the last boot: then it is complete, synced or not."""
        with contextlib.suppress(OSError, msgspec.DecodeError):
            return msgspec.json.decode((path / "facts").read_bytes(), type=LayerInfo).boot == boot_id()
        return not (path / "lease").exists()  # removed just now: the caller looks again

    def obtain(
        self,
        key: str,
        make: Callable[[Path], tuple[int, int, int]],
        cancel: CancelToken | None = None,
        *,
        parent_build: str | None = None,
    ) -> LayerLease:
        """Lease a layer, and make it first if the store does not have it.

        Only one process makes it; the others wait. ``make`` fills an empty directory, and returns the bytes,
        the files, and how many files it left out. With ``parent_build``, a layer on another build of the
        layer below is replaced. Raises CreateError, Cancelled, and what ``make`` raises.
        """
        if found := self.lease(key, parent_build):
            return found
        with self.build_lock(key, cancel):
            if found := self.lease(key, parent_build):
                return found
            return self.add(key, make)

    def add(self, key: str, make: Callable[[Path], tuple[int, int, int]]) -> LayerLease:
        """Make a layer that the store does not have. The caller holds its ``build_lock``."""
        with self.scratch() as scratch:
            tree = scratch / "tree"
            tree.mkdir(mode=0o755)
            tree.chmod(0o755)
            size, files, left_out = make(tree)
            info = LayerInfo(key, size, files, time.time(), left_out, boot_id())
            (scratch / "facts").write_bytes(msgspec.json.encode(info))
            descriptor = os.open(scratch / "lease", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_SH)  # before the layer is visible to others
                path = self.path(key)
                self._directory("kept")
                self._directory(f"kept/{path.parent.name}")
                self._place(scratch, key)
                (path / "lock").unlink()
            except BaseException:
                os.close(descriptor)
                raise
        return LayerLease(key, path, descriptor)

    def _place(self, complete: Path, key: str) -> None:
        """Rename a complete layer to its name, in place of a stale one. Raises CreateError if that is in use.

        Other users of the host have no access: a layer may contain set-id programs, and files that only the
        image's root may read.
        """
        path = self.path(key)
        complete.chmod(0o700)
        try:
            complete.rename(path)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            if not self.remove(key) and (path / "lease").exists():
                raise CreateError(
                    f"the layer {key} cannot be replaced: another build of it is in use",
                    remedy="end the sandboxes that use it, and try again",
                ) from error
            with self.scratch() as scratch, contextlib.suppress(FileNotFoundError):
                path.rename(scratch / "removed")  # a layer that was partly deleted by hand
            complete.rename(path)

    def sync(self, keys: Iterable[str]) -> None:
        """Write layers to disk, so that they survive a power cut. Raises OSError."""
        durability.sync_layers(self.root, [self.path(key) for key in keys])

    def sync_in_background(self, keys: Iterable[str]) -> None:
        """Start ``sync`` in a thread."""
        self._sync.start(self.root, [self.path(key) for key in keys])

    def wait_for_sync(self) -> None:
        """Wait for all syncs in the background."""
        self._sync.wait()

    @contextlib.contextmanager
    def build_lock(self, key: str, cancel: CancelToken | None = None, *, wait: bool = True) -> Iterator[None]:
        """Hold the lock for building a layer, one at a time among all processes.

        Raises Cancelled, or BlockingIOError if it is held and ``wait`` is false.
        """
        name = hashlib.sha256(key.encode()).hexdigest()[:32]
        with locked(self._directory("locks") / name, fcntl.LOCK_EX, cancel, wait=wait):
            yield

    @contextlib.contextmanager
    def scratch(self) -> Iterator[Path]:
        """A temporary directory in the store. It is removed at the end, unless it was renamed."""
        with locked(self._directory("making") / ".lock", fcntl.LOCK_SH):
            path = Path(tempfile.mkdtemp(dir=self._directory("making")))
            lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)
            os.close(lock)

    def layers(self) -> list[LayerInfo]:
        found = []
        for path in (self.root / "kept").glob("*/*/facts"):
            with contextlib.suppress(OSError, msgspec.DecodeError):
                info = msgspec.json.decode(path.read_bytes(), type=LayerInfo)
                if self.path(info.key) == path.parent:
                    found.append(info)
        return found

    def provenance(self, key: str) -> Provenance | None:
        """Provenance of a layer; None if the layer is missing, or an image's."""
        return self._provenance.get(key)

    def is_stale(self, key: str) -> bool:
        """Whether a layer below it is gone or was built again: then the layer cannot be used."""
        return self._provenance.is_stale(key)

    def last_use(self, key: str) -> float | None:
        """When a layer was last used; None if the store does not have it."""
        try:
            return (self.path(key) / "lease").stat().st_mtime
        except OSError:
            return None

    def is_in_use(self, key: str) -> bool:
        """Whether a process holds a lease of the layer."""
        return not self.is_unused(key) and self.path(key).exists()

    def is_unused(self, key: str) -> bool:
        """Whether the store has the layer, and no process holds a lease of it."""
        try:
            with open(self.path(key) / "lease") as lease:
                fcntl.flock(lease, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        return True

    # --- Images -------------------------------------------------------------------------------------

    def image(self, name: str) -> StoredImage | None:
        return self._images.get(name)

    def images(self) -> list[StoredImage]:
        return self._images.all()

    def put_image(self, image: StoredImage) -> None:
        """Write an image under its name. The caller must hold leases of its layers."""
        self._images.put(image)

    def remove_image(self, name: str) -> bool:
        """Remove an image's name; return whether it existed. Its layers stay until the next collection."""
        return self._images.remove(name)

    def image_last_use(self, image: StoredImage) -> float:
        """When one of the image's layers was last used."""
        times = [self.last_use(key) for key in image.mounted]
        return max([time for time in times if time is not None], default=image.added)

    # --- Removal ------------------------------------------------------------------------------------

    def collect(self, spare: int = 0, keep: Iterable[str] = (), *, dry_run: bool = False) -> CollectResult:
        """Remove layers that no image, no snapshot and no ``keep`` names, and no process uses; or count them.

        The most recently used ones stay, up to ``spare`` bytes. Use of a layer counts as use of all layers
        below it, so upper layers go first. Stale layers always go.
        """
        with locked(self._directory() / "lock", fcntl.LOCK_EX):
            half = sweep(self.root, dry_run=dry_run)
            named = self._named() | set(keep)
            layers = self.layers()
            unnamed = [info for info in layers if info.key not in named]
            uses = self._provenance.last_uses({info.key: self.last_use(info.key) or 0.0 for info in layers})
            stale = {info.key for info in unnamed if self.is_stale(info.key)}
            unnamed.sort(key=lambda info: uses[info.key], reverse=True)
            kept = removed = size = in_use = 0
            for info in unnamed:
                if info.key not in stale:
                    kept += info.size
                    if kept <= spare:
                        continue
                if self.is_unused(info.key) if dry_run else self.remove(info.key):
                    removed, size = removed + 1, size + info.size
                else:
                    in_use += 1
        return CollectResult(removed, size, in_use, half)

    def discard(self, key: str) -> bool:
        """Remove an unused layer that no name and no other layer needs; return whether it did."""
        with locked(self._directory() / "lock", fcntl.LOCK_EX):
            kinds = (provenance.STAGE, provenance.SNAPSHOT)
            built = [
                f"{kind}:{path.name}" for kind in kinds for path in (self.root / "kept" / kind).glob("*")
            ]
            return key not in self._named() | self._provenance.needed(built) and self.remove(key)

    def _named(self) -> set[str]:
        entries: list[NameEntry] = [*self.images(), *self.snapshots.all()]
        return {key for entry in entries for key in entry.keys}

    def remove(self, key: str) -> bool:
        """Remove an unused layer, even if a name needs it; return whether it did."""
        path = self.path(key)
        try:
            descriptor = os.open(path / "lease", os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Others may have removed the layer and built it again: then it is not ours to remove.
            if not is_same_file(descriptor, path / "lease"):
                return False
            with self.scratch() as scratch:
                path.rename(scratch / "removed")
        except BlockingIOError:
            return False
        finally:
            os.close(descriptor)
        return True

    # --- Paths --------------------------------------------------------------------------------------

    def path(self, key: str) -> Path:
        """The directory of a layer, whether it exists or not."""
        if not _KEY.fullmatch(key):
            raise ValueError(f"{key!r} is not the key of a layer")
        kind, _, name = key.partition(":")
        return self.root / "kept" / kind / name

    def download_path(self, digest: str) -> Path:
        """Where a blob is downloaded to."""
        return self._directory("parts") / digest.removeprefix("sha256:")

    def _directory(self, name: str = "") -> Path:
        path = self.root / name
        try:
            self.root.mkdir(parents=True, exist_ok=True, mode=0o700)  # the mode applies to the last part only
            path.mkdir(exist_ok=True, mode=0o700)
        except OSError as error:
            raise CreateError(
                f"the cache directory {path} cannot be created: {error.strerror}",
                remedy="set DUTYFREE_CACHE to a writable directory",
            ) from error
        return path

"""The layer store: keys to immutable directories, shared by all images and processes of this machine.

::

    <cache>/layers/kept/<kind>/<hex>/tree the files; never changed once the directory has its name
                              /facts      size, number of files, when it was made (JSON)
                              /settled    there once all of it is known to be on the disk
                              /lease      who uses the layer holds a shared lock; its time: the last use
                              /packed     as it travels to other machines, if it did lately
                  /images/<hex>           an image's name, its layers and its settings (JSON)
                  /snapshots/<hex>        a snapshot's name and its layers (JSON)
                  /parts/<hex>            a blob that is being downloaded
                  /making/<random>        a layer that is being made, under an exclusive lock
                  /locks/<hex>            whoever makes the layer of that key

A key is ``kind:hex``: ``sha256`` for a layer of an image by its diff id, ``squash`` for several in one, and
so on. The store does not care what a key means, only that it names one content for ever; of a stage, which
may leave something else each time, what came of one run, and nothing fits upon another (``standing``).

A layer is made under another name and renamed, so half a layer is never seen. It is removed only under an
exclusive lock on its lease, so never while somebody uses it; locks end with their process, however it ends.
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
from dutyfree.engine.images.manifest import Settings
from dutyfree.engine.store import durability
from dutyfree.engine.store import provenance as made
from dutyfree.engine.store.cancel import Halt
from dutyfree.engine.store.durability import MARK, Settler
from dutyfree.engine.store.layer_lease import Facts, Lease, boot
from dutyfree.engine.store.locks import locked, same
from dutyfree.engine.store.names import Label, Labels
from dutyfree.engine.store.standing import Standing
from dutyfree.engine.store.sweep import sweep

_KEY = re.compile(r"[a-z0-9]+:[0-9a-f]{64}")


class Image(msgspec.Struct, frozen=True, kw_only=True):
    """An image by its name."""

    name: str
    digest: str
    """Of its manifest; of what else its contents are known by, where it has none."""
    layers: tuple[str, ...]
    """Keys of its own layers, the lowest first."""
    mounted: tuple[str, ...]
    """Keys of the layers that sandboxes stand on, the uppermost first."""
    settings: Settings
    size: int
    source: str = ""
    """What it was made from, where that may change under its name: a file by its time, a daemon's image."""
    created: str = ""
    added: float = 0.0

    @property
    def keys(self) -> set[str]:
        return {*self.layers, *self.mounted}


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """Files of a sandbox by their name: a layer, and all that lies below it."""

    name: str
    layer: str
    below: tuple[str, ...]
    """Keys of the layers that it needs, the image's too."""
    size: int
    """Bytes of its own layer."""
    made: float
    """Seconds since the epoch."""

    @property
    def keys(self) -> set[str]:
        return {self.layer, *self.below}


class Collected(msgspec.Struct, frozen=True):
    layers: int
    size: int
    in_use: int
    """Layers that no image names, but somebody uses."""
    half: int = 0
    """Bytes of what killed processes left half made, or half fetched too long ago."""


class Store:
    """The store in one directory. All methods block, and may be called from any thread and process."""

    def __init__(self, root: Path | None = None) -> None:
        self.root = root or paths.cache() / "layers"
        self._images = Labels(Image, partial(self._directory, "images"))
        self.snapshots = Labels(Snapshot, partial(self._directory, "snapshots"))
        self._settler = Settler()
        self._standing = Standing(self.path)

    # --- Layers -------------------------------------------------------------------------------------

    def lease(self, key: str, upon: str | None = None) -> Lease | None:
        """The layer, if the store has it, to be kept until the lease is closed.

        Of a stage's, only one that was made upon the run of this birth.
        """
        path = self.path(key)
        while True:
            try:
                descriptor = os.open(path / "lease", os.O_RDWR | os.O_CLOEXEC)
            except (FileNotFoundError, NotADirectoryError):
                return None
            fcntl.flock(descriptor, fcntl.LOCK_SH)
            if not (path / MARK).exists() and not self._trusted(path):
                os.close(descriptor)
                self.remove(key)
                return None
            # Its remover may have been quicker: then what we hold is no longer what has the name.
            with contextlib.suppress(OSError):
                if same(descriptor, path / "lease"):
                    if upon is not None and not self._is_upon(key, upon):
                        os.close(descriptor)
                        return None
                    os.utime(descriptor)
                    return Lease(key, path, descriptor)
            os.close(descriptor)

    def _is_upon(self, key: str, birth: str) -> bool:
        told = self._standing.told(key)
        return told is not None and told.upon == birth

    def obtain(
        self,
        key: str,
        make: Callable[[Path], tuple[int, int, int]],
        halt: Halt | None = None,
        *,
        upon: str | None = None,
    ) -> Lease:
        """The layer, made by ``make`` if the store does not have it: once, whoever asks at the same time.

        ``make`` fills an empty directory, and tells the bytes, the files, and what it left out. Of a stage's,
        one that was made upon another run is replaced. Raises CreateError, Stopped, and what ``make`` raises.
        """
        if found := self.lease(key, upon):
            return found
        with self.making(key, halt):
            if found := self.lease(key, upon):
                return found
            return self.make(key, make)

    def make(self, key: str, make: Callable[[Path], tuple[int, int, int]]) -> Lease:
        """The same for one who is ``making`` it, and knows that it is not there."""
        with self.scratch() as scratch:
            tree = scratch / "tree"
            tree.mkdir(mode=0o755)
            tree.chmod(0o755)
            size, files, left_out = make(tree)
            facts = Facts(key, size, files, time.time(), left_out, boot())
            (scratch / "facts").write_bytes(msgspec.json.encode(facts))
            descriptor = os.open(scratch / "lease", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_SH)  # from its first moment on nobody removes it
                path = self.path(key)
                self._directory("kept")
                self._directory(f"kept/{path.parent.name}")
                self._place(scratch, key)
                (path / "lock").unlink()
            except BaseException:
                os.close(descriptor)
                raise
        return Lease(key, path, descriptor)

    def _place(self, whole: Path, key: str) -> None:
        """Give a layer its name, instead of one that fits nothing. Raises CreateError if that is used.

        Closed to all other users of the host: a layer may hold set-id programs, and files that
        only root of the image may read.
        """
        path = self.path(key)
        whole.chmod(0o700)
        try:
            whole.rename(path)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            if not self.remove(key) and (path / "lease").exists():
                raise CreateError(f"another run of {key} is in use") from error
            with self.scratch() as scratch, contextlib.suppress(FileNotFoundError):
                path.rename(scratch / "removed")  # of which somebody had removed a part
            whole.rename(path)

    def settle(self, keys: Iterable[str]) -> None:
        """See that layers are on the disk: one that is not yet is not believed after the next boot.

        Raises OSError.
        """
        durability.settle(self.root, [self.path(key) for key in keys])

    def settle_behind(self, keys: Iterable[str]) -> None:
        """The same, which may take long, without waiting for it."""
        self._settler.begin(self.root, [self.path(key) for key in keys])

    def until_settled(self) -> None:
        """Wait for it."""
        self._settler.wait()

    def _trusted(self, path: Path) -> bool:
        """Whether the kernel that made the layer still runs, and so knows all of it."""
        with contextlib.suppress(OSError, msgspec.DecodeError):
            return msgspec.json.decode((path / "facts").read_bytes(), type=Facts).boot == boot()
        return not (path / "lease").exists()  # just removed: the caller looks again

    @contextlib.contextmanager
    def making(self, key: str, halt: Halt | None = None, *, wait: bool = True) -> Iterator[None]:
        """For one at a time among all processes. Raises Stopped; or BlockingIOError rather than to wait."""
        name = hashlib.sha256(key.encode()).hexdigest()[:32]
        with locked(self._directory("locks") / name, fcntl.LOCK_EX, halt, wait=wait):
            yield

    @contextlib.contextmanager
    def scratch(self) -> Iterator[Path]:
        """A directory to make something in, removed afterwards unless it was renamed."""
        with locked(self._directory("making") / ".lock", fcntl.LOCK_SH):
            path = Path(tempfile.mkdtemp(dir=self._directory("making")))
            lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)
            os.close(lock)

    # --- Images -------------------------------------------------------------------------------------

    def image(self, name: str) -> Image | None:
        return self._images.get(name)

    def images(self) -> list[Image]:
        return self._images.all()

    def name(self, image: Image) -> None:
        """Put an image under its name. Its layers must be leased by the caller."""
        self._images.put(image)

    def forget(self, name: str) -> bool:
        """Take a name away; whether there was one. Its layers stay until they are collected."""
        return self._images.remove(name)

    def used(self, image: Image) -> float:
        """When one of its layers was last used."""
        times = [self.last_use(key) for key in image.mounted]
        return max([moment for moment in times if moment is not None], default=image.added)

    # --- Order --------------------------------------------------------------------------------------

    def collect(self, spare: int = 0, keep: Iterable[str] = (), *, dry_run: bool = False) -> Collected:
        """Remove what no image names, ``keep`` does not name either, and nobody uses; or only count it.

        Of these, the last used ones stay as long as they take no more than ``spare`` bytes together; a layer
        is used whenever one is that stands on it, and goes after it. Of what is loose, nothing stays.
        """
        with locked(self._directory() / "lock", fcntl.LOCK_EX):
            half = sweep(self.root, dry_run=dry_run)
            named = self._named() | set(keep)
            layers = self.layers()
            unnamed = [facts for facts in layers if facts.key not in named]
            uses = self._standing.uses({facts.key: self.last_use(facts.key) or 0.0 for facts in layers})
            loose = {facts.key for facts in unnamed if self.is_loose(facts.key)}
            unnamed.sort(key=lambda facts: uses[facts.key], reverse=True)
            kept = removed = size = in_use = 0
            for facts in unnamed:
                if facts.key not in loose:
                    kept += facts.size
                    if kept <= spare:
                        continue
                if self._unused(facts.key) if dry_run else self.remove(facts.key):
                    removed, size = removed + 1, size + facts.size
                else:
                    in_use += 1
        return Collected(removed, size, in_use, half)

    def told(self, key: str) -> made.Made | None:
        """What a layer says of itself, if it is there and of a stage or a snapshot."""
        return self._standing.told(key)

    def is_loose(self, key: str) -> bool:
        """Whether it was made upon a run of a stage that is not here: nobody can use it."""
        return self._standing.is_loose(key)

    def discard(self, key: str) -> bool:
        """Remove a layer that no name and no other layer needs; not while somebody uses it. If it is gone."""
        with locked(self._directory() / "lock", fcntl.LOCK_EX):
            kinds = (made.STAGE, made.SNAPSHOT)
            every = [
                f"{kind}:{path.name}" for kind in kinds for path in (self.root / "kept" / kind).glob("*")
            ]
            return key not in self._named() | self._standing.needed(every) and self.remove(key)

    def _named(self) -> set[str]:
        labels: list[Label] = [*self.images(), *self.snapshots.all()]
        return {key for label in labels for key in label.keys}

    def layers(self) -> list[Facts]:
        found = []
        for path in (self.root / "kept").glob("*/*/facts"):
            with contextlib.suppress(OSError, msgspec.DecodeError):
                facts = msgspec.json.decode(path.read_bytes(), type=Facts)
                if self.path(facts.key) == path.parent:
                    found.append(facts)
        return found

    def _unused(self, key: str) -> bool:
        try:
            with open(self.path(key) / "lease") as lease:
                fcntl.flock(lease, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        return True

    def is_used(self, key: str) -> bool:
        """Whether somebody holds a lease of it just now."""
        return not self._unused(key) and self.path(key).exists()

    def remove(self, key: str) -> bool:
        """Remove a layer, whoever names it; not while somebody uses it. Whether it is gone by that."""
        path = self.path(key)
        try:
            descriptor = os.open(path / "lease", os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Another may have removed it, and a third made it anew: that one is not ours to remove.
            if not same(descriptor, path / "lease"):
                return False
            with self.scratch() as scratch:
                path.rename(scratch / "removed")
        except BlockingIOError:
            return False
        finally:
            os.close(descriptor)
        return True

    # --- Where things lie ---------------------------------------------------------------------------

    def part(self, digest: str) -> Path:
        """Where a blob is downloaded to."""
        return self._directory("parts") / digest.removeprefix("sha256:")

    def _directory(self, name: str = "") -> Path:
        path = self.root / name
        try:
            self.root.mkdir(parents=True, exist_ok=True, mode=0o700)  # the mode is the last one's alone
            path.mkdir(exist_ok=True, mode=0o700)
        except OSError as error:
            raise CreateError(
                f"the cache directory {path} cannot be made: {error.strerror}",
                remedy="set DUTYFREE_CACHE to a directory that can be written",
            ) from error
        return path

    def path(self, key: str) -> Path:
        """Where a layer lies, or would."""
        if not _KEY.fullmatch(key):
            raise ValueError(f"{key!r} is no key of a layer")
        kind, _, name = key.partition(":")
        return self.root / "kept" / kind / name

    def last_use(self, key: str) -> float | None:
        """Of a layer that is there."""
        try:
            return (self.path(key) / "lease").stat().st_mtime
        except OSError:
            return None

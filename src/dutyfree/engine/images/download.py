"""A blob on its way to the disk: taken up again where it was cut, verified, and read while it grows."""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from dutyfree.contract.errors import CreateError
from dutyfree.engine.images.manifest import BlobDescriptor
from dutyfree.engine.images.registry import RangeError, RegistryClient, TransientError
from dutyfree.engine.images.streams import Readable
from dutyfree.engine.store.cancel import CancelToken

Told = Callable[[int], None]

PATIENCE = 0.1
"""Between two looks whether anybody still wants what is waited for."""


@contextlib.contextmanager
def fetched(
    registry: RegistryClient, wanted: BlobDescriptor, path: Path, told: Told, cancel: CancelToken
) -> Iterator[Readable]:
    """The blob to be read, while it comes; its end is read only once it is verified. ``path`` is removed.

    Whoever leaves by an error halts the download. Raises as ``download``, here or where it is read.
    """
    if path.exists():  # an earlier download may have left what is wrong: verified before anybody reads it
        download(registry, wanted, path, told, cancel)
        with open(path, "rb", buffering=0) as file:
            yield file
    else:
        path.touch(mode=0o600)
        with (
            open(path, "rb", buffering=0) as file,
            _growing(registry, wanted, path, told, cancel, file) as grown,
        ):
            yield grown
    path.unlink(missing_ok=True)


@contextlib.contextmanager
def _growing(
    registry: RegistryClient,
    wanted: BlobDescriptor,
    path: Path,
    told: Told,
    cancel: CancelToken,
    file: BinaryIO,
) -> Iterator[Readable]:
    growing = _Growing(file, cancel)

    def grown(at: int) -> None:
        growing.grow(at)
        told(at)

    def fetch() -> None:
        error: BaseException | None = None
        try:
            download(registry, wanted, path, grown, cancel)
        except BaseException as caught:  # noqa: BLE001 (raised where the blob is read)
            error = caught
        growing.end(error)

    thread = threading.Thread(target=fetch, name="dutyfree-fetch", daemon=True)
    thread.start()
    try:
        yield growing
    except BaseException:
        cancel.set()
        raise
    finally:
        thread.join()


class _Growing:
    """A file that another thread appends to.

    If that begins anew, what was read already must come again: the layer's own digest tells whether it did.
    """

    def __init__(self, file: BinaryIO, cancel: CancelToken) -> None:
        self._file = file
        self._cancel = cancel
        self._changed = threading.Condition()
        self._there = self._at = 0
        self._ended = False
        self._error: BaseException | None = None

    def grow(self, at: int) -> None:
        with self._changed:
            self._there = at
            self._changed.notify_all()

    def end(self, error: BaseException | None) -> None:
        with self._changed:
            self._ended, self._error = True, error
            self._changed.notify_all()

    def read(self, size: int, /) -> bytes:
        while True:
            with self._changed:
                while self._there <= self._at and not self._ended:
                    self._cancel.check()
                    self._changed.wait(PATIENCE)
                if self._error:
                    raise self._error
                left = self._there - self._at
            data = self._file.read(min(size, left)) if left > 0 else b""
            self._at += len(data)
            if data or left <= 0:  # else it was cut off under our hands, to begin anew
                return data


def download(
    registry: RegistryClient, wanted: BlobDescriptor, path: Path, told: Told, cancel: CancelToken
) -> None:
    """The blob at ``path``, whole and verified; what is there of it already is not fetched again.

    One at a time for one path. Raises CreateError, Cancelled, and OSError of the disk.
    """
    with open(path, "a+b", buffering=0) as file:
        part = _Part(file, wanted, told)
        part.recall(cancel)
        taken_up = part.at > 0
        while True:
            part.fill(registry, cancel)
            if part.whole:
                return
            part.restart()
            if not taken_up:
                break
            taken_up = False  # the fault may be in what an earlier download left
    path.unlink(missing_ok=True)
    raise CreateError(
        f"{registry.base} gives something else than {wanted.digest}",
        remedy="the registry or what lies between is broken or hostile: use another, or a mirror",
    )


class _Part:
    def __init__(self, file: BinaryIO, wanted: BlobDescriptor, told: Told) -> None:
        self._file = file
        self._wanted = wanted
        self._told = told
        self._hash = hashlib.sha256()
        self.at = 0

    @property
    def whole(self) -> bool:
        return self.at == self._wanted.size and f"sha256:{self._hash.hexdigest()}" == self._wanted.digest

    def recall(self, cancel: CancelToken) -> None:
        """Read what an earlier download left."""
        if os.fstat(self._file.fileno()).st_size > self._wanted.size:
            self.restart()
        self._file.seek(0)
        while piece := self._file.read(1 << 20):
            cancel.check()
            self._hash.update(piece)
            self.at += len(piece)
        self._told(self.at)

    def restart(self) -> None:
        self._file.truncate(0)
        self._hash = hashlib.sha256()
        self.at = 0
        self._told(0)

    def fill(self, registry: RegistryClient, cancel: CancelToken) -> None:
        attempt = 0
        while self.at < self._wanted.size:
            before = self.at
            try:
                self._receive(registry, cancel)
                if self.at < self._wanted.size:
                    raise TransientError(f"it gave {self.at} of {self._wanted.size} bytes")
            except TransientError as passing:
                if isinstance(passing, RangeError):
                    self.restart()
                attempt = 1 if self.at > before else attempt + 1
                registry.pause(attempt, passing, cancel)

    def _receive(self, registry: RegistryClient, cancel: CancelToken) -> None:
        with registry.blob(self._wanted.digest, self.at) as (start, pieces):
            if start != self.at:
                self.restart()
            for piece in pieces:
                cancel.check()
                if self.at + len(piece) > self._wanted.size:
                    raise CreateError(f"{registry.base} gives more of {self._wanted.digest} than there is")
                rest = memoryview(piece)
                while rest:
                    rest = rest[self._file.write(rest) :]
                self._hash.update(piece)
                self.at += len(piece)
                self._told(self.at)

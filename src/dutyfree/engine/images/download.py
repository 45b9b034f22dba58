"""Download a blob: resume it after an interruption, verify it, and read it while it arrives."""

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
from dutyfree.engine.images.streams import Readable, write_all
from dutyfree.engine.store.cancel import POLL_SECONDS, CancelToken

OnBytes = Callable[[int], None]
"""Receives the number of bytes that have arrived so far."""


@contextlib.contextmanager
def open_download(
    registry: RegistryClient, wanted: BlobDescriptor, path: Path, on_bytes: OnBytes, cancel: CancelToken
) -> Iterator[Readable]:
    """Download a blob to ``path``, and yield a file that can be read meanwhile. Removes ``path`` at the end.

    The reader sees the end of the file only after the blob is verified. An exception in the caller cancels
    the download. Raises the errors of ``download``, here or where the file is read.
    """
    if path.exists():  # left by an earlier download: verify all of it before it is read
        download(registry, wanted, path, on_bytes, cancel)
        with open(path, "rb", buffering=0) as file:
            yield file
    else:
        path.touch(mode=0o600)
        with (
            open(path, "rb", buffering=0) as file,
            _download_in_thread(registry, wanted, path, on_bytes, cancel, file) as growing_file,
        ):
            yield growing_file
    path.unlink(missing_ok=True)


@contextlib.contextmanager
def _download_in_thread(
    registry: RegistryClient,
    wanted: BlobDescriptor,
    path: Path,
    on_bytes: OnBytes,
    cancel: CancelToken,
    file: BinaryIO,
) -> Iterator[Readable]:
    growing_file = _GrowingFile(file, cancel)

    def report(at: int) -> None:
        growing_file.grow(at)
        on_bytes(at)

    def fetch() -> None:
        error: BaseException | None = None
        try:
            download(registry, wanted, path, report, cancel)
        except BaseException as caught:  # noqa: BLE001 (raised where the blob is read)
            error = caught
        growing_file.end(error)

    thread = threading.Thread(target=fetch, name="dutyfree-fetch", daemon=True)
    thread.start()
    try:
        yield growing_file
    except BaseException:
        cancel.set()
        raise
    finally:
        thread.join()


class _GrowingFile:
    """A file that another thread appends to.

    If the download starts again, the part that was read already is not read again. The layer's own digest
    shows whether it was the same.
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
                    self._changed.wait(POLL_SECONDS)
                if self._error:
                    raise self._error
                left = self._there - self._at
            data = self._file.read(min(size, left)) if left > 0 else b""
            self._at += len(data)
            if data or left <= 0:  # else the file was truncated to start again
                return data


def download(
    registry: RegistryClient, wanted: BlobDescriptor, path: Path, on_bytes: OnBytes, cancel: CancelToken
) -> None:
    """Download a blob to ``path``, and verify it. Resumes from the bytes that are there.

    Only one download per path at a time. Raises CreateError, Cancelled, and OSError of the disk.
    """
    with open(path, "a+b", buffering=0) as file:
        part = _Part(file, wanted, on_bytes)
        part.read_existing(cancel)
        is_resumed = part.at > 0
        while True:
            part.fill(registry, cancel)
            if part.is_complete:
                return
            part.restart()
            if not is_resumed:
                break
            is_resumed = False  # the bytes of the earlier download may have been wrong: try once more
    path.unlink(missing_ok=True)
    raise CreateError(
        f"{registry.base} sends something else than {wanted.digest}",
        remedy="the registry or a proxy is broken or hostile: use another one, or a mirror",
    )


class _Part:
    """A partial download."""

    def __init__(self, file: BinaryIO, wanted: BlobDescriptor, on_bytes: OnBytes) -> None:
        self._file = file
        self._wanted = wanted
        self._on_bytes = on_bytes
        self._hash = hashlib.sha256()
        self.at = 0

    @property
    def is_complete(self) -> bool:
        return self.at == self._wanted.size and f"sha256:{self._hash.hexdigest()}" == self._wanted.digest

    def read_existing(self, cancel: CancelToken) -> None:
        """Hash the bytes that an earlier download left."""
        if os.fstat(self._file.fileno()).st_size > self._wanted.size:
            self.restart()
        self._file.seek(0)
        while piece := self._file.read(1 << 20):
            cancel.check()
            self._hash.update(piece)
            self.at += len(piece)
        self._on_bytes(self.at)

    def restart(self) -> None:
        self._file.truncate(0)
        self._hash = hashlib.sha256()
        self.at = 0
        self._on_bytes(0)

    def fill(self, registry: RegistryClient, cancel: CancelToken) -> None:
        attempt = 0
        while self.at < self._wanted.size:
            before = self.at
            try:
                self._receive(registry, cancel)
                if self.at < self._wanted.size:
                    raise TransientError(f"it sent {self.at} of {self._wanted.size} bytes")
            except TransientError as error:
                if isinstance(error, RangeError):
                    self.restart()
                attempt = 1 if self.at > before else attempt + 1
                registry.pause(attempt, error, cancel)

    def _receive(self, registry: RegistryClient, cancel: CancelToken) -> None:
        with registry.blob(self._wanted.digest, self.at) as (start, pieces):
            if start != self.at:
                self.restart()
            for piece in pieces:
                cancel.check()
                if self.at + len(piece) > self._wanted.size:
                    raise CreateError(
                        f"{registry.base} sends more bytes of {self._wanted.digest} than {self._wanted.size}"
                    )
                write_all(self._file.fileno(), piece)
                self._hash.update(piece)
                self.at += len(piece)
                self._on_bytes(self.at)

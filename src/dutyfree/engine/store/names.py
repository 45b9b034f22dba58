"""Names in the layer store: one small file each, which keeps its layers from being evicted."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import msgspec

from dutyfree.engine.store.durability import sync_directory
from dutyfree.engine.store.locks import locked

SCRATCH = ".image-"
"""Prefix of an entry's file until it is complete."""


class NameEntry(Protocol):
    """A record under a name."""

    @property
    def name(self) -> str: ...

    @property
    def keys(self) -> set[str]:
        """Keys of the layers that must stay."""


T = TypeVar("T", bound=NameEntry)


class NameTable(Generic[T]):
    """All names of one kind, in one directory of the store. All methods block."""

    def __init__(self, kind: type[T], directory: Callable[[], Path]) -> None:
        self._kind = kind
        self._directory = directory

    def get(self, name: str) -> T | None:
        return self._read(self._path(name))

    def all(self) -> list[T]:
        found = (self._read(path) for path in self._directory().glob("*"))
        return sorted((entry for entry in found if entry), key=lambda entry: entry.name)

    def put(self, entry: T) -> None:
        """Write an entry, and sync it to disk.

        The caller must hold leases of its layers: they are not protected before the entry is written.
        """
        root = self._directory().parent
        with locked(root / "lock", fcntl.LOCK_SH):
            descriptor, scratch = tempfile.mkstemp(dir=root, prefix=SCRATCH)
            try:
                with open(descriptor, "wb") as file:
                    file.write(msgspec.json.encode(entry))
                    file.flush()
                    os.fsync(descriptor)
                Path(scratch).rename(self._path(entry.name))
                sync_directory(self._directory())
            except BaseException:
                Path(scratch).unlink(missing_ok=True)
                raise

    def remove(self, name: str) -> bool:
        """Remove a name, and return whether it existed. Its layers stay until the next collection."""
        try:
            self._path(name).unlink()
        except FileNotFoundError:
            return False
        return True

    def _path(self, name: str) -> Path:
        return self._directory() / hashlib.sha256(name.encode()).hexdigest()[:32]

    def _read(self, path: Path) -> T | None:
        with contextlib.suppress(OSError, msgspec.DecodeError):
            return msgspec.json.decode(path.read_bytes(), type=self._kind)
        return None

"""Names in the layer store: small files, each of which keeps some layers from being collected."""

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


class Label(Protocol):
    """What a name stands for."""

    @property
    def name(self) -> str: ...

    @property
    def keys(self) -> set[str]:
        """Of the layers that must stay."""
        ...


T = TypeVar("T", bound=Label)


class Labels(Generic[T]):
    """Those of one kind, in a directory of the store. All methods block."""

    def __init__(self, kind: type[T], directory: Callable[[], Path]) -> None:
        self._kind = kind
        self._directory = directory

    def get(self, name: str) -> T | None:
        return self._read(self._path(name))

    def all(self) -> list[T]:
        found = (self._read(path) for path in self._directory().glob("*"))
        return sorted((label for label in found if label), key=lambda label: label.name)

    def put(self, label: T) -> None:
        """Onto the disk. Its layers must be leased by the caller: what collects them waits for no other."""
        root = self._directory().parent
        with locked(root / "lock", fcntl.LOCK_SH):
            descriptor, scratch = tempfile.mkstemp(dir=root, prefix=SCRATCH)
            try:
                with open(descriptor, "wb") as file:
                    file.write(msgspec.json.encode(label))
                    file.flush()
                    os.fsync(descriptor)
                Path(scratch).rename(self._path(label.name))
                sync_directory(self._directory())
            except BaseException:
                Path(scratch).unlink(missing_ok=True)
                raise

    def remove(self, name: str) -> bool:
        """Whether there was one. Its layers stay until they are collected."""
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


SCRATCH = ".image-"
"""How a label is called until it has its name."""

"""A layer in use, and the facts that the store keeps about it."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from dutyfree.engine.store.durability import SYNCED


class LayerInfo(msgspec.Struct, frozen=True):
    """What the store writes beside a layer."""

    key: str
    size: int
    files: int
    made: float
    """When it was added, in seconds since the epoch."""
    left_out: int = 0
    """Device nodes that were not unpacked."""
    boot: str = ""
    """Boot id of the machine when the layer was added."""


class LayerLease:
    """A layer in use. It stays on disk until ``close``, or until this process ends."""

    def __init__(self, key: str, path: Path, descriptor: int) -> None:
        self.key = key
        self.path = path
        self.tree = path / "tree"
        self._descriptor = descriptor

    @property
    def descriptor(self) -> int:
        """Holds the lock that keeps the layer on disk."""
        return self._descriptor

    @property
    def info(self) -> LayerInfo:
        return msgspec.json.decode((self.path / "facts").read_bytes(), type=LayerInfo)

    @property
    def is_synced(self) -> bool:
        """Whether all of the layer is known to be on disk."""
        return (self.path / SYNCED).exists()

    def close(self) -> None:
        if self._descriptor >= 0:
            with contextlib.suppress(OSError):
                os.utime(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

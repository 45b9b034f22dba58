"""A layer of the store in somebody's hands, and what is known of it."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from dutyfree.engine.store.durability import MARK


class Facts(msgspec.Struct, frozen=True):
    key: str
    size: int
    files: int
    made: float
    left_out: int = 0
    boot: str = ""
    """Of the kernel under which it was made."""


class Lease:
    """A layer in use. Nobody removes it before ``close``, or the end of this process."""

    def __init__(self, key: str, path: Path, descriptor: int) -> None:
        self.key = key
        self.path = path
        self.tree = path / "tree"
        self._descriptor = descriptor

    @property
    def facts(self) -> Facts:
        return msgspec.json.decode((self.path / "facts").read_bytes(), type=Facts)

    @property
    def is_settled(self) -> bool:
        """Whether it is known to be on the disk."""
        return (self.path / MARK).exists()

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


def boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()

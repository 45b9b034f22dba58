"""A blob on its way to the disk: taken up again where it was cut, and verified."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from dutyfree.engine.images.halting import Halt
from dutyfree.engine.images.manifest import Descriptor
from dutyfree.engine.images.registry import NoRange, Passing, Registry
from dutyfree.errors import CreateError

Told = Callable[[int], None]


def download(registry: Registry, wanted: Descriptor, path: Path, told: Told, halt: Halt) -> None:
    """The blob at ``path``, whole and verified; what is there of it already is not fetched again.

    One at a time for one path. Raises CreateError, Stopped, and OSError of the disk.
    """
    with open(path, "a+b", buffering=0) as file:
        part = _Part(file, wanted, told)
        part.recall(halt)
        taken_up = part.at > 0
        while True:
            part.fill(registry, halt)
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
    def __init__(self, file: BinaryIO, wanted: Descriptor, told: Told) -> None:
        self._file = file
        self._wanted = wanted
        self._told = told
        self._hash = hashlib.sha256()
        self.at = 0

    @property
    def whole(self) -> bool:
        return self.at == self._wanted.size and f"sha256:{self._hash.hexdigest()}" == self._wanted.digest

    def recall(self, halt: Halt) -> None:
        """Read what an earlier download left."""
        if os.fstat(self._file.fileno()).st_size > self._wanted.size:
            self.restart()
        self._file.seek(0)
        while piece := self._file.read(1 << 20):
            halt.check()
            self._hash.update(piece)
            self.at += len(piece)
        self._told(self.at)

    def restart(self) -> None:
        self._file.truncate(0)
        self._hash = hashlib.sha256()
        self.at = 0
        self._told(0)

    def fill(self, registry: Registry, halt: Halt) -> None:
        attempt = 0
        while self.at < self._wanted.size:
            before = self.at
            try:
                self._receive(registry, halt)
                if self.at < self._wanted.size:
                    raise Passing(f"it gave {self.at} of {self._wanted.size} bytes")
            except Passing as passing:
                if isinstance(passing, NoRange):
                    self.restart()
                attempt = 1 if self.at > before else attempt + 1
                registry.pause(attempt, passing)

    def _receive(self, registry: Registry, halt: Halt) -> None:
        with registry.blob(self._wanted.digest, self.at) as (start, pieces):
            if start != self.at:
                self.restart()
            for piece in pieces:
                halt.check()
                if self.at + len(piece) > self._wanted.size:
                    raise CreateError(f"{registry.base} gives more of {self._wanted.digest} than there is")
                rest = memoryview(piece)
                while rest:
                    rest = rest[self._file.write(rest) :]
                self._hash.update(piece)
                self.at += len(piece)
                self._told(self.at)

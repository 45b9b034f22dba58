"""What sandboxes are labelled with, for whoever looks at this machine from outside, as ``dutyfree ps`` does.

Labels are their owner's business: what runs in a sandbox sees none of them, as it would in the title of its
init. They stand in a file in memory that the owner holds open, and end with it, however it ends.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from dutyfree.contract.errors import UsageError
from dutyfree.engine.host import fork_guard

_NAME = "dutyfree-labels"
_LARGEST = 64 << 20
"""Bytes that are read of it: who wrote it may be anybody."""

ROOM = 1 << 16
"""Bytes of sandboxes that are gone, beyond as many as of those that live, before a new file is begun."""


def check(labels: Mapping[str, str] | None) -> None:
    """Raises UsageError for what are no labels."""
    if not labels:
        return
    is_sound = isinstance(labels, Mapping) and all(
        isinstance(one, str) for pair in labels.items() for one in pair
    )
    if not is_sound:
        raise UsageError(f"labels are texts with names, not {labels!r}")


class LabelFile:
    """Of the sandboxes of one launcher, by their numbers. Costs nothing until one has labels."""

    def __init__(self, launcher: int) -> None:
        self._name = f"{_NAME}-{launcher}"
        self._file = -1
        self._lines: dict[int, bytes] = {}
        self._size = 0
        self._written = 0
        fork_guard.bind(self)

    def put(self, number: int, labels: Mapping[str, str]) -> None:
        """Labels that were checked, of a sandbox that has none yet."""
        self.drop(number)
        line = self._lines[number] = msgspec.json.encode((number, labels)) + b"\n"
        self._size += len(line)
        with contextlib.suppress(OSError):  # a sandbox whose labels nobody sees is better than none
            if self._file < 0 or self._written > 2 * self._size + ROOM:
                self._begin()
            else:
                self._append(line)

    def drop(self, number: int) -> None:
        """It is gone: no number is used again, so what was told of it need not be taken back."""
        self._size -= len(self._lines.pop(number, b""))

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    orphan = close

    def _begin(self) -> None:
        """A new file: who reads the former one reads it whole."""
        self.close()
        self._file = os.memfd_create(self._name, os.MFD_CLOEXEC)
        os.set_blocking(self._file, False)  # it never does
        self._written = 0
        self._append(b"".join(self._lines.values()))

    def _append(self, data: bytes) -> None:
        self._written += os.write(self._file, data)


def read(owner: int, launcher: Iterable[int]) -> dict[int, dict[str, str]]:
    """By number, what an owner tells of the sandboxes of a launcher with these pids, to who may look."""
    names = {f"/memfd:{_NAME}-{pid} (deleted)" for pid in launcher}
    found: dict[int, dict[str, str]] = {}
    with contextlib.suppress(OSError, msgspec.MsgspecError):
        for file in Path(f"/proc/{owner}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                if os.readlink(file) in names:
                    # What it leads to may have changed since, to a pipe that is never written to.
                    with open(os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as opened:
                        lines = (opened.read(_LARGEST) or b"").splitlines()
                    found.update(msgspec.json.decode(line, type=tuple[int, dict[str, str]]) for line in lines)
    return found

"""Labels of sandboxes, which ``dutyfree ps`` shows.

Processes in a sandbox cannot see its labels. The owner keeps them in a file in memory, which it holds open:
however the owner ends, they end with it.
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
"""The most bytes that are read: any process could have written the file."""

ROOM = 1 << 16
"""Bytes of labels of closed sandboxes, above as many as of live ones, at which a new file is begun."""


def check(labels: Mapping[str, str] | None) -> None:
    """Raises UsageError unless all names and values are strings."""
    if not labels:
        return
    is_sound = isinstance(labels, Mapping) and all(
        isinstance(one, str) for pair in labels.items() for one in pair
    )
    if not is_sound:
        raise UsageError(f"labels are strings with names, not {labels!r}")


class LabelFile:
    """The labels of one launcher's sandboxes, by number. There is no file until a sandbox has labels."""

    def __init__(self, launcher: int) -> None:
        self._name = f"{_NAME}-{launcher}"
        self._file = -1
        self._lines: dict[int, bytes] = {}
        self._size = 0
        self._written = 0
        fork_guard.bind(self)

    def put(self, number: int, labels: Mapping[str, str]) -> None:
        """Set the labels of a sandbox, which ``check`` accepted."""
        self.drop(number)
        line = self._lines[number] = msgspec.json.encode((number, labels)) + b"\n"
        self._size += len(line)
        with contextlib.suppress(OSError):  # a sandbox without visible labels is better than none
            if self._file < 0 or self._written > 2 * self._size + ROOM:
                self._begin()
            else:
                self._append(line)

    def drop(self, number: int) -> None:
        """The sandbox is gone. Its line stays in the file: no number is used again."""
        self._size -= len(self._lines.pop(number, b""))

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    orphan = close

    def _begin(self) -> None:
        """Begin a new file, so that readers of the former one still read all of it."""
        self.close()
        self._file = os.memfd_create(self._name, os.MFD_CLOEXEC)
        os.set_blocking(self._file, False)  # it never blocks; this tells the test for blocking calls
        self._written = 0
        self._append(b"".join(self._lines.values()))

    def _append(self, data: bytes) -> None:
        self._written += os.write(self._file, data)


def read(owner: int, launcher: Iterable[int]) -> dict[int, dict[str, str]]:
    """The labels by number of a launcher with these pids; empty if we may not look into its owner."""
    names = {f"/memfd:{_NAME}-{pid} (deleted)" for pid in launcher}
    found: dict[int, dict[str, str]] = {}
    with contextlib.suppress(OSError, msgspec.MsgspecError):
        for file in Path(f"/proc/{owner}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # it was closed meanwhile
                if os.readlink(file) in names:
                    # By now the descriptor may be another file, such as a pipe that blocks.
                    with open(os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as opened:
                        lines = (opened.read(_LARGEST) or b"").splitlines()
                    found.update(msgspec.json.decode(line, type=tuple[int, dict[str, str]]) for line in lines)
    return found

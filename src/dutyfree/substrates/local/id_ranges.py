"""Ranges of the host's user ids: no two containers share one, nor a container and the machines of ``vm``.

The launcher of ``native`` takes its ranges from the same file (``id_ranges.c``): each range is one byte, and
a process locks the bytes of its ranges. The kernel drops the locks when the process ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import secrets
import struct

FIRST = 1 << 30
COUNT = 65536
RANGES = 16383
LAST = FIRST + RANGES * COUNT - 1
REGISTER = "/run/dutyfree-ids"


class IdRanges:
    """The ranges of one open substrate."""

    def __init__(self) -> None:
        self._next = itertools.count(secrets.randbelow(RANGES))
        self._taken: set[int] = set()
        self._file = -1
        with contextlib.suppress(OSError):  # without /run, the random start is all that there is
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            self._file = os.open(REGISTER, flags, 0o600)

    def claim(self) -> int:
        """The first id of a free range. Raises OSError."""
        for number in itertools.islice(self._next, RANGES):
            slot = number % RANGES
            if slot not in self._taken and self._lock(fcntl.F_WRLCK, slot):
                self._taken.add(slot)
                return FIRST + slot * COUNT
        raise OSError(f"all {RANGES} ranges of user ids are in use")

    def release(self, first: int) -> None:
        slot = (first - FIRST) // COUNT
        self._taken.discard(slot)
        self._lock(fcntl.F_UNLCK, slot)

    def _lock(self, kind: int, slot: int) -> bool:
        if self._file < 0:
            return True
        region = struct.pack("hhqqi4x", kind, os.SEEK_SET, slot, 1, 0)
        try:
            fcntl.fcntl(self._file, fcntl.F_OFD_SETLK, region)
        except OSError:
            return False
        return True

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

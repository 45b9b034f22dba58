"""Locks that are files: the kernel frees one with its holder, however that ends."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

from dutyfree.engine.store.cancel import Halt

PATIENCE = 0.05
"""Between two looks whether another process is done."""


@contextlib.contextmanager
def locked(path: Path, how: int, halt: Halt | None = None, *, wait: bool = True) -> Iterator[int]:
    """Hold it. Raises Stopped; or BlockingIOError rather than to wait."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            while not try_lock(descriptor, how):
                if not wait:
                    raise BlockingIOError(f"{path} is locked")
                # A thread in flock(2) can be woken by nobody; this one can be stopped.
                if halt is None:
                    time.sleep(PATIENCE)
                else:
                    halt.wait(PATIENCE)
            if same(descriptor, path):  # else it was removed by who held it
                yield descriptor
                return
        finally:
            os.close(descriptor)


def try_lock(descriptor: int, how: int) -> bool:
    try:
        fcntl.flock(descriptor, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def same(descriptor: int, path: Path) -> bool:
    """Whether what is open still has the name."""
    with contextlib.suppress(OSError):
        return os.path.samestat(os.fstat(descriptor), path.stat())
    return False


def remove(path: Path) -> None:
    """Remove a lock that nobody holds. Who opened it before, and gets it after, sees that it is no more."""
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            if try_lock(descriptor, fcntl.LOCK_EX) and same(descriptor, path):
                path.unlink()
        finally:
            os.close(descriptor)


def abandoned(lock: Path) -> bool:
    """Whether nobody holds the lock, whose holder may have been killed before it was even made."""
    try:
        descriptor = os.open(lock, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        return error.errno == errno.ENOENT
    try:
        return try_lock(descriptor, fcntl.LOCK_EX)
    finally:
        os.close(descriptor)

"""File locks between processes. The kernel releases a lock when its holder ends, however it ends."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

from dutyfree.engine.store.cancel import POLL_SECONDS, CancelToken


@contextlib.contextmanager
def locked(path: Path, how: int, cancel: CancelToken | None = None, *, wait: bool = True) -> Iterator[int]:
    """Hold a lock of the kind ``how``, and yield its descriptor.

    Raises Cancelled, or BlockingIOError if it is locked and ``wait`` is false.
    """
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            while not try_lock(descriptor, how):
                if not wait:
                    raise BlockingIOError(f"{path} is locked")
                # Poll: a thread that blocks in flock(2) could not be cancelled.
                if cancel is None:
                    time.sleep(POLL_SECONDS)
                else:
                    cancel.wait(POLL_SECONDS)
            if is_same_file(descriptor, path):  # else the previous holder removed it
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


def is_same_file(descriptor: int, path: Path) -> bool:
    """Whether the open file is the one at ``path``."""
    with contextlib.suppress(OSError):
        return os.path.samestat(os.fstat(descriptor), path.stat())
    return False


def remove(path: Path) -> None:
    """Remove a lock file that no process holds. ``locked`` notices this, and creates a new one."""
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            if try_lock(descriptor, fcntl.LOCK_EX) and is_same_file(descriptor, path):
                path.unlink()
        finally:
            os.close(descriptor)


def is_abandoned(lock: Path) -> bool:
    """Whether no process holds the lock. Its owner may have been killed before it created the file."""
    try:
        descriptor = os.open(lock, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        return error.errno == errno.ENOENT
    try:
        return try_lock(descriptor, fcntl.LOCK_EX)
    finally:
        os.close(descriptor)

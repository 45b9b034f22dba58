"""What is made must reach the disk before it may be believed after a crash of the machine.

``syncfs`` once for many files costs less than ``fsync`` of each, and takes in the directories too. Only then
a layer gets its mark; the mark itself is made sure of last, so that what was promised to stay does stay.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import threading
from collections.abc import Iterable
from pathlib import Path

MARK = "settled"

_libc = ctypes.CDLL(None, use_errno=True)
_log = logging.getLogger(__name__)


def settle(root: Path, layers: Iterable[Path]) -> None:
    """See that layers are on the disk, and mark them: one without a mark is not believed after a boot.

    Raises OSError; none is marked then.
    """
    with contextlib.ExitStack() as stack:
        new = []
        for path in layers:
            with contextlib.suppress(FileNotFoundError):
                # Not by its name: another may be made under it while we wait.
                directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                stack.callback(os.close, directory)
                if MARK not in os.listdir(directory):
                    new.append(directory)
        if new:
            _sync(root)
        for directory in new:
            with contextlib.suppress(FileNotFoundError):  # removed since
                os.close(os.open(MARK, os.O_CREAT | os.O_CLOEXEC, 0o600, dir_fd=directory))
                os.fsync(directory)


class Settler:
    """The same without waiting for it, which may take long."""

    def __init__(self) -> None:
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()

    def begin(self, root: Path, layers: list[Path]) -> None:
        thread = threading.Thread(target=_settle, args=(root, layers), name="dutyfree-settle", daemon=True)
        with self._lock:
            self._threads = [one for one in self._threads if one.is_alive()]
            self._threads.append(thread)
            thread.start()

    def wait(self) -> None:
        """Until all that was begun is done."""
        with self._lock:
            threads = list(self._threads)
        for thread in threads:
            thread.join()


def _settle(root: Path, layers: list[Path]) -> None:
    try:
        settle(root, layers)
    except OSError as error:
        _log.warning("layers may be made again after the next boot: they could not be synced: %s", error)


def sync_directory(path: Path) -> None:
    """Names in it stay after a crash. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync(root: Path) -> None:
    descriptor = os.open(root, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if _libc.syncfs(descriptor):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), str(root))
    finally:
        os.close(descriptor)

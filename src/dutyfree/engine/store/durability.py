"""Sync layers to disk, and mark those that survive a power cut.

After a boot the store trusts only marked layers. One ``syncfs`` for many files is cheaper than ``fsync`` of
each, and includes the directories. The mark is written and synced last.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import threading
from collections.abc import Iterable
from pathlib import Path

SYNCED = "settled"
"""Name of the mark in a layer's directory."""

_libc = ctypes.CDLL(None, use_errno=True)
_log = logging.getLogger(__name__)


def sync_layers(root: Path, layers: Iterable[Path]) -> None:
    """Write layers of the store at ``root`` to disk, then mark them. Raises OSError; then none is marked."""
    with contextlib.ExitStack() as stack:
        unmarked = []
        for path in layers:
            with contextlib.suppress(FileNotFoundError):
                # By descriptor: the layer may be removed and built again while we sync.
                directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                stack.callback(os.close, directory)
                if SYNCED not in os.listdir(directory):
                    unmarked.append(directory)
        if unmarked:
            _syncfs(root)
        for directory in unmarked:
            with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                os.close(os.open(SYNCED, os.O_CREAT | os.O_CLOEXEC, 0o600, dir_fd=directory))
                os.fsync(directory)


class BackgroundSync:
    """``sync_layers`` in threads: a sync may take long."""

    def __init__(self) -> None:
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()

    def start(self, root: Path, layers: list[Path]) -> None:
        thread = threading.Thread(target=_sync, args=(root, layers), name="dutyfree-sync", daemon=True)
        with self._lock:
            self._threads = [one for one in self._threads if one.is_alive()]
            self._threads.append(thread)
            thread.start()

    def wait(self) -> None:
        """Wait for all syncs that were started."""
        with self._lock:
            threads = list(self._threads)
        for thread in threads:
            thread.join()


def _sync(root: Path, layers: list[Path]) -> None:
    try:
        sync_layers(root, layers)
    except OSError as error:
        _log.warning("layers could not be synced to disk, and may be built again after a reboot: %s", error)


def sync_directory(path: Path) -> None:
    """Write a directory's entries to disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _syncfs(root: Path) -> None:
    descriptor = os.open(root, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if _libc.syncfs(descriptor):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), str(root))
    finally:
        os.close(descriptor)

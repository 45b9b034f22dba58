"""Move layers between the launcher and the store: use stored layers in sandboxes, write layers to disk."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from dutyfree.contract.errors import CreateError
from dutyfree.engine.images import rootfs
from dutyfree.engine.launcher import protocol
from dutyfree.engine.launcher.client import Launcher, LauncherError
from dutyfree.engine.launcher.protocol import Request
from dutyfree.engine.layers.start_state import StartState
from dutyfree.engine.store.cancel import POLL_SECONDS, Cancelled, CancelToken
from dutyfree.engine.store.layer_lease import LayerLease

TOO_DEEP = (errno.ENAMETOOLONG, errno.ELOOP)
"""Errors for directories that are too deep to copy. Processes in the sandbox made them."""

MAX_CHAIN = 8
"""The most layers of stages and snapshots on an image. With the layers of the image (17) and those in memory
(6) a mount stays below the limit of 32."""

T = TypeVar("T")


@dataclass
class DiskLayers:
    """Layers of the store that one launcher uses. Their leases end with ``close``."""

    launcher: Launcher
    _leases: dict[str, LayerLease] = field(default_factory=dict)
    _numbers: dict[str, tuple[int, ...]] = field(default_factory=dict)

    async def stack(self, below: StartState, lease: LayerLease, build_id: str) -> StartState:
        """Add a layer of the store to a state, and keep its lease. Raises CreateError."""
        self.keep([lease])
        if lease.key not in self._numbers:
            self._numbers[lease.key] = await self.open(lease, len(below.trees))
        return below.with_layer(self._numbers[lease.key], lease.key, build_id)

    async def open(self, lease: LayerLease, count: int) -> tuple[int, ...]:
        """The launcher's layers for a layer of the store, one for each file system. Raises CreateError."""
        parts = [lease.tree / str(index) for index in range(count)]
        return tuple([await rootfs.layer(self.launcher, part, lease.descriptor) for part in parts])

    def keep(self, leases: Sequence[LayerLease]) -> None:
        """Keep these leases until ``close``, one for each layer."""
        for lease in leases:
            if self._leases.setdefault(lease.key, lease) is not lease:
                lease.close()

    async def write(self, own: Sequence[int], below: Sequence[int], target: Path) -> None:
        """Merge layers (``own``, the uppermost first) into an empty directory.

        They may refer to files in the layers ``below``, which are copied too. Raises CreateError, and OSError
        with an errno of TOO_DEEP.
        """
        descriptor = os.open(target, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            await self.launcher.ask(Request.MERGE, 0, protocol.merge(own, below), descriptor)
        except LauncherError as error:
            if error.number in TOO_DEEP:
                raise OSError(error.number, os.strerror(error.number), str(target)) from error
            raise CreateError(f"files cannot be written to {target}: {error.message}") from error
        finally:
            os.close(descriptor)

    def close(self) -> None:
        while self._leases:
            self._leases.popitem()[1].close()


def measure(tree: Path) -> tuple[int, int, int]:
    """Bytes on disk, number of files, and 0 files left out: as ``Store.obtain`` expects them."""
    size = files = 0
    for directory, _, names in os.walk(tree):
        for name in names:
            files += 1
            size += os.lstat(os.path.join(directory, name)).st_blocks * 512
    return size, files, 0


def run_in_loop(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, T], cancel: CancelToken) -> T:
    """Run a coroutine in the event loop, from a thread, and wait for its end.

    Cancels the coroutine when the token is set, and raises Cancelled then.
    """
    ended: Future[asyncio.Task[T]] = Future()
    begun: list[asyncio.Task[T]] = []

    def begin() -> None:
        begun.append(loop.create_task(work))
        begun[0].add_done_callback(ended.set_result)

    loop.call_soon_threadsafe(begin)
    while True:
        try:
            task = ended.result(POLL_SECONDS)
        except TimeoutError:
            if begun and cancel.is_set():
                loop.call_soon_threadsafe(begun[0].cancel)
            continue
        if task.cancelled():
            raise Cancelled
        return task.result()

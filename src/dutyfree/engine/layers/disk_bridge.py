"""Between the launcher's layers in memory and those of the store on the disk, both ways."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from dutyfree.contract.errors import CreateError
from dutyfree.engine.images import rootfs
from dutyfree.engine.launcher import protocol
from dutyfree.engine.launcher.client import Launcher, LauncherError
from dutyfree.engine.launcher.protocol import Request, Tree
from dutyfree.engine.layers.command_defaults import CommandDefaults
from dutyfree.engine.store.cancel import Cancelled, CancelToken
from dutyfree.engine.store.layer_lease import LayerLease

DEEP = (errno.ENAMETOOLONG, errno.ELOOP)
"""Errors of directories that are too deep to be copied, which what ran in the sandbox made."""

DEEPEST = 8
"""Layers of stages and snapshots upon each other, and upon an image. With the image's own (17) and those in
memory (6) that stays below what the kernel is asked for (32)."""

HEARING = 0.05
"""Seconds until a thread hears that it is to cancel."""

T = TypeVar("T")


class StoredOrigin(NamedTuple):
    """What of a state lies on the disk: an image, and layers of the store upon it."""

    image: str
    identity: str | None
    """None of an image that may change under its name."""
    mounted: tuple[str, ...]
    """Keys of the image's layers, the uppermost first; none of one that is not in the store."""
    keys: tuple[str, ...]
    """Of the layers upon it, the lowest first."""
    trees: tuple[Tree, ...]
    """All of them together."""
    build_ids: tuple[str, ...] = ()
    """Of the runs that made those upon the image."""


class StartState(NamedTuple):
    """What sandboxes start from."""

    trees: tuple[Tree, ...]
    defaults: CommandDefaults
    origin: StoredOrigin
    build_id: str = ""
    """Of the run of a stage that this is what came of: another run may have left something else."""


@dataclass
class DiskLayers:
    """Layers of the store in the hands of one launcher, kept from being removed until it ends."""

    launcher: Launcher
    _leases: dict[str, LayerLease] = field(default_factory=dict)
    _numbers: dict[str, tuple[int, ...]] = field(default_factory=dict)

    async def adopt(self, below: StartState, lease: LayerLease, build_id: str) -> StartState:
        """A layer of the store, of the run of this build_id, upon others. Raises CreateError."""
        self.hold([lease])
        if lease.key not in self._numbers:
            self._numbers[lease.key] = await self.layers(lease, len(below.trees))
        return upon(below, self._numbers[lease.key], lease.key, build_id)

    async def layers(self, lease: LayerLease, count: int) -> tuple[int, ...]:
        """A layer of the store in the launcher's hands: one for each file system. Raises CreateError."""
        parts = [lease.tree / str(index) for index in range(count)]
        return tuple([await rootfs.layer(self.launcher, part) for part in parts])

    def hold(self, leases: Sequence[LayerLease]) -> None:
        """So that nobody removes the layers."""
        for lease in leases:
            if self._leases.setdefault(lease.key, lease) is not lease:
                lease.close()

    async def copy(self, own: Sequence[int], below: Sequence[int], target: Path) -> None:
        """Write layers, the uppermost first, as one to an empty directory; what they refer to below, too.

        Raises CreateError, and OSError for one of DEEP.
        """
        descriptor = os.open(target, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            await self.launcher.ask(Request.MERGE, 0, protocol.merge(own, below), descriptor)
        except LauncherError as error:
            if error.number in DEEP:
                raise OSError(error.number, os.strerror(error.number), str(target)) from error
            raise CreateError(f"files cannot be written to {target}: {error.message}") from error
        finally:
            os.close(descriptor)

    def close(self) -> None:
        while self._leases:
            self._leases.popitem()[1].close()


def upon(below: StartState, own: Sequence[int], key: str, build_id: str) -> StartState:
    """Layers, one for each file system, of one run, upon others."""
    trees = tuple((point, (layer, *layers)) for layer, (point, layers) in zip(own, below.trees, strict=True))
    origin = below.origin
    if origin.trees == below.trees:  # else what lies between is in memory alone
        keys, build_ids = (*origin.keys, key), (*origin.build_ids, build_id)
        origin = origin._replace(keys=keys, build_ids=build_ids, trees=trees)
    return StartState(trees, below.defaults, origin, build_id)


def measure(tree: Path) -> tuple[int, int, int]:
    """Bytes on the disk, files, and nothing left out: as the store wants to know."""
    size = files = 0
    for directory, _, names in os.walk(tree):
        for name in names:
            files += 1
            size += os.lstat(os.path.join(directory, name)).st_blocks * 512
    return size, files, 0


def in_loop(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, T], cancel: CancelToken) -> T:
    """From a thread: have the loop do it, to its end. Raises Cancelled once the cancel is set."""
    ended: Future[asyncio.Task[T]] = Future()
    begun: list[asyncio.Task[T]] = []

    def begin() -> None:
        begun.append(loop.create_task(work))
        begun[0].add_done_callback(ended.set_result)

    loop.call_soon_threadsafe(begin)
    while True:
        try:
            task = ended.result(HEARING)
        except TimeoutError:
            if begun and cancel.is_set():
                loop.call_soon_threadsafe(begun[0].cancel)
            continue
        if task.cancelled():
            raise Cancelled
        return task.result()

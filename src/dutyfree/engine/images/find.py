"""Images by name, for those who await: found in the store, or brought into it."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

from dutyfree.contract.errors import CreateError
from dutyfree.engine.images import archives, reference
from dutyfree.engine.images.pull import LeasedImage, Progress, Puller, PullOptions
from dutyfree.engine.store.cancel import CancelToken, run_in_thread
from dutyfree.engine.store.store import Store

T = TypeVar("T")

LAYOUT = "oci:"
DAEMON = "docker-daemon:"


async def find(name: str, options: PullOptions | None = None, store: Store | None = None) -> LeasedImage:
    """The image of that name: a path, ``oci:path``, or a reference, pulled if the store has none.

    Raises CreateError.
    """
    return await in_thread(lambda cancel: _find(name, Puller(store or Store(), options, None, cancel)))


async def pull(
    name: str,
    options: PullOptions | None = None,
    progress: Progress | None = None,
    store: Store | None = None,
) -> LeasedImage:
    """The image as its registry has it now. Raises CreateError."""
    wanted = reference.parse(name)
    return await in_thread(lambda cancel: Puller(store or Store(), options, progress, cancel).pull(wanted))


async def known(name: str, source: str, store: Store) -> LeasedImage | None:
    """The image that the store has under the name, if it was made from that source."""
    return await in_thread(lambda cancel: Puller(store, cancel=cancel).held(name, source))


async def bring(
    path: str,
    name: str | None = None,
    progress: Progress | None = None,
    store: Store | None = None,
    identity: str | None = None,
) -> LeasedImage:
    """An image from a path, or ``oci:path``, under a name of its own. Raises CreateError."""
    kept = None if name is None else str(reference.parse(name)) if not name.startswith(DAEMON) else name
    return await in_thread(
        lambda cancel: _local(path, Puller(store or Store(), None, progress, cancel), kept, identity)
    )


async def in_thread(function: Callable[[CancelToken], T]) -> T:
    """Run what blocks beside the event loop. Cancelled, it is halted, and waited for."""
    cancel = CancelToken()
    return await run_in_thread(partial(function, cancel), cancel)


def _find(name: str, puller: Puller) -> LeasedImage:
    if name.startswith(("/", LAYOUT)):
        return _local(name, puller)
    wanted = reference.parse(name)
    return puller.held(str(wanted)) or puller.pull(wanted)


def _local(name: str, puller: Puller, kept: str | None = None, identity: str | None = None) -> LeasedImage:
    text, _, tag = name.removeprefix(LAYOUT).partition(":") if name.startswith(LAYOUT) else (name, "", "")
    path = Path(text).absolute()
    try:
        layout = (path / "oci-layout").is_file()
        found = (path / "index.json" if layout else path).stat()
    except OSError as error:
        raise CreateError(
            f"there is no image at {path}: {error.strerror}",
            remedy="name a root file system, a tar, an OCI layout, or an image of a registry",
        ) from error
    # Whatever has the same place, size and time is what it was.
    source = identity or f"{os.path.realpath(path)} {found.st_ino} {found.st_size} {found.st_mtime_ns}"
    kept = kept or (name if layout else str(path))
    held = puller.held(kept, source) if path.is_file() or layout else None
    if held:
        return held
    if layout:
        return puller.files(archives.LayoutDirectory(path), str(path), kept, source, tag)
    if path.is_dir():
        if not os.path.lexists(path / "bin"):
            raise CreateError(f"{path} is no root file system: it has no /bin")
        return puller.rootfs(path, kept, f"{source} {os.urandom(8).hex()}")
    if archives.holds_image(path):
        return puller.archive(path, kept, source)
    return puller.rootfs(path, kept, source)

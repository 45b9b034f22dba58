"""Find an image by any kind of name, in the store or elsewhere. For async callers."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

from dutyfree.contract.errors import CreateError
from dutyfree.engine.images import archives, reference
from dutyfree.engine.images.install import LeasedImage, Progress
from dutyfree.engine.images.pull import Puller, PullOptions
from dutyfree.engine.store.cancel import CancelToken, run_in_thread
from dutyfree.engine.store.store import Store

T = TypeVar("T")

LAYOUT = "oci:"
DAEMON = "docker-daemon:"


async def find(name: str, options: PullOptions | None = None, store: Store | None = None) -> LeasedImage:
    """Get an image by name: a path, ``oci:path``, or a reference. Pulls it if the store does not have it.

    Raises CreateError.
    """
    return await _in_thread(lambda cancel: _find(name, Puller(store or Store(), options, None, cancel)))


async def find_stored(name: str, source: str, store: Store) -> LeasedImage | None:
    """The image that the store has under the name, if it was imported from that source."""
    return await _in_thread(lambda cancel: Puller(store, cancel=cancel).lease(name, source))


async def import_image(
    path: str,
    name: str | None = None,
    progress: Progress | None = None,
    store: Store | None = None,
    identity: str | None = None,
) -> LeasedImage:
    """Import an image from a path or ``oci:path``, under ``name`` if it is given. Raises CreateError."""
    stored_as = None if name is None else str(reference.parse(name)) if not name.startswith(DAEMON) else name
    return await _in_thread(
        lambda cancel: _import(path, Puller(store or Store(), None, progress, cancel), stored_as, identity)
    )


async def _in_thread(function: Callable[[CancelToken], T]) -> T:
    cancel = CancelToken()
    return await run_in_thread(partial(function, cancel), cancel)


def _find(name: str, puller: Puller) -> LeasedImage:
    if name.startswith(("/", LAYOUT)):
        return _import(name, puller)
    wanted = reference.parse(name)
    return puller.lease(str(wanted)) or puller.pull(wanted)


def _import(
    name: str, puller: Puller, stored_as: str | None = None, identity: str | None = None
) -> LeasedImage:
    text, _, tag = name.removeprefix(LAYOUT).partition(":") if name.startswith(LAYOUT) else (name, "", "")
    path = Path(text).absolute()
    try:
        is_layout = (path / "oci-layout").is_file()
        found = (path / "index.json" if is_layout else path).stat()
    except OSError as error:
        raise CreateError(
            f"there is no image at {path}: {error.strerror}",
            remedy="name a root file system, a tar, an OCI layout, or an image of a registry",
        ) from error
    # A file with the same path, size and time counts as unchanged.
    source = identity or f"{os.path.realpath(path)} {found.st_ino} {found.st_size} {found.st_mtime_ns}"
    stored_as = stored_as or (name if is_layout else str(path))
    known = puller.lease(stored_as, source) if path.is_file() or is_layout else None
    if known:
        return known
    if is_layout:
        return puller.import_files(archives.LayoutDirectory(path), str(path), stored_as, source, tag)
    if path.is_dir():
        if not os.path.lexists(path / "bin"):
            raise CreateError(f"{path} is not a root file system: it has no /bin")
        return puller.import_rootfs(path, stored_as, f"{source} {os.urandom(8).hex()}")
    if archives.holds_image(path):
        return puller.import_archive(path, stored_as, source)
    return puller.import_rootfs(path, stored_as, source)

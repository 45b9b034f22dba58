"""Files that clients send for their recipes, on the server's disk: each tree once per tenant, by digest.

What one tenant has there is bounded: the trees that were not used for the longest time make room.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import anyio.to_thread

from dutyfree.contract.entries import Links
from dutyfree.contract.errors import Exhausted, RecipeError
from dutyfree.contract.stage import tree_digest
from dutyfree.engine.sandbox import tree_stream
from dutyfree.wire.recipes import DIGEST

LARGEST_TREE = 2 << 30
"""Bytes of the largest tree, as it is sent."""
MOST_BYTES = 32 << 30
"""Bytes of all trees of a tenant on disk."""
UNUSED_SECONDS = 3600.0
"""A tree that was used more recently is not removed to make room: a stage may be reading it."""
FREE_SHARE = 0.05
"""The share of the disk, in bytes and in files, that clients cannot fill."""
_ENTRY_BYTES = 4096
"""Bytes that a file counts at least."""
ABANDONED = 86400.0
"""Seconds after which what has begun to arrive does not come any more."""


class TenantFiles:
    """The trees below ``root``, as ``TENANT/DIGEST``. A tree gets its name when it is verified."""

    def __init__(self, root: Path, most: int = MOST_BYTES) -> None:
        self._root = root
        self._most = most
        self._sizes: dict[Path, int] = {}

    def path(self, tenant: str, digest: str) -> Path:
        """Where a tree is, or would be. Raises RecipeError for what is no digest."""
        if not DIGEST.fullmatch(digest):
            raise RecipeError(f"{digest[:80]!r} is not a digest of files")
        return self._root / tenant / digest

    async def missing(self, tenant: str, digests: Sequence[str]) -> list[str]:
        """Those that the tenant has not sent. Raises RecipeError."""
        paths = [self.path(tenant, digest) for digest in digests]
        if not paths:
            return []
        there = await anyio.to_thread.run_sync(lambda: [_used_now(path) for path in paths])
        return [digest for digest, found in zip(digests, there, strict=True) if not found]

    async def put(self, tenant: str, digest: str, descriptor: int) -> None:
        """Read a tree stream, which is closed, and keep it if it has this digest.

        Raises RecipeError, and Exhausted if the tenant has too many files, or the disk is nearly full.
        """
        path = self.path(tenant, digest)
        await anyio.to_thread.run_sync(self._receive, descriptor, path)

    def _receive(self, descriptor: int, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        try:
            check_disk(path.parent)
            self._make_room(path.parent)
        except BaseException:
            os.close(descriptor)
            raise
        _receive(descriptor, path)

    def _make_room(self, directory: Path) -> None:
        """Remove the trees of a tenant that were not used for long, if it has too much. Raises Exhausted."""
        trees = [path for path in directory.iterdir() if DIGEST.fullmatch(path.name)]
        for path in trees:
            if path not in self._sizes:
                self._sizes[path] = _size(path)
        total = sum(self._sizes[path] for path in trees)
        for path in sorted(trees, key=_last_use):
            if total <= self._most or time.time() - _last_use(path) < UNUSED_SECONDS:
                break
            total -= self._sizes.pop(path)
            _remove(path)
        if total > self._most:
            raise Exhausted(
                f"the files of your recipes take {total} bytes, and may take {self._most}",
                remedy="use fewer files at once; those that are not used for an hour make room",
                numbers={"bytes": total, "retry_after": UNUSED_SECONDS},
            )

    def sweep(self, older: float = ABANDONED) -> None:
        """Remove what servers that were killed had begun to receive."""
        for path in self._root.glob("*/.receiving-*"):
            if time.time() - path.lstat().st_mtime > older:
                shutil.rmtree(path, ignore_errors=True)
                if path.is_file():
                    path.unlink(missing_ok=True)

    def scratch(self, tenant: str) -> Path:
        """A new empty file beside the tenant's trees, for the caller to fill and to remove."""
        parent = self._root / tenant
        parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor, name = tempfile.mkstemp(prefix=".receiving-", dir=parent)
        os.close(descriptor)
        return Path(name)

    async def keep(self, tenant: str, received: Path) -> str:
        """Keep a file that ``scratch`` made, under its digest, which is returned. Raises Exhausted."""

        def move() -> str:
            check_disk(received.parent)
            self._make_room(received.parent)
            digest = tree_digest(received).hex()
            path = self.path(tenant, digest)
            if not os.path.lexists(path):
                received.rename(path)
            return digest

        return await anyio.to_thread.run_sync(move)


def check_disk(directory: Path) -> None:
    """Raises Exhausted if the file system of a directory is nearly full."""
    found = os.statvfs(directory)
    is_full = found.f_bavail < found.f_blocks * FREE_SHARE
    if is_full or (found.f_files and found.f_favail < found.f_files * FREE_SHARE):
        raise Exhausted("the disk of the server is nearly full", remedy="tell its operator", numbers={})


def _used_now(path: Path) -> bool:
    """Whether a tree exists. If it does, it counts as used."""
    try:
        modified = path.lstat().st_mtime_ns  # that of the client's file, which stays
        os.utime(path, ns=(time.time_ns(), modified), follow_symlinks=False)
    except OSError:
        return False
    return True


def _last_use(path: Path) -> float:
    try:
        return path.lstat().st_atime
    except OSError:
        return 0.0


def _size(path: Path) -> int:
    """Bytes of a tree on disk."""
    found = path.lstat()
    total = max(_ENTRY_BYTES, found.st_blocks * 512)
    if path.is_dir() and not path.is_symlink():
        with os.scandir(path) as entries:
            total += sum(_size(Path(entry.path)) for entry in entries)
    return total


def _remove(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)
    with contextlib.suppress(OSError):
        path.unlink()  # a tree of one file


def _receive(descriptor: int, path: Path) -> None:
    with _scratch(path.parent) as scratch:
        received = scratch / "tree"
        tree_stream.unpack(descriptor, received, Links("", outside=True))
        if received.is_symlink():  # a stage follows it, and would copy a file of this host
            raise RecipeError("the files of a stage cannot be a link")
        found = tree_digest(received).hex()
        if found != path.name:
            raise RecipeError(
                f"the files have the digest {found}, not {path.name}",
                remedy="did they change while they were sent?",
            )
        if not os.path.lexists(path):
            received.rename(path)


@contextmanager
def _scratch(parent: Path) -> Iterator[Path]:
    scratch = Path(tempfile.mkdtemp(prefix=".receiving-", dir=parent))
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)

"""Files that clients send for their recipes, on the server's disk: each tree once per tenant, by digest."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import anyio.to_thread

from dutyfree.contract.entries import Links
from dutyfree.contract.errors import RecipeError
from dutyfree.contract.stage import tree_digest
from dutyfree.engine.sandbox import tree_stream
from dutyfree.wire.recipes import DIGEST

ABANDONED = 86400.0
"""Seconds after which what has begun to arrive does not come any more."""


class TenantFiles:
    """The trees below ``root``, as ``TENANT/DIGEST``. A tree gets its name when it is verified."""

    def __init__(self, root: Path) -> None:
        self._root = root

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
        there = await anyio.to_thread.run_sync(lambda: [os.path.lexists(path) for path in paths])
        return [digest for digest, found in zip(digests, there, strict=True) if not found]

    async def put(self, tenant: str, digest: str, descriptor: int) -> None:
        """Read a tree stream, which is closed, and keep it if it has this digest. Raises RecipeError."""
        path = self.path(tenant, digest)
        await anyio.to_thread.run_sync(_receive, descriptor, path)

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
        """Keep a file that ``scratch`` made, under its digest, which is returned."""

        def move() -> str:
            digest = tree_digest(received).hex()
            path = self.path(tenant, digest)
            if not os.path.lexists(path):
                received.rename(path)
            return digest

        return await anyio.to_thread.run_sync(move)


def _receive(descriptor: int, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
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

"""Files that clients send for their recipes, on the server's disk: each tree once per tenant, by digest.

What one tenant has there is bounded: the trees that were not used for the longest time make room. What is
arriving is bounded too.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

import anyio
import anyio.to_thread

from dutyfree.contract.entries import Links
from dutyfree.contract.errors import Exhausted, RecipeError
from dutyfree.contract.stage import tree_digest
from dutyfree.engine.launcher.protocol import MEMBER
from dutyfree.engine.sandbox import tree_stream
from dutyfree.wire.recipes import DIGEST

LARGEST_TREE = 2 << 30
"""Bytes of the largest tree, as it is sent."""
MOST_ENTRIES = 500_000
"""Files and directories of a tree."""
MOST_BYTES = 32 << 30
"""Bytes of all trees of a tenant on disk."""
MOST_ARRIVING = 8 << 30
"""Bytes of what a tenant is sending, on disk."""
RECEIVED_AT_ONCE = 4
"""Trees of a tenant that are received at the same time. Others wait, so that no tenant takes all threads."""
STALL_SECONDS = 60.0
UNUSED_SECONDS = 3600.0
"""A tree that was used more recently is not removed to make room: a stage may be reading it."""
FREE_SHARE = 0.05
"""The share of the disk, in bytes and in files, that clients cannot fill."""
_ENTRY_BYTES = 4096
"""Bytes that a file counts at least."""
ABANDONED = 86400.0
"""Seconds after which what has begun to arrive does not come any more."""
_CHECK_STEP = 64 << 20
"""Bytes that arrive between two looks at the disk."""


class Arrival:
    """What a client is sending: how much it is, and whether there is room for it."""

    def __init__(self, directory: Path, tenant: str, totals: Counter[str]) -> None:
        """``totals``: of all arrivals of each tenant."""
        self._directory = directory
        self._tenant = tenant
        self._totals = totals
        self._head = bytearray()
        self._content = 0
        self._entries = 0
        self._sent = 0
        self.size = 0
        """Bytes that it takes on disk."""

    async def add_tree(self, data: bytes) -> None:
        """Count the next part of a tree stream. Raises RecipeError, Exhausted."""
        self._sent += len(data)
        entries = self._count_entries(data)
        self._entries += entries
        if self._sent > LARGEST_TREE or self._entries > MOST_ENTRIES:
            raise RecipeError(
                f"the files have more than {LARGEST_TREE} bytes, or are more than {MOST_ENTRIES}"
            )
        await self.add(len(data) + entries * _ENTRY_BYTES)

    async def add(self, size: int) -> None:
        """Count what goes to the disk now. Raises Exhausted."""
        if self._totals[self._tenant] + size > MOST_ARRIVING:
            raise Exhausted(
                f"you are sending more than {MOST_ARRIVING} bytes of files",
                remedy="send fewer files at once",
                numbers={"bytes": self._totals[self._tenant], "retry_after": 5.0},
            )
        looked, self.size = self.size // _CHECK_STEP, self.size + size
        self._totals[self._tenant] += size
        if self.size // _CHECK_STEP != looked:
            await anyio.to_thread.run_sync(check_disk, self._directory)

    def _count_entries(self, data: bytes) -> int:
        """How many files begin in this part: the heads of a tree stream are counted, the rest is skipped."""
        found, at = 0, 0
        while at < len(data):
            if self._content:
                skipped = min(self._content, len(data) - at)
                self._content -= skipped
                at += skipped
                continue
            part = data[at : at + MEMBER.size - len(self._head)]
            self._head += part
            at += len(part)
            if len(self._head) == MEMBER.size:
                size, mode, name = MEMBER.unpack(self._head)
                self._head.clear()
                self._content = name + (0 if stat.S_ISDIR(mode) else size)
                found += 1
        return found


class _Turns(NamedTuple):
    """What the transfers of one tenant wait for, and those of no other."""

    threads: anyio.CapacityLimiter
    making_room: threading.Lock


class TenantFiles:
    """The trees below ``root``, as ``TENANT/DIGEST``. A tree gets its name when it is verified."""

    def __init__(self, root: Path, most: int = MOST_BYTES, stall: float = STALL_SECONDS) -> None:
        self._root = root
        self._most = most
        self.stall = stall
        """Seconds in which the next part of a tree must come."""
        self._sizes: dict[Path, int] = {}
        self._turns: dict[str, _Turns] = {}
        self._arriving: Counter[str] = Counter()

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

    @contextmanager
    def arriving(self, tenant: str) -> Iterator[Arrival]:
        """Count what a client sends while it sends it."""
        arrival = Arrival(self._root, tenant, self._arriving)
        try:
            yield arrival
        finally:
            self._arriving[tenant] -= arrival.size

    async def put(self, path: Path, descriptor: int) -> None:
        """Read a tree stream, which is closed, and keep it at ``path`` if it has this digest.

        Raises RecipeError, CollectError, and Exhausted if the tenant has too many files, or the disk has no
        room.
        """
        # Whoever gets it closes the descriptor: the call may be cancelled at any time.
        owned = threading.Lock()
        turns = self._turns_of(path.parent.name)

        def receive() -> None:
            if owned.acquire(blocking=False):
                self._receive(descriptor, path, turns)

        try:
            await anyio.to_thread.run_sync(receive, limiter=turns.threads)
        finally:
            if owned.acquire(blocking=False):
                os.close(descriptor)

    def _turns_of(self, tenant: str) -> _Turns:
        turns = self._turns.get(tenant)
        if turns is None:
            turns = self._turns[tenant] = _Turns(anyio.CapacityLimiter(RECEIVED_AT_ONCE), threading.Lock())
        return turns

    def _receive(self, descriptor: int, path: Path, turns: _Turns) -> None:
        with ExitStack() as stack:
            stack.callback(os.close, descriptor)
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            check_disk(path.parent)
            with turns.making_room:
                self._make_room(path.parent)
            scratch = stack.enter_context(_scratch(path.parent))
            _receive(os.dup(descriptor), scratch / "tree", path)

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
        turns = self._turns_of(tenant)

        def move() -> str:
            check_disk(received.parent)
            with turns.making_room:
                self._make_room(received.parent)
            digest = tree_digest(received).hex()
            path = self.path(tenant, digest)
            if not os.path.lexists(path):
                received.rename(path)
            return digest

        return await anyio.to_thread.run_sync(move, limiter=turns.threads)


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


def _receive(descriptor: int, received: Path, path: Path) -> None:
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

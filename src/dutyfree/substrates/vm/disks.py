"""The disks of machines: one read-only disk for each layer of a recipe, and an empty one to write to.

A layer of the engine's store becomes a file system once, in the cache, and all machines share it. Files that
no machine shares have no name, so they end with the processes that have them open.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from dutyfree.contract.errors import CreateError, Unavailable
from dutyfree.engine.layers.lower_directories import LowerDirectories
from dutyfree.engine.store import provenance
from dutyfree.engine.store.locks import locked, try_lock
from dutyfree.engine.store.store import Store
from dutyfree.substrates.vm.kernel import folder

MOST = 20
"""Disks that a machine can have, as in setup/machine.c."""

BLOCK = 4096
INODE = 256


class Disks:
    """The disks of one open substrate, as descriptors, until ``close``. Threads may share it."""

    def __init__(self) -> None:
        self._open: dict[str, int] = {}
        self._lock = threading.Lock()
        """Held while a disk is made, so that all machines of a recipe get the same one."""

    def lower(self, found: LowerDirectories) -> tuple[int, ...]:
        """The layers of a recipe. Blocks. Raises CreateError."""
        return tuple(self._layer(path, f"{found.key}-{number}") for number, path in enumerate(found.paths))

    def named(self, name: str, path: Path) -> int:
        """The disk of a directory whose name says all about its files. Blocks. Raises CreateError."""
        return self._once(name, lambda: _kept(path, name))

    def private(self, path: Path) -> int:
        """The disk of a directory, for this opening alone. Blocks. Raises CreateError."""
        return self._once(str(path), lambda: _unnamed(path))

    def _once(self, name: str, make: Callable[[], int]) -> int:
        with self._lock:
            if name not in self._open:
                self._open[name] = make()
            return self._open[name]

    def _layer(self, path: Path, chain: str) -> int:
        if name := _name(path):
            return self.named(name, path)
        # Of this machine's own files. Without a key it lives as long as its directory.
        return self.private(path) if chain.startswith("-") else self.named(f"chain-{chain}", path)

    def upper(self, size: int) -> int:
        """A new empty disk of this size, which the caller closes. Blocks. Raises CreateError."""
        template = self._once(f"empty-{size}", lambda: _empty(size))
        with _reported("a disk"):
            return copied(template)

    def close(self) -> None:
        while self._open:
            os.close(self._open.popitem()[1])


def copied(source: int) -> int:
    """A copy of a file with holes, without a name. Blocks."""
    target = _nameless()
    try:
        size = os.fstat(source).st_size
        os.truncate(target, size)
        at = 0
        while at < size:
            try:
                at = os.lseek(source, at, os.SEEK_DATA)
            except OSError:  # no more data
                break
            end = os.lseek(source, at, os.SEEK_HOLE)
            while at < end:
                at += os.copy_file_range(source, target, end - at, at, at)
    except BaseException:
        os.close(target)
        raise
    return target


def _nameless() -> int:
    folder().mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder(), os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    os.fchmod(descriptor, 0o666)  # QEMU, with another user id, opens it again by its descriptor
    return descriptor


def _name(path: Path) -> str:
    """The name of the disk of a layer of the store, which says all about its files; "" for others. Blocks."""
    with contextlib.suppress(ValueError):
        relative = path.resolve().relative_to(Store().root.resolve())
        return f"layer-{hashlib.sha256(f'{relative}{_build_id(path)}'.encode()).hexdigest()[:32]}"
    return ""


def _build_id(path: Path) -> str:
    """The build of a stage, whose key does not say which files it wrote; "" for the layer of an image."""
    # The tree of an image is all its own: a file of that name there says nothing.
    made = provenance.read(path.parent) if path.parent.name == "tree" else None
    return f" {made.build_id}" if made is not None else ""


def _kept(path: Path, name: str) -> int:
    """The disk in the cache, made if it is missing."""
    target = folder() / "disks" / f"{name}.ext4"
    with _reported(f"the disk of {path}"):
        target.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            return _opened(target)
        with locked(folder() / "disks/lock", fcntl.LOCK_EX):
            for old in target.parent.glob("making-*"):  # of a killed process: we hold the lock
                old.unlink()
            if not target.exists():
                descriptor, scratch = tempfile.mkstemp(prefix="making-", dir=target.parent)
                try:
                    os.fchmod(descriptor, 0o644)
                    _fill(descriptor, path)
                    os.fsync(descriptor)
                    Path(scratch).rename(target)
                except BaseException:
                    Path(scratch).unlink()
                    raise
                finally:
                    os.close(descriptor)
            return _opened(target)


def _opened(path: Path) -> int:
    """Open a disk and mark it as used: ``dutyfree gc`` removes others."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    with contextlib.suppress(PermissionError):
        os.utime(descriptor)
    return descriptor


def unused() -> Iterator[Path]:
    """The disks in the cache that no process uses now. They can be made again."""
    for path in sorted((folder() / "disks").glob("*.ext4"), key=lambda one: one.stat().st_mtime):
        with contextlib.suppress(OSError):
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                if try_lock(descriptor, fcntl.LOCK_EX):
                    yield path
            finally:
                os.close(descriptor)


def _unnamed(path: Path) -> int:
    """A disk that no QEMU process can write to, although many share it."""
    with _reported(f"the disk of {path}"):
        writable = _nameless()
        try:
            _fill(writable, path)
            os.fchmod(writable, 0o444)
            return os.open(f"/proc/self/fd/{writable}", os.O_RDONLY | os.O_CLOEXEC)
        finally:
            os.close(writable)


def _empty(size: int) -> int:
    """A disk that ``copied`` copies; no machine has it."""
    with _reported("an empty disk"):
        descriptor = _nameless()
        try:
            os.truncate(descriptor, size)
            _make(descriptor, "-E", "lazy_itable_init=1,lazy_journal_init=1,nodiscard", "-m", "0")
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor


def _fill(descriptor: int, source: Path) -> None:
    """Make a file system of a directory. No journal, because nobody writes to it."""
    size, inodes = 0, 64
    for directory, names, files in os.walk(source):
        inodes += len(names) + len(files)
        size += BLOCK * (1 + len(names) // 64)
        for name in files:
            found = os.lstat(os.path.join(directory, name))
            size += -(-found.st_size // BLOCK) * BLOCK
    for more in (1, 2):
        wanted = more * (size + size // 16 + inodes * (INODE + 64) + (4 << 20))
        os.truncate(descriptor, 0)
        os.truncate(descriptor, -(-wanted // BLOCK) * BLOCK)
        try:
            options = ("-O", "^has_journal,^resize_inode", "-m", "0", "-N", str(inodes), "-I", str(INODE))
            _make(descriptor, *options, "-d", str(source))
            return
        except CreateError:
            if more == 2:
                raise


def _make(descriptor: int, *options: str) -> None:
    """Raises CreateError, Unavailable."""
    program = shutil.which("mke2fs", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
    if program is None:
        raise Unavailable("vm: there is no mke2fs", remedy="on Debian as root: apt-get install e2fsprogs")
    command = [program, "-q", "-F", "-t", "ext4", "-b", str(BLOCK), *options, f"/proc/self/fd/{descriptor}"]
    done = subprocess.run(command, capture_output=True, check=False, pass_fds=(descriptor,))
    if done.returncode:
        raise CreateError(f"vm: mke2fs failed: {done.stderr.decode(errors='replace').strip()}")


@contextlib.contextmanager
def _reported(what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CreateError(
            f"vm: {what} cannot be written to {folder()}: {error.strerror or error}",
            remedy="free some space there, or set DUTYFREE_CACHE to another directory",
        ) from error

"""The disks of machines: one read-only disk for each layer of a recipe, and an empty one to write to.

A layer of the engine's store becomes a file system once, in the cache, and all machines share it. Files that
no machine shares have no name, so they end with the processes that have them open. A QEMU process inherits
its disks; so ours can be closed when it runs.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path

from dutyfree.contract.errors import CreateError, Unavailable
from dutyfree.engine.layers.lower_directories import LowerDirectories
from dutyfree.engine.store import locks, provenance
from dutyfree.engine.store.locks import locked, try_lock
from dutyfree.engine.store.store import Store
from dutyfree.substrates.vm.kernel import folder

MOST = 20
"""Disks that a machine can have, as in setup/machine.c."""

BLOCK = 4096
INODE = 256


class OpenDisks:
    """Disks of machines, as descriptors, until ``close``."""

    def __init__(self, descriptors: Iterable[int]) -> None:
        """It takes the descriptors over. What it has already is closed if the next one cannot be opened."""
        self.descriptors: tuple[int, ...] = ()
        try:
            for descriptor in descriptors:
                self.descriptors += (descriptor,)
        except BaseException:
            self.close()
            raise

    def duplicate(self) -> OpenDisks:
        """The same disks, which stay open when these are closed. Raises OSError."""
        return OpenDisks(map(os.dup, self.descriptors))

    def close(self) -> None:
        for descriptor in self.descriptors:
            os.close(descriptor)


def lower(found: LowerDirectories) -> Iterator[int]:
    """Open the disks of a recipe's layers; the caller closes them. Blocks. Raises CreateError."""
    for number, path in enumerate(found.paths):
        if name := _name(path):
            yield named(name, path)
        elif found.key:  # of this machine's own files
            yield named(f"chain-{found.key}-{number}", path)
        else:
            yield private(path)


def template(size: int) -> OpenDisks:
    """An empty disk for ``copied``. Blocks. Raises CreateError."""
    return OpenDisks((_empty(size),))


def copied(source: int) -> int:
    """A copy of a disk, with its holes, without a name. Blocks. Raises CreateError."""
    with _reported("a disk"):
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


def named(name: str, path: Path) -> int:
    """Open the disk of a directory whose name says all about its files. Blocks. Raises CreateError."""
    with _reported(f"the disk of {path}"):
        if (disk := kept(name)) is not None:
            return disk
        target = _target(name)
        target.parent.mkdir(parents=True, exist_ok=True)
        lock = target.with_suffix(".lock")
        try:
            with locked(lock, fcntl.LOCK_EX):  # so that no two processes make it
                if not target.exists():
                    _keep(path, target)
                return _opened(target)
        finally:
            locks.remove(lock)


def kept(name: str) -> int | None:
    """Open the disk of a name, if it is in the cache. Blocks. Raises CreateError."""
    with _reported(f"the disk {name}"), contextlib.suppress(FileNotFoundError):
        return _opened(_target(name))
    return None


def _target(name: str) -> Path:
    return folder() / "disks" / f"{name}.ext4"


def _keep(path: Path, target: Path) -> None:
    """Make a disk, which has no name until it is complete."""
    descriptor = _nameless()
    try:
        os.fchmod(descriptor, 0o644)
        _fill(descriptor, path)
        os.fsync(descriptor)
        # With src_dir_fd, os.link follows the symbolic link in /proc.
        os.link(f"/proc/self/fd/{descriptor}", target, src_dir_fd=descriptor)
    finally:
        os.close(descriptor)


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


def private(path: Path) -> int:
    """Make the disk of a directory for this opening alone. Blocks. Raises CreateError.

    No QEMU process can write to it, although many share it.
    """
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

"""Writable file systems on disk: the directory of their images, and the templates of the images.

``init/launcher/disk.h`` says what an image is. To format one takes longer than to create a sandbox. So each
disk limit has a template, formatted once. The launcher copies the few blocks of it that are not empty.
"""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import anyio.to_thread

from dutyfree import paths
from dutyfree.contract.errors import CreateError, Unavailable
from dutyfree.engine.host.features import HostFeatures
from dutyfree.engine.launcher import protocol
from dutyfree.engine.launcher.client import Launcher, LauncherError
from dutyfree.engine.launcher.protocol import Request

DEFAULT_DISK = 512 << 20
"""Bytes that a sandbox may write to disk if its limits do not say."""
BUILD_DISK = 4 << 30
"""The same for a sandbox in which a stage is built, on a disk with room for four of them."""

BLOCK = 4096
BYTES_PER_INODE = 8192
LEAST_INODES = 1024
LARGE = 256 << 20
INODE = 256
GROUP = 128 << 20
"""Bytes of one block group of ext4. Each has two blocks of bitmaps."""
RESERVED_MOST = 16 << 20
"""ext4 keeps 2 % free for its own tables, and at most this many bytes."""

FEATURES = "none,ext_attr,dir_index,filetype,extent,flex_bg,sparse_super,large_file,huge_file,dir_nlink"
FEATURES += ",extra_isize,uninit_bg,has_journal"
"""There is nothing to recover, because no image outlives its sandbox. But without a journal, ext4 does not
reuse the inodes of removed files for some time, and the search for others makes each new file slow."""
EXTENDED = "lazy_itable_init=1,nodiscard,packed_meta_blocks=1,root_owner=0:0"

LEAST_DISK = 4 << 20
"""In a smaller image there is no room for a journal."""

LEAST_MERGE = 64 << 20

FORMATTER = "mke2fs"
NOT_RESERVED = "cannot reserve the disk space"
"""Begins the message of a launcher for which the disk is too full (init/launcher/disk.c)."""
_SBIN = "/usr/local/sbin:/usr/sbin:/sbin"


class DiskStorage:
    """Where one launcher makes images, and the templates that it has."""

    def __init__(self, launcher: Launcher, directory: Path) -> None:
        self.directory = directory
        self.build_limit = BUILD_DISK
        """Bytes that a stage may write: on a small disk a quarter of what was free."""
        self._launcher = launcher
        self._templates: dict[int, asyncio.Task[None]] = {}

    @classmethod
    async def open(cls, launcher: Launcher, host: HostFeatures) -> DiskStorage:
        """Tell the launcher the directory. Raises Unavailable."""
        if host.mode != "root":
            raise Unavailable(
                'native: storage="disk" needs root, because only root can mount an ext4 image',
                remedy='run as root, or use storage="memory"',
            )
        if await anyio.to_thread.run_sync(_formatter) is None:
            raise Unavailable(
                f'native: storage="disk" needs {FORMATTER}, and it is not in PATH',
                remedy='apt-get install e2fsprogs, or use storage="memory"',
            )
        storage = cls(launcher, paths.cache() / "disk")
        try:
            descriptor = await anyio.to_thread.run_sync(storage._open_directory)
        except OSError as error:
            raise Unavailable(
                f"native: no files can be made in {storage.directory}: {error.strerror}",
                remedy="set DUTYFREE_CACHE to a directory on a local disk",
            ) from error
        try:
            await launcher.ask(Request.DISK, 0, b"", descriptor)
        except LauncherError as error:
            if error.number != errno.EEXIST:  # it has it from a former owner
                raise
        finally:
            os.close(descriptor)
        return storage

    def _open_directory(self) -> int:
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.build_limit = max(DEFAULT_DISK, min(BUILD_DISK, self._free() // 4 >> 26 << 26))
        return os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    async def provide(self, limit: int) -> None:
        """Make sure that the launcher can make images of this disk limit. Raises CreateError."""
        if limit < LEAST_DISK:
            raise CreateError(
                f'with storage="disk" the disk limit must be at least {LEAST_DISK} bytes, not {limit}',
                remedy='allow more with Limits(disk=…), or use storage="memory"',
            )
        task = self._templates.get(limit)
        if task is None:
            task = self._templates[limit] = asyncio.create_task(self._add_template(limit))
        try:
            await asyncio.shield(task)
        except (CreateError, LauncherError):
            self._templates.pop(limit, None)  # the next request tries again
            raise

    async def _add_template(self, limit: int) -> None:
        try:
            descriptor = await anyio.to_thread.run_sync(_format, self.directory, limit)
        except (OSError, subprocess.SubprocessError) as error:
            raise CreateError(
                f"no file system could be made in {self.directory}: {_reason(error)}"
            ) from error
        try:
            await self._launcher.ask(Request.TEMPLATE, 0, protocol.DISK_LIMIT.pack(limit), descriptor)
        except LauncherError as error:
            raise await self.refusal(error, limit) from error
        finally:
            os.close(descriptor)

    def _free(self) -> int:
        found = os.statvfs(self.directory)
        return found.f_bavail * found.f_frsize

    async def refusal(self, error: LauncherError, limit: int) -> CreateError:
        """The error for a sandbox whose file system could not be made."""
        what = f"no sandbox could be made: {error.message}"
        if error.number in (errno.ENOSPC, errno.EDQUOT):
            free = await anyio.to_thread.run_sync(self._free)
            return CreateError(
                f"{what}: a sandbox reserves its disk limit of {limit} bytes;"
                f" {self.directory} has {free} free, and 5 % of the disk stay free for others",
                remedy="allow less with Limits(disk=…), end other sandboxes, free space there, or set"
                ' DUTYFREE_CACHE to a directory on a larger disk; or use storage="memory"',
            )
        if error.number == errno.EOPNOTSUPP:
            return CreateError(
                f"{what}: the file system of {self.directory} cannot reserve space, or has no unnamed files",
                remedy="set DUTYFREE_CACHE to a directory on ext4, xfs or btrfs",
            )
        return CreateError(
            what,
            remedy="see the log of the kernel: the host must allow loop devices and ext4;"
            ' or use storage="memory"',
        )


def limit_of(disk: int | None) -> int:
    """The disk limit of an image: whole blocks."""
    disk = DEFAULT_DISK if disk is None else disk
    return -(-disk // BLOCK) * BLOCK


def merge_limit(size: int) -> int:
    """The disk limit of an image for layers of this size together: a power of two, to need few templates."""
    return max(LEAST_MERGE, 1 << (2 * size - 1).bit_length())


def inodes(limit: int) -> int:
    """How many files, directories and links an image of this disk limit can have."""
    return limit // BYTES_PER_INODE + LEAST_INODES


def journal(limit: int) -> int:
    """Bytes of the journal. A small one makes many small changes wait for the disk."""
    return (16 if limit >= LARGE else 4) << 20


def image_size(limit: int) -> int:
    """Bytes of an image in which ``limit`` bytes can be written."""
    content = limit + journal(limit) + inodes(limit) * INODE + (1 << 20)
    content += -(-content // GROUP) * 4 * BLOCK
    content += min(content // 48, RESERVED_MOST + BLOCK)
    return -(-content // BLOCK) * BLOCK


def _formatter() -> str | None:
    return shutil.which(FORMATTER) or shutil.which(FORMATTER, path=_SBIN)


def _format(directory: Path, limit: int) -> int:
    """A file without a name with an empty file system. Blocks. Raises OSError, SubprocessError."""
    with tempfile.TemporaryFile(dir=directory) as image:
        os.truncate(image.fileno(), image_size(limit))
        subprocess.run(
            [
                _formatter() or FORMATTER,
                *("-q", "-F", "-b", str(BLOCK), "-m", "0", "-I", str(INODE), "-N", str(inodes(limit))),
                *("-O", FEATURES, "-J", f"size={journal(limit) >> 20}", "-E", EXTENDED),
                f"/proc/self/fd/{image.fileno()}",
            ],
            env={"MKE2FS_CONFIG": os.devnull},
            pass_fds=[image.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            check=True,
        )
        return os.dup(image.fileno())


def _reason(error: OSError | subprocess.SubprocessError) -> str:
    if isinstance(error, subprocess.CalledProcessError):
        said = (error.stderr or b"").decode(errors="replace").strip()
        return f"{FORMATTER} failed: {said or error.returncode}"
    return str(error)

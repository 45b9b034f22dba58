"""Unpack a layer's tar into a directory that overlayfs can mount.

Layers are untrusted. The kernel resolves every path inside the directory (openat2), so neither ``..`` nor
links lead out of it. Device nodes are left out, and so are extended attributes other than ``user.*`` and
ACLs: they could change what the overlay shows, or give rights on the host. Whiteouts are converted to those
of overlayfs: ``.wh.name`` to a character device 0/0, ``.wh..wh..opq`` to an attribute.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import posixpath
import shutil
import stat
import tarfile
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

from dutyfree.engine.images.archive_paths import (
    DEPTH_MAX,
    DIRECTORY,
    PATH_BYTES_MAX,
    encode,
    normalize,
    open_directory,
    parents,
)
from dutyfree.engine.images.streams import InvalidLayer, hash_pieces, read_ahead, write_all
from dutyfree.engine.images.tar_reader import ForwardReader, members
from dutyfree.engine.store.cancel import CancelToken
from dutyfree.engine.store.overlay import ACL_ATTRIBUTES, OPAQUE, is_whiteout

WHITEOUT = ".wh."
OPAQUE_MARK = ".wh..wh..opq"

UNPACKED_MAX = 64 << 30
"""Default limit for the bytes of one unpacked layer."""
MEMBERS_MAX = 1 << 22
_ID_MAX = (1 << 32) - 1

_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC

_PATH_ERRORS = (
    errno.ELOOP,
    errno.ENOTDIR,
    errno.ENAMETOOLONG,
    errno.EXDEV,
    errno.EMLINK,
    errno.EINVAL,
    errno.EFBIG,
)

T = TypeVar("T")


class UnpackResult(NamedTuple):
    diff_id: str
    """Digest of the tar."""
    size: int
    """Bytes on disk, roughly."""
    files: int
    left_out: int
    """Device nodes that were left out."""
    whiteout_directories: tuple[str, ...] = ()
    """Directories that contain whiteouts."""


def unpack(
    pieces: Iterator[bytes],
    root: int,
    *,
    limit: int = UNPACKED_MAX,
    whiteouts: bool = True,
    cancel: CancelToken | None = None,
) -> UnpackResult:
    """Unpack a tar into the empty directory that the descriptor ``root`` has open.

    Another thread produces the pieces; if unpacking fails before it has ended, ``cancel`` is set. Raises
    InvalidLayer for a broken or hostile layer, OSError of the disk, Cancelled, and errors of the pieces.
    """
    cancel = cancel or CancelToken()
    digest = hashlib.sha256()
    target = _Target(root, whiteouts)
    try:
        with read_ahead(hash_pieces(pieces, digest), cancel) as ahead:
            stream = ForwardReader(ahead, limit, cancel)
            if stream.has_more():  # a layer without changes may be an empty file instead of a tar
                for member in members(stream):
                    target.add(member, stream)
            stream.drain()
        target.finish()
    except (tarfile.TarError, ValueError, OverflowError, EOFError, RecursionError) as error:
        raise InvalidLayer(f"it is not a valid tar: {error}") from error
    except OSError as error:
        if error.errno in _PATH_ERRORS:
            raise InvalidLayer(f"one of its paths cannot be used: {error}") from error
        raise
    finally:
        target.close()
    diff_id = f"sha256:{digest.hexdigest()}"
    return UnpackResult(diff_id, target.size, target.files, target.left_out, target.whiteout_directories)


class _Target:
    """The directory that is filled."""

    def __init__(self, root: int, whiteouts: bool) -> None:
        self._root = root
        self._whiteouts = whiteouts
        self._parent_name: bytes | None = None
        self._parent = -1
        self._times: dict[bytes, int] = {}
        self._opaque: set[str] = set()
        self._whiteouts_made: dict[str, None] = {}
        self._count = 0
        self.size = self.files = self.left_out = 0

    def close(self) -> None:
        if self._parent >= 0:
            os.close(self._parent)
            self._parent, self._parent_name = -1, None

    def add(self, member: tarfile.TarInfo, stream: ForwardReader) -> None:
        self._count += 1
        if self._count > MEMBERS_MAX:
            raise InvalidLayer(f"it has more than {MEMBERS_MAX} members")
        if not (0 <= member.uid < _ID_MAX and 0 <= member.gid < _ID_MAX):
            raise InvalidLayer(f"{member.name!r} has an invalid user or group id")
        name = normalize(member.name)
        base = name.rpartition("/")[2]
        if self._whiteouts and base.startswith(WHITEOUT):
            self._add_whiteout(name, base)
        elif not name:
            if member.isdir():
                self._apply_metadata(self._root, member)
                self._times[b"."] = _nanoseconds(member)
        else:
            self._add_member(name, member, stream)

    def _add_member(self, name: str, member: tarfile.TarInfo, stream: ForwardReader) -> None:
        parent, base = self._enter(name)
        if member.isdir():
            self._directory(parent, base, name, member)
            return
        if member.isdev() and not member.isfifo():
            self.left_out += 1
            return
        if not (member.isreg() or member.issym() or member.islnk() or member.isfifo()):
            raise InvalidLayer(f"{name!r} has an unknown type")
        source = self._link_source(member, name) if member.islnk() else None
        if source and source[2]:  # a link to itself
            os.close(source[0])
            return
        self.files += 1
        if source:
            self._clear(parent, base)
            try:
                os.link(source[1], base, src_dir_fd=source[0], dst_dir_fd=parent, follow_symlinks=False)
            finally:
                os.close(source[0])
        elif member.issym():
            self._replace(parent, base, lambda: os.symlink(encode(member.linkname), base, dir_fd=parent))
            os.chown(base, member.uid, member.gid, dir_fd=parent, follow_symlinks=False)
            self._set_time(base, parent, member)
        elif member.isfifo():
            self._replace(parent, base, lambda: os.mkfifo(base, 0o600, dir_fd=parent))
            os.chown(base, member.uid, member.gid, dir_fd=parent, follow_symlinks=False)
            os.chmod(base, member.mode & 0o7777, dir_fd=parent)
            self._set_time(base, parent, member)
        else:
            self._file(parent, base, member, stream)

    def _file(self, parent: int, base: bytes, member: tarfile.TarInfo, stream: ForwardReader) -> None:
        file = self._replace(parent, base, lambda: os.open(base, _NEW, 0o600, dir_fd=parent))
        try:
            # The parts of a sparse file; typeshed has the wrong type.
            holes: Any = member.sparse
            parts: list[tuple[int, int]] = [(0, member.size)] if holes is None else holes
            if stream.tell() != member.offset_data:
                stream.seek(member.offset_data)
            written = 0
            for offset, size in parts:
                if size and holes is not None:
                    os.lseek(file, offset, os.SEEK_SET)
                while size:
                    piece = stream.take(size)
                    if not piece:
                        raise InvalidLayer("it is truncated")
                    write_all(file, piece)
                    size -= len(piece)
                    written += len(piece)
            if holes is not None:
                os.ftruncate(file, member.size)
            self.size += (written + 4095) & ~4095
            self._apply_metadata(file, member)
            os.utime(file, ns=(_nanoseconds(member),) * 2)
        finally:
            os.close(file)

    def _directory(self, parent: int, base: bytes, name: str, member: tarfile.TarInfo) -> None:
        opaque = False
        found = _lstat(base, parent)
        if found is None or not stat.S_ISDIR(found.st_mode):
            # A directory in place of a whiteout hides the directory below it.
            opaque = found is not None and is_whiteout(found)
            self._clear(parent, base)
            os.mkdir(base, 0o755, dir_fd=parent)
            self.size += 4096
            self.files += 1
        directory = os.open(base, DIRECTORY | os.O_NOFOLLOW, dir_fd=parent)
        try:
            self._apply_metadata(directory, member)
            if opaque:
                os.setxattr(directory, OPAQUE, b"y")
        finally:
            os.close(directory)
        self._times[encode(name)] = _nanoseconds(member)

    def _add_whiteout(self, name: str, base: str) -> None:
        parent, _ = self._enter(name)
        directory = name.rpartition("/")[0]
        if base == OPAQUE_MARK:
            os.setxattr(parent, OPAQUE, b"y")
            self._opaque.add(directory)
            return
        if base.startswith(WHITEOUT * 2):
            return  # metadata of aufs
        hidden = encode(base.removeprefix(WHITEOUT))
        if hidden in (b"", b".", b".."):
            raise InvalidLayer(f"{name!r} is a whiteout of an invalid name")
        found = _lstat(hidden, parent)
        if found is None:
            os.mknod(hidden, stat.S_IFCHR, 0, dir_fd=parent)
            self._whiteouts_made[f"{directory}/{base.removeprefix(WHITEOUT)}".lstrip("/")] = None
        elif stat.S_ISDIR(found.st_mode):
            # The layer's own directory of that name stays, and hides the one below it.
            own = os.open(hidden, DIRECTORY | os.O_NOFOLLOW, dir_fd=parent)
            os.setxattr(own, OPAQUE, b"y")
            os.close(own)

    @property
    def whiteout_directories(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name.rpartition("/")[0] for name in self._whiteouts_made))

    def _remove_useless_whiteouts(self) -> None:
        """Remove whiteouts from opaque directories: there overlayfs would list them as files."""
        for name in [name for name in self._whiteouts_made if not self._opaque.isdisjoint(parents(name))]:
            del self._whiteouts_made[name]
            parent, base = self._enter(name)
            found = _lstat(base, parent)
            if found is not None and is_whiteout(found):
                os.unlink(base, dir_fd=parent)

    def _link_source(self, member: tarfile.TarInfo, name: str) -> tuple[int, bytes, bool]:
        """The target of a hard link: its open directory, its name, and whether it is the link itself."""
        target = normalize(member.linkname)
        if not target:
            raise InvalidLayer(f"{name!r} is a link to the root")
        directory, base = posixpath.split(target)
        try:
            source = open_directory(self._root, encode(directory) or b".")
            found = os.stat(encode(base), dir_fd=source, follow_symlinks=False)
        except FileNotFoundError as error:
            raise InvalidLayer(f"{name!r} is a link to {target!r}, which is not in the layer") from error
        parent, own = self._enter(name)
        there = _lstat(own, parent)
        same = there is not None and (there.st_dev, there.st_ino) == (found.st_dev, found.st_ino)
        if stat.S_ISDIR(found.st_mode) or stat.S_ISCHR(found.st_mode):
            os.close(source)
            raise InvalidLayer(f"{name!r} is a link to {target!r}, which is not a file")
        return source, encode(base), same

    def _enter(self, name: str) -> tuple[int, bytes]:
        """Open the parent directory of a path, and create it if need be. Returns it, and the last part."""
        directory, _, base = name.rpartition("/")
        wanted = encode(directory)
        if wanted != self._parent_name:
            if name.count("/") > DEPTH_MAX or len(wanted) > PATH_BYTES_MAX:
                raise InvalidLayer(f"the path {name[:200]!r}… is too deep")
            self.close()
            self._parent = self._open(wanted)
            self._parent_name = wanted
        return self._parent, encode(base)

    def _open(self, wanted: bytes) -> int:
        if not wanted:
            return os.dup(self._root)
        try:
            return open_directory(self._root, wanted)
        except (FileNotFoundError, NotADirectoryError):
            pass
        directory_above, _, base = wanted.rpartition(b"/")
        parent = self._open(directory_above)
        try:
            found = _lstat(base, parent)
            if found is not None and is_whiteout(found):
                os.unlink(base, dir_fd=parent)
            os.mkdir(base, 0o755, dir_fd=parent)
            directory = os.open(base, DIRECTORY | os.O_NOFOLLOW, dir_fd=parent)
            os.fchmod(directory, 0o755)  # independent of our umask
            if found is not None:
                os.setxattr(directory, OPAQUE, b"y")
            return directory
        except FileExistsError as error:  # a dangling link
            raise InvalidLayer(f"{wanted!r} is used as a directory, but is not one") from error
        finally:
            os.close(parent)

    def _replace(self, parent: int, base: bytes, make: Callable[[], T]) -> T:
        """Create an entry, in place of one that an earlier member may have created."""
        try:
            return make()
        except FileExistsError:
            self._clear(parent, base)
            return make()

    def _clear(self, parent: int, base: bytes) -> None:
        """Remove an entry that an earlier member created."""
        found = _lstat(base, parent)
        if found is None:
            return
        if stat.S_ISDIR(found.st_mode):
            shutil.rmtree(base, dir_fd=parent)
        else:
            os.unlink(base, dir_fd=parent)

    def _apply_metadata(self, file: int, member: tarfile.TarInfo) -> None:
        os.fchown(file, member.uid, member.gid)
        os.fchmod(file, member.mode & 0o7777)
        for key, value in member.pax_headers.items():
            name = key.removeprefix("SCHILY.xattr.")
            own = name.startswith("user.") and not name.startswith("user.overlay.")
            if name != key and (own or name in ACL_ATTRIBUTES):
                with contextlib.suppress(OSError):  # too large for this file system: tar ignores that too
                    os.setxattr(file, encode(name), encode(value))

    @staticmethod
    def _set_time(base: bytes, parent: int, member: tarfile.TarInfo) -> None:
        os.utime(base, ns=(_nanoseconds(member),) * 2, dir_fd=parent, follow_symlinks=False)

    def finish(self) -> None:
        """Set the times of directories. Last, since adding an entry changes them."""
        if self._opaque:
            self._remove_useless_whiteouts()
        self.close()
        for name, when in self._times.items():
            with contextlib.suppress(OSError):  # a later member may have replaced it
                directory = open_directory(self._root, name)
                try:
                    os.utime(directory, ns=(when, when))
                finally:
                    os.close(directory)


def _lstat(base: bytes, parent: int) -> os.stat_result | None:
    try:
        return os.stat(base, dir_fd=parent, follow_symlinks=False)
    except FileNotFoundError:
        return None


def _nanoseconds(member: tarfile.TarInfo) -> int:
    seconds, _, rest = member.pax_headers.get("mtime", "").partition(".")
    if seconds.isdecimal() and rest.isdecimal():  # a float has too few digits
        when = int(seconds) * 1_000_000_000 + int(f"{rest:0<9}"[:9])
    else:
        when = int(member.mtime * 1_000_000_000)
    return max(0, min(when, 1 << 62))

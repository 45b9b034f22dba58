"""A layer's tar becomes a directory, in the form that overlayfs wants.

Layers come from strangers. Every name is resolved by the kernel inside the directory (openat2), so neither
``..`` nor links, nor links through links, lead out. What would give the layer a meaning of its own to the
overlay or to the host does not survive: device nodes, attributes other than ``user.*``, those of overlayfs.
Whiteouts become overlayfs' own: ``.wh.name`` a character device 0/0, ``.wh..wh..opq`` an attribute.
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

from dutyfree.engine.images.archive_paths import DEPTH, DIRECTORY, NAME_BYTES, above, encode, inside, resolve
from dutyfree.engine.images.streams import InvalidLayer, ahead, hashed
from dutyfree.engine.images.tar_reader import ForwardReader, members
from dutyfree.engine.store.cancel import CancelToken
from dutyfree.engine.store.overlay import ACL_ATTRIBUTES, OPAQUE, is_whiteout

WHITEOUT = ".wh."
OPAQUE_MARK = ".wh..wh..opq"

LARGEST = 64 << 30
"""Bytes of one layer, unpacked."""
MEMBERS = 1 << 22
_IDS = 1 << 32

_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC

_NOWHERE = (
    errno.ELOOP,
    errno.ENOTDIR,
    errno.ENAMETOOLONG,
    errno.EXDEV,
    errno.EMLINK,
    errno.EINVAL,
    errno.EFBIG,
)

T = TypeVar("T")


class Unpacked(NamedTuple):
    diff_id: str
    size: int
    """Bytes on the disk, roughly."""
    files: int
    left_out: int
    """Device nodes."""
    hiding: tuple[str, ...] = ()
    """Directories that hold whiteouts."""


def unpack(
    pieces: Iterator[bytes],
    root: int,
    *,
    limit: int = LARGEST,
    whiteouts: bool = True,
    cancel: CancelToken | None = None,
) -> Unpacked:
    """Unpack a tar into the empty directory that ``root`` is open at.

    The pieces are made by a thread of their own. Raises InvalidLayer for a layer that is broken or hostile,
    OSError of the disk, Cancelled, and what making the pieces raises; ``cancel`` is set if not all were made.
    """
    cancel = cancel or CancelToken()
    digest = hashlib.sha256()
    target = _Target(root, whiteouts)
    try:
        with ahead(hashed(pieces, digest), cancel) as made:
            stream = ForwardReader(made, limit, cancel)
            if stream.peek():  # layers that change nothing are sometimes no tar, but nothing at all
                for member in members(stream):
                    target.add(member, stream)
            stream.finish()
        target.finish()
    except (tarfile.TarError, ValueError, OverflowError, EOFError, RecursionError) as error:
        raise InvalidLayer(f"it is no tar that can be unpacked: {error}") from error
    except OSError as error:
        if error.errno in _NOWHERE:
            raise InvalidLayer(f"one of its names leads nowhere: {error}") from error
        raise
    finally:
        target.close()
    return Unpacked(f"sha256:{digest.hexdigest()}", target.size, target.files, target.left_out, target.hiding)


class _Target:
    def __init__(self, root: int, whiteouts: bool) -> None:
        self._root = root
        self._whiteouts = whiteouts
        self._parent_name: bytes | None = None
        self._parent = -1
        self._times: dict[bytes, int] = {}
        self._opaque: set[str] = set()
        self._whited: dict[str, None] = {}
        self._count = 0
        self.size = self.files = self.left_out = 0

    def close(self) -> None:
        if self._parent >= 0:
            os.close(self._parent)
            self._parent, self._parent_name = -1, None

    def add(self, member: tarfile.TarInfo, stream: ForwardReader) -> None:
        self._count += 1
        if self._count > MEMBERS:
            raise InvalidLayer(f"it has more than {MEMBERS} members")
        if not (0 <= member.uid < _IDS - 1 and 0 <= member.gid < _IDS - 1):
            raise InvalidLayer(f"{member.name!r} belongs to no possible user")
        name = inside(member.name)
        base = name.rpartition("/")[2]
        if self._whiteouts and base.startswith(WHITEOUT):
            self._hide(name, base)
        elif not name:
            if member.isdir():
                self._dress(self._root, member)
                self._times[b"."] = _nanoseconds(member)
        else:
            self._make(name, member, stream)

    def _make(self, name: str, member: tarfile.TarInfo, stream: ForwardReader) -> None:
        parent, base = self._enter(name)
        if member.isdir():
            self._directory(parent, base, name, member)
            return
        if member.isdev() and not member.isfifo():
            self.left_out += 1
            return
        if not (member.isreg() or member.issym() or member.islnk() or member.isfifo()):
            raise InvalidLayer(f"{name!r} is of a kind that is not known")
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
            self._anew(parent, base, lambda: os.symlink(encode(member.linkname), base, dir_fd=parent))
            os.chown(base, member.uid, member.gid, dir_fd=parent, follow_symlinks=False)
            self._stamp(base, parent, member)
        elif member.isfifo():
            self._anew(parent, base, lambda: os.mkfifo(base, 0o600, dir_fd=parent))
            os.chown(base, member.uid, member.gid, dir_fd=parent, follow_symlinks=False)
            os.chmod(base, member.mode & 0o7777, dir_fd=parent)
            self._stamp(base, parent, member)
        else:
            self._file(parent, base, member, stream)

    def _file(self, parent: int, base: bytes, member: tarfile.TarInfo, stream: ForwardReader) -> None:
        file = self._anew(parent, base, lambda: os.open(base, _NEW, 0o600, dir_fd=parent))
        try:
            # What typeshed takes for a number are the pieces of a file with holes.
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
                        raise InvalidLayer("it ends in the middle")
                    _write(file, piece)
                    size -= len(piece)
                    written += len(piece)
            if holes is not None:
                os.ftruncate(file, member.size)
            self.size += (written + 4095) & ~4095
            self._dress(file, member)
            os.utime(file, ns=(_nanoseconds(member),) * 2)
        finally:
            os.close(file)

    def _directory(self, parent: int, base: bytes, name: str, member: tarfile.TarInfo) -> None:
        opaque = False
        found = _lstat(base, parent)
        if found is None or not stat.S_ISDIR(found.st_mode):
            # In the place of a whiteout it hides what lies below it.
            opaque = found is not None and is_whiteout(found)
            self._clear(parent, base)
            os.mkdir(base, 0o755, dir_fd=parent)
            self.size += 4096
            self.files += 1
        directory = os.open(base, DIRECTORY | os.O_NOFOLLOW, dir_fd=parent)
        try:
            self._dress(directory, member)
            if opaque:
                os.setxattr(directory, OPAQUE, b"y")
        finally:
            os.close(directory)
        self._times[encode(name)] = _nanoseconds(member)

    def _hide(self, name: str, base: str) -> None:
        parent, _ = self._enter(name)
        directory = name.rpartition("/")[0]
        if base == OPAQUE_MARK:
            os.setxattr(parent, OPAQUE, b"y")
            self._opaque.add(directory)
            return
        if base.startswith(WHITEOUT * 2):
            return  # the bookkeeping of aufs
        hidden = encode(base.removeprefix(WHITEOUT))
        if hidden in (b"", b".", b".."):
            raise InvalidLayer(f"{name!r} hides no possible name")
        found = _lstat(hidden, parent)
        if found is None:
            os.mknod(hidden, stat.S_IFCHR, 0, dir_fd=parent)
            self._whited[f"{directory}/{base.removeprefix(WHITEOUT)}".lstrip("/")] = None
        elif stat.S_ISDIR(found.st_mode):
            # Its own directory of that name stays, and what lies below it goes.
            own = os.open(hidden, DIRECTORY | os.O_NOFOLLOW, dir_fd=parent)
            os.setxattr(own, OPAQUE, b"y")
            os.close(own)

    @property
    def hiding(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name.rpartition("/")[0] for name in self._whited))

    def _unhide(self) -> None:
        """In a directory that hides all that lies below it, overlayfs would list a whiteout like a file."""
        for name in [name for name in self._whited if not self._opaque.isdisjoint(above(name))]:
            del self._whited[name]
            parent, base = self._enter(name)
            found = _lstat(base, parent)
            if found is not None and is_whiteout(found):
                os.unlink(base, dir_fd=parent)

    def _link_source(self, member: tarfile.TarInfo, name: str) -> tuple[int, bytes, bool]:
        """The directory and the name of what a hard link names; and whether that is the link itself."""
        target = inside(member.linkname)
        if not target:
            raise InvalidLayer(f"{name!r} is a link to the root")
        directory, base = posixpath.split(target)
        try:
            source = resolve(self._root, encode(directory) or b".")
            found = os.stat(encode(base), dir_fd=source, follow_symlinks=False)
        except FileNotFoundError as error:
            raise InvalidLayer(f"{name!r} is a link to {target!r}, which is not in the layer") from error
        parent, own = self._enter(name)
        there = _lstat(own, parent)
        same = there is not None and (there.st_dev, there.st_ino) == (found.st_dev, found.st_ino)
        if stat.S_ISDIR(found.st_mode) or stat.S_ISCHR(found.st_mode):
            os.close(source)
            raise InvalidLayer(f"{name!r} is a link to {target!r}, which is no file")
        return source, encode(base), same

    def _enter(self, name: str) -> tuple[int, bytes]:
        """The directory that a name lies in, made if need be, and the name's last part."""
        directory, _, base = name.rpartition("/")
        wanted = encode(directory)
        if wanted != self._parent_name:
            if name.count("/") > DEPTH or len(wanted) > NAME_BYTES:
                raise InvalidLayer(f"{name[:200]!r}… lies too deep")
            self.close()
            self._parent = self._open(wanted)
            self._parent_name = wanted
        return self._parent, encode(base)

    def _open(self, wanted: bytes) -> int:
        if not wanted:
            return os.dup(self._root)
        try:
            return resolve(self._root, wanted)
        except (FileNotFoundError, NotADirectoryError):
            pass
        above, _, base = wanted.rpartition(b"/")
        parent = self._open(above)
        try:
            found = _lstat(base, parent)
            if found is not None and is_whiteout(found):
                os.unlink(base, dir_fd=parent)
            os.mkdir(base, 0o755, dir_fd=parent)
            directory = os.open(base, DIRECTORY | os.O_NOFOLLOW, dir_fd=parent)
            os.fchmod(directory, 0o755)  # whatever our umask is
            if found is not None:
                os.setxattr(directory, OPAQUE, b"y")
            return directory
        except FileExistsError as error:  # a link that leads nowhere
            raise InvalidLayer(f"{wanted!r} is used as a directory, and is none") from error
        finally:
            os.close(parent)

    def _anew(self, parent: int, base: bytes, make: Callable[[], T]) -> T:
        """Make it, in the place of what an earlier member put there: rarely is there any."""
        try:
            return make()
        except FileExistsError:
            self._clear(parent, base)
            return make()

    def _clear(self, parent: int, base: bytes) -> None:
        """Remove what an earlier member put in the place of this one."""
        found = _lstat(base, parent)
        if found is None:
            return
        if stat.S_ISDIR(found.st_mode):
            shutil.rmtree(base, dir_fd=parent)
        else:
            os.unlink(base, dir_fd=parent)

    def _dress(self, file: int, member: tarfile.TarInfo) -> None:
        os.fchown(file, member.uid, member.gid)
        os.fchmod(file, member.mode & 0o7777)
        for key, value in member.pax_headers.items():
            name = key.removeprefix("SCHILY.xattr.")
            own = name.startswith("user.") and not name.startswith("user.overlay.")
            if name != key and (own or name in ACL_ATTRIBUTES):
                with contextlib.suppress(OSError):  # too large for this file system, as tar forgives it
                    os.setxattr(file, encode(name), encode(value))

    @staticmethod
    def _stamp(base: bytes, parent: int, member: tarfile.TarInfo) -> None:
        os.utime(base, ns=(_nanoseconds(member),) * 2, dir_fd=parent, follow_symlinks=False)

    def finish(self) -> None:
        """Directories get their times last, when nothing is put into them any more."""
        if self._opaque:
            self._unhide()
        self.close()
        for name, when in self._times.items():
            with contextlib.suppress(OSError):  # replaced by another member since
                directory = resolve(self._root, name)
                try:
                    os.utime(directory, ns=(when, when))
                finally:
                    os.close(directory)


def _lstat(base: bytes, parent: int) -> os.stat_result | None:
    try:
        return os.stat(base, dir_fd=parent, follow_symlinks=False)
    except FileNotFoundError:
        return None


def _write(file: int, data: memoryview) -> None:
    while data:
        data = data[os.write(file, data) :]


def _nanoseconds(member: tarfile.TarInfo) -> int:
    seconds, _, rest = member.pax_headers.get("mtime", "").partition(".")
    if seconds.isdecimal() and rest.isdecimal():  # a float is too short for it
        when = int(seconds) * 1_000_000_000 + int(f"{rest:0<9}"[:9])
    else:
        when = int(member.mtime * 1_000_000_000)
    return max(0, min(when, 1 << 62))

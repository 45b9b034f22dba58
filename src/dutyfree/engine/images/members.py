"""The members of a tar, read forwards: those with plain headers by ourselves, all others by tarfile.

Nearly all members of nearly all layers are plain: a name, numbers in octal, no extended header. Reading them
takes half of tarfile's time, which is a good part of an unpacking.
"""

from __future__ import annotations

import struct
import tarfile
from collections.abc import Iterator

from dutyfree.engine.images.streams import Forward

_BLOCK = 512
_FIELDS = struct.Struct("100s8s8s8s12s12s8s1s100s6s82x155s12x")
_PLAIN = (tarfile.REGTYPE, tarfile.LNKTYPE, tarfile.SYMTYPE, tarfile.DIRTYPE)
_MAGIC = (b"ustar\0", b"ustar ")


def members(stream: Forward) -> Iterator[tarfile.TarInfo]:
    """One after another; what of a member's contents was not read is passed over. Raises as tarfile does."""
    with tarfile.open(fileobj=stream, mode="r:", errorlevel=2) as tar:  # type: ignore[call-overload]
        member = tar.next()
        while member is not None:
            tar.members.clear()  # tarfile would keep them all
            yield member
            stream.seek(tar.offset)
            member = None if tar.pax_headers else _plain(stream, tar)
            member = member or tar.next()


def _plain(stream: Forward, tar: tarfile.TarFile) -> tarfile.TarInfo | None:
    """The next member, if its header is plain and whole in what is at hand: else nothing is taken."""
    block = stream.at_hand(_BLOCK)
    if len(block) < _BLOCK:
        return None
    name, mode, uid, gid, size, mtime, checksum, kind, target, magic, prefix = _FIELDS.unpack(block)
    if kind not in _PLAIN or magic not in _MAGIC:
        return None
    member = tarfile.TarInfo()
    try:
        if sum(block) - sum(checksum) + 8 * 0x20 != _octal(checksum):
            return None
        member.mode, member.uid, member.gid = _octal(mode), _octal(uid), _octal(gid)
        member.size, member.mtime = _octal(size), _octal(mtime)
    except ValueError:  # not octal, or broken: tarfile knows
        return None
    if member.size < 0:
        return None
    member.name = _text(prefix) + "/" + _text(name) if prefix[0] else _text(name)
    if kind == tarfile.DIRTYPE:
        member.name = member.name.rstrip("/")
    member.type, member.linkname = kind, _text(target)
    stream.seek(stream.tell() + _BLOCK)
    member.offset_data = stream.tell()
    blocks = (member.size + _BLOCK - 1) // _BLOCK if kind == tarfile.REGTYPE else 0
    tar.offset = member.offset_data + blocks * _BLOCK
    return member


def _octal(field: bytes) -> int:
    return int(field.partition(b"\0")[0].strip() or b"0", 8)


def _text(field: bytes) -> str:
    return field.partition(b"\0")[0].decode("utf-8", "surrogateescape")

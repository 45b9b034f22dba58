"""Pack and unpack: nothing is lost or added, and the same tree gives the same bytes."""

from __future__ import annotations

import io
import os
import socket
import stat
import struct
import subprocess
import tarfile
from pathlib import Path

import pytest

from dutyfree.engine.images.pack import pack
from dutyfree.engine.images.streams import InvalidLayer
from dutyfree.engine.images.unpack import unpack
from dutyfree.engine.store.overlay import OPAQUE

pytestmark = pytest.mark.root("layers have many owners")


def packed(tree: Path) -> bytes:
    root = os.open(tree, os.O_RDONLY | os.O_DIRECTORY)
    try:
        return b"".join(pack(root))
    finally:
        os.close(root)


def unpacked(data: bytes, target: Path) -> Path:
    target.mkdir()
    root = os.open(target, os.O_RDONLY | os.O_DIRECTORY)
    try:
        unpack(iter([data[i : i + 7001] for i in range(0, len(data), 7001)]), root)
    finally:
        os.close(root)
    return target


def described(tree: Path) -> dict[str, tuple[object, ...]]:
    """All metadata and contents of a tree. Hard links are given as their first name."""
    found: dict[str, tuple[object, ...]] = {}
    first: dict[int, str] = {}
    paths = [tree, *sorted(tree.rglob("*"))]
    for path in paths:
        info = path.lstat()
        name = os.fsencode(path.relative_to(tree)).hex()
        attributes = {n: os.getxattr(path, n) for n in os.listxattr(path, follow_symlinks=False)}
        kind = stat.S_IFMT(info.st_mode)
        content: object = None
        if stat.S_ISREG(info.st_mode):
            content = (path.read_bytes(), info.st_size - info.st_blocks * 512 > 1 << 20)
        elif stat.S_ISLNK(info.st_mode):
            content = os.readlink(path)
        same = first.setdefault(info.st_ino, name) if not stat.S_ISDIR(info.st_mode) else name
        if stat.S_ISCHR(info.st_mode):  # a whiteout has no other metadata
            found[name] = (kind, info.st_rdev)
            continue
        mode, owner = stat.S_IMODE(info.st_mode), (info.st_uid, info.st_gid)
        found[name] = (kind, mode, owner, info.st_mtime_ns, attributes, content, same)
    return found


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    root = tmp_path / "tree"
    (root / "usr/share/deep").mkdir(parents=True)
    (root / "usr/share/deep/file").write_bytes(os.urandom(3_000_001))
    os.link(root / "usr/share/deep/file", root / "usr/another")
    (root / "empty").touch()
    (root / "link").symlink_to("a/" + "long/" * 60)
    (root / ("n" * 200)).write_text("a long name")
    (root / ("d" * 120) / ("e" * 120)).mkdir(parents=True)
    (root / os.fsdecode(b"no\xffutf8\nat all")).write_text("odd")
    os.mkfifo(root / "pipe")
    (root / "pipe").chmod(0o640)
    with open(root / "sparse", "wb") as file:
        file.truncate(40_000_000)
        file.seek(10_000_000)
        file.write(b"in the middle")
    with open(root / "hole", "wb") as file:
        file.truncate(20_000_000)
    os.mknod(root / "usr/gone", stat.S_IFCHR, 0)
    (root / "opaque").mkdir()
    os.setxattr(root / "opaque", OPAQUE, b"y")
    (root / "opaque/new").write_text("new")
    os.setxattr(root / "usr", "user.note", b"bytes\0\xff=\n")
    os.setxattr(root / "empty", "user.empty", b"")
    (root / "set").write_text("id")
    os.chown(root / "set", 70_000, 3_000_000)
    (root / "set").chmod(0o4711)
    os.chown(root / "link", 5, 6, follow_symlinks=False)
    entries = ((1, 7, -1), (2, 6, 7), (4, 1, -1), (0x10, 7, -1), (0x20, 1, -1))  # user 7 may read and write
    access = struct.pack("<I", 2) + b"".join(struct.pack("<HHi", *entry) for entry in entries)
    os.setxattr(root / "set", "system.posix_acl_access", access)
    os.utime(root / "set", ns=(1, 1_234_567_890_123_456_789))
    os.utime(root / "usr", ns=(1, 999_999_999))
    os.utime(root, ns=(1, 5_000_000_000))
    return root


def test_a_tree_comes_back_as_it_was(tree: Path, tmp_path: Path) -> None:
    data = packed(tree)
    copy = unpacked(data, tmp_path / "copy")
    assert described(copy) == described(tree)
    assert packed(copy) == data


def test_other_programs_read_it(tree: Path, tmp_path: Path) -> None:
    (tmp_path / "layer.tar").write_bytes(packed(tree))
    listed = subprocess.run(
        ["tar", "-tf", tmp_path / "layer.tar"], check=True, capture_output=True, env={"LC_ALL": "C"}
    )
    assert b"usr/.wh.gone" in listed.stdout
    assert b"opaque/.wh..wh..opq" in listed.stdout
    with tarfile.open(fileobj=io.BytesIO(packed(tree))) as tar:
        assert tar.getmember("usr/share/deep/file").islnk()
        assert tar.getmember("sparse").size == 40_000_000


def test_what_no_tar_can_tell_is_refused(tmp_path: Path) -> None:
    for name in (".wh.file", ".wh..wh..opq"):
        root = tmp_path / f"tree{name}"
        root.mkdir()
        (root / name).touch()
        with pytest.raises(InvalidLayer, match="rename it"):
            packed(root)
    root = tmp_path / "redirecting"
    (root / "moved").mkdir(parents=True)
    os.setxattr(root / "moved", "trusted.overlay.redirect", b"/usr")
    with pytest.raises(InvalidLayer, match="refers to others"):
        packed(root)


def test_sockets_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "tree").mkdir()
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "tree/socket"))
    assert list(unpacked(packed(tmp_path / "tree"), tmp_path / "copy").iterdir()) == []

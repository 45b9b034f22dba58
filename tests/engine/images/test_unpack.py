"""Untrusted layers: what they must not do, and what must be unpacked correctly."""

from __future__ import annotations

import contextlib
import gzip
import io
import os
import random
import stat
import tarfile
import tracemalloc
from pathlib import Path

import pytest
from backports import zstd

from dutyfree.engine.images import streams
from dutyfree.engine.images.streams import InvalidLayer
from dutyfree.engine.images.tar_reader import ForwardReader, members
from dutyfree.engine.images.unpack import UnpackResult, unpack
from dutyfree.engine.store.cancel import CancelToken
from dutyfree.engine.store.overlay import OPAQUE
from tests.engine.images.composing import digest, directory, hard, link, member, tar

pytestmark = pytest.mark.root("layers hold files of many owners")


def into(root: Path, data: bytes, *, limit: int = 1 << 30, whiteouts: bool = True) -> UnpackResult:
    root.mkdir(exist_ok=True)
    descriptor = os.open(root, os.O_RDONLY)
    try:
        pieces = streams.decompress(io.BytesIO(data))
        return unpack(pieces, descriptor, limit=limit, whiteouts=whiteouts)
    finally:
        os.close(descriptor)


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """A directory that no layer may touch."""
    secret = tmp_path / "outside"
    secret.mkdir()
    (secret / "file").write_text("secret")
    return secret


def untouched(outside: Path) -> bool:
    return (outside / "file").read_text() == "secret" and os.listdir(outside) == ["file"]


def test_what_a_layer_holds_is_what_comes_out(tmp_path: Path) -> None:
    old = os.umask(0o077)
    try:
        data = tar(
            directory("./", 0o751, uid=3),
            directory("d", 0o2775, uid=12, gid=34, mtime=1_000_000),
            member("d/f", b"text", mode=0o4711, uid=70000, gid=5, mtime=1_234_567),
            hard("d/hard", "d/f"),
            link("d/l", "/etc/passwd", uid=7, mtime=5),
            link("e", "d"),
            member("made/by/need", b""),
            member("pipe", type=tarfile.FIFOTYPE, mode=0o622),
            member("null", type=tarfile.CHRTYPE, devmajor=1, devminor=3),
            member("disk", type=tarfile.BLKTYPE, devmajor=8),
        )
        done = into(tmp_path / "x", data)
    finally:
        os.umask(old)
    root = tmp_path / "x"
    assert done.diff_id == digest(data)
    assert done.left_out == 2
    assert sorted(os.listdir(root)) == ["d", "e", "made", "pipe"]
    assert (root.stat().st_uid, stat.S_IMODE(root.stat().st_mode)) == (3, 0o751)
    found = (root / "d").stat()
    assert (found.st_uid, found.st_gid, stat.S_IMODE(found.st_mode)) == (12, 34, 0o2775)
    assert found.st_mtime == 1_000_000
    found = (root / "d/f").stat()
    assert (found.st_uid, stat.S_IMODE(found.st_mode), found.st_nlink) == (70000, 0o4711, 2)
    assert found.st_mtime == 1_234_567
    assert os.readlink(root / "d/l") == "/etc/passwd"
    assert ((root / "d/l").lstat().st_uid, (root / "d/l").lstat().st_mtime) == (7, 5)
    assert stat.S_IMODE((root / "made/by").stat().st_mode) == 0o755
    assert stat.S_IMODE((root / "pipe").stat().st_mode) == 0o622


@pytest.mark.parametrize("names", [["../out"], ["a/../../out"], ["./../out"], ["/../out"], ["..", "x"]])
def test_names_that_lead_out_are_refused(tmp_path: Path, names: list[str]) -> None:
    with pytest.raises(InvalidLayer, match="leads out"):
        into(tmp_path / "x", tar(*[member(name, b"evil") for name in names]))
    assert not (tmp_path / "out").exists()


def test_absolute_names_stay_inside(tmp_path: Path) -> None:
    into(tmp_path / "x", tar(member("/tmp/dutyfree-absolute", b"evil"), member("//a/./b//c", b"1")))
    assert (tmp_path / "x/tmp/dutyfree-absolute").read_bytes() == b"evil"
    assert (tmp_path / "x/a/b/c").read_bytes() == b"1"
    assert not Path("/tmp/dutyfree-absolute").exists()


@pytest.mark.parametrize(
    "up", ["{outside}", "../outside", "../../../../../../..{outside}", "self/../../outside"]
)
def test_nothing_is_written_through_a_link(tmp_path: Path, outside: Path, up: str) -> None:
    target = up.format(outside=outside)
    members = [
        link("self", "."),
        link("way", target),
        member("way/file", b"evil"),
        member("way/new", b"evil"),
    ]
    with contextlib.suppress(InvalidLayer):
        into(tmp_path / "x", tar(*members))
    assert untouched(outside)


def test_links_through_links_stay_inside(tmp_path: Path, outside: Path) -> None:
    members = [
        directory("a"),
        directory("outside"),
        link("a/up", ".."),
        link("b", "a/up/../../../../outside"),
        member("b/file", b"evil"),
    ]
    into(tmp_path / "x", tar(*members))
    assert (tmp_path / "x/outside/file").read_bytes() == b"evil"
    assert untouched(outside)


def test_a_file_replaces_a_link_and_does_not_follow_it(tmp_path: Path, outside: Path) -> None:
    into(tmp_path / "x", tar(link("f", str(outside / "file")), member("f", b"mine")))
    assert (tmp_path / "x/f").read_bytes() == b"mine"
    assert not (tmp_path / "x/f").is_symlink()
    assert untouched(outside)


def test_a_directory_replaces_a_link_and_does_not_dress_its_target(tmp_path: Path, outside: Path) -> None:
    before = outside.stat()
    into(
        tmp_path / "x", tar(link("d", str(outside)), directory("d", 0o777, uid=5), member("d/file", b"evil"))
    )
    assert (outside.stat().st_mode, outside.stat().st_uid) == (before.st_mode, before.st_uid)
    assert untouched(outside)


@pytest.mark.parametrize("target", ["../outside/file", "/../outside/file", "a/../../outside/file"])
def test_hard_links_that_lead_out_are_refused(tmp_path: Path, outside: Path, target: str) -> None:
    with pytest.raises(InvalidLayer):
        into(tmp_path / "x", tar(hard("f", target), member("f", b"evil")))
    assert untouched(outside)


def test_hard_links_through_links_stay_inside(tmp_path: Path, outside: Path) -> None:
    members = [link("way", str(outside)), hard("f", "way/file"), member("f", b"evil")]
    with pytest.raises(InvalidLayer):
        into(tmp_path / "x", tar(*members))
    assert untouched(outside)
    assert (outside / "file").stat().st_nlink == 1


def test_a_hard_link_to_a_link_is_a_link(tmp_path: Path, outside: Path) -> None:
    into(tmp_path / "x", tar(link("l", str(outside / "file")), hard("h", "l")))
    assert (tmp_path / "x/h").is_symlink()
    assert (outside / "file").stat().st_nlink == 1


def test_a_hard_link_to_itself_changes_nothing(tmp_path: Path) -> None:
    into(tmp_path / "x", tar(member("f", b"1"), hard("f", "f"), hard("./f", "f")))
    assert (tmp_path / "x/f").read_bytes() == b"1"


@pytest.mark.parametrize("target", ["missing", "d", "gone", ""])
def test_hard_links_to_no_file_are_refused(tmp_path: Path, target: str) -> None:
    with pytest.raises(InvalidLayer):
        into(tmp_path / "x", tar(directory("d"), member(".wh.gone"), hard("f", target)))


def test_whiteouts_become_those_of_the_overlay(tmp_path: Path) -> None:
    members = [
        directory("d"),
        member("d/.wh.file"),
        member("d/.wh..wh.plnk", b"bookkeeping of aufs"),
        directory("o"),
        member("o/.wh..wh..opq"),
        member("o/new", b"1"),
        member("x/.wh.deep"),
    ]
    into(tmp_path / "x", tar(*members))
    root = tmp_path / "x"
    for name in ("d/file", "x/deep"):
        found = (root / name).lstat()
        assert (stat.S_ISCHR(found.st_mode), found.st_rdev) == (True, 0)
    assert os.listdir(root / "d") == ["file"]
    assert os.getxattr(root / "o", OPAQUE) == b"y"
    assert os.listdir(root / "o") == ["new"]


def test_a_name_that_is_hidden_and_made_in_one_layer_is_there(tmp_path: Path) -> None:
    """In either order. The directory hides the one in the lower layer."""
    members = [
        member(".wh.a"),
        member("a", b"1"),
        member("b", b"2"),
        member(".wh.b"),
        member(".wh.c"),
        directory("c"),
        directory("d"),
        member(".wh.d"),
        member(".wh.e"),
        member("e/f", b"3"),
    ]
    into(tmp_path / "x", tar(*members))
    root = tmp_path / "x"
    assert ((root / "a").read_bytes(), (root / "b").read_bytes(), (root / "e/f").read_bytes()) == (
        b"1",
        b"2",
        b"3",
    )
    for name in ("c", "d", "e"):
        assert os.getxattr(root / name, OPAQUE) == b"y"


@pytest.mark.parametrize("name", [".wh.", ".wh..", ".wh...", "d/.wh..."])
def test_whiteouts_of_no_name_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(InvalidLayer):
        into(tmp_path / "x", tar(directory("d"), member(name)))


def test_whiteouts_through_links_stay_inside(tmp_path: Path, outside: Path) -> None:
    for name in ("way/.wh.file", "way/.wh..wh..opq"):
        with pytest.raises(InvalidLayer):
            into(tmp_path / "x", tar(link("way", str(outside)), member(name)))
        assert untouched(outside)
        assert OPAQUE not in os.listxattr(outside)


def test_a_root_file_system_may_hold_such_names(tmp_path: Path) -> None:
    into(tmp_path / "x", tar(member(".wh.file", b"1")), whiteouts=False)
    assert (tmp_path / "x/.wh.file").read_bytes() == b"1"


def test_attributes_with_a_meaning_do_not_survive(tmp_path: Path) -> None:
    listed = """
        trusted.overlay.redirect trusted.overlay.opaque trusted.overlay.metacopy
        trusted.overlay.overlay.opaque user.overlay.opaque user.overlay.redirect security.capability
        system.posix_acl_access trusted.other
    """
    names = listed.split()
    headers = {f"SCHILY.xattr.{name}": "/etc" for name in names} | {"SCHILY.xattr.user.kept": "v\udcff\n="}
    members = [directory("d", pax_headers=headers), member("f", b"1", pax_headers=headers)]
    into(tmp_path / "x", tar(*members))
    for name in ("d", "f"):
        assert os.listxattr(tmp_path / "x" / name) == ["user.kept"]
        assert os.getxattr(tmp_path / "x" / name, "user.kept") == b"v\xff\n="


def test_an_overlay_device_cannot_be_made_a_whiteout(tmp_path: Path) -> None:
    """A device node 0/0 in the tar is left out, like other devices."""
    into(tmp_path / "x", tar(member("f", type=tarfile.CHRTYPE, devmajor=0, devminor=0)))
    assert os.listdir(tmp_path / "x") == []


def test_files_with_holes_keep_them(tmp_path: Path) -> None:
    source = tmp_path / "holes"
    with open(source, "wb") as file:
        file.write(b"begin")
        file.seek(64 << 20)
        file.write(b"end")
    for form in ("gnu", "pax"):
        archive = tmp_path / f"{form}.tar"
        assert os.system(f"tar --sparse --format={form} -C {tmp_path} -cf {archive} holes") == 0
        assert archive.stat().st_size < 1 << 20
        into(tmp_path / form, archive.read_bytes())
        found = tmp_path / form / "holes"
        assert found.stat().st_blocks < 1000
        assert found.read_bytes() == source.read_bytes()


def test_bombs_are_bounded(tmp_path: Path) -> None:
    bomb = gzip.compress(tar(member("zero", bytes(64 << 20))))
    assert len(bomb) < 1 << 20
    with pytest.raises(InvalidLayer, match="grows beyond"):
        into(tmp_path / "x", bomb, limit=1 << 20)
    assert sum(path.stat().st_size for path in (tmp_path / "x").rglob("*")) <= 1 << 20


@pytest.mark.parametrize("kind", [tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.GNUTYPE_LONGNAME])
def test_a_header_that_would_fill_the_memory_is_refused(tmp_path: Path, kind: bytes) -> None:
    info = tarfile.TarInfo("header")
    info.type, info.size = kind, 1 << 32
    tracemalloc.start()
    try:
        with pytest.raises(InvalidLayer):
            into(tmp_path / "x", info.tobuf(tarfile.GNU_FORMAT) + bytes(4 << 20))
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()


def test_deep_trees_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidLayer):
        into(tmp_path / "x", tar(member("/".join("d" * 1000), b"1")))
    with pytest.raises(InvalidLayer):
        into(tmp_path / "y", tar(member("d" * 200 + "/" + "e" * 300, b"1")))
    # Each path is short, but leads deeper through a link.
    deep = "/".join("d" * 150)
    members = []
    for number in range(8):
        at = f"l{number}/" if number else ""
        members += [directory(f"{at}{deep}"), link(f"l{number + 1}", f"{at}{deep}")]
    with pytest.raises(InvalidLayer):
        into(tmp_path / "z", tar(*members))


@pytest.mark.parametrize("fields", [{"uid": 1 << 32}, {"gid": (1 << 32) - 1}, {"uid": 1 << 70}])
def test_impossible_owners_are_refused(tmp_path: Path, fields: dict[str, int]) -> None:
    with pytest.raises(InvalidLayer):
        into(tmp_path / "x", tar(member("f", b"1", **fields)))


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
@pytest.mark.parametrize("size", [512, 1000, 1 << 20])
def test_members_are_read_as_tarfile_reads_them(form: int, size: int) -> None:
    """Plain and other headers, within one piece of the stream or across two."""
    order = random.Random(form)
    kinds = [
        tarfile.REGTYPE,
        tarfile.DIRTYPE,
        tarfile.SYMTYPE,
        tarfile.LNKTYPE,
        tarfile.FIFOTYPE,
        tarfile.AREGTYPE,
    ]
    scratch = io.BytesIO()
    with tarfile.open(fileobj=scratch, mode="w", format=form) as archive:
        for number in range(300):
            name = "/".join(["d" * order.choice([1, 20, 60])] * order.randint(1, 3)) + f"/\xe4{number}"
            info = tarfile.TarInfo(name + "/" * order.randint(0, 1))
            info.type = order.choice(kinds)
            info.mode, info.uid, info.gid = (order.randrange(1 << 12) for _ in range(3))
            info.mtime = order.randrange(1 << 33)
            info.linkname = "t" * order.choice([1, 99, 100]) if info.type in kinds[2:4] else ""
            info.size = order.choice([0, 1, 511, 512, 513, 3000]) if info.type == tarfile.REGTYPE else 0
            if form == tarfile.PAX_FORMAT and number % 7 == 0:
                info.pax_headers = {"SCHILY.xattr.user.a": "b", "mtime": "1.5"}
            archive.addfile(info, io.BytesIO(order.randbytes(info.size)))
    data = scratch.getvalue()

    def seen(found: tarfile.TarInfo) -> tuple[object, ...]:
        fields = (found.name, found.type, found.mode, found.uid, found.gid, found.size, found.mtime)
        return (*fields, found.linkname, found.offset_data, found.pax_headers)

    pieces = (data[at : at + size] for at in range(0, len(data), size))
    ours = [seen(found) for found in members(ForwardReader(pieces, 1 << 30, CancelToken()))]
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        assert ours == [seen(found) for found in archive]
    assert len(ours) == 300


def test_what_is_broken_is_refused(tmp_path: Path) -> None:
    whole = tar(member("f", os.urandom(200_000)))
    for number, broken in enumerate(
        (
            whole[:100_000],
            gzip.compress(whole)[:100_000],
            gzip.compress(whole)[:-4] + b"abcd",
            zstd.compress(whole)[:100_000],
            b"\x1f\x8b" + bytes(100),
            b"no tar at all" * 100,
        )
    ):
        with pytest.raises(InvalidLayer):
            into(tmp_path / str(number), broken)


def test_every_compression(tmp_path: Path) -> None:
    import bz2
    import lzma

    data = tar(member("f", os.urandom(3 << 20)))
    packed = [
        data,
        gzip.compress(data),
        zstd.compress(data),
        bz2.compress(data),
        lzma.compress(data, preset=0),
    ]
    half = len(data) // 2
    packed += [make(data[:half]) + make(data[half:]) for make in (gzip.compress, zstd.compress)]
    packed.append(b"\x50\x2a\x4d\x18\x04\x00\x00\x00skip" + zstd.compress(data))
    for number, each in enumerate(packed):
        assert into(tmp_path / str(number), each).diff_id == digest(data)
    assert into(tmp_path / "nothing", b"").diff_id == digest(b"")

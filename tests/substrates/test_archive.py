"""Unpacking archives that an agent may have written: their size, their holes, and what makes no sense."""

from __future__ import annotations

import gzip
import io
import tarfile
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from dutyfree.contract.entries import Links
from dutyfree.contract.errors import ActionError, FileError
from dutyfree.substrates.local.archive import unpack

ALL_LINKS = Links("top", outside=True)


class Archive:
    """An archive in the making, whose top is the directory ``x``."""

    def __init__(self, form: int = tarfile.GNU_FORMAT) -> None:
        self._buffer = io.BytesIO()
        self._tar = tarfile.TarFile(fileobj=self._buffer, mode="w", format=form)
        self.add("x", tarfile.DIRTYPE)

    def add(
        self,
        name: str,
        kind: bytes = tarfile.REGTYPE,
        data: bytes = b"",
        link: str = "",
        headers: dict[str, str] | None = None,
    ) -> Archive:
        member = tarfile.TarInfo(name)
        member.type, member.size, member.linkname, member.mode = kind, len(data), link, 0o755
        member.pax_headers = headers or {}
        self._tar.addfile(member, io.BytesIO(data))
        return self

    def stream(self) -> io.BytesIO:
        self._tar.close()
        return io.BytesIO(self._buffer.getvalue())


def sparse(*segments: tuple[int, int], size: int, data: bytes) -> io.BytesIO:
    """A file of the old GNU format that says itself how large it is, and where its data is."""
    member = tarfile.TarInfo("x")
    member.type, member.size = tarfile.GNUTYPE_SPARSE, len(data)
    header = bytearray(member.tobuf(tarfile.GNU_FORMAT))
    for number, (offset, length) in enumerate(segments):
        header[386 + 24 * number : 410 + 24 * number] = tarfile.itn(offset, 12, tarfile.GNU_FORMAT) + (  # type: ignore[attr-defined]
            tarfile.itn(length, 12, tarfile.GNU_FORMAT)  # type: ignore[attr-defined]
        )
    header[482] = 0
    header[483:495] = tarfile.itn(size, 12, tarfile.GNU_FORMAT)  # type: ignore[attr-defined]
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return io.BytesIO(bytes(header) + data + bytes(1024))


def test_holes_stay_holes(tmp_path: Path) -> None:
    size = 3 << 30
    unpack(sparse((size - 512, 512), size=size, data=b"A" * 512), tmp_path / "file", ALL_LINKS)
    found = (tmp_path / "file").stat()
    assert found.st_size == size
    assert found.st_blocks * 512 < 1 << 20
    with open(tmp_path / "file", "rb") as file:
        assert file.read(4) == bytes(4)
        file.seek(size - 512)
        assert file.read() == b"A" * 512
    segments = ((512, 512), (2048, 512))
    unpack(sparse(*segments, size=4096, data=b"A" * 512 + b"B" * 512), tmp_path / "file", ALL_LINKS)
    expected = bytes(512) + b"A" * 512 + bytes(1024) + b"B" * 512 + bytes(1536)
    assert (tmp_path / "file").read_bytes() == expected


def test_what_is_too_large_is_refused(tmp_path: Path) -> None:
    hard_links = Archive().add("x/file", data=bytes(100_000))
    for number in range(20):
        hard_links.add(f"x/{number}", tarfile.LNKTYPE, link="x/file")
    claims = sparse((0, 512), size=2_000_000, data=bytes(512))
    empty = Archive()
    for number in range(1000):
        empty.add(f"x/{number}")
    for number, stream in enumerate((hard_links.stream(), claims, empty.stream())):
        with pytest.raises(FileError) as refused:
            unpack(stream, tmp_path / str(number), ALL_LINKS, largest=1_000_000)
        assert refused.value.kind == "too_large"
    assert not list(tmp_path.iterdir()), "nothing is left of it"


def test_members_are_not_kept_in_memory(tmp_path: Path) -> None:
    many = Archive()
    for number in range(5000):
        many.add(f"x/{number % 10}")
    stream = many.stream()
    tracemalloc.start()
    try:
        unpack(stream, tmp_path / "tree", ALL_LINKS)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(list((tmp_path / "tree").iterdir())) == 10
    assert peak < 1_000_000


BAD_MAP = {"GNU.sparse.map": "1,2,x", "GNU.sparse.major": "0", "GNU.sparse.minor": "1"}


def headers_first(headers: dict[str, str]) -> io.BytesIO:
    member = tarfile.TarInfo("x")
    member.pax_headers = headers
    return io.BytesIO(member.tobuf(tarfile.PAX_FORMAT) + bytes(1024))


NONSENSE: dict[str, Callable[[], io.BytesIO]] = {
    "empty": lambda: io.BytesIO(bytes(10240)),
    "compressed": lambda: io.BytesIO(gzip.compress(bytes(1 << 20))),
    "cut": lambda: io.BytesIO(Archive().add("x/f", data=bytes(4096)).stream().getvalue()[:2048]),
    "segments overlap": lambda: sparse((0, 512), (0, 512), size=4096, data=bytes(1024)),
    "segments beyond the end": lambda: sparse((0, 512), (8192, 512), size=4096, data=bytes(1024)),
    "no numbers": lambda: Archive(tarfile.PAX_FORMAT).add("x/f", headers=BAD_MAP).stream(),
    "no numbers at once": lambda: headers_first(BAD_MAP),
}


@pytest.mark.parametrize("name", NONSENSE)
def test_nonsense_is_an_error_of_the_archive(name: str, tmp_path: Path) -> None:
    with pytest.raises(tarfile.TarError):
        unpack(NONSENSE[name](), tmp_path / "target", ALL_LINKS)


IMPOSSIBLE: dict[str, Callable[[], Archive]] = {
    "a name with a NUL": lambda: Archive(tarfile.PAX_FORMAT).add("x/f", headers={"path": "x/a\0b"}),
    "a link with a NUL": lambda: Archive(tarfile.PAX_FORMAT).add(
        "x/f", tarfile.SYMTYPE, link="a", headers={"linkpath": "a\0b"}
    ),
    "an empty link": lambda: Archive().add("x/f", tarfile.SYMTYPE),
    "a long link": lambda: Archive().add("x/f", tarfile.SYMTYPE, link="a" * 5000),
    "a link in place of a directory": lambda: (
        Archive().add("x/a", tarfile.DIRTYPE).add("x/a/c", tarfile.SYMTYPE, link="b")
    ).add("x/a", tarfile.SYMTYPE, link="b"),
    "a link in place of the top": lambda: Archive().add("x", tarfile.SYMTYPE, link="b"),
    "a hard link to nothing": lambda: Archive().add("x/f", tarfile.LNKTYPE, link="x/nothing"),
    "a hard link to a directory": lambda: Archive().add("x/f", tarfile.LNKTYPE, link="x"),
    "a file in place of a directory": lambda: Archive().add("x/a", tarfile.DIRTYPE).add("x/a"),
    "a long name": lambda: Archive().add(f"x/{'a' * 5000}"),
}


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_files_that_cannot_exist_are_the_agents_fault(name: str, tmp_path: Path) -> None:
    with pytest.raises(ActionError):
        unpack(IMPOSSIBLE[name]().stream(), tmp_path / "target", ALL_LINKS)


def test_the_top_that_is_a_hard_link(tmp_path: Path) -> None:
    member = tarfile.TarInfo("x")
    member.type, member.linkname = tarfile.LNKTYPE, "y"
    with pytest.raises(ActionError):
        unpack(io.BytesIO(member.tobuf() + bytes(1024)), tmp_path / "target", ALL_LINKS)


def test_a_target_that_cannot_be_written_is_the_callers_fault(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(FileExistsError) as refused:
        unpack(Archive().stream(), tmp_path / "file", ALL_LINKS)
    assert not isinstance(refused.value, ActionError)
    assert (tmp_path / "file").is_file()

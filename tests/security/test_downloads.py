"""Downloads of hostile trees, in which links point to files of the owner."""

from __future__ import annotations

import os
import socket
import struct
import threading
from pathlib import Path, PurePosixPath

import pytest
from hypothesis import given
from hypothesis import strategies as some

from dutyfree.contract.entries import NAMED, Links, leads_out
from dutyfree.contract.errors import ActionError, CollectError
from dutyfree.engine.launcher.protocol import MEMBER
from dutyfree.engine.sandbox import tree_stream

NAMES = some.sampled_from(["a", "b", "c"])
PLACES = some.lists(NAMES, min_size=1, max_size=3).map("/".join)
LEADS = some.lists(some.sampled_from(["a", "b", "c", "..", ".", ""]), min_size=1, max_size=5).map("/".join)


def lead(root: dict[str, str], name: str) -> PurePosixPath | None:
    """Where the kernel would resolve a path in a tree at /x/y/z with these links; None if it gives up."""
    ahead, at, followed = name.split("/")[::-1], PurePosixPath("/x/y/z"), 0
    while ahead:
        part = ahead.pop()
        if part in ("", "."):
            continue
        at = at.parent if part == ".." else at / part
        below = str(at.relative_to("/x/y/z")) if at.is_relative_to("/x/y/z") else None
        if part != ".." and below in root:
            if (followed := followed + 1) > 40:
                return None
            at = at.parent
            ahead += root[below].split("/")[::-1]
    return at


@given(some.dictionaries(PLACES, LEADS, max_size=6))
def test_no_way_through_admitted_links_leads_out(wanted: dict[str, str]) -> None:
    admitted: dict[str, str] = {}
    for name, destination in wanted.items():
        above = [str(parent) for parent in PurePosixPath(name).parents]
        free = not any(place in wanted for place in above)  # nothing can be below a link
        if destination and free and not leads_out(name, destination):
            admitted[name] = destination
    for name in admitted:
        reached = lead(admitted, name)
        assert reached is None or reached.is_relative_to("/x/y/z"), (name, reached, admitted)


def member(name: str, mode: int, data: bytes) -> bytes:
    return MEMBER.pack(len(data), mode, len(name)) + name.encode() + data


LINK, DIRECTORY, FILE = 0o120777, 0o040755, 0o104755


def unpacked(target: Path, *members: bytes, outside: bool = False) -> Links:
    """A stream from a compromised PID 1."""
    ours, theirs = os.pipe()
    sent = b"".join(members) + MEMBER.pack(0, 0, 0)
    writer = threading.Thread(target=_write, args=(theirs, sent))
    writer.start()
    links = Links("tree", outside=outside)
    try:
        tree_stream.unpack(ours, target, links)
    finally:
        writer.join()
    return links


def _write(pipe: int, data: bytes) -> None:
    with open(pipe, "wb") as stream:
        try:
            stream.write(data)
            stream.flush()
        except BrokenPipeError:
            pass


def test_links_are_left_out_and_named(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("secret")
    hostile = [
        member("", DIRECTORY, b""),
        member("l", LINK, str(secret).encode()),
        member("m", LINK, b"../secret"),
    ]
    links = unpacked(tmp_path / "t", *hostile, member("n", LINK, b"x/../../secret"))
    assert links.left_out == ["l", "m", "n"]
    assert list((tmp_path / "t").iterdir()) == []
    assert unpacked(tmp_path / "t", *hostile, outside=True).left_out == []
    assert (tmp_path / "t" / "l").read_text() == "secret", "who asks for them has them"
    with pytest.raises(ActionError, match="is a link to"):
        unpacked(tmp_path / "top", member("", LINK, str(secret).encode()))
    assert not os.path.lexists(tmp_path / "top")


def test_a_link_that_is_replaced_by_a_directory(tmp_path: Path) -> None:
    """A link or a file at the target is replaced, never written through."""
    (tmp_path / "out").mkdir()
    (tmp_path / "t").mkdir()
    (tmp_path / "t" / "d").symlink_to(tmp_path / "out")
    unpacked(
        tmp_path / "t", member("", DIRECTORY, b""), member("d", DIRECTORY, b""), member("d/f", FILE, b"x")
    )
    assert list((tmp_path / "out").iterdir()) == []
    assert (tmp_path / "t" / "d" / "f").stat().st_mode & 0o7777 == 0o755
    for name in ("../f", "d/../../f", "/f", "d//f", "none/f", "d/."):
        with pytest.raises(CollectError):
            unpacked(tmp_path / "t", member("", DIRECTORY, b""), member(name, FILE, b"x"))


def test_more_links_than_are_named(tmp_path: Path) -> None:
    many = b"".join(member(f"l{number}", LINK, b"/") for number in range(NAMED + 10))
    assert len(unpacked(tmp_path / "t", member("", DIRECTORY, b""), many).left_out) == NAMED


def test_nonsense_in_the_pipe(tmp_path: Path) -> None:
    for nonsense in (b"", b"\xff" * 16, member("", LINK, b"a\0b"), struct.pack("=QII", 1 << 63, LINK, 0)):
        ours, theirs = socket.socketpair()
        theirs.sendall(nonsense)
        theirs.close()
        with pytest.raises((CollectError, OSError)):
            tree_stream.unpack(ours.detach(), tmp_path / "t", Links("tree", outside=False))
        assert not os.path.lexists(tmp_path / "t")

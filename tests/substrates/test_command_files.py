"""Edits by commands: with each program that a sandbox may have, and without any."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import anyio
import pytest

from dutyfree.contract import Observation
from dutyfree.contract.errors import EditError, FileError, RequestError, SpecialFile
from dutyfree.substrates.local.command import Commands
from dutyfree.substrates.local.command_files import FilesByCommands

pytestmark = pytest.mark.anyio

TOOLS = ("sh", "head", "cat", "chmod", "mkdir")
EDITORS = {"perl": shutil.which("perl"), "python3": sys.executable, "neither": None}


class Directory(FilesByCommands):
    """A directory of this host, with these tools only."""

    def __init__(self, root: Path, editor: str) -> None:
        self._root = root / "work"
        self._root.mkdir()
        self._tools = root / "tools"
        self._tools.mkdir()
        for name in TOOLS:
            (self._tools / name).symlink_to(str(shutil.which(name)))
        if program := EDITORS[editor]:
            (self._tools / editor).symlink_to(program)
        self._commands = Commands("edits", str(root))
        self.commands = 0
        self.expected = 1 if EDITORS[editor] else 3
        """The commands of the first edit: one that tells that there is no editor, then a read and a write."""

    @property
    def workdir(self) -> str:
        return str(self._root)

    async def run_tool(self, argv: tuple[str, ...], stdin: bytes | None = None) -> Observation:
        self.commands += 1
        return await self._commands.run(argv, cwd="/", env={"PATH": str(self._tools)}, stdin=stdin)


@pytest.fixture(params=list(EDITORS))
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> Directory:
    if request.param == "perl" and not EDITORS["perl"]:
        pytest.skip("there is no perl; to enable it: apt-get install perl-base")
    return Directory(tmp_path, request.param)


async def test_edits(directory: Directory) -> None:
    root = Path(directory.workdir)
    text = b"one\n\0two'\"$(x)\\n\xff\nthree"
    await anyio.Path(root / "file").write_bytes(text)
    await anyio.Path(root / "file").chmod(0o640)
    (root / "link").symlink_to("file")
    await directory.edit("link", b"\0two'\"$(x)\\n\xff\n", b"2\n\n")
    assert directory.commands == directory.expected
    assert await anyio.Path(root / "file").read_bytes() == b"one\n2\n\nthree"
    assert (root / "link").is_symlink()
    await directory.edit("file", b"three", b"")
    assert await anyio.Path(root / "file").read_bytes() == b"one\n2\n\n"


async def test_edits_that_do_not_fit(directory: Directory) -> None:
    file = anyio.Path(directory.workdir, "file")
    await file.write_bytes(b"a\nb a\n" + b"a\n" * 30 + b"aaa")
    with pytest.raises(EditError) as error:
        await directory.edit("file", b"a", b"x")
    assert (error.value.count, error.value.lines) == (35, (1, 2, *range(3, 17)))
    with pytest.raises(EditError) as error:
        await directory.edit("file", b"missing", b"x")
    assert (error.value.count, error.value.lines) == (0, ())
    with pytest.raises(RequestError):
        await directory.edit("file", b"", b"x")
    with pytest.raises(FileNotFoundError):
        await directory.edit("nowhere/file", b"a", b"x")
    with pytest.raises(IsADirectoryError):
        await directory.edit(".", b"a", b"x")
    with pytest.raises((SpecialFile, FileError)):
        await directory.edit("/dev/null", b"a", b"x")
    assert await file.read_bytes() == b"a\nb a\n" + b"a\n" * 30 + b"aaa"

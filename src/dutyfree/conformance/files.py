"""Files: one at a time, of any size and with any name."""

from __future__ import annotations

import hashlib
import os
import random
from shutil import SpecialFileError

import anyio.to_thread

from dutyfree.conformance import expect
from dutyfree.conformance.suite import at_once, in_sandbox
from dutyfree.conformance.trees import local_directory
from dutyfree.contract import Sandbox
from dutyfree.contract.errors import LimitError

HOSTILE = [
    "with space",
    " leading and trailing ",
    "new\nline",
    "tab\t",
    "it's",
    '"quoted"',
    "`id`",
    "$HOME",
    "$(id)",
    "-dash",
    "--",
    "a..b",
    "..hidden",
    "...",
    ".dot",
    "back\\slash",
    "semi;colon",
    "*",
    "?",
    "[a]",
    "#hash",
    "~",
    "%41%00",
    "a=b",
    "a:b",
    "ünïcödé→𝄞",
    "日本語",
    "u\u0308",
    "x" * 255,
    "\u00fc" * 127,
]


@in_sandbox(deadline=180)
async def round_trips(sandbox: Sandbox) -> None:
    """Files of 0 B to 50 MB are read as they were written."""
    for size in (0, 1, 4096, 1 << 20, 50_000_000):
        data = random.Random(size).randbytes(size)  # noqa: S311
        await sandbox.write(f"file of {size}", data)
        found = await sandbox.read(f"file of {size}")
        expect.that(found == data, f"{size} bytes written, {len(found)} read, not the same")


@in_sandbox("commands")
async def files_are_the_commands_files(sandbox: Sandbox) -> None:
    """Commands see written files, and files that commands wrote can be read."""
    data = random.Random(1).randbytes(100_000)  # noqa: S311
    await sandbox.write("given", data)
    seen = await sandbox.exec("sha256sum < given && cat given given > made")
    expect.equal(
        seen.stdout.split()[0].decode(), hashlib.sha256(data).hexdigest(), "digest of a written file"
    )
    expect.that(await sandbox.read("made") == data + data, "a file made by a command is read wrongly")
    expect.that(
        await sandbox.read(f"{sandbox.workdir}/made") == data + data, "its absolute path leads elsewhere"
    )


@in_sandbox()
async def write_makes_parents(sandbox: Sandbox) -> None:
    """Writing a file makes its missing parent directories."""
    await sandbox.write("a/b/c/file", b"deep")
    expect.equal(await sandbox.read("a/b/c/file"), b"deep", "content")
    expect.equal([entry.kind for entry in await sandbox.list("a/b")], ["directory"], "kind of the parent")


@in_sandbox()
async def overwriting(sandbox: Sandbox) -> None:
    """A shorter content replaces a longer one entirely."""
    for data in (b"long " * 10_000, b"short", b""):
        await sandbox.write("file", data)
        expect.equal(await sandbox.read("file"), data, "content after overwriting")


@in_sandbox()
async def write_modes(sandbox: Sandbox) -> None:
    """``mode`` is the file's mode, with any umask; 0o644 by default."""
    for mode in (0o600, 0o755, 0o666):
        await sandbox.write(f"file{mode:o}", b"", mode=mode)
    await sandbox.write("plain", b"")
    modes = {entry.name: entry.mode & 0o7777 for entry in await sandbox.list(".")}
    expect.equal(modes, {"file600": 0o600, "file755": 0o755, "file666": 0o666, "plain": 0o644}, "modes")


@in_sandbox()
async def write_modes_that_cannot_be(sandbox: Sandbox) -> None:
    """A mode out of range is refused, and nothing is written."""
    for mode in (-1, 0o10000, 1 << 40):
        with expect.raises(LimitError, f"write with mode {mode}"):
            await sandbox.write("never", b"", mode=mode)
    with expect.raises(FileNotFoundError, "read of what was not written"):
        await sandbox.read("never")


@in_sandbox("commands")
async def written_scripts_run(sandbox: Sandbox) -> None:
    """A file written with mode 0o755 can be run at once, and repeatedly."""
    for number in range(10):
        await sandbox.write("script", f"#!/bin/sh\necho {number}\n".encode(), mode=0o755)
        seen = await sandbox.exec(["./script"])
        expect.equal((seen.exit_code, seen.stdout), (0, f"{number}\n".encode()), "a script just written")


@in_sandbox()
async def hostile_names(sandbox: Sandbox) -> None:
    """Names with spaces, newlines, quotes, dashes, shell syntax, 255 bytes, in any script, are valid."""
    for name in HOSTILE:
        await sandbox.write(f"names/{name}", name.encode())
        expect.equal(await sandbox.read(f"names/{name}"), name.encode(), f"content of {name!r}")
    found = [entry.name for entry in await sandbox.list("names")]
    expect.equal(found, sorted(HOSTILE), "names")
    for name in HOSTILE:
        await sandbox.write(f"{name}/{name}", b"in a directory of that name")
        expect.equal([entry.name for entry in await sandbox.list(name)], [name], f"names in {name!r}")
        await sandbox.remove(name)
    expect.equal([entry.name for entry in await sandbox.list(".")], ["names"], "what is left")


@in_sandbox()
async def names_that_are_not_unicode(sandbox: Sandbox) -> None:
    """Names may have any bytes; bytes that are not UTF-8 are surrogate escapes, as in Python."""
    name = os.fsdecode(b"caf\xe9 \xff")
    await sandbox.write(f"names/{name}", b"content")
    expect.equal([entry.name for entry in await sandbox.list("names")], [name], "names")
    expect.equal(await sandbox.read(f"names/{name}"), b"content", "content")
    await sandbox.remove(f"names/{name}")
    expect.equal(await sandbox.list("names"), (), "names after the removal")


@in_sandbox()
async def dots_in_paths(sandbox: Sandbox) -> None:
    """``.`` and ``..`` in a path have their usual meaning."""
    await sandbox.write("a/file", b"1")
    await sandbox.write("b/file", b"2")
    expect.equal(await sandbox.read("a/../b/./file"), b"2", "content")
    expect.equal(await sandbox.read("./a//file"), b"1", "content")


@in_sandbox()
async def reading_what_is_not_there(sandbox: Sandbox) -> None:
    """A missing file raises FileNotFoundError, a directory IsADirectoryError."""
    await sandbox.write("directory/file", b"")
    for path in ("missing", "no/such/file", "/no/such/file"):
        with expect.raises(FileNotFoundError, f"read({path!r})"):
            await sandbox.read(path)
    for path in ("directory", "."):
        with expect.raises(IsADirectoryError, f"read({path!r})"):
            await sandbox.read(path)
    with expect.raises((NotADirectoryError, FileNotFoundError), "read below a file"):
        await sandbox.read("directory/file/below")


@in_sandbox()
async def writing_where_it_cannot_be(sandbox: Sandbox) -> None:
    """Writing to a directory raises IsADirectoryError; below a file, an OSError; nothing is changed."""
    await sandbox.write("directory/file", b"content")
    with expect.raises(IsADirectoryError, "write to a directory"):
        await sandbox.write("directory", b"")
    with expect.raises((NotADirectoryError, FileExistsError), "write below a file"):
        await sandbox.write("directory/file/below", b"")
    expect.equal(await sandbox.read("directory/file"), b"content", "content")


@in_sandbox()
async def listing(sandbox: Sandbox) -> None:
    """A listing is sorted by name, with kinds, sizes and modes."""
    await sandbox.write("d/b", b"12345", mode=0o600)
    await sandbox.write("d/a", b"")
    await sandbox.write("d/C/file", b"")
    await sandbox.write("d/ä", b"1", mode=0o755)
    found = [(entry.name, entry.kind) for entry in await sandbox.list("d")]
    expect.equal(found, [("C", "directory"), ("a", "file"), ("b", "file"), ("ä", "file")], "names and kinds")
    sizes = {
        entry.name: (entry.size, entry.mode & 0o777)
        for entry in await sandbox.list("d")
        if entry.kind == "file"
    }
    expect.equal(sizes, {"a": (0, 0o644), "b": (5, 0o600), "ä": (1, 0o755)}, "sizes and modes")


@in_sandbox("commands")
async def listing_of_many(sandbox: Sandbox) -> None:
    """3,000 names, links and pipes are listed."""
    names = [f"{number:04}" for number in range(3000)]
    seen = await sandbox.exec(
        "mkdir many && cd many && seq -f %04g 0 2999 | xargs touch && ln -s gone link && mkfifo pipe"
    )
    expect.succeeded(seen, "making 3,000 files")
    found = await sandbox.list("many")
    expect.equal([entry.name for entry in found], [*names, "link", "pipe"], "names")
    expect.equal([entry.kind for entry in found[-3:]], ["file", "link", "other"], "kinds")


@in_sandbox()
async def listing_what_is_not_there(sandbox: Sandbox) -> None:
    """A missing directory raises FileNotFoundError, a file NotADirectoryError."""
    await sandbox.write("file", b"")
    with expect.raises(FileNotFoundError, "list of a missing directory"):
        await sandbox.list("missing")
    with expect.raises(NotADirectoryError, "list of a file"):
        await sandbox.list("file")


@in_sandbox()
async def removing(sandbox: Sandbox) -> None:
    """A file or a whole tree is removed, and nothing else; a missing one raises FileNotFoundError."""
    for path in ("file", "tree/a/b/c", "tree/d", "tree2/e"):
        await sandbox.write(path, b"")
    await sandbox.remove("file")
    await sandbox.remove("tree")
    expect.equal([entry.name for entry in await sandbox.list(".")], ["tree2"], "what is left")
    for path in ("file", "tree", "tree/d"):
        with expect.raises(FileNotFoundError, f"remove({path!r}) again"):
            await sandbox.remove(path)


@in_sandbox("commands")
async def symbolic_links(sandbox: Sandbox) -> None:
    """Links are followed by read and write, listed as links, and removed without their target."""
    await sandbox.write("real/file", b"content")
    await sandbox.exec("ln -s real/file link; ln -s real directory; ln -s nowhere dangling; ln -s loop loop")
    expect.equal(await sandbox.read("link"), b"content", "read through a link")
    expect.equal(await sandbox.read("directory/file"), b"content", "read through a linked directory")
    kinds = {entry.name: entry.kind for entry in await sandbox.list(".")}
    wanted = {"link": "link", "directory": "link", "dangling": "link", "loop": "link", "real": "directory"}
    expect.equal(kinds, wanted, "kinds")
    expect.equal([entry.name for entry in await sandbox.list("directory")], ["file"], "list through a link")
    with expect.raises(FileNotFoundError, "read of a dangling link"):
        await sandbox.read("dangling")
    with expect.raises(OSError, "read of a link to itself"):
        await sandbox.read("loop")
    await sandbox.write("link", b"changed")
    expect.equal(await sandbox.read("real/file"), b"changed", "the target of a link written to")
    for name in ("link", "directory", "dangling", "loop"):
        await sandbox.remove(name)
    expect.equal(await sandbox.read("real/file"), b"changed", "the target of a removed link")


@in_sandbox("commands", deadline=120)
async def special_files(sandbox: Sandbox) -> None:
    """Reading, writing or copying a pipe or a device raises SpecialFileError, at once."""
    expect.succeeded(await sandbox.exec("mkfifo pipe && ln -s pipe link"), "making a pipe")
    async with local_directory() as local:
        for name in ("pipe", "link", "/dev/zero"):
            with expect.raises(SpecialFileError, f"read({name!r})"):
                await sandbox.read(name)
        for name in ("pipe", "link", "/dev/full"):
            with expect.raises(SpecialFileError, f"write({name!r})"):
                await sandbox.write(name, b"x")
        with expect.raises(SpecialFileError, "download of a pipe"):
            await sandbox.download("pipe", local / "pipe")
        await anyio.to_thread.run_sync(os.mkfifo, local / "pipe")
        with expect.raises(SpecialFileError, "upload of a pipe"):
            await sandbox.upload(local / "pipe", "uploaded")
    kinds = [(entry.name, entry.kind) for entry in await sandbox.list(".")]
    expect.equal(kinds, [("link", "link"), ("pipe", "other")], "names and kinds")


@in_sandbox()
async def concurrent_files(sandbox: Sandbox) -> None:
    """32 files at once are written and read without mixing."""

    async def one(number: int) -> None:
        data = str(number).encode() * 10_000
        await sandbox.write(f"d/{number}", data)
        expect.that(await sandbox.read(f"d/{number}") == data, f"file {number} is not what was written")
        await sandbox.list("d")

    await at_once(one, range(32))

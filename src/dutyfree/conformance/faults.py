"""Verdicts: what an agent causes is an observation or an ActionError, and no other error."""

from __future__ import annotations

import errno
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import anyio

from dutyfree.conformance import expect
from dutyfree.conformance.limits import limited
from dutyfree.conformance.suite import Skipped, in_sandbox, on_substrate, require
from dutyfree.conformance.trees import local_directory
from dutyfree.contract import Limits, Observation, Sandbox, Substrate
from dutyfree.contract.abilities import Batching, Editing, ManagedProcesses, Searching, ShellSessions
from dutyfree.contract.errors import ActionError, ActionKind, UsageError, verdict

LONE_SURROGATE = "\ud800"


async def told(action: Awaitable[Any], what: str, *kinds: ActionKind) -> ActionError:
    """The action must raise an ActionError, of one of these kinds if any are named."""
    try:
        await action
    except ActionError as error:
        expect.that(str(error), f"{what}: an error without a message")
        expect.that(not kinds or error.kind in kinds, f"{what}: kind {error.kind!r}, expected {kinds}")
        expect.equal(verdict(error), "task", f"{what}: the verdict")
        return error
    except Exception as error:
        raise AssertionError(f"{what}: {type(error).__name__} ({error}), expected an ActionError") from error
    raise AssertionError(f"{what}: nothing was raised, expected an ActionError")


async def borne(action: Awaitable[Any], what: str) -> Observation | ActionError | None:
    """The action may succeed or raise an ActionError; nothing else is the agent's fault."""
    try:
        result = await action
    except ActionError as error:
        return error
    except Exception as error:
        raise AssertionError(f"{what}: {type(error).__name__} ({error}), expected an ActionError") from error
    return result if isinstance(result, Observation) else None


@in_sandbox()
async def commands_that_cannot_be_started(sandbox: Sandbox) -> None:
    """An empty command, a NUL byte, a text that cannot be encoded: 126 or 127 and a reason, not an error."""
    wanted: list[tuple[Any, int]] = [
        ([], 127),
        ("echo a\0b", 126),
        (["echo", "a\0b"], 126),
        (f"echo {LONE_SURROGATE}", 126),
        (["echo", "x" * (1 << 20)], 126),
    ]
    for command, code in wanted:
        seen = await sandbox.exec(command)
        expect.equal(seen.exit_code, code, f"exit code of {ascii(command)[:60]}")
        expect.that(seen.stderr and not seen.started, f"{ascii(command)[:60]}: {seen}")
    seen = await sandbox.exec("true", cwd="a\0b")
    expect.that(seen.exit_code in (126, 127) and not seen.started, f"a NUL byte in cwd: {seen}")


@in_sandbox("commands")
async def places_where_no_command_starts(sandbox: Sandbox) -> None:
    """A cwd or a user that does not exist: 126 or 127 and a reason on stderr, not an error."""
    await sandbox.write("file", b"")
    for cwd, code in (("nowhere", 127), ("file", 126), ("x" * 300, 126)):
        seen = await sandbox.exec("true", cwd=cwd)
        expect.that(not seen.started and seen.stderr, f"cwd={cwd[:20]!r}: {seen}")
        expect.equal(seen.exit_code, code, f"exit code with cwd={cwd[:20]!r}")
    seen = await sandbox.exec("true", user="no-such-user")
    expect.equal(seen.exit_code, 126, "exit code of a command of an unknown user")
    expect.that(not seen.started and b"no-such-user" in seen.stderr, f"the user is not named: {seen}")


@in_sandbox()
async def paths_that_cannot_be(sandbox: Sandbox) -> None:
    """Every problem with a path raises an ActionError with the kind of the problem."""
    await sandbox.write("directory/file", b"content")
    for path, kinds in (
        ("missing", ("not_found",)),
        ("directory", ("is_directory",)),
        ("directory/file/below", ("not_directory", "not_found")),
        ("a\0b", ("bad_path",)),
        (LONE_SURROGATE, ("bad_path",)),
        ("x" * 300, ("name_too_long",)),
    ):
        await told(sandbox.read(path), f"read({ascii(path)[:30]})", *kinds)
    for path, kinds in (
        ("directory", ("is_directory",)),
        ("directory/file/below", ("not_directory", "exists")),
        ("a\0b", ("bad_path",)),
        ("x" * 300, ("name_too_long",)),
    ):
        await told(sandbox.write(path, b""), f"write({ascii(path)[:30]})", *kinds)
    await told(sandbox.list("directory/file"), "list of a file", "not_directory")
    for action in (sandbox.list, sandbox.remove):
        await told(action("missing"), f"{action.__name__} of nothing", "not_found")
        await told(action("a\0b"), f"{action.__name__} of a NUL byte", "bad_path")
    async with local_directory() as local:
        await told(sandbox.download("missing", local / "x"), "download of nothing", "not_found")
        source = local / "source"
        await anyio.Path(source).write_bytes(b"x")
        await told(sandbox.upload(source, "directory"), "upload onto a directory", "is_directory")
        await told(sandbox.upload(source, "a\0b"), "upload to a NUL byte", "bad_path")


@in_sandbox("commands")
async def links_that_lead_nowhere(sandbox: Sandbox) -> None:
    """A link to itself raises an ActionError, of the kind link_loop, for reading and for writing."""
    expect.succeeded(await sandbox.exec("ln -s loop loop"), "making a link to itself")
    await told(sandbox.read("loop"), "read of a link to itself", "link_loop")
    await told(sandbox.write("loop", b""), "write to a link to itself", "link_loop")


@in_sandbox()
async def edits_that_do_not_fit(sandbox: Sandbox) -> None:
    """An edit whose text is absent, there twice, or empty raises an ActionError of the kind edit."""
    if not isinstance(sandbox, Editing):
        raise Skipped("the sandbox cannot edit")
    await sandbox.write("file", b"one two one")
    for old in (b"absent", b"one", b""):
        await told(sandbox.edit("file", old, b"x"), f"an edit of {old!r}", "edit")
    await told(sandbox.edit("missing", b"a", b"b"), "an edit of a missing file", "not_found")
    expect.equal(await sandbox.read("file"), b"one two one", "content after edits that failed")


@in_sandbox()
async def searches_that_cannot_be(sandbox: Sandbox) -> None:
    """A bad expression, an empty text or a NUL byte in a search raises an ActionError of the kind pattern."""
    if not isinstance(sandbox, Searching):
        raise Skipped("the sandbox cannot search")
    await told(sandbox.search(".", "(", regex=True), "a search for a bad expression", "pattern")
    await told(sandbox.search(".", ""), "a search for nothing", "pattern")
    await told(sandbox.search(".", "a\0b"), "a search for a NUL byte", "pattern")
    await told(sandbox.search("missing", "a"), "a search in a missing directory", "not_found")


@in_sandbox()
async def mistakes_of_the_program(sandbox: Sandbox) -> None:
    """Arguments of wrong types and numbers out of range raise UsageError at once; nothing is done."""
    one: Any = sandbox
    wrong: list[tuple[str, Callable[[], Awaitable[Any]]]] = [
        ("a command of bytes", lambda: one.exec(b"ls")),
        ("a command of a number", lambda: one.exec(["echo", 1])),
        ("no command", lambda: one.exec(None)),
        ("a timeout of text", lambda: one.exec("touch never", timeout="5")),
        ("a timeout of nan", lambda: one.exec("touch never", timeout=float("nan"))),
        ("a variable with an equals sign", lambda: one.exec("touch never", env={"A=B": "1"})),
        ("a variable without a name", lambda: one.exec("touch never", env={"": "1"})),
        ("a variable of a number", lambda: one.exec("touch never", env={"A": 1})),
        ("variables in a list", lambda: one.exec("touch never", env=["A=1"])),
        ("a directory of bytes", lambda: one.exec("touch never", cwd=b"/")),
        ("a user of a number", lambda: one.exec("touch never", user=0)),
        ("an input of text", lambda: one.exec("touch never", stdin="text")),
        ("contents of text", lambda: one.write("never", "text")),
        ("a mode of -1", lambda: one.write("never", b"", mode=-1)),
        ("a mode of text", lambda: one.write("never", b"", mode="644")),
        ("a path of bytes", lambda: one.read(b"never")),
        ("a path of a number", lambda: one.list(1)),
    ]
    if isinstance(sandbox, Batching):
        wrong += [
            ("a batch of text", lambda: one.batch("ls")),
            ("a batch of numbers", lambda: one.batch([1])),
        ]
    if isinstance(sandbox, ManagedProcesses):
        wrong += [("a process that never was", lambda: one.attach("never"))]
    for what, action in wrong:
        with expect.raises(UsageError, what):
            await action()
    expect.equal(await sandbox.list("."), (), "files after calls that were refused")


@in_sandbox()
async def sources_that_are_missing_here(sandbox: Sandbox) -> None:
    """A missing local file is the program's mistake: FileNotFoundError, not an ActionError."""
    try:
        await sandbox.upload(Path("/no/such/file/here"), "never")
    except FileNotFoundError as error:
        expect.equal(verdict(error), "program", "the verdict on a missing source")
    else:
        raise AssertionError("upload of a missing local file raised nothing")


@on_substrate("commands", deadline=180)
async def a_full_disk(substrate: Substrate) -> None:
    """After an agent filled the disk, writes and edits raise ActionErrors of the kind no_space."""
    async with limited(substrate, Limits(disk=16 << 20)) as sandbox:
        if sandbox is None:
            raise Skipped("the substrate limits no disk")
        await sandbox.write("file", b"one two")
        expect.that(not (await sandbox.exec("cat /dev/zero > full")).ok, "the disk has no end")
        error = await told(sandbox.write("large", b"x" * (1 << 20)), "a write to a full disk", "no_space")
        expect.equal(getattr(error, "errno", None), errno.ENOSPC, "the errno of a write to a full disk")
        if isinstance(sandbox, Editing):
            await told(sandbox.edit("file", b"one", b"x" * (1 << 20)), "an edit on a full disk", "no_space")
        if isinstance(sandbox, ShellSessions):
            async with sandbox.shell() as held:
                await borne(held.run("echo fine"), "a shell on a full disk")
        await sandbox.remove("full")
        await sandbox.write("large", b"x" * (1 << 20))


async def runs_freely(sandbox: Sandbox) -> bool:
    """Whether no sign shows yet that all processes are in use."""
    try:
        return not any(entry.name == "full" for entry in await sandbox.list("."))
    except ActionError:
        return False


@on_substrate("python", deadline=180)
async def no_processes_left(substrate: Substrate) -> None:
    """While an agent uses all processes of its limit, actions succeed, fail or raise ActionErrors."""
    async with limited(substrate, Limits(pids=32)) as sandbox:
        if sandbox is None:
            raise Skipped("the substrate limits no processes")
        await sandbox.write("file", b"one two")
        bomb = (
            "import os, time\ntry:\n while os.fork(): pass\nexcept OSError: open('full', 'w')\ntime.sleep(60)"
        )
        await sandbox.exec(["sh", "-c", 'python3 -c "$0" >/dev/null 2>&1 &', bomb])
        with anyio.fail_after(60):
            while await runs_freely(sandbox):  # noqa: ASYNC110
                await anyio.sleep(0.02)
        seen = await borne(sandbox.exec("true; true", timeout=60), "a command")
        expect.that(isinstance(seen, Observation), f"a command without a process: {seen!r}")
        await borne(sandbox.read("file"), "read")
        await borne(sandbox.write("more", b"x"), "write")
        await borne(sandbox.list("."), "list")
        await borne(sandbox.remove("full"), "remove")
        if isinstance(sandbox, Searching):
            await borne(sandbox.search(".", "one"), "search")
        async with local_directory() as local:
            await borne(sandbox.download(".", local / "copy"), "download")
            await borne(sandbox.upload(local, "uploaded"), "upload")


@on_substrate("python", deadline=180)
async def out_of_memory(substrate: Substrate) -> None:
    """A command that the memory limit killed is marked ``oom``; those before and after it are not."""
    async with limited(substrate, Limits(memory=128 << 20)) as sandbox:
        if sandbox is None:
            raise Skipped("the substrate limits no memory")
        await require(sandbox, "python")
        eat = ["python3", "-c", "held = bytearray(512 << 20)"]
        expect.equal((await sandbox.exec("kill -9 $$")).oom, False, "oom of a command that killed itself")
        seen = await sandbox.exec(eat, timeout=60)
        expect.equal((seen.oom, seen.signal), (True, 9), "oom of a command that used up its memory")
        expect.equal((await sandbox.exec("true")).oom, False, "oom of the next command")
        shell = "python3 -c 'held = bytearray(512 << 20)' >/dev/null 2>&1; exit 0"
        seen = await sandbox.exec(shell, timeout=60)
        expect.equal((seen.oom, seen.exit_code), (True, 0), "oom of a command whose child was killed")


@on_substrate("python", deadline=180)
async def out_of_memory_in_the_background(substrate: Substrate) -> None:
    """If the memory limit kills a process in the background, only the next observation has ``oom``."""
    async with limited(substrate, Limits(memory=128 << 20)) as sandbox:
        if sandbox is None:
            raise Skipped("the substrate limits no memory")
        await require(sandbox, "python")
        eat = "python3 -c 'held = bytearray(512 << 20)' >/dev/null 2>&1; echo over > over"
        await sandbox.exec(["sh", "-c", '(sleep 0.5; eval "$0") >/dev/null 2>&1 </dev/null &', eat])
        with anyio.fail_after(60):
            while not [one for one in await sandbox.list(".") if one.name == "over"]:  # noqa: ASYNC110
                await anyio.sleep(0.02)
        expect.equal((await sandbox.exec("true")).oom, True, "oom of the command after the kill")
        expect.equal((await sandbox.exec("true")).oom, False, "oom of the command after that")

"""Further abilities: edits, searches, batches, watches, terminals, processes that can be found again."""

from __future__ import annotations

from dutyfree.conformance import expect
from dutyfree.conformance.processes import PATIENCE
from dutyfree.conformance.suite import Skipped, in_sandbox
from dutyfree.contract import Edit, Exec, List, Match, Observation, Read, Sandbox, Write
from dutyfree.contract.abilities import (
    Batching,
    Editing,
    ManagedProcesses,
    Searching,
    Terminal,
    Terminals,
    Watching,
)
from dutyfree.contract.errors import EditError


@in_sandbox()
async def edit(sandbox: Sandbox) -> None:
    """An edit replaces a text that occurs once, keeps the mode of the file, and says why it fails."""
    if not isinstance(sandbox, Editing):
        raise Skipped("not Editing")
    await sandbox.write("file", b"one\ntwo\nthree two\n", mode=0o751)
    await sandbox.edit("file", b"three", b"\xff\0")
    expect.equal(await sandbox.read("file"), b"one\ntwo\n\xff\0 two\n", "the edited file")
    for old, count, lines in ((b"two", 2, (2, 3)), (b"absent", 0, ())):
        try:
            await sandbox.edit("file", old, b"")
        except EditError as error:
            expect.equal((error.count, error.lines), (count, lines), f"where {old!r} stands")
        else:
            raise AssertionError(f"an edit of {old!r}, which occurs {count} times, succeeded")
    expect.equal(await sandbox.read("file"), b"one\ntwo\n\xff\0 two\n", "the file after edits that failed")
    found = await sandbox.list(".")
    expect.equal([(entry.name, entry.mode) for entry in found], [("file", 0o751)], "what is there")
    with expect.raises(FileNotFoundError, "an edit of a missing file"):
        await sandbox.edit("missing", b"a", b"b")
    with expect.raises(IsADirectoryError, "an edit of a directory"):
        await sandbox.edit(".", b"a", b"b")
    with expect.raises(ValueError, "an edit of nothing"):
        await sandbox.edit("file", b"", b"b")


@in_sandbox("commands")
async def edit_follows_links(sandbox: Sandbox) -> None:
    """An edit of a link changes its target, and keeps the link."""
    if not isinstance(sandbox, Editing):
        raise Skipped("not Editing")
    await sandbox.exec("mkdir sub; echo before > sub/file; ln -s sub/file link; chmod 640 sub/file")
    await sandbox.edit("link", b"before", b"after")
    seen = await sandbox.exec("cat sub/file; test -L link && stat -c %a sub/file && ls -A sub")
    expect.equal(seen.stdout, b"after\n640\nfile\n", "the file, its mode, and what is beside it")


@in_sandbox()
async def search(sandbox: Sandbox) -> None:
    """A search finds lines by text and by expression, and files by name, in order and within its limits."""
    if not isinstance(sandbox, Searching):
        raise Skipped("not Searching")
    await sandbox.write("src/b.py", b"import os\nx = 1  # note\n")
    await sandbox.write("src/a.py", b"# Note\ny = 2\n# note")
    await sandbox.write("src/deep/data.txt", b"a note too\n")
    await sandbox.write("src/binary", b"note\0note\n")
    await sandbox.write("src/.git/config", b"note\n")
    found = await sandbox.search("src", "note")
    wanted = (
        Match("src/a.py", 3, b"# note"),
        Match("src/b.py", 2, b"x = 1  # note"),
        Match("src/deep/data.txt", 1, b"a note too"),
    )
    expect.equal(found.matches, wanted, "lines with a text")
    expect.equal((found.truncated, found.unseen), (False, 1), "cut off, and files that were passed over")
    found = await sandbox.search("src", "^[xy] = [0-9]+", regex=True, names=["*.py"])
    lines = [(match.path, match.line) for match in found.matches]
    expect.equal(lines, [("src/a.py", 2), ("src/b.py", 2)], "lines that fit an expression")
    found = await sandbox.search("src", "NOTE", ignore_case=True, names=["a.py"], limit=1, width=4)
    expect.equal(found.matches, (Match("src/a.py", 1, b"# No", True),), "one match, of which the line is cut")
    expect.equal(found.truncated, True, "cut off")
    found = await sandbox.search("src", names=["*.py", "deep/*"], skip=())
    expect.equal(
        [match.path for match in found.matches], ["src/a.py", "src/b.py", "src/deep/data.txt"], "names"
    )
    with expect.raises(ValueError, "a search for a bad expression"):
        await sandbox.search("src", "(", regex=True)
    with expect.raises(FileNotFoundError, "a search in a missing directory"):
        await sandbox.search("missing", "x")


@in_sandbox()
async def batch(sandbox: Sandbox) -> None:
    """A batch performs its actions in order, and each sees the effects of those before it."""
    if not isinstance(sandbox, Batching):
        raise Skipped("not Batching")
    results = await sandbox.batch(
        [
            Write("file", b"before\n"),
            Exec("cat file"),
            Edit("file", b"before", b"after"),
            Read("file"),
            List("."),
            Exec(("echo", "two  words"), timeout=60),
        ]
    )
    expect.equal(len(results), 6, "number of results")
    wrote, seen, edited, data, entries, last = results
    expect.that(
        isinstance(seen, Observation) and seen.stdout == b"before\n", f"not a file's content: {seen!r}"
    )
    expect.equal((wrote, edited, data), (None, None, b"after\n"), "results of a write, an edit and a read")
    expect.that(isinstance(entries, tuple) and [one.name for one in entries] == ["file"], f"not: {entries!r}")
    expect.that(isinstance(last, Observation) and last.stdout == b"two  words\n", f"not an echo: {last!r}")
    expect.equal(await sandbox.batch([]), (), "results of nothing")


@in_sandbox()
async def batch_stops(sandbox: Sandbox) -> None:
    """A batch ends after the first failed action, or goes on if requested; an error is a result."""
    if not isinstance(sandbox, Batching):
        raise Skipped("not Batching")
    for bad in (Exec("exit 3"), Read("missing"), Edit("file", b"absent", b"x")):
        await sandbox.write("file", b"one")
        actions = [Exec("true"), bad, Write("file", b"two"), Read("file")]
        results = await sandbox.batch(actions)
        expect.equal(len(results), 2, f"number of results when {type(bad).__name__} fails")
        expect.equal(await sandbox.read("file"), b"one", "a file that the rest would have written")
        results = await sandbox.batch(actions, stop_on_failure=False)
        expect.equal((len(results), results[-1]), (4, b"two"), "results when it goes on")
    expect.that(isinstance(results[1], EditError), f"not an EditError: {results[1]!r}")


@in_sandbox("commands", deadline=120)
async def batch_times_out(sandbox: Sandbox) -> None:
    """In a batch each command has its own timeout, and a timeout is a failure."""
    if not isinstance(sandbox, Batching):
        raise Skipped("not Batching")
    for seconds in PATIENCE:
        overruns = Exec("echo begun; sleep 1000", timeout=seconds)
        commands = [Exec("sleep 0.3", timeout=60), overruns, Exec("echo after")]
        with expect.within(100, "a batch with a timeout"):
            first, second, third = await sandbox.batch(commands, stop_on_failure=False)
            stopped = await sandbox.batch(commands)
        if isinstance(second, Observation) and second.stdout:
            break
    expect.that(isinstance(first, Observation) and first.ok, f"the first failed: {first!r}")
    expect.that(
        isinstance(second, Observation) and second.timed_out and second.stdout == b"begun\n",
        f"not a timeout: {second!r}",
    )
    expect.that(isinstance(third, Observation) and third.stdout == b"after\n", f"not the third: {third!r}")
    expect.equal(len(stopped), 2, "results up to the timeout")


@in_sandbox("commands", deadline=120)
async def batch_of_large_contents(sandbox: Sandbox) -> None:
    """A batch writes and reads large files, and a command in it gets a large input."""
    if not isinstance(sandbox, Batching):
        raise Skipped("not Batching")
    large = bytes(range(256)) * (20 << 10)
    results = await sandbox.batch(
        [Write("file", large), Exec("cat > copy", stdin=large), Exec("wc -c < file"), Read("copy")]
    )
    expect.equal(len(results), 4, "number of results")
    wrote, fed, counted, copied = results
    expect.equal(wrote, None, "result of the write")
    expect.that(isinstance(fed, Observation) and fed.ok, f"the command with input failed: {fed!r}")
    expect.that(
        isinstance(counted, Observation) and counted.stdout.split() == [b"%d" % len(large)],
        f"not the size of the file that was written: {counted!r}",
    )
    expect.equal(copied, large, "the file that the command wrote")


@in_sandbox(deadline=120)
async def watch(sandbox: Sandbox) -> None:
    """A watch reports files that are made, changed and deleted, in subdirectories if requested."""
    if not isinstance(sandbox, Watching):
        raise Skipped("not Watching")
    await sandbox.write("sub/old", b"")
    for recursive in (False, True):
        async with sandbox.watch(".", recursive=recursive) as changes:
            await sandbox.write("file", b"1")
            await sandbox.write("file", b"2")
            await sandbox.write("sub/new", b"")
            await sandbox.remove("sub/new")
            await sandbox.remove("file")
            seen = set()
            with expect.within(100, "changes"):
                async for change in changes:
                    seen.add((change.kind, change.path))
                    if ("deleted", "file") in seen:
                        break
        wanted = {("created", "file"), ("modified", "file"), ("deleted", "file")}
        expect.that(wanted <= seen, f"changes are missing: {wanted - seen}")
        expect.equal(("created", "sub/new") in seen, recursive, "whether a deeper change was told")
    with expect.raises(FileNotFoundError, "a watch of a missing path"):
        async with sandbox.watch("missing"):
            pass


async def _all(terminal: Terminal) -> bytes:
    said = b""
    while part := await terminal.read():
        said += part
    return said


@in_sandbox(deadline=120)
async def terminal(sandbox: Sandbox) -> None:
    """A terminal echoes its input, runs it, and ends."""
    if not isinstance(sandbox, Terminals):
        raise Skipped("not Terminals")
    async with sandbox.terminal() as held:
        await held.write(b"echo mark\n")
        await held.write(b"exit 3\n")
        said = await _all(held)
        expect.equal(said.count(b"mark"), 2, f"times that the mark was said, in {said!r}")
        expect.equal((await held.wait()).exit_code, 3, "exit code of the shell")
        with expect.raises(BrokenPipeError, "typing after the end"):
            await held.write(b"x")
    async with sandbox.terminal(["echo", "alone"]) as held:
        expect.equal(await _all(held), b"alone\r\n", "what a command says in a terminal")
    async with sandbox.terminal("sleep 1000") as held:
        pass  # leaving it ends it
    with expect.raises(ValueError, "a terminal without a column"):
        async with sandbox.terminal(columns=0):
            pass


@in_sandbox("commands", deadline=120)
async def terminal_is_one(sandbox: Sandbox) -> None:
    """A command in a terminal sees the requested size, a change of size, and Ctrl-C."""
    if not isinstance(sandbox, Terminals):
        raise Skipped("not Terminals")
    script = "trap 'stty size; echo changed' WINCH; tty; stty size; echo $TERM; while :; do sleep 0.1; done"
    async with sandbox.terminal(script, rows=33, columns=99, env={"TERM": "vt100"}) as held:
        said = b""
        while b"vt100" not in said:
            said += await held.read()
        expect.that(b"/dev/" in said and b"33 99\r\n" in said, f"not a terminal of 33 by 99: {said!r}")
        await held.resize(40, 120)
        while b"changed" not in said:
            said += await held.read()
        expect.that(b"40 120\r\n" in said, f"not a new size: {said!r}")
        await held.write(b"\x03")
        with expect.within(100, "Ctrl-C"):
            seen = await held.wait()
        expect.equal(seen.signal, 2, "the signal that ended it")


@in_sandbox(deadline=120)
async def managed_processes(sandbox: Sandbox) -> None:
    """Background processes can be listed, found by id, written to, read again, and sent signals."""
    if not isinstance(sandbox, ManagedProcesses):
        raise Skipped("not ManagedProcesses")
    slow = await sandbox.start("sleep 1000")
    reading = await sandbox.start("cat", stdin=True)
    expect.equal({one.id for one in await sandbox.processes()}, {slow.id, reading.id}, "processes")
    again = await sandbox.attach(reading.id)
    expect.that(again.running, "the attached one has ended")
    await again.write(b"one ")
    await reading.write(b"two")
    await again.close_stdin()
    expect.equal((await reading.wait()).stdout, b"one two", "what it said of what it was told")
    pieces = [piece async for piece in again.output()]
    expect.equal(b"".join(piece.data for piece in pieces), b"one two", "its output, read again")
    pieces = [piece async for piece in again.output(after=4)]
    expect.equal((pieces[0].position, pieces[0].data), (4, b"two"), "its output from the middle")
    await slow.signal(15)
    expect.equal((await slow.wait()).signal, 15, "the signal that ended the other")
    expect.that(not slow.running, "it runs after its end")
    with expect.raises(KeyError, "attaching to nothing"):
        await sandbox.attach("nothing")
    with expect.raises(ValueError, "writing to one without a stdin"):
        await slow.write(b"x")


@in_sandbox("commands", deadline=120)
async def managed_output_is_bounded(sandbox: Sandbox) -> None:
    """A background process with endless output neither stops nor fills memory; its latest is readable."""
    if not isinstance(sandbox, ManagedProcesses):
        raise Skipped("not ManagedProcesses")
    process = await sandbox.start(
        "i=0; while [ $i -lt 40 ]; do i=$((i+1)); head -c 1000000 /dev/zero; done; echo end"
    )
    seen = await process.wait()
    expect.that(seen.ok, f"it failed: {seen.exit_code}")
    pieces = [piece async for piece in process.output()]
    expect.that(pieces[-1].data.endswith(b"end\n"), "the latest is not the end")
    expect.equal(pieces[-1].position + len(pieces[-1].data), 40_000_004, "the length of the whole")
    kept = sum(len(piece.data) for piece in pieces)
    expect.that(kept <= 33 << 20, f"{kept} bytes were kept")

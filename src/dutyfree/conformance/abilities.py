"""Abilities, each checked if the sandbox has it."""

from __future__ import annotations

import itertools

import anyio

from dutyfree.conformance import expect
from dutyfree.conformance.processes import PATIENCE, beat
from dutyfree.conformance.suite import Skipped, in_sandbox, on_substrate
from dutyfree.contract import Observation, Sandbox, Substrate
from dutyfree.contract.abilities import (
    BackgroundProcesses,
    Chunk,
    Forkable,
    Pausable,
    Resettable,
    ShellSessions,
    Snapshottable,
    Streaming,
)


@in_sandbox()
async def reset(sandbox: Sandbox) -> None:
    """A reset restores the state in which the sandbox was handed out."""
    if not isinstance(sandbox, Resettable):
        raise Skipped("not Resettable")
    for _ in range(2):
        await sandbox.write("trace/file", b"")
        await sandbox.reset()
        expect.equal(await sandbox.list("."), (), "files after the reset")
    expect.equal((await sandbox.exec("echo usable")).stdout, b"usable\n", "a command after the reset")


@in_sandbox("commands")
async def reset_ends_processes(sandbox: Sandbox) -> None:
    """A reset kills all processes."""
    if not isinstance(sandbox, Resettable):
        raise Skipped("not Resettable")
    await sandbox.exec(f"setsid sh -c {beat('file')} </dev/null >/dev/null 2>&1 & sleep 0.2")
    await sandbox.reset()
    await anyio.sleep(0.3)
    expect.equal(await sandbox.list("."), (), "files after the reset")


@on_substrate()
async def snapshot(substrate: Substrate) -> None:
    """Sandboxes of a snapshot's recipe have the files of that moment, each its own copy."""
    async with substrate.sandbox() as sandbox:
        if not isinstance(sandbox, Snapshottable):
            raise Skipped("not Snapshottable")
        await sandbox.write("file", b"then")
        recipe = await sandbox.snapshot()
        await sandbox.write("file", b"later")
        for _ in range(2):
            async with substrate.sandbox(recipe) as copy:
                expect.equal(await copy.read("file"), b"then", "a file of the snapshot")
                await copy.write("file", b"changed")
        expect.equal(await sandbox.read("file"), b"later", "the file of the original")
    async with substrate.sandbox(recipe) as copy:
        expect.equal(await copy.read("file"), b"then", "a file of the snapshot, the original gone")


@in_sandbox()
async def fork(sandbox: Sandbox) -> None:
    """Forks start from the present files, and are independent."""
    if not isinstance(sandbox, Forkable):
        raise Skipped("not Forkable")
    await sandbox.write("file", b"common")
    async with sandbox.fork(3) as children:
        expect.equal(len(children), 3, "number of forks")
        for number, child in enumerate(children):
            expect.equal(await child.read("file"), b"common", f"file of fork {number}")
            await child.write("file", str(number).encode())
        found = [await child.read("file") for child in children]
        expect.equal(found, [b"0", b"1", b"2"], "files of the forks")
        expect.equal(await sandbox.read("file"), b"common", "the file of the parent")


PAUSED = (2, 10, 30)
"""How long a process sleeps that must be paused before its end, also on a slow machine."""


@in_sandbox(deadline=180)
async def pause(sandbox: Sandbox) -> None:
    """Processes stop while the sandbox is paused, and go on after resume."""
    if not isinstance(sandbox, Pausable):
        raise Skipped("not Pausable")
    if not isinstance(sandbox, BackgroundProcesses):
        raise Skipped("Pausable, but not BackgroundProcesses")
    for seconds in PAUSED:
        process = await sandbox.start(f"sleep {seconds}")
        await sandbox.pause()
        with anyio.move_on_after(seconds + 0.5) as scope:
            await process.wait()
        if scope.cancelled_caught:
            break
        await sandbox.resume()
    expect.that(scope.cancelled_caught, "the process ended while paused")
    await sandbox.resume()
    with expect.within(100, "a process after the resumption"):
        expect.equal((await process.wait()).exit_code, 0, "exit code of the resumed process")


@in_sandbox("commands", deadline=120)
async def pause_stops_commands(sandbox: Sandbox) -> None:
    """A command in the background stops while the sandbox is paused, and goes on after resume."""
    if not isinstance(sandbox, Pausable):
        raise Skipped("not Pausable")
    loop = "i=0; while [ $i -lt 1200 ]; do i=$((i + 1)); cat /proc/uptime >> beats; sleep 0.05; done"
    await sandbox.exec(f"({loop}) </dev/null >/dev/null 2>&1 & until [ -s beats ]; do sleep 0.05; done")
    await sandbox.pause()
    await anyio.sleep(1)
    await sandbox.resume()
    more = "n=$(wc -l < beats); while [ $(wc -l < beats) -lt $((n + 4)) ]; do sleep 0.05; done"
    expect.that((await sandbox.exec(more, timeout=60)).ok, "it did not go on after the resumption")
    beats = [float(line.split()[0]) for line in (await sandbox.read("beats")).splitlines()]
    gaps = [later - earlier for earlier, later in itertools.pairwise(beats)]
    expect.that(
        max(gaps) > 0.9, f"it went on while paused: {len(beats)} beats, the longest gap {max(gaps)} s"
    )


@in_sandbox()
async def shell(sandbox: Sandbox) -> None:
    """A shell keeps its variables and its working directory, separate from other shells."""
    if not isinstance(sandbox, ShellSessions):
        raise Skipped("not ShellSessions")
    await sandbox.write("sub/file", b"content")
    async with sandbox.shell() as one, sandbox.shell() as other:
        await one.run("cd sub")
        await one.run("export NAME='two words'")
        expect.equal((await one.run("cat file")).stdout, b"content", "a file in the shell's directory")
        expect.equal((await one.run("printenv NAME")).stdout, b"two words\n", "the shell's variable")
        expect.equal((await one.run("false")).exit_code, 1, "exit code of false")
        expect.equal((await one.run("true")).exit_code, 0, "exit code of true")
        expect.equal(
            (await other.run("printenv NAME")).exit_code, 1, "exit code of printenv in another shell"
        )


@in_sandbox("commands", deadline=120)
async def shell_survives(sandbox: Sandbox) -> None:
    """A shell separates the streams, and survives a timeout and output without a newline."""
    if not isinstance(sandbox, ShellSessions):
        raise Skipped("not ShellSessions")
    async with sandbox.shell() as held:
        seen = await held.run("x=1; printf out; printf err >&2; f() { return 7; }; f")
        expect.equal((seen.stdout, seen.stderr, seen.exit_code), (b"out", b"err", 7), "streams and exit code")
        for seconds in PATIENCE:
            with expect.within(100, "a timeout in a shell"):
                seen = await held.run("echo before; sleep 1000", timeout=seconds)
            if seen.stdout:
                break
        expect.that(seen.timed_out and seen.stdout == b"before\n", f"not a timeout: {seen}")
        expect.equal((await held.run("echo usable")).stdout, b"usable\n", "the next command")


@in_sandbox(deadline=120)
async def background(sandbox: Sandbox) -> None:
    """A background process runs beside others; it can be awaited, also twice, or killed."""
    if not isinstance(sandbox, BackgroundProcesses):
        raise Skipped("not BackgroundProcesses")
    slow = await sandbox.start("sleep 1000")
    quick = await sandbox.start(["echo", "two  words"])
    expect.that(slow.id != quick.id, f"both have the id {slow.id!r}")
    for _ in range(2):
        seen = await quick.wait()
        expect.equal((seen.exit_code, seen.stdout), (0, b"two  words\n"), "the quick one")
    expect.equal((await sandbox.exec("echo beside")).stdout, b"beside\n", "a command beside them")
    with expect.within(100, "killing a process"):
        await slow.kill()
        seen = await slow.wait()
    expect.equal((seen.exit_code, seen.signal), (137, 9), "the killed one")
    await quick.kill()


@in_sandbox()
async def streaming(sandbox: Sandbox) -> None:
    """Output arrives in chunks; the last item is the Observation, without output."""
    if not isinstance(sandbox, Streaming):
        raise Skipped("not Streaming")
    stream = sandbox.stream(["echo", "hello"])
    items = [item async for item in stream]
    output = b"".join(item.data for item in items[:-1] if isinstance(item, Chunk) and item.stream == "stdout")
    expect.equal(output, b"hello\n", "the chunks of stdout")
    last = items[-1]
    expect.that(isinstance(last, Observation), f"the last item is {last!r}, not an Observation")
    if isinstance(last, Observation):
        expect.equal((last.exit_code, last.stdout, last.stderr), (0, b"", b""), "the Observation")


@in_sandbox("commands", deadline=120)
async def streaming_as_it_comes(sandbox: Sandbox) -> None:
    """Chunks arrive while the command runs, from both streams."""
    if not isinstance(sandbox, Streaming):
        raise Skipped("not Streaming")
    arrived: dict[str, bytes] = {}
    with expect.within(100, "the first chunks"):
        async for item in sandbox.stream("echo out; echo err >&2; sleep 1000", timeout=60):
            if isinstance(item, Chunk):
                arrived[item.stream] = arrived.get(item.stream, b"") + item.data
            if len(arrived) == 2:
                break
    expect.equal(arrived, {"stdout": b"out\n", "stderr": b"err\n"}, "chunks before the end")

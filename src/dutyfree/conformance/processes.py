"""Processes: which are killed, which go on, and which do not delay a result."""

from __future__ import annotations

import uuid
from time import perf_counter

import anyio

from dutyfree.conformance import expect
from dutyfree.conformance.suite import at_once, in_sandbox, on_substrate
from dutyfree.contract import Limits, Sandbox, Substrate
from dutyfree.contract.errors import SubstrateError

BEAT = "i=0; while [ $i -lt 1200 ]; do i=$((i + 1)); echo x >> {file}; sleep 0.05; done"
"""Bounded, so that it ends even if a substrate fails to kill it."""


def beat(file: str) -> str:
    """A loop that appends to a file, quoted as one word of a shell."""
    return f"'{BEAT.format(file=file)}'"


FAMILY = f"""
sh -c {beat("child")} &
setsid sh -c {beat("session")} &
(setsid sh -c {beat("orphan")} </dev/null >/dev/null 2>&1 &)
trap '' TERM INT HUP
echo started
sleep 1000
"""
"""A child, a child in its own session, an orphan, and a shell that ignores SIGTERM."""

MEMBERS = ("child", "session", "orphan")

PATIENCE = (0.7, 4, 20)
"""Timeouts in seconds, long enough for a command to start on a slow machine."""


@in_sandbox("commands", deadline=120)
async def timeout_keeps_output(sandbox: Sandbox) -> None:
    """A timeout returns near its deadline, is reported, and keeps the output."""
    for command in (
        "echo out; echo err >&2; sleep 1000; echo late",
        ["sh", "-c", "echo out; echo err >&2; sleep 1000"],
    ):
        for seconds in PATIENCE:
            begun = perf_counter()
            seen = await sandbox.exec(command, timeout=seconds)
            taken = perf_counter() - begun
            expect.that(seen.timed_out and not seen.ok and seen.exit_code != 0, f"not a timeout: {seen}")
            expect.that(seconds <= taken < 100, f"a timeout of {seconds} s returned after {taken:.2f} s")
            if seen.stderr:
                break
        expect.equal((seen.stdout, seen.stderr), (b"out\n", b"err\n"), "output before the timeout")


@in_sandbox("commands")
async def timeout_not_reached(sandbox: Sandbox) -> None:
    """A command that ends in time has not timed out."""
    seen = await sandbox.exec("echo done; exit 3", timeout=60)
    expect.equal((seen.timed_out, seen.exit_code, seen.stdout), (False, 3, b"done\n"), "a quick command")


@in_sandbox("commands", deadline=120)
async def timeout_kills_the_tree(sandbox: Sandbox) -> None:
    """A timeout kills children, children in other sessions, orphans, and processes that ignore SIGTERM."""
    for seconds in PATIENCE:
        seen = await sandbox.exec(FAMILY, timeout=seconds)
        expect.that(seen.timed_out, f"not a timeout: {seen}")
        if seen.stdout and await expect.written(sandbox, MEMBERS):
            break
    expect.equal(seen.stdout, b"started\n", "output before the timeout")
    await expect.quiet(sandbox, MEMBERS, "after the timeout")


@in_sandbox("commands", deadline=120)
async def timeout_kills_the_disguised(sandbox: Sandbox) -> None:
    """A timeout kills a descendant that emptied its environment, left the session and lost its parent."""
    disguised = f"env -i PATH=/usr/bin:/bin setsid sh -c {beat('disguised')}"
    for seconds in PATIENCE:
        seen = await sandbox.exec(f"({disguised} </dev/null >/dev/null 2>&1 &)\nsleep 1000", timeout=seconds)
        expect.that(seen.timed_out, f"not a timeout: {seen}")
        if await expect.written(sandbox, ["disguised"]):
            break
    await expect.quiet(sandbox, ["disguised"], "after the timeout")


@in_sandbox("commands", deadline=120)
async def timeout_of_a_flood(sandbox: Sandbox) -> None:
    """A command that floods its output is stopped in time, and its output is bounded."""
    for seconds in PATIENCE:
        with expect.within(seconds + 80, "a timeout"):
            seen = await sandbox.exec(["yes"], timeout=seconds)
        expect.that(seen.timed_out, f"not a timeout: exit code {seen.exit_code}")
        if seen.stdout:
            break
    expect.that(0 < len(seen.stdout) <= Limits().output, f"{len(seen.stdout)} bytes kept")


@in_sandbox("commands", deadline=120)
async def background_child_holds_nothing(sandbox: Sandbox) -> None:
    """A child in the background does not delay the result, even if it keeps the output open."""
    for command in ("sleep 1000 & echo started", "sleep 1000 >/dev/null 2>&1 </dev/null & echo started"):
        with expect.within(100, f"{command!r}"):
            seen = await sandbox.exec(command)
        expect.equal((seen.exit_code, seen.stdout), (0, b"started\n"), f"{command!r}")
    with expect.within(100, "a background child with a timeout"):
        seen = await sandbox.exec("sleep 1000 & echo started", timeout=60)
    expect.that(seen.ok, f"a background child made the command {seen}")


@in_sandbox("commands", deadline=120)
async def background_child_lives_on(sandbox: Sandbox) -> None:
    """A child in the background, such as a server, goes on after the call."""
    begun = "until [ -s server ]; do sleep 0.05; done"
    await sandbox.exec(f"sh -c {beat('server')} >/dev/null 2>&1 </dev/null & {begun}")
    before = len(await sandbox.read("server"))
    with anyio.move_on_after(30):
        while len(await sandbox.read("server")) <= before:  # noqa: ASYNC110 (files tell nobody)
            await anyio.sleep(0.1)
        return
    raise AssertionError("the child in the background did not go on")


@in_sandbox("commands", deadline=120)
async def stuck_command_blocks_no_other(sandbox: Sandbox) -> None:
    """A command that never ends and does not read its input does not block other commands."""
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(lambda: sandbox.exec("exec sleep 1000", stdin=bytes(1_000_000)))
        await anyio.sleep(0.2)
        with expect.within(100, "ten commands beside a stuck one"):
            for number in range(10):
                expect.equal((await sandbox.exec(f"echo {number}")).stdout, f"{number}\n".encode(), "output")
            await sandbox.write("file", b"1")
            expect.equal(await sandbox.read("file"), b"1", "a file beside a stuck command")
        tasks.cancel_scope.cancel()


@in_sandbox("commands", deadline=120)
async def cancellation_kills(sandbox: Sandbox) -> None:
    """A cancelled exec returns at once and its whole tree is killed; the sandbox stays usable."""
    for seconds in PATIENCE:
        with expect.within(seconds + 80, "a cancelled exec"), anyio.move_on_after(seconds):
            await sandbox.exec(FAMILY)
            raise AssertionError("the command ended by itself")
        if await expect.written(sandbox, MEMBERS):
            break
    await expect.quiet(sandbox, MEMBERS, "after the cancellation")
    expect.equal((await sandbox.exec("echo usable")).stdout, b"usable\n", "the next command")


@in_sandbox("commands", deadline=120)
async def many_cancellations(sandbox: Sandbox) -> None:
    """Commands cancelled at any moment of their life leave the sandbox usable."""

    async def one(number: int) -> None:
        with anyio.move_on_after(number * 0.002):
            await sandbox.exec("echo x; sleep 30; echo y", stdin=b"z")

    await at_once(one, range(24))
    expect.equal((await sandbox.exec("echo usable")).stdout, b"usable\n", "the next command")


@on_substrate("commands", deadline=120)
async def leaving_kills(substrate: Substrate) -> None:
    """Closing the sandbox ends all its processes: children, other sessions, orphans."""
    await _leave(substrate, ("{0} &", "setsid {0} &", "(setsid {0} </dev/null >/dev/null 2>&1 &)"))


@on_substrate("commands", deadline=120)
async def leaving_kills_the_disguised(substrate: Substrate) -> None:
    """Closing the sandbox also ends a process that emptied its environment."""
    await _leave(substrate, ("(env -i PATH=/usr/bin:/bin setsid {0} </dev/null >/dev/null 2>&1 &)",))


async def _leave(substrate: Substrate, starts: tuple[str, ...]) -> None:
    token = f"dutyfree{uuid.uuid4().hex}"
    # With the bracket the search does not find itself.
    search = f"grep -la '{token[:-1]}[{token[-1]}]' /proc/[0-9]*/cmdline"
    script = "\n".join(start.format(f"sh -c 'sleep 1000; exit 1' {token}") for start in starts)
    async with substrate.sandbox() as sandbox:
        expect.succeeded(await sandbox.exec(script), "starting processes")
        found: list[bytes] = []
        with anyio.move_on_after(30):
            while len(found) != len(starts):
                found = (await sandbox.exec(search)).stdout.splitlines()
        expect.equal(len(found), len(starts), "number of processes that run")
    async with substrate.sandbox() as sandbox:
        found = (await sandbox.exec(search)).stdout.splitlines()
        expect.equal(found, [], "processes of the closed sandbox")


@on_substrate("commands", deadline=120)
async def leaving_ends_what_runs(substrate: Substrate) -> None:
    """A command in another task ends when the sandbox closes: killed, or with an error."""
    ended = anyio.Event()

    async def run(sandbox: Sandbox) -> None:
        try:
            seen = await sandbox.exec("sleep 1000")
            expect.that(not seen.ok, "a killed command is reported as a success")
        except SubstrateError:
            pass
        ended.set()

    with expect.within(100, "leaving a sandbox in use"):
        async with anyio.create_task_group() as tasks:
            async with substrate.sandbox() as sandbox:
                tasks.start_soon(run, sandbox)
                await anyio.sleep(0.3)
            await ended.wait()


@in_sandbox("commands")
async def no_descriptors_leak(sandbox: Sandbox) -> None:
    """A command has three descriptors: no socket or pipe of ours, nor of another command."""
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(lambda: sandbox.exec("sleep 1000", stdin=b"x"))
        await anyio.sleep(0.2)
        seen = await sandbox.exec(["ls", "/proc/self/fd"])
        tasks.cancel_scope.cancel()
    # The fourth is the directory that ls reads.
    expect.equal(seen.stdout.split(), [b"0", b"1", b"2", b"3"], "open descriptors")


@in_sandbox("commands", deadline=120)
async def orphans_are_reaped(sandbox: Sandbox) -> None:
    """Orphans that end do not stay zombies."""
    name = f"z{uuid.uuid4().hex[:12]}"
    await sandbox.exec(f'cp "$(command -v sleep)" {name}')
    seen = await sandbox.exec(f"for i in 1 2 3 4 5; do (./{name} 0.1 &); done; ./{name} 0.3")
    expect.succeeded(seen, "starting orphans")
    search = f"grep -l 'Name:.{name}' /proc/[0-9]*/status"
    with anyio.move_on_after(60):
        while (await sandbox.exec(search)).stdout:  # noqa: ASYNC110 (no event tells of a stranger's zombie)
            await anyio.sleep(0.2)
        return
    raise AssertionError("orphans are zombies 60 s after their end")

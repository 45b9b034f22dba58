"""Actions on real sandboxes: what the conformance suite cannot check on every substrate."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import signal
import socket
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest

from dutyfree import Edit, Exec, Limits, List, Read, Search, Write
from dutyfree.contract import Observation, Substrate, errors
from dutyfree.contract.abilities import Terminal
from dutyfree.engine.host import proc
from dutyfree.engine.launcher.client import BINARY, Launcher, Reply
from dutyfree.engine.launcher.protocol import Request
from dutyfree.engine.launcher.timeouts import Timeouts
from dutyfree.engine.layers.command_defaults import command_defaults
from dutyfree.engine.sandbox import watch
from dutyfree.engine.sandbox.guest import Guest
from dutyfree.engine.sandbox.init_sandbox import InitSandbox
from dutyfree.engine.sandbox.sandbox import NativeSandbox
from dutyfree.substrates.native import Native, NativeConfig
from tests.awaiting import appeared, enter, together, until
from tests.engine import counts

# --- Numbers that cannot be --------------------------------------------------------------------------


async def test_texts_instead_of_bytes(native: Native) -> None:
    text: Any = "text"
    async with native.sandbox() as sandbox:
        for wrong in (
            lambda: sandbox.write("file", text),
            lambda: sandbox.edit("file", text, b""),
            lambda: sandbox.edit("file", b"old", text),
            lambda: sandbox.batch([Write("file", text)]),
        ):
            with pytest.raises(errors.ArgumentError, match="must be bytes, not str") as refused:
                await wrong()
            assert isinstance(refused.value, TypeError)
        assert repr(sandbox) == f"<sandbox {sandbox.id}>"
        assert repr(native).startswith("<native: 1 handed out, ")
    assert repr(sandbox) == f"<sandbox {sandbox.id}, closed>"


async def test_numbers_out_of_range(native: Native) -> None:
    """Numbers out of range are refused; a very long timeout becomes the longest one."""
    async with native.sandbox() as sandbox:
        for mode in (-1, 0o10000, 1 << 40):
            with pytest.raises(errors.LimitError, match="a mode must be from 0 to 0o7777"):
                await sandbox.batch([Write("never", b"", mode)])
        for rows in (0, -1, 1 << 16):
            with pytest.raises(errors.LimitError, match="a terminal of"):
                await enter(sandbox.terminal(rows=rows))
        for limit, width in ((0, 1), (-1, 1), (1, -1)):
            with pytest.raises(errors.LimitError, match="a search needs limit"):
                await sandbox.search(".", "x", limit=limit, width=width)
        for number in (-1, 0, 65, 1 << 40):
            process = await sandbox.start("true")
            with pytest.raises(errors.LimitError, match="no signal"):
                await process.signal(number)
        for port in (-1, 0, 1 << 16):
            with pytest.raises(errors.UsageError, match="no port"):
                await sandbox.connect(port)
        for seconds in (1e18, float("inf")):
            assert (await sandbox.exec("true", timeout=seconds)).ok
            assert (await sandbox.search(".", "x", timeout=seconds, limit=1 << 70)).matches == ()


# --- Batches -----------------------------------------------------------------------------------------


async def test_a_batch_wakes_its_owner_once(native: Native) -> None:
    async with native.sandbox() as sandbox:
        woken = 0
        channel = sandbox._lifecycle.channel()
        receive = channel._receive

        def counting() -> None:
            nonlocal woken
            woken += 1
            receive()

        channel._loop.remove_reader(channel._socket)
        channel._loop.add_reader(channel._socket, counting)
        results = await sandbox.batch([Exec(("/bin/true",)) for _ in range(20)])
        assert len(results) == 20
        assert woken <= 2


async def test_everything_in_one_batch(native: Native) -> None:
    large = os.urandom(700_000)
    async with native.sandbox() as sandbox:
        results = await sandbox.batch(
            [
                Write("large", large),
                Exec("cat > copy; wc -c < copy", stdin=large),
                Read("copy"),
                Write("small", b"some text\n"),
                Edit("small", b"some", b"other"),
                Exec("cat", stdin=b"input"),
                Search(".", "other"),
                List("."),
                Exec("head -c 3000000 /dev/zero"),
                Read("small"),
            ]
        )
        assert len(results) == 10
        assert results[2] == large
        assert results[9] == b"other text\n"
        assert isinstance(results[5], Observation)
        assert results[5].stdout == b"input"
        assert isinstance(results[8], Observation)
        assert len(results[8].stdout) == 3_000_000
        # The next batch starts from zero.
        assert (await sandbox.batch([Exec("true")], stop_on_failure=False))[0].ok  # type: ignore[union-attr]


@pytest.mark.parametrize("batched", [True, False])
async def test_answers_wait_in_files_and_not_in_memory(native: Native, batched: bool) -> None:
    """Init holds only a few answers in memory, for any number of requests."""
    others = counts.sandboxes(os.getpid())
    content = os.urandom(256 << 10)
    async with native.sandbox() as sandbox:
        (init,) = counts.sandboxes(os.getpid()) - others
        await sandbox.write("file", content)
        before = _peak_memory(init)
        if batched:
            assert await sandbox.batch([Read("file")] * 200) == (content,) * 200
        else:
            results = await asyncio.gather(*(sandbox.read("file") for _ in range(200)))
            assert results == [content] * 200
        assert _peak_memory(init) - before < 8 << 10


def _peak_memory(process: int) -> int:
    """The peak memory of a process in KiB."""
    text = Path(f"/proc/{process}/status").read_text()
    return int(next(line.split()[1] for line in text.splitlines() if line.startswith("VmHWM")))


async def test_batches_at_once_do_not_mix(native: Native) -> None:
    async with native.sandbox() as sandbox:

        async def one(number: int) -> None:
            path = f"file{number}"
            for turn in range(10):
                text = f"{number} {turn}".encode()
                results = await sandbox.batch(
                    [Write(path, text), Exec(f"cat {path}"), Read(path), Exec("exit 1")]
                )
                assert isinstance(results[1], Observation)
                assert (results[1].stdout, results[2]) == (text, text)
                assert len(results) == 4

        await together(*(partial(one, number) for number in range(8)))


async def test_a_batch_does_not_delay_other_actions(native: Native) -> None:
    async with native.sandbox() as sandbox, anyio.create_task_group() as tasks:
        tasks.start_soon(sandbox.batch, [Exec("touch begun; sleep 1000"), Exec("sleep 1000")])
        with anyio.fail_after(60):
            await appeared(sandbox, "begun")
            assert (await sandbox.exec("echo beside")).stdout == b"beside\n"
        tasks.cancel_scope.cancel()


async def test_a_cancelled_batch_is_killed_and_goes_no_further(native: Native) -> None:
    async with native.sandbox() as sandbox:
        for stop in (True, False):
            asked = (Exec("touch begun; sleep 60"), Write("never", b""), Exec("touch never"))
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(partial(sandbox.batch, asked, stop_on_failure=stop))
                await appeared(sandbox, "begun")
                tasks.cancel_scope.cancel()
            assert [entry.name for entry in await sandbox.list(".")] == ["begun"]
            await sandbox.remove("begun")
            assert b"sleep 60" not in (await sandbox.exec("cat /proc/[0-9]*/cmdline | tr '\\0' ' '")).stdout


async def test_actions_of_a_batch_that_cannot_be_sent(native: Native) -> None:
    async with native.sandbox() as sandbox:
        before = len(os.listdir("/proc/self/fd"))
        for wrong in (Edit("file", b"", b"x"), Edit("file", b"x" * (5 << 20), b""), Read("a\0b")):
            seen = await sandbox.batch([Write("file", b""), Exec("cat", stdin=b"x"), wrong, Read("file")])
            assert (seen[0], len(seen)) == (None, 3)
            assert isinstance(seen[1], Observation)
            assert isinstance(seen[2], errors.ActionError)
        seen = await sandbox.batch([Exec("a\0b"), Exec(()), Exec("true")], stop_on_failure=False)
        assert [one.exit_code for one in seen if isinstance(one, Observation)] == [126, 127, 0]
        with pytest.raises(errors.ArgumentError, match="timeout must be"):
            await sandbox.batch([Write("never", b""), Exec("true", timeout=float("nan"))])
        assert [entry.name for entry in await sandbox.list(".")] == ["file"]
        assert await counts.descriptors(before) <= before


async def test_the_time_of_a_batched_command_is_its_own(native: Native) -> None:
    async with native.sandbox() as sandbox:
        begun = anyio.current_time()
        first, second = await sandbox.batch([Exec("sleep 0.3"), Exec("true")])
        assert isinstance(first, Observation)
        assert isinstance(second, Observation)
        assert 0.3 <= first.seconds <= anyio.current_time() - begun - second.seconds


# --- Edits and searches ------------------------------------------------------------------------------


async def test_edits_keep_owners_and_leave_nothing(native: Native) -> None:
    async with native.sandbox() as sandbox:
        await sandbox.exec("mkdir d; printf 'a b c' > d/f; chown 7:8 d/f; chmod 4750 d/f")
        await sandbox.edit("d/f", b"b", b"")
        assert (await sandbox.exec("stat -c '%u %g %a' d/f; cat d/f; ls -A d")).stdout == b"7 8 4750\na  cf\n"
        await sandbox.exec("truncate -s 17000000 d/f")
        with pytest.raises(OSError, match="too large") as refused:
            await sandbox.edit("d/f", b"a", b"b")
        assert refused.value.errno == errno.EFBIG
        await sandbox.exec("rm d/f; mkfifo d/f")
        with pytest.raises(OSError, match="Neither a file"):
            await sandbox.edit("d/f", b"a", b"b")
        assert [entry.name for entry in await sandbox.list("d")] == ["f"]


async def test_a_full_disk_leaves_the_old_file(native: Native) -> None:
    async with native.sandbox(limits=Limits(memory=64 << 20, disk=4 << 20)) as sandbox:
        await sandbox.write("file", b"old" + bytes(1 << 20))
        await sandbox.exec("head -c 100000000 /dev/zero > filler")
        with pytest.raises(OSError, match="No space"):
            await sandbox.edit("file", b"old", b"new" * 1000)
        await sandbox.remove("filler")
        assert (await sandbox.read("file"))[:3] == b"old"
        assert [entry.name for entry in await sandbox.list(".")] == ["file"]


async def test_lines_of_an_edit_that_matches_often(native: Native) -> None:
    async with native.sandbox() as sandbox:
        await sandbox.write("file", b"x\n" * 1000)
        with pytest.raises(errors.EditError, match="1000 times") as refused:
            await sandbox.edit("file", b"x", b"y")
        assert (refused.value.count, refused.value.lines) == (1000, tuple(range(1, 17)))


async def test_a_search_that_takes_for_ever_is_ended(native: Native) -> None:
    async with native.sandbox() as sandbox:
        await sandbox.exec("head -c 60000000 /dev/zero | tr '\\0' a > file")
        slow = "(a{1,100}b|a{1,100}c)+d"
        with anyio.fail_after(60):
            with pytest.raises(TimeoutError):
                await sandbox.search(".", slow, regex=True, timeout=0.3)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(lambda: sandbox.search(".", slow, regex=True, timeout=None))
                await anyio.sleep(0.1)
                assert (await sandbox.exec("echo beside")).stdout == b"beside\n"
                tasks.cancel_scope.cancel()
        seen = await sandbox.exec("ls /proc | grep -c '^[0-9]'")
        assert int(seen.stdout) <= 5


async def test_searches_of_hostile_trees(native: Native) -> None:
    async with native.sandbox() as sandbox:
        await sandbox.exec(
            "mkfifo pipe; ln -s / loop; ln -s /dev/zero zero; ln -s loop loop2; truncate -s 1T huge;"
            "mkdir dark; touch 'new\nline' \"$(printf 'b\\377d')\"; echo x > dark/f;"
            "d=deep; for i in $(seq 300); do mkdir $d && cd $d || break; done; echo x > f"
        )
        with anyio.fail_after(60):
            found = await sandbox.search(".", "x")
        assert [match.path for match in found.matches] == ["dark/f"]
        assert found.unseen == 1
        names = {match.path for match in (await sandbox.search(".", skip=["deep"])).matches}
        assert {"new\nline", os.fsdecode(b"b\xffd"), "pipe", "loop"} <= names


async def test_a_search_with_many_matches(native: Native) -> None:
    async with native.sandbox() as sandbox:
        await sandbox.exec("seq 100000 > numbers; head -c 100000 /dev/zero | tr '\\0' 7 > wide")
        found = await sandbox.search(".", "7", limit=50_000)
        assert len(found.matches) == sum("7" in str(number) for number in range(1, 100_001)) + 1
        assert (found.matches[0].line, found.matches[0].text) == (7, b"7")
        assert (found.matches[-1].path, len(found.matches[-1].text), found.matches[-1].cut) == (
            "wide",
            500,
            True,
        )
        assert (await sandbox.search(".", "7", limit=10)).truncated


async def test_a_large_directory_is_listed_beside_others(native: Native) -> None:
    async with native.sandbox() as sandbox:
        await sandbox.exec("mkdir many; cd many; seq 30000 | xargs touch")
        entries = await sandbox.list("many")
        assert len(entries) == 30_000
        assert {entry.name for entry in entries} == {str(number) for number in range(1, 30_001)}
        with pytest.raises(NotADirectoryError):
            await sandbox.list("many/1")


# --- Watches -----------------------------------------------------------------------------------------


async def test_a_slow_watcher_gets_lost_changes_reported(native: Native) -> None:
    async with native.sandbox() as sandbox:
        async with sandbox.watch(".") as changes:
            await sandbox.exec("i=0; while [ $i -lt 60000 ]; do i=$((i+1)); : > f; : >> g; done")
            kinds = set()
            with anyio.fail_after(60):
                async for change in changes:
                    kinds.add(change.kind)
                    if change.kind == "lost":
                        break
            assert "lost" in kinds
        assert (await sandbox.exec("true")).ok


async def test_a_watch_ends_with_what_it_watches(native: Native) -> None:
    async with native.sandbox() as sandbox:
        await sandbox.exec("mkdir gone")
        async with sandbox.watch("gone", recursive=True) as changes:
            await sandbox.exec("mkdir -p gone/a/b; echo > gone/a/b/c")
            with anyio.fail_after(60):
                while (change := await anext(changes)).path != "a/b/c":
                    pass
                assert change.kind == "created"
                await sandbox.exec("rm -r gone")
                seen = [change async for change in changes]
        assert ("deleted", "") in {(change.kind, change.path) for change in seen}
        processes = (await sandbox.exec("ls /proc | grep -c '^[0-9]'")).stdout
        assert int(processes) <= 5


async def test_too_many_directories_are_reported(native: Native) -> None:
    async with native.sandbox() as sandbox:
        assert (await sandbox.exec(f"mkdir $(seq {watch.DIRECTORIES_MAX + 1})")).ok
        async with sandbox.watch(".", recursive=True) as changes:
            with anyio.fail_after(60):
                assert (await anext(changes)).kind == "lost"


# --- Terminals ---------------------------------------------------------------------------------------


async def line(held: Terminal) -> bytes:
    """Read one line; the kernel may deliver it in parts."""
    said = b""
    while not said.endswith(b"\n") and (part := await held.read()):
        said += part
    return said


async def test_leaving_a_terminal_hangs_it_up(native: Native) -> None:
    async with native.sandbox() as sandbox:
        async with sandbox.terminal(
            "trap 'echo hung up > told; exit' HUP; echo on; while :; do read nothing; done"
        ) as held:
            assert await line(held) == b"on\r\n"
        assert await sandbox.read("told") == b"hung up\n"
        async with sandbox.terminal("trap '' HUP; echo on; while :; do sleep 1; done") as held:
            assert await line(held) == b"on\r\n"
        assert b"sleep" not in (await sandbox.exec("cat /proc/[0-9]*/comm")).stdout


async def test_a_terminal_as_another_user(native: Native) -> None:
    async with (
        native.sandbox() as sandbox,
        sandbox.terminal("id -u; tty; echo x > $(tty)", user="nobody") as held,
    ):
        said = b""
        while part := await held.read():
            said += part
        assert said == b"65534\r\n/dev/pts/0\r\nx\r\n"


async def test_many_terminals_and_no_descriptor_left(native: Native) -> None:
    before = len(os.listdir("/proc/self/fd"))
    async with native.sandbox() as sandbox:
        for _ in range(100):  # more than can be open at the same time
            async with sandbox.terminal(["echo", "x"]) as held:
                assert await line(held) == b"x\r\n"
        async with sandbox.terminal("sleep 100") as held:
            await sandbox.close()
            with pytest.raises(errors.ExecError):
                raise errors.ExecError("") if not await held.read() else AssertionError
    assert await counts.descriptors(before) <= before


async def test_a_terminal_that_cannot_be_opened(native: Native) -> None:
    async with native.sandbox() as sandbox:
        async with sandbox.terminal(["/no/such/program"]) as held:
            assert (await held.wait()).exit_code == 127
        async with sandbox.terminal(user="nobody-here") as held:
            seen = await held.wait()
            assert (seen.exit_code, seen.started) == (126, False)
            assert b"no such user" in seen.stderr
        # The seccomp filter refuses TIOCSTI, also in the terminal's own session.
        script = "import fcntl; fcntl.ioctl(0, 0x5412, b'x')"
        async with sandbox.terminal(["python3", "-c", script]) as held:
            assert (await held.wait()).exit_code == 1


# --- Behind a byte stream ----------------------------------------------------------------------------


class NoControl:
    """Of an init that ends with its stream, and is never paused."""

    freezer = True

    async def freeze(self) -> None: ...

    async def thaw(self) -> None: ...

    async def destroy(self) -> None: ...

    async def responds(self) -> bool:
        return True

    def give_up(self) -> None: ...


@pytest.fixture
async def streamed(tmp_path: Path) -> AsyncIterator[InitSandbox]:
    """An init as those of containers, with the files of this machine; it runs in ``tmp_path``."""
    ours, theirs = socket.socketpair()
    with theirs:
        words = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc", str(BINARY), "guest")
        stream = theirs.fileno()
        process = await asyncio.create_subprocess_exec(*words, stdin=stream, stdout=stream, cwd=tmp_path)

    async def explain() -> Exception:
        return errors.ExecError(f"init ended with code {await process.wait()}")

    guest = Guest("streamed", ours, NoControl(), explain=explain)
    try:
        await guest.wait_ready()
        yield guest.sandbox(command_defaults(), Limits())
    finally:
        guest.close()
        await process.wait()


@pytest.mark.native
@pytest.mark.root("only root can make a pid namespace here")
async def test_large_contents_in_a_batch_behind_a_stream(streamed: InitSandbox) -> None:
    """The owner waits until init has taken the input, also before the last action."""
    large = os.urandom(6 << 20)
    with anyio.fail_after(60):
        results = await streamed.batch(
            [Write("file", large), Exec("cat > copy", stdin=large), Read("file"), Read("copy")]
        )
    assert len(results) == 4
    assert results[2] == results[3] == large


@pytest.mark.native
@pytest.mark.root("only root can make a pid namespace here")
@pytest.mark.parametrize("_time", range(5))
async def test_input_after_that_of_a_command_which_ends(
    streamed: InitSandbox, tmp_path: Path, _time: int
) -> None:
    """Init learns in one turn that nobody reads the first input, and that the second one begins."""
    content = os.urandom(6 << 20)
    reader = await streamed.start(["sleep", "98543"], stdin=True)
    (sleeper,) = await until(lambda: _processes("sleep\x0098543\0"))
    init = proc.stat(sleeper).parent
    os.kill(init, signal.SIGSTOP)
    try:
        await reader.write(b"for nobody")
        writing = asyncio.create_task(streamed.write("file", content))
        await anyio.sleep(0.1)  # both are on their way
        os.kill(sleeper, signal.SIGKILL)
    finally:
        os.kill(init, signal.SIGCONT)
    await writing
    assert (tmp_path / "file").read_bytes() == content


def _processes(command_line: str) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if path.read_text() == command_line:
                found.append(int(path.parent.name))
    return found


async def _reads_within_limits(sandbox: InitSandbox) -> None:
    for size, largest in ((100, 99), (300_000, 299_999), (5 << 20, 1 << 20)):
        content = os.urandom(size)
        await sandbox.write("file", content)
        assert await sandbox.read("file", largest=size) == content
        for _ in range(2):
            with pytest.raises(errors.ActionError) as refused:
                await sandbox.read("file", largest=largest)
            assert refused.value.kind == "too_large"
    assert (await sandbox.exec("echo usable")).stdout == b"usable\n"


async def test_reads_within_limits(native: Native) -> None:
    async with native.sandbox() as sandbox:
        await _reads_within_limits(sandbox)


@pytest.mark.native
@pytest.mark.root("only root can make a pid namespace here")
async def test_reads_within_limits_behind_a_stream(streamed: InitSandbox) -> None:
    await _reads_within_limits(streamed)


# --- Pauses ------------------------------------------------------------------------------------------


async def test_a_pause_cannot_be_seen_or_undone(native: Native) -> None:
    script = """
import os, signal, time
child = os.fork()
if child == 0:
    while True: time.sleep(0.01)
open("ready", "w")
stops = 0
end = time.monotonic() + 1.5
while time.monotonic() < end:
    pid, status = os.waitpid(child, os.WNOHANG | os.WUNTRACED)
    stops += bool(pid)
    os.kill(child, signal.SIGCONT)
    time.sleep(0.005)
os.kill(child, 9)
print("stops", stops)
"""
    async with native.sandbox() as sandbox:
        await sandbox.write("script.py", script.encode())
        process = await sandbox.start(["python3", "script.py"])
        await appeared(sandbox, "ready")
        for _ in range(3):
            await sandbox.pause()
            await anyio.sleep(0.1)
            with pytest.raises(errors.DispatchError, match="is paused"):
                await sandbox.exec("true")
            await sandbox.resume()
        assert (await process.wait()).stdout == b"stops 0\n"


async def test_a_pause_counts_for_no_timeout(native: Native) -> None:
    async with native.sandbox() as sandbox:
        seen: list[Observation] = []

        async def run() -> None:
            seen.append(await sandbox.exec("touch begun; sleep 0.6; echo done", timeout=12))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run)
            await appeared(sandbox, "begun")
            await sandbox.pause()
            await anyio.sleep(13)  # longer than the command's timeout plus the answer timeout
            await sandbox.resume()
        assert seen[0].stdout == b"done\n"
        assert not seen[0].timed_out


async def test_a_paused_sandbox_can_be_left_and_cancelled_in(native: Native) -> None:
    async with native.sandbox() as sandbox:
        await sandbox.exec("sleep 100 &")
        await sandbox.pause()
        with anyio.fail_after(60):
            await sandbox.close()  # returns when nothing is left
    async with native.sandbox() as sandbox:

        async def run() -> None:
            await sandbox.exec("touch begun; until [ -e on ]; do sleep 0.02; done; touch never; sleep 100")

        with anyio.fail_after(60):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(run)
                await appeared(sandbox, "begun")
                await sandbox.pause()
                tasks.cancel_scope.cancel()
        await sandbox.resume()
        await sandbox.write("on", b"")
        await anyio.sleep(0.5)
        assert {entry.name for entry in await sandbox.list(".")} == {"begun", "on"}
    async with native.sandbox() as sandbox:  # it reuses the control group, which is not frozen
        assert (await sandbox.exec("true")).ok


async def test_a_pause_by_signals_without_a_freezer(native: Native) -> None:
    async with native.sandbox() as sandbox:
        sandbox._lifecycle.handle.freezer = False
        for turns in (20, 300):  # 0.1 s each; the second time only if the first ended before the pause
            process = await sandbox.start(
                f"touch begun; for i in $(seq {turns}); do echo $i; sleep 0.1; done"
            )
            await appeared(sandbox, "begun")
            await sandbox.pause()
            with anyio.move_on_after(turns * 0.1 + 0.5) as scope:
                await process.wait()
            await sandbox.resume()
            assert (await process.wait()).ok
            await sandbox.remove("begun")
            if scope.cancelled_caught:
                break
        assert scope.cancelled_caught


# --- The end -----------------------------------------------------------------------------------------


async def test_an_end_that_takes_too_long_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    ask = Launcher.ask

    async def slow(
        self: Launcher, kind: Request, number: int = 0, body: bytes = b"", descriptor: int | None = None
    ) -> Reply:
        if kind == Request.DESTROY:
            await anyio.sleep(1)
        return await ask(self, kind, number, body, descriptor)

    monkeypatch.setattr(Launcher, "ask", slow)
    async with Native(NativeConfig(), Timeouts(end=0.2)) as native:
        with pytest.raises(errors.CleanupError, match=r"native-\d+-\d+ is not gone after 0.2 s"):
            await enter(native.sandbox())


async def test_processes_are_found_again_and_forgotten(native: Substrate) -> None:
    async with native.sandbox() as sandbox:
        assert isinstance(sandbox, NativeSandbox)
        for _ in range(80):
            await (await sandbox.start(["/bin/true"])).wait()
        running = await sandbox.start("sleep 100")
        found = await sandbox.processes()
        assert found[-1] is running
        assert len(found) <= 65
        await running.signal(signal.SIGSTOP)
        await anyio.sleep(0.1)
        assert running.running
        await running.kill()
        await sandbox.reset()
        assert await sandbox.processes() == ()
        with pytest.raises(KeyError):
            await sandbox.attach(running.id)


async def test_a_process_that_takes_no_input(native: Native) -> None:
    async with native.sandbox() as sandbox:
        process = await sandbox.start("sleep 0.5", stdin=True)
        with anyio.fail_after(60), pytest.raises(BrokenPipeError):
            await process.write(bytes(10_000_000))
        assert (await process.wait()).ok
        with pytest.raises(BrokenPipeError):
            await process.write(b"x")

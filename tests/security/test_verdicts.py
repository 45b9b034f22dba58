"""A hostile agent tries to disguise its own act as an infrastructure failure, to get a free retry.

After each attack every kind of action must succeed, be observed, or raise an ActionError. Any other error
would have the attempt repeated elsewhere, or end the training loop.
"""

from __future__ import annotations

import errno
import socket
import textwrap
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest

import dutyfree
from dutyfree import Action, Edit, Exec, Limits, List, Read, Recipe, Search, Service, Stage, Write
from dutyfree.contract import errors
from dutyfree.engine.launcher.timeouts import Timeouts
from dutyfree.engine.layers import run_stage
from dutyfree.engine.sandbox.channel import SetupError
from dutyfree.engine.sandbox.snapshot import unusable
from dutyfree.substrates.docker import images
from dutyfree.substrates.docker import sandbox as container
from dutyfree.substrates.docker.engine import Engine
from dutyfree.substrates.native import Native, NativeConfig
from tests.attacks import FORK_BOMB
from tests.awaiting import appeared, enter

LIMITS = Limits(memory=160 << 20, pids=40, disk=48 << 20)
SECONDS = 60.0

FORK_BOMB_WITH_RETRIES = """
import os, time
for _ in range(3):
    os.fork()
while True:
    try:
        os.fork()
    except OSError:
        open("ready", "w")
        time.sleep(0.001)
"""

MEMORY = """
import time
held = []
try:
    while True: held.append(bytearray(1 << 20)); len(held) == 120 and open("ready", "w")
except MemoryError: pass
time.sleep(1000)
"""

MEMORY_AGAIN_AND_AGAIN = """
import os, time
while True:
    if os.fork() == 0:
        open("ready", "w")
        held = [bytearray(1 << 20) for _ in range(400)]
    else:
        os.wait()
"""

DESCRIPTORS = """
import os, time
held = []
try:
    while True: held.append(os.open("/dev/null", 0))
except OSError: os.close(held.pop())
open("ready", "w")
time.sleep(1000)
"""

TERMINALS = """
import os, time
held = []
try:
    while True: held.append(os.openpty())
except OSError: open("ready", "w")
time.sleep(1000)
"""

FLOOD = """
import os
open("ready", "w")
while True: os.write(1, b"x" * 65536); os.write(2, b"y" * 65536)
"""

KILLER = """
import os, time
open("ready", "w")
while True:
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            try: os.kill(int(name), 9)
            except OSError: pass
    time.sleep(0.002)
"""

LIMITER = """
import os, resource, time
for what in (resource.RLIMIT_NOFILE, resource.RLIMIT_FSIZE, resource.RLIMIT_AS, resource.RLIMIT_CPU,
             resource.RLIMIT_NPROC, resource.RLIMIT_STACK, resource.RLIMIT_DATA, resource.RLIMIT_MEMLOCK):
    for pid in (1, os.getppid()):
        try: resource.prlimit(pid, what, (0, 0))
        except (OSError, ValueError): pass
open("ready", "w")
time.sleep(1000)
"""

TRACER = """
import ctypes, os, time
libc, seen = ctypes.CDLL(None), {os.getpid()}
open("ready", "w")
while True:
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) not in seen:
            if libc.ptrace(0x4206, int(name), None, None) == 0: seen.add(int(name))
    time.sleep(0.005)
"""

BACKGROUND = {
    "a fork bomb": FORK_BOMB,
    "a fork bomb that goes on": FORK_BOMB_WITH_RETRIES,
    "memory used up": MEMORY,
    "memory used up again and again": MEMORY_AGAIN_AND_AGAIN,
    "descriptors used up": DESCRIPTORS,
    "terminals used up": TERMINALS,
    "a flood of output": FLOOD,
    "everything is killed": KILLER,
    "limits of the first process": LIMITER,
    "everything is traced": TRACER,
}

DEEP = "import os\nfor _ in range(2500): os.mkdir('d'); os.chdir('d')"

FOREGROUND = {
    "a full disk": "cat /dev/zero > full",
    "no inodes left": "i=0; while [ $i -lt 40 ] && mkdir -p n/$i && (cd n/$i && seq 1 3000 | xargs touch) "
    "2>/dev/null; do i=$((i + 1)); done",
    "no shell": "rm -f /bin/sh /usr/bin/sh /bin/dash /usr/bin/dash",
    "no workspace": "rm -rf /workspace",
    "a workspace that is a file": "cd /; rm -rf /workspace; echo x > /workspace",
    "a workspace that is a loop": "cd /; rm -rf /workspace; ln -s workspace /workspace",
    "no users": "rm -f /etc/passwd /etc/group; ln -s /proc/self/mem /etc/passwd",
    "a closed workspace": "chmod 000 /workspace /tmp",
    "no temporary files": "rm -rf /tmp; echo x > /tmp",
    "pipes for files": "rm -f file source; mkfifo file source; mkfifo tree",
    "a link to memory": "rm -f file; ln -s /proc/self/mem file; ln -s /proc/1/mem tree",
    "a link to itself": "rm -f file; ln -s file file",
    "links to devices": "rm -f file; ln -s /dev/zero file; ln -s /dev/full tree",
    "deep directories": f'python3 -c "{DEEP}"',
    "names that are not text": "mkdir tree; cd tree; touch \"$(printf 'caf\\351 \\377')\"",
    "long names": 'touch "$(printf %0250d 1)"; mkdir -p "$(printf %0250d 2)/$(printf %0250d 3)"',
    "the first process is asked to end": "kill -9 1; kill -15 1; kill -19 1; kill -2 1; kill -6 1; exit 0",
    "no program": "rm -rf /usr/bin/* /bin/* /usr/local/bin/* 2>/dev/null",
    "libraries are gone": "rm -rf /lib/* /usr/lib/* /lib64/* 2>/dev/null",
    "links in /proc": "rm -f file; ln -s /proc/self/fd/3 file; ln -s /proc/1/root tree",
}


@pytest.fixture(scope="module")
async def native() -> AsyncIterator[Any]:
    """It waits longer than usual for an init: this machine may do other work."""
    async with Native(NativeConfig(), Timeouts(answer=20.0)) as native:
        yield native


async def judged(name: str, action: Callable[[], Awaitable[Any]]) -> str:
    """The outcome of an action; fails if it is neither a result nor the agent's fault."""
    try:
        with anyio.fail_after(2 * SECONDS):
            await action()
    except errors.ActionError as error:
        return error.kind
    except Exception as error:
        raise AssertionError(f"{name}: {type(error).__name__}: {error}: {errors.verdict(error)}") from error
    return "done"


def actions(sandbox: Any, local: Path) -> dict[str, Callable[[], Awaitable[Any]]]:
    (local / "source").mkdir(exist_ok=True)
    (local / "source" / "file").write_bytes(b"x" * 100_000)

    async def shell() -> None:
        async with sandbox.shell() as held:
            await held.run("cd /; echo x", timeout=2)
            await held.run("kill -9 $$", timeout=2)
            await held.run("echo y", timeout=2)

    async def terminal() -> None:
        async with sandbox.terminal() as held:
            with suppress(BrokenPipeError):
                await held.write(b"exit 3\n")
            with anyio.move_on_after(2):
                await held.wait()

    async def start() -> None:
        process = await sandbox.start("cat", stdin=True)
        await process.write(b"x")
        await process.close_stdin()
        with anyio.move_on_after(2):
            await process.wait()
        await process.kill()

    async def stream() -> None:
        async for _ in sandbox.stream("echo x; echo y >&2", timeout=2):
            pass

    async def watch() -> None:
        await enter(sandbox.watch("."))

    async def batch() -> None:
        wanted: list[Action] = [
            Write("b", b"x"),
            Read("file"),
            Exec("true", timeout=2),
            Edit("file", b"one", b"two"),
            List("."),
        ]
        await sandbox.batch([*wanted, Search(".", "x", timeout=2)], stop_on_failure=False)

    async def fork() -> None:
        async with sandbox.fork(1) as (child,):
            await child.exec("true", timeout=2)

    return {
        "exec": lambda: sandbox.exec("echo x", timeout=2),
        "exec of a program": lambda: sandbox.exec(["/usr/bin/env", "true"], timeout=2),
        "exec elsewhere": lambda: sandbox.exec("pwd", cwd="tree/d", timeout=2),
        "exec as another": lambda: sandbox.exec("id", user="nobody", timeout=2),
        "exec with an input": lambda: sandbox.exec("cat", stdin=b"x" * 300_000, timeout=2),
        "read": lambda: sandbox.read("file"),
        "read of a tree": lambda: sandbox.read("tree"),
        "write": lambda: sandbox.write("file", b"one two"),
        "write of much": lambda: sandbox.write("new/file", b"x" * 400_000),
        "edit": lambda: sandbox.edit("file", b"one", b"1"),
        "list": lambda: sandbox.list("."),
        "search": lambda: sandbox.search(".", "one", timeout=5),
        "search for names": lambda: sandbox.search("/", names=["file"], timeout=5),
        "shell": shell,
        "terminal": terminal,
        "start": start,
        "stream": stream,
        "watch": watch,
        "batch": batch,
        "upload": lambda: sandbox.upload(local / "source", "uploaded"),
        "download": lambda: sandbox.download(".", local / "copy"),
        "download of a tree": lambda: sandbox.download("tree", local / "tree"),
        "remove": lambda: sandbox.remove("new"),
        "remove of a tree": lambda: sandbox.remove("tree"),
        "snapshot": sandbox.snapshot,
        "fork": fork,
    }


async def all_judged(sandbox: Any, local: Path, attack: str) -> None:
    found = {}
    for name, action in actions(sandbox, local).items():
        found[name] = await judged(f"{attack}: {name}", action)
    assert found
    await sandbox.reset()  # from here on, failures are the infrastructure's
    assert (await sandbox.exec("echo on")).stdout == b"on\n"


@pytest.mark.parametrize("attack", list(BACKGROUND))
async def test_left_in_the_background(native: Any, tmp_path: Path, attack: str) -> None:
    async with native.sandbox(limits=LIMITS) as sandbox:
        await sandbox.write("file", b"one two")
        await sandbox.write("script.py", textwrap.dedent(BACKGROUND[attack]).encode())
        await sandbox.exec("python3 script.py >/dev/null 2>&1 </dev/null &")
        await appeared(sandbox, "ready")
        await all_judged(sandbox, tmp_path, attack)


@pytest.mark.parametrize("attack", list(FOREGROUND))
async def test_done_before(native: Any, tmp_path: Path, attack: str) -> None:
    async with native.sandbox(limits=LIMITS) as sandbox:
        await sandbox.write("file", b"one two")
        await sandbox.exec(FOREGROUND[attack], timeout=SECONDS)
        await all_judged(sandbox, tmp_path, attack)


STOPPER = "import os\nopen('ready', 'w')\nwhile True:\n  try: os.kill(-1, 19)\n  except OSError: pass"
FAR = {"PATH": ":".join([*(f"/{number}" for number in range(4000)), "/usr/bin"])}


async def run_until_it_fails(sandbox: Any) -> None:
    while True:
        await sandbox.exec(["true"], env=FAR, timeout=0.2)


async def test_an_init_that_is_held_up(impatient: Any) -> None:
    """The launcher answers, so processes in the sandbox keep its init from answering."""
    async with impatient.sandbox(limits=LIMITS) as sandbox:
        await sandbox.write("script.py", STOPPER.encode())
        await sandbox.exec("python3 script.py >/dev/null 2>&1 </dev/null &")
        await appeared(sandbox, "ready")
        with anyio.fail_after(200), pytest.raises(errors.SandboxGone) as gone:
            await run_until_it_fails(sandbox)
        assert (gone.value.kind, errors.verdict(gone.value)) == ("gone", "task")
        for action in (
            lambda: sandbox.read("file"),
            lambda: sandbox.batch([Read("file")]),
            lambda: sandbox.connect(80),
            lambda: sandbox.set_network("on"),
            sandbox.pause,
            sandbox.snapshot,
            lambda: sandbox.fork(1).__aenter__(),
        ):
            with pytest.raises(errors.SandboxGone):
                await action()


async def test_a_killed_worker_is_no_broken_machine(native: Any) -> None:
    """Processes in the sandbox run searches, transfers and watches; its root can kill them."""
    async with native.sandbox(limits=LIMITS) as sandbox:
        await sandbox.exec("seq 1 1000000 > large; cp large another; cp large third")
        await sandbox.write("script.py", KILLER.encode())
        await sandbox.exec("python3 script.py >/dev/null 2>&1 </dev/null &")
        await appeared(sandbox, "ready")
        kinds = set()
        with anyio.fail_after(120):
            while "killed" not in kinds:
                kinds.add(await judged("search", lambda: sandbox.search("/", "no such text", timeout=30)))
        assert kinds <= {"killed", "done"}


STOPPER_OF_WORKERS = """
import os
open("ready", "w")
while True:
    for name in os.listdir("/proc"):
        try:
            if name.isdigit() and name != "1" and "python" not in open(f"/proc/{name}/cmdline").read():
                os.kill(int(name), 19)
        except OSError:
            pass
"""


async def test_a_stopped_worker_keeps_no_action_waiting(native: Any, tmp_path: Path) -> None:
    """Root of the sandbox can also stop them for ever."""
    (tmp_path / "source").mkdir()
    for number in range(20):
        (tmp_path / "source" / str(number)).write_bytes(b"x" * 1_000_000)
    async with native.sandbox(limits=LIMITS) as sandbox:
        names = "mkdir many; cd many; seq -f %0200g 1 4000 | xargs touch"
        assert (await sandbox.exec(names, timeout=SECONDS)).ok
        await sandbox.write("script.py", STOPPER_OF_WORKERS.encode())
        await sandbox.start(["python3", "script.py"])
        await appeared(sandbox, "ready")
        for name, action in {
            "upload": lambda: sandbox.upload(tmp_path / "source", "uploaded"),
            "download": lambda: sandbox.download("many", tmp_path / "copy"),
            "list": lambda: sandbox.list("many"),
            "remove": lambda: sandbox.remove("uploaded"),
        }.items():
            with anyio.fail_after(60):
                assert await judged(name, action) in ("killed", "done", "not_found")


async def test_a_file_that_the_kernel_makes_up_is_no_broken_disk(native: Any, tmp_path: Path) -> None:
    (tmp_path / "source").write_bytes(b"x")
    async with native.sandbox(limits=LIMITS) as sandbox:
        process = await sandbox.start("echo $$; exec sleep 1000")
        pid = int((await anext(aiter(process.output()))).data)
        with pytest.raises(errors.SpecialFile):
            await sandbox.upload(tmp_path / "source", f"/proc/{pid}/mem")


QUEUE = """
import socket, time
server = socket.socket()
server.bind(("127.0.0.1", 8080))
server.listen(0)
clients = [socket.socket() for _ in range(8)]
for client in clients:
    client.setblocking(False)
    try: client.connect(("127.0.0.1", 8080))
    except BlockingIOError: pass
open("ready", "w")
time.sleep(1000)
"""


@pytest.mark.native
async def test_a_server_that_accepts_nobody() -> None:
    async with (
        Native(NativeConfig(), Timeouts(connect=0.5)) as native,
        native.sandbox(limits=LIMITS) as sandbox,
    ):
        await sandbox.write("script.py", QUEUE.encode())
        await sandbox.start(["python3", "script.py"])
        await appeared(sandbox, "ready")
        with anyio.fail_after(60), pytest.raises(errors.ActionTimeout, match="8080"):
            await sandbox.connect(8080)
        assert await sandbox.exec("true")
        # The loop has dropped the descriptor: it watches the next one of the same number.
        one, other = socket.socketpair()
        with one, other, anyio.fail_after(60):
            await anyio.wait_writable(one)


async def test_kills_for_memory_are_marked_everywhere(native: Any) -> None:
    """In commands, shells, processes in the background and batches."""
    async with native.sandbox(limits=LIMITS) as sandbox:
        seen = await sandbox.exec(["python3", "-c", "held = bytearray(600 << 20)"], timeout=SECONDS)
        assert (seen.oom, seen.signal) == (True, 9)
        async with sandbox.shell() as held:
            seen = await held.run("python3 -c 'held = bytearray(600 << 20)' 2>/dev/null", timeout=SECONDS)
            assert (seen.oom, seen.exit_code) == (True, 137)
            seen = await held.run("sh -c 'kill -9 $$'", timeout=SECONDS)
            assert (seen.oom, seen.exit_code) == (False, 137)
        process = await sandbox.start(["python3", "-c", "held = bytearray(600 << 20)"])
        assert (await process.wait()).oom
        (seen,) = await sandbox.batch([Exec(("python3", "-c", "held = bytearray(600 << 20)"))])
        assert isinstance(seen, dutyfree.Observation)
        assert seen.oom


async def test_commands_at_the_same_time_all_hear_of_a_kill(native: Any) -> None:
    """Each command that ran when the limit killed a process; none that started later."""
    async with native.sandbox(limits=LIMITS) as sandbox:
        waiting_one = await sandbox.start("read line; exit 0", stdin=True)
        seen = await sandbox.exec(["python3", "-c", "held = bytearray(600 << 20)"], timeout=SECONDS)
        assert seen.oom
        assert not (await sandbox.exec("true")).oom
        await waiting_one.write(b"\n")
        assert (await waiting_one.wait()).oom


async def test_a_shell_whose_marks_are_forged(native: Any) -> None:
    """The command can redefine the program that prints the end mark, and read the mark."""
    async with native.sandbox(limits=LIMITS) as sandbox:
        for trick in (
            'printf() { command printf "$1" "$2" 99999999999999999999; }',
            'printf() { command printf "$1" "$2" -1; }',
            "printf() { :; }",
            "exec 1>&-; exec 2>&-",
            "exec 0<&-",
            "kill -9 $$",
            "trap '' TERM; set -e; false",
            "while :; do echo x > /proc/$$/fd/0; done",
        ):
            async with sandbox.shell() as held:
                for command in (trick, "true", "true"):
                    await judged(f"{trick}: {command}", partial(held.run, command, timeout=1))
        assert (await sandbox.exec("echo on")).stdout == b"on\n"


async def test_mistakes_here_are_not_the_agents_fault(native: Any, tmp_path: Path) -> None:
    """The program's own request fails: an error of the program, and no ActionError."""
    (tmp_path / "file").write_bytes(b"")
    async with native.sandbox() as sandbox:
        await sandbox.exec("mkdir tree; echo x > tree/a")
        with pytest.raises(OSError) as refused:  # noqa: PT011 (the next line says which)
            await sandbox.download("tree", tmp_path / "file" / "below")
        assert errors.verdict(refused.value) == "program"
        with pytest.raises(FileNotFoundError) as missing:
            await sandbox.upload(tmp_path / "missing", "x")
        assert errors.verdict(missing.value) == "program"


async def test_a_service_that_the_machinery_cannot_start_again(
    native: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = Recipe(services=(Service("sleeper", "exec sleep 1000"),))
    async with native.sandbox(recipe) as sandbox:
        for cause, wanted in (
            (errors.ExecError("a broken disk"), errors.ExecError),
            (None, errors.ActionError),
        ):

            async def fail(_: object, cause: Exception | None = cause) -> None:
                raise errors.CreateError("it does not start") from cause

            monkeypatch.setattr(sandbox._services, "_start", fail)
            with pytest.raises(wanted):
                await sandbox.restart("sleeper")


@pytest.mark.parametrize("number", [errno.ENOMEM, errno.ENOSPC, errno.EMFILE, errno.EAGAIN, errno.EIO])
def test_a_host_without_room_for_a_fork_is_not_the_agents_fault(number: int) -> None:
    assert errors.verdict(unusable(SetupError("mount", number))) == "infrastructure"
    assert errors.verdict(unusable(SetupError("mount", errno.ENOTDIR))) == "task"


# --- Containers ---------------------------------------------------------------------------------------

IN_CONTAINERS = {
    "a fork bomb": FORK_BOMB,
    "memory used up again and again": MEMORY_AGAIN_AND_AGAIN,
    "everything is killed": KILLER,
}
BEFORE_IN_CONTAINERS = (
    "no shell",
    "a workspace that is a loop",
    "no users",
    "pipes for files",
    "a link to memory",
    "a link to itself",
    "deep directories",
    "names that are not text",
    "the first process is asked to end",
    "no program",
    "libraries are gone",
)


def plain_actions(sandbox: Any, local: Path) -> dict[str, Callable[[], Awaitable[Any]]]:
    """The actions of the contract, which every sandbox has."""
    (local / "source").write_bytes(b"x" * 100_000)
    return {
        "exec": lambda: sandbox.exec("echo x", timeout=20),
        "exec of a program": lambda: sandbox.exec(["/usr/bin/env", "true"], timeout=20),
        "exec as another": lambda: sandbox.exec("id", user="nobody", timeout=20),
        "read": lambda: sandbox.read("file"),
        "write": lambda: sandbox.write("file", b"one two"),
        "list": lambda: sandbox.list("."),
        "upload": lambda: sandbox.upload(local / "source", "uploaded"),
        "download": lambda: sandbox.download("tree", local / "tree"),
        "download of a file": lambda: sandbox.download("file", local / "file"),
        "remove": lambda: sandbox.remove("tree"),
    }


async def test_a_file_in_a_container_that_has_no_end(docker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is never read whole, whatever the container's tools do."""
    monkeypatch.setattr(container, "TOOL_OUTPUT", 1 << 20)
    async with docker.sandbox() as sandbox:
        assert (await sandbox.exec("truncate -s 16M file")).ok
        with pytest.raises(errors.ActionError) as refused:
            await sandbox.read("file")
        assert refused.value.kind == "too_large"


async def test_a_container_that_is_ended_from_outside(docker: Any, engine: Engine) -> None:
    """Killed by an operator: not the agent's fault. A container that the agent ends is its fault."""
    async with docker.sandbox() as sandbox:
        await engine.request("POST", f"/containers/{sandbox.id}/kill")
        with pytest.raises(errors.SandboxClosed) as closed:
            await sandbox.exec("true")
        assert errors.verdict(closed.value) == "infrastructure"
    async with docker.sandbox() as sandbox:
        with anyio.fail_after(SECONDS), pytest.raises(errors.SandboxGone) as gone:
            await exec_until_it_fails(sandbox, "kill -9 -1; kill -15 -1")
        assert errors.verdict(gone.value) == "task"
        with pytest.raises(errors.SandboxGone) as again:
            await sandbox.read("file")
        assert again.value is gone.value, "the engine may have forgotten why by now"


@pytest.mark.alone  # it makes the engine forget the containers of other tests
async def test_a_container_whose_end_the_engine_has_forgotten(docker: Any, engine: Engine) -> None:
    """The engine keeps a few hundred events. Without the event, the agent is not blamed."""
    async with docker.sandbox() as sandbox, docker.sandbox() as busy:
        await engine.request("POST", f"/containers/{sandbox.id}/kill")
        for _ in range(300):
            await engine.request("POST", f"/containers/{busy.id}/kill", query={"signal": "CONT"})
        with pytest.raises(errors.SandboxClosed, match="does not know why") as closed:
            await sandbox.exec("true")
        assert errors.verdict(closed.value) == "infrastructure"


class Gone:
    """A stage of the recipe ends its own sandbox."""

    id = "gone"

    async def exec(self, *_: object, **__: object) -> None:
        raise errors.SandboxGone("the sandbox is gone")


async def test_a_stage_that_ends_its_sandbox() -> None:
    """No agent has run yet: the recipe is at fault."""
    sandbox: Any = Gone()
    with pytest.raises(errors.CreateError, match="the sandbox is gone") as failed:
        await run_stage.apply(sandbox, Stage("setup", ("true",)), 1)
    assert errors.verdict(failed.value) == "infrastructure"
    with pytest.raises(errors.CreateError, match="the sandbox is gone"):
        await images._must_succeed(sandbox, "true", "stage 1", {})


async def test_a_stage_with_a_path_that_cannot_be(docker: Any, tmp_path: Path) -> None:
    (tmp_path / "source").write_bytes(b"")
    with pytest.raises(errors.CreateError, match="NUL byte"):
        await enter(docker.sandbox(Recipe(stages=(Stage("setup", files={"a\0b": tmp_path / "source"}),))))


async def exec_until_it_fails(sandbox: Any, command: str) -> None:
    while True:
        await sandbox.exec(command, timeout=SECONDS)


@pytest.mark.parametrize("attack", [*IN_CONTAINERS, *BEFORE_IN_CONTAINERS])
async def test_in_a_container(docker: Any, tmp_path: Path, attack: str) -> None:
    async with docker.sandbox(limits=Limits(memory=160 << 20, pids=40)) as sandbox:
        await sandbox.write("file", b"one two")
        if attack in IN_CONTAINERS:
            await sandbox.write("script.py", IN_CONTAINERS[attack].encode())
            await sandbox.exec("python3 script.py >/dev/null 2>&1 </dev/null & sleep 1", timeout=SECONDS)
        else:
            await sandbox.exec(FOREGROUND[attack], timeout=SECONDS)
        for name, action in plain_actions(sandbox, tmp_path).items():
            await judged(f"{attack}: {name}", action)

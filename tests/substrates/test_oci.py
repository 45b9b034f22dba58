"""The substrate ``oci``: crun in both modes; what isolates; who is at fault; what a killed owner leaves."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import stat
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest

import dutyfree
from dutyfree import Limits, Recipe, Stage, gc, study_image, substrates
from dutyfree.conformance import CHECKS, Check
from dutyfree.contract.abilities import Forkable, Pausable, Pooling, Resettable, Snapshottable
from dutyfree.contract.errors import (
    ActionError,
    CreateError,
    DispatchError,
    DutyfreeError,
    ExecError,
    OptionError,
    SandboxClosed,
    SandboxGone,
)
from dutyfree.engine.host import proc
from dutyfree.engine.launcher.client import BINARY
from dutyfree.substrates.local.reaper import Reaper, remove_groups
from dutyfree.substrates.oci import execution, seccomp
from dutyfree.substrates.oci.gc import PREFIX
from dutyfree.substrates.oci.substrate import Oci
from tests.awaiting import appeared, enter, overrun_beside, together, until
from tests.oci_runtime import left, need
from tests.opening import open_native
from tests.processes import eventually, speaking_python

pytestmark = [pytest.mark.native, pytest.mark.root("only root can mount the layers of containers")]

NAMES = """
    user unknown_user not_executable environment stdin_of_ten_megabytes output_limit timeout_kills_the_tree
    timeout_kills_the_disguised many_cancellations leaving_ends_what_runs background_processes round_trips
    tree_round_trip recipe_path recipe_environment out_of_memory pids sandboxes_at_once
    places_where_no_command_starts batch_of_large_contents
"""
CORE = {*NAMES.split()}
"""What depends on the runtime or its exec. All checks are slow tests in ``test_conformance``."""


@pytest.fixture(scope="module", params=["init", "exec"])
async def oci(request: pytest.FixtureRequest) -> AsyncIterator[Oci]:
    need("crun")
    async with dutyfree.open("oci", actions=request.param) as opened:
        await opened.prepare()
        yield opened


@pytest.mark.parametrize("check", [check for check in CHECKS if check.name in CORE], ids=str)
async def test_conformance(oci: Oci, check: Check) -> None:
    await check(oci)


@pytest.mark.slow
async def test_no_id_of_gvisor_is_the_beginning_of_another() -> None:
    """It takes the beginning of an id for the id, when it enters a container and when it removes files."""
    need("runsc")
    async with (
        dutyfree.open("oci", runtime="runsc", actions="exec") as oci,
        oci.sandbox() as first,
        contextlib.AsyncExitStack() as stack,
    ):
        for _ in range(8):
            await enter(oci.sandbox())
        tenth = await stack.enter_async_context(oci.sandbox())
        assert not tenth.id.startswith(first.id)
        assert (await first.exec("touch first")).ok
        assert (await tenth.exec("ls first")).exit_code != 0


@pytest.mark.parametrize("runtime", ["crun", "runsc"])
async def test_the_host_limits_the_processor(runtime: str) -> None:
    """Also of gVisor, which itself only estimates the processor time of its processes."""
    need(runtime)
    work = "import time; t = time.time()\nwhile time.time() - t < 2: pass"
    async with dutyfree.open("oci", runtime=runtime) as oci, oci.sandbox(limits=Limits(cpus=0.25)) as sandbox:
        used = processor_seconds(sandbox.id)
        begun = anyio.current_time()
        assert (await sandbox.exec(["python3", "-c", work])).ok
        share = (processor_seconds(sandbox.id) - used) / (anyio.current_time() - begun)
    assert 0.05 < share < 0.4


def processor_seconds(name: str) -> float:
    """What the processes of a container have used, and those that they have waited for."""
    group = next(Path("/sys/fs/cgroup").glob(f"**/{name}*/cgroup.procs"))
    ticks = 0
    for pid in group.read_text().split():
        ticks += sum(int(word) for word in proc.read(f"{pid}/stat").rpartition(b")")[2].split()[11:15])
    return ticks / os.sysconf("SC_CLK_TCK")


async def test_a_container_that_cannot_be_resumed(tmp_path: Path) -> None:
    """It stays paused, and does not count as running."""
    need("crun")
    program = tmp_path / "crun"
    real, broken = shutil.which("crun"), tmp_path / "broken"
    program.write_text(
        f'#!/bin/sh\n[ -e {broken} ] && case " $* " in *" resume "*) exit 1;; esac\nexec {real} "$@"\n'
    )
    program.chmod(0o755)
    async with dutyfree.open("oci", program=str(program)) as oci, oci.sandbox() as sandbox:
        assert isinstance(sandbox, Pausable)
        await sandbox.pause()
        broken.touch()
        with pytest.raises(ExecError, match="could not resume"):
            await sandbox.resume()
        with pytest.raises(DispatchError, match="paused"):
            await sandbox.exec("true")
        broken.unlink()
        await sandbox.resume()
        assert (await sandbox.exec("echo again")).stdout == b"again\n"


# --- What isolates ------------------------------------------------------------------------------------------


async def test_what_a_container_may(oci: Oci) -> None:
    """No way out: namespaces of its own, ids that are nobody's, no network, no devices, read-only /proc."""
    attempts = """
        try() { ( eval "$1" ) >/dev/null 2>&1 && echo "succeeded: $1"; }
        try "unshare --user true"
        try "unshare --mount true"
        try "mount -t tmpfs none /mnt"
        try "mknod /workspace/disk b 8 0"
        try "echo 1 > /proc/sys/kernel/core_pattern"
        try "echo b > /proc/sysrq-trigger"
        try "mkdir /sys/fs/cgroup/memory/own"
        try "head -c 1 /proc/kcore | grep -q ."
        try "python3 -c 'import socket; socket.create_connection((\\"1.1.1.1\\", 80), 1)'"
        try "python3 -c 'import socket; socket.socket(40, 1)'"
        try "python3 -c 'import ctypes, os; n = 41 if os.uname().machine == \\"x86_64\\" else 198
s = ctypes.CDLL(None).syscall; os._exit(s(n, ctypes.c_long(1 << 32 | 40), 1, 0) < 0)'"
        try "echo x >> /.dutyfree-init"
        try "rm -f /.dutyfree-init"
        try "head -c 1 /proc/1/mem"
        try "cat /proc/1/maps | grep -q ."
        awk '/CapEff|NoNewPrivs|^Seccomp:/ {print $2}' /proc/self/status
        awk '{print ($2 >= 1073741824), $3}' /proc/self/uid_map
        ls /sys/class/net; ps ax | wc -l
    """
    async with oci.sandbox() as sandbox:
        seen = await sandbox.exec(attempts)
        *lines, processes = seen.stdout.decode().split("\n")[:-1]
        assert lines == ["00000000800405fb", "1", "2", "1 65536", "lo"], seen
        assert int(processes) < 10
        owners = await sandbox.exec("stat -c %u:%g / /etc /usr/bin/python3; touch own; stat -c %u own")
        assert owners.stdout.split() == [b"0:0", b"0:0", b"0:0", b"0"]


def environments_of(name: str) -> list[bytes]:
    """The environments of the processes with this name in their command lines."""
    found = []
    for pid in proc.pids():
        with contextlib.suppress(OSError):
            if name.encode() in proc.read(f"{pid}/cmdline"):
                found.append(proc.environment(pid))
    return found


@pytest.mark.parametrize("runtime", ["crun", "runsc"])
async def test_the_runtime_does_not_have_our_credentials(
    runtime: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    need(runtime)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hidden")
    async with dutyfree.open("oci", runtime=runtime) as oci, oci.sandbox() as sandbox:
        environments = await anyio.to_thread.run_sync(environments_of, sandbox.id)
        assert environments
        assert not [one for one in environments if b"AWS_SECRET_ACCESS_KEY" in one]
        assert (await sandbox.exec("true")).ok


def execs_of(name: str) -> list[int]:
    """The runtimes that execute a command in a container now."""
    found = []
    for pid in proc.pids():
        with contextlib.suppress(OSError):
            words = proc.read(f"{pid}/cmdline").split(b"\0")
            if b"exec" in words and name.encode() in words:
                found.append(pid)
    return found


@pytest.mark.parametrize("runtime", ["crun", "runc", "runsc"])
async def test_other_users_of_the_host_do_not_see_variables(runtime: str) -> None:
    """Everybody can read the command line of a process. The files for the runtime are ours alone."""
    need(runtime)
    recipe = Recipe(env={"TOKEN": "hidden"})

    def seen(base: Path, name: str) -> tuple[list[bytes], dict[str, int]]:
        lines, modes = [], {}
        for pid in proc.pids():
            with contextlib.suppress(OSError):
                lines.append(proc.read(f"{pid}/cmdline"))
        for path in (base / name).iterdir():
            with contextlib.suppress(OSError):  # a directory, or of an exec that has ended
                if b"hidden" in path.read_bytes():
                    modes[path.name] = stat.S_IMODE(path.stat().st_mode)
        return lines, modes

    async def run(sandbox: dutyfree.Sandbox) -> None:
        await sandbox.exec("touch begun; sleep 1000", env={"OWN": "hidden-too"})

    async with dutyfree.open("oci", runtime=runtime, actions="exec") as oci, oci.sandbox(recipe) as sandbox:
        assert (await sandbox.exec("echo $TOKEN $OWN", env={"OWN": "too"})).stdout == b"hidden too\n"
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run, sandbox)
            await appeared(sandbox, "begun")
            lines, modes = await anyio.to_thread.run_sync(seen, oci._base, sandbox.id)
            tasks.cancel_scope.cancel()
        assert [line for line in lines if b"exec" in line.split(b"\0") and sandbox.id.encode() in line]
        assert not [line for line in lines if b"hidden" in line]
        assert len(modes) > 1, "the configuration, and the file of the command"
        assert {*modes.values()} == {0o600}


@pytest.mark.parametrize("runtime", ["crun", "runc", "runsc"])
async def test_commands_and_variables_may_have_any_bytes(runtime: str) -> None:
    """The runtime gets them in JSON, which has none that are not UTF-8."""
    need(runtime)
    name = os.fsdecode(b"caf\xe9")
    async with dutyfree.open("oci", runtime=runtime, actions="exec") as oci, oci.sandbox() as sandbox:
        words = ("%s|", os.fsdecode(b"\xff\\101\n"), "é", "-n", "$A", "")
        seen = await sandbox.exec(["printf", *words], env={"dutyfree_word": "mine"})
        assert seen.stdout == b"\xff\\101\n|" + "é|-n|$A||".encode()
        assert (await sandbox.exec(f"mkdir {name}")).ok
        variables = {"A": os.fsdecode(b"\xfe\n"), "B": "ü"}
        seen = await sandbox.exec('printf %s "$A$B"; pwd', cwd=name, env=variables)
        assert seen.stdout == b"\xfe\n" + "ü".encode() + b"/workspace/caf\xe9\n"
        assert (await sandbox.exec(f"exit 3 # {name}")).exit_code == 3


async def test_short_commands_of_the_runtime_do_not_have_them_either(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    need("crun")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hidden")
    program = tmp_path / "crun"
    program.write_text(f'#!/bin/sh\nenv >> {tmp_path}/seen\nexec {shutil.which("crun")} "$@"\n')
    program.chmod(0o755)
    async with dutyfree.open("oci", program=str(program)) as oci, oci.sandbox() as sandbox:
        await sandbox.pause()
        await sandbox.resume()
        assert (await sandbox.exec("true")).ok
    seen = (tmp_path / "seen").read_text()
    assert "PATH=" in seen
    assert "AWS_SECRET_ACCESS_KEY" not in seen


async def test_containers_share_nothing_that_is_written(oci: Oci) -> None:
    async with oci.sandbox() as one, oci.sandbox() as other:
        await one.exec("echo mine > /etc/hostname; echo mine > file; rm /usr/bin/git")
        seen = await other.exec("cat /etc/hostname; ls; command -v git")
        assert seen.stdout.split() == [b"sandbox", b"/usr/bin/git"]
        assert (await one.exec("id -u; cat /proc/self/uid_map")).stdout != (
            await other.exec("id -u; cat /proc/self/uid_map")
        ).stdout


async def test_refused_are_limits_that_nothing_enforces(oci: Oci) -> None:
    for limits in (Limits(network="on"), Limits(network=("example.org",))):
        with pytest.raises(CreateError, match="network"):
            await enter(oci.sandbox(limits=limits))
    need("crun")
    async with dutyfree.open("oci", storage="disk") as on_disk:
        with pytest.raises(CreateError, match="disk"):
            await enter(on_disk.sandbox(limits=Limits(disk="10M")))
        async with on_disk.sandbox() as sandbox:
            assert (await sandbox.exec("echo x > file; cat file")).stdout == b"x\n"
    with pytest.raises(OptionError, match="runsc"):
        dutyfree.open("oci", restore=True)


async def test_the_limit_of_the_disk(oci: Oci) -> None:
    async with oci.sandbox(limits=Limits(disk="10M")) as sandbox:
        seen = await sandbox.exec("head -c 20000000 /dev/zero > large")
        assert not seen.ok
        assert b"No space left" in seen.stderr


@pytest.mark.parametrize("runtime", ["crun", "runc"])
async def test_the_limit_of_the_disk_is_one_of_empty_files_too(runtime: str) -> None:
    """Their inodes use memory."""
    need(runtime)
    async with (
        dutyfree.open("oci", runtime=runtime) as oci,
        oci.sandbox(limits=Limits(disk="4M")) as sandbox,
    ):
        most = 4 * 256 + 1024
        assert 1024 < await empty_files(sandbox, ".", most + 1) <= most
        for place in ("/dev", "/dev/shm"):
            assert await empty_files(sandbox, place, 20_000) < 64 * 256 + 1024
        assert not (await sandbox.exec("touch /sys/fs/cgroup/own")).ok


async def empty_files(sandbox: dutyfree.Sandbox, place: str, count: int) -> int:
    """Make empty files; how many could be made."""
    code = f"""
import os
made = 0
try:
    for made in range({count}):
        os.mknod(f"{place}/empty-{{made}}")
    made += 1
except OSError as error:
    assert error.errno == 28, error
print(made)
"""
    return int((await sandbox.exec(["python3", "-c", code])).stdout)


# --- Recipes and images -------------------------------------------------------------------------------------


@pytest.mark.usefixtures("cache")
async def test_layers_are_those_of_native(monkeypatch: pytest.MonkeyPatch) -> None:
    need("crun")
    stage = Stage("setup", commands=("head -c 16 /dev/urandom | od -An -tx1 > random",))
    recipe = Recipe("host", (stage,), env={"COLOUR": "red"})
    async with dutyfree.open("native") as native, native.sandbox(recipe) as sandbox:
        built = await sandbox.read("random")
    async with dutyfree.open("oci", image="host") as oci, oci.sandbox(recipe) as sandbox:
        assert await sandbox.read("random") == built
        seen = await sandbox.exec("echo $COLOUR; python3 -c 'print(1)'; ls -d /usr/bin /etc/passwd")
        assert seen.stdout.split() == [b"red", b"1", b"/etc/passwd", b"/usr/bin"]
        assert [span.name for span in sandbox.spans] == ["layers", "bundle", "overlay", "start"]


@pytest.mark.parametrize("runtime", ["crun", "runc", "runsc"])
async def test_an_image_without_a_shell(runtime: str, tmp_path: Path) -> None:
    """Init needs nothing of the image: neither a shell nor a library nor a tool."""
    need(runtime)
    if not (busybox := shutil.which("busybox")):
        pytest.skip("busybox is missing; to enable it: apt-get install busybox-static")
    root = tmp_path / "root"
    for name in ("bin", "etc", "proc", "dev", "sys", "tmp"):
        (root / name).mkdir(parents=True)
    shutil.copy(busybox, root / "bin/echo")
    async with dutyfree.open("oci", runtime=runtime, image=str(root)) as oci, oci.sandbox() as sandbox:
        assert (await sandbox.exec(["/bin/echo", "hello"])).stdout == b"hello\n"
        assert (await sandbox.exec("true")).exit_code == 127
        await sandbox.write("directory/file", b"content")
        assert await sandbox.read("directory/file") == b"content"
        assert [entry.name for entry in await sandbox.list("directory")] == ["file"]
        await sandbox.upload(root / "bin", "copied")
        assert (await sandbox.exec(["copied/echo", "again"])).stdout == b"again\n"


# --- Who is at fault ----------------------------------------------------------------------------------------


async def test_a_container_that_is_killed_is_no_failed_command(oci: Oci) -> None:
    failures: list[Any] = []

    async def run(sandbox: Any) -> None:
        try:
            failures.append(await sandbox.exec("touch begun; sleep 1000"))
        except DutyfreeError as error:
            failures.append(error)

    async with oci.sandbox(limits=Limits(memory="1G")) as sandbox:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run, sandbox)
            await appeared(sandbox, "begun")
            await anyio.to_thread.run_sync(remove_groups, f"{oci._base.name}/{sandbox.id}")
        assert isinstance(failures[0], SandboxClosed), failures
        assert "killed from outside" in str(failures[0])
        with pytest.raises(SandboxClosed):
            await sandbox.exec("true")


async def repeat(sandbox: dutyfree.Sandbox, command: str) -> None:
    for _ in range(30):
        await sandbox.exec(command)


@pytest.mark.parametrize("runtime", ["crun", "runc"])
async def test_memory_that_is_exhausted_is_no_kill_from_outside(runtime: str) -> None:
    """Files fill the memory, so at last the kernel kills init, and the runtime removes the group at once."""
    need(runtime)
    async with (
        dutyfree.open("oci", runtime=runtime) as oci,
        oci.sandbox(limits=Limits(memory="64M")) as sandbox,
    ):
        with pytest.raises(SandboxGone, match="memory limit"):
            await repeat(sandbox, "[ -e /tmp/file ] || head -c 1000000000 /dev/zero > /tmp/file")
        with pytest.raises(SandboxGone):
            await sandbox.exec("true")


@pytest.mark.parametrize("actions", ["init", "exec"])
async def test_who_kills_init_in_gvisor_ends_the_sandbox(actions: str) -> None:
    need("runsc")
    async with dutyfree.open("oci", runtime="runsc", actions=actions) as oci, oci.sandbox() as sandbox:
        with pytest.raises(SandboxGone, match="PID 1"):
            await repeat(sandbox, "kill -9 1; sleep 1")


async def test_a_runtime_that_is_killed_is_no_failed_command() -> None:
    """The command itself may have gone on, so it is killed."""
    need("crun")
    failures: list[Any] = []

    async def run(sandbox: Any) -> None:
        try:
            failures.append(await sandbox.exec("touch begun; sleep 1003"))
        except DutyfreeError as error:
            failures.append(error)

    async with dutyfree.open("oci", actions="exec") as oci, oci.sandbox() as sandbox:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run, sandbox)
            await appeared(sandbox, "begun")
            for pid in await anyio.to_thread.run_sync(execs_of, sandbox.id):
                os.kill(pid, signal.SIGKILL)
        assert isinstance(failures[0], ExecError), failures
        assert "signal 9 ended crun exec" in str(failures[0])
        seen = await sandbox.exec("ps ax -o args")
        assert b"sleep 1003" not in seen.stdout


async def test_a_timeout_ends_no_command_that_began_later(oci: Oci) -> None:
    async with oci.sandbox() as sandbox:
        seen, later = await overrun_beside(sandbox)
    assert seen.timed_out
    assert later.stdout == b"lives\n"


KILLING = """
import os
if os.fork() == 0:
    os.setsid()
    for fd in range(3):
        os.close(fd)
    own = str(os.getpid())
    while True:
        for pid in os.listdir("/proc"):
            if pid.isdigit() and pid not in ("1", own):
                try:
                    os.kill(int(pid), 9)
                except OSError:
                    pass
"""


@pytest.mark.parametrize("runtime", ["crun", pytest.param("runc", marks=pytest.mark.slow)])
async def test_tools_that_the_agent_broke_are_its_own_fault(runtime: str) -> None:
    need(runtime)
    async with dutyfree.open("oci", runtime=runtime, actions="exec") as oci:
        for broken in ("rm /usr/bin/sh; mkdir /usr/bin/sh", "rm /usr/bin/sh; mkfifo -m 755 /usr/bin/sh"):
            async with oci.sandbox() as sandbox:
                await sandbox.exec(broken)
                await fails(sandbox)
                assert not (await sandbox.exec("true", user="nobody")).started
        async with oci.sandbox() as sandbox:
            await sandbox.exec("rm -r /workspace; ln -s /proc/1/cwd /workspace")
            await sandbox.exec("true")  # no error of the machine
        async with oci.sandbox() as sandbox:  # crun and runc say many things if their child is killed
            await sandbox.exec(["python3", "-c", KILLING])
            for _ in range(10):
                await fails(sandbox)
                assert not (await sandbox.exec("sleep 1")).ok
                assert not (await sandbox.exec("sleep 1", user="nobody")).ok


@pytest.mark.parametrize("runtime", ["crun", "runc"])
async def test_a_program_that_cannot_be_executed_did_not_start(runtime: str) -> None:
    need(runtime)
    async with dutyfree.open("oci", runtime=runtime, actions="exec") as oci, oci.sandbox() as sandbox:
        for content, code in ((b"\x7fELF", 126), (b"#!/\n", 126), (b"#!/nowhere\n", 127)):
            await sandbox.write("program", content, mode=0o755)
            seen = await sandbox.exec(["/workspace/program"])
            assert seen.exit_code == code, seen
        seen = await sandbox.exec("echo 'exec: Text file busy' >&2; exit 1")
        assert (seen.started, seen.exit_code, seen.stderr) == (True, 1, b"exec: Text file busy\n")
        if runtime == "crun":
            await sandbox.exec("rm /usr/bin/sh; touch /usr/bin/sh; chmod 755 /usr/bin/sh")
            seen = await sandbox.exec("true")
            assert (seen.started, seen.exit_code) == (False, 126)


async def fails(sandbox: dutyfree.Sandbox) -> None:
    for action in (sandbox.read("/etc/hostname"), sandbox.write("x", b""), sandbox.list("/")):
        try:
            await action
        except ActionError:
            continue
        # A killer is not always fast enough.


@pytest.mark.parametrize("runtime", ["crun", "runc"])
async def test_memory_that_is_full_is_no_failure_of_the_runtime(runtime: str) -> None:
    need(runtime)
    async with (
        dutyfree.open("oci", runtime=runtime, actions="exec") as oci,
        oci.sandbox(limits=Limits(memory="64M")) as sandbox,
    ):
        await sandbox.exec("head -c 1000000000 /dev/zero > /tmp/file")
        with contextlib.suppress(SandboxGone):
            for _ in range(5):
                await sandbox.exec("true")
                await fails(sandbox)


POSE = """
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        for fd in range(3):
            os.close(fd)
        beat = "while True:\\n open('/tmp/beat', 'w').write(str(time.time()))\\n time.sleep(0.05)"
        os.execve(sys.executable, [sys.executable, "-c", "import time\\n" + beat, *sys.argv[1:]], {})
    os._exit(0)
time.sleep(1000)
"""


@pytest.mark.parametrize(
    "runtime", ["crun", *(pytest.param(name, marks=pytest.mark.slow) for name in ("runc", "runsc"))]
)
async def test_no_process_outlives_its_command_as_another(runtime: str) -> None:
    """It has an empty environment, and the command line of init."""
    need(runtime)
    async with dutyfree.open("oci", runtime=runtime, actions="exec") as oci, oci.sandbox() as sandbox:
        for words in (("/.dutyfree-init", "guest"), ("/.dutyfree-init", "guest", "3"), ("dutyfree-killer",)):
            seen = await sandbox.exec(["python3", "-c", POSE, *words], timeout=1)
            assert seen.timed_out
            before = await sandbox.read("/tmp/beat")
            await sandbox.exec("sleep 0.5")
            assert await sandbox.read("/tmp/beat") == before
        assert (await sandbox.exec("true")).ok


async def test_a_file_without_an_end_is_not_read_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the container's tools do."""
    need("crun")
    monkeypatch.setattr(execution, "TOOL_OUTPUT", 1 << 20)
    async with dutyfree.open("oci", actions="exec") as oci, oci.sandbox() as sandbox:
        assert (await sandbox.exec("truncate -s 16M file")).ok
        with pytest.raises(ActionError) as refused:
            await sandbox.read("file")
        assert refused.value.kind == "too_large"


async def test_an_id_that_no_user_has() -> None:
    """The container's own program says it, so the runtime must not fail at it."""
    need("crun")
    async with dutyfree.open("oci", actions="exec") as oci, oci.sandbox() as sandbox:
        for said in (r"\377", "0 0", "-1", "65536", "9" * 5000, ""):
            await sandbox.write("/usr/bin/id", f"#!/bin/sh\nprintf -- '{said}'\n".encode(), mode=0o755)
            seen = await sandbox.exec("true", user="nobody")
            assert not seen.started, said[:10]
            assert b"there is no user" in seen.stderr


async def test_a_paused_container_and_its_end(oci: Oci) -> None:
    async with oci.sandbox() as sandbox:
        assert isinstance(sandbox, Pausable)
        await sandbox.exec("(while :; do date +%N > tick; sleep 0.01; done) >/dev/null 2>&1 &")
        await appeared(sandbox, "tick")
        await sandbox.pause()
        with pytest.raises(DispatchError, match="paused"):
            await sandbox.exec("true")
        await sandbox.resume()
        before = await sandbox.read("tick")

        async def ticks() -> bool:
            return await sandbox.read("tick") != before

        assert await until(ticks)
        await sandbox.pause()  # a frozen container can be destroyed


async def test_gvisor_ends_as_a_whole_at_a_limit() -> None:
    need("runsc")
    async with dutyfree.open("oci", runtime="runsc") as oci:
        async with oci.sandbox(limits=Limits(memory="200M")) as sandbox:
            with pytest.raises(SandboxGone, match="memory"):
                await sandbox.exec(["python3", "-c", "print(len(b'x' * (512 << 20)))"])
        async with oci.sandbox() as sandbox:
            seen = await sandbox.exec("dmesg | head -1; id -u; sleep 100 & echo started")
            assert b"started" in seen.stdout
            late = await sandbox.exec("setsid sleep 101 & sleep 102", timeout=0.5)
            assert late.timed_out
            assert b"sleep 102" not in (await sandbox.exec("ps axww -o args")).stdout


async def test_containers_restored_from_one_checkpoint() -> None:
    need("runsc")
    async with dutyfree.open("oci", runtime="runsc", restore=True) as oci:
        await oci.prepare()
        async with oci.sandbox() as one, oci.sandbox(limits=Limits(memory="200M")) as other:
            await one.write("file", b"mine")
            assert [entry.name for entry in await other.list(".")] == []
            seen = await other.exec("echo $$ $HOSTNAME; pwd; sleep 100 & sleep 101", timeout=0.5)
            assert seen.timed_out
            assert seen.stdout.endswith(b" sandbox\n/workspace\n")
            assert await one.read("file") == b"mine"
            with pytest.raises(SandboxGone, match="memory"):
                await other.exec(["python3", "-c", "print(len(b'x' * (512 << 20)))"])
        assert await oci.sandboxes() == []


async def test_a_checkpoint_is_made_again_and_goes_with_its_layers() -> None:
    need("runsc")
    async with dutyfree.open("oci", runtime="runsc", restore=True) as oci:

        def kept() -> list[str]:
            return [path.name for path in oci._base.glob("layers/*/checkpoint*")]

        for seconds in (0.1, 0.3, 1.0):
            with anyio.move_on_after(seconds):
                await oci.prepare()
            assert await anyio.to_thread.run_sync(kept) in ([], ["checkpoint"])
        await oci.prepare()
        assert await anyio.to_thread.run_sync(kept) == ["checkpoint"]
        await oci._layers.close()
        assert await anyio.to_thread.run_sync(kept) == []
        async with oci.sandbox() as sandbox:
            assert (await sandbox.exec("true")).ok


# --- What is left -------------------------------------------------------------------------------------------

HELD = """
import anyio, sys, dutyfree

async def main():
    async with dutyfree.open("oci", runtime=sys.argv[1], actions=sys.argv[2], storage=sys.argv[3]) as oci:
        async with oci.sandbox() as one, oci.sandbox() as other:
            for sandbox in (one, other):
                await sandbox.exec("setsid sleep 1000 >/dev/null 2>&1 & echo x > file")
            print(oci._base.name.rpartition("-")[2], oci._reaper._process.pid, flush=True)
            await one.exec("sleep 1000 & wait")

anyio.run(main)
"""


@pytest.mark.parametrize(
    ("runtime", "actions", "storage"),
    [
        ("crun", "init", "memory"),
        ("crun", "exec", "disk"),
        ("runc", "exec", "memory"),
        ("runsc", "init", "disk"),
    ],
)
def test_a_killed_owner_leaves_nothing(runtime: str, actions: str, storage: str) -> None:
    need(runtime)
    with speaking_python(HELD, runtime, actions, storage) as (process, said):
        name = said.split()[0]
        assert len(left(name)) > 4
        process.kill()
    assert eventually(lambda: not left(name)), left(name)


def test_a_runtime_that_makes_its_groups_late_leaves_none(tmp_path: Path) -> None:
    """The owner is dead, and its reaper removes groups, while a runtime still makes them."""
    need("crun")
    name, directory = f"{PREFIX}late{os.getpid()}", tmp_path / "base"
    directory.mkdir()
    reaper = Reaper(directory=str(directory), marker=f"DUTYFREE_OWNER={name}", groups=name)
    script = 'while :; do for top in /sys/fs/cgroup/*/; do mkdir -p "$top$0/x" 2>/dev/null; done; done'
    late = subprocess.Popen(["/bin/sh", "-c", script, name], env={**os.environ, "DUTYFREE_OWNER": name})
    try:
        assert eventually(lambda: len(left(name)) > 1)
        reaper.engage()
        assert late.wait(60) == -signal.SIGKILL
        assert eventually(lambda: not directory.exists())
        assert eventually(lambda: not left(name), 5), left(name)
    finally:
        late.kill()
        late.wait()
        remove_groups(name)


def test_gc_removes_what_a_killed_reaper_leaves() -> None:
    need("crun")
    with speaking_python(HELD, "crun", "init", "disk") as (process, said):
        name, reaper = said.split()
        process.send_signal(signal.SIGSTOP)  # it must not see the end of its reaper
        os.kill(int(reaper), signal.SIGKILL)
        process.kill()
    assert left(name)
    found = anyio.run(gc.collect)
    assert [one.kind for one in found if name in one.what] == ["containers of oci"]
    assert eventually(lambda: not left(name)), left(name)


async def test_closing_leaves_nothing_and_sandboxes_at_once() -> None:
    need("crun")
    async with dutyfree.open("oci") as oci:
        name = oci._base.name.rpartition("-")[2]

        async def use() -> None:
            async with oci.sandbox() as sandbox:
                assert (await sandbox.exec("echo x > file; cat file")).stdout == b"x\n"

        await together(*[use] * 8)
        assert await oci.sandboxes() == []
        assert not await anyio.to_thread.run_sync(lambda: list(oci._base.glob("oci-*")))
    assert not await anyio.to_thread.run_sync(left, name)


DEEP = """
import os
for _ in range(3000):
    os.mkdir("d")
    os.chdir("d")
"""


async def test_a_deep_directory_is_removed(tmp_path: Path) -> None:
    """A later opening removes it too, if the first could not."""
    need("crun")
    async with dutyfree.open("oci", storage="disk", directory=str(tmp_path)) as oci:
        async with oci.sandbox() as sandbox:
            assert (await sandbox.exec(["python3", "-c", DEEP])).ok
        assert await oci.sandboxes() == []
    assert not await anyio.to_thread.run_sync(lambda: list(tmp_path.iterdir()))


TAR = """#!/usr/bin/python3
import sys, tarfile
out = tarfile.open(fileobj=sys.stdout.buffer, mode="w|")
for name, kind, target in (("x", b"5", ""), ("x/a", b"5", ""), ("x/a", b"2", "")):
    member = tarfile.TarInfo(name)
    member.type, member.linkname, member.mode = kind, target, 0o755
    out.addfile(member)
out.close()
"""


async def test_archives_of_a_changed_tar_are_the_agents_fault(tmp_path: Path) -> None:
    need("crun")
    async with dutyfree.open("oci", actions="exec") as oci, oci.sandbox() as sandbox:
        await sandbox.write("file", b"content")
        for tar in (TAR, "#!/bin/sh\nexit 0\n", "#!/bin/sh\necho nonsense | gzip\n"):
            await sandbox.write("tar", tar.encode(), mode=0o755)
            assert (await sandbox.exec("mv tar /usr/bin/tar")).ok
            with pytest.raises(ActionError):
                await sandbox.download("file", tmp_path / "file")
            assert not await anyio.Path(tmp_path / "file").exists()


# --- Parts --------------------------------------------------------------------------------------------------


def test_the_filter_is_that_of_native_in_another_form() -> None:
    found = seccomp.profile()
    names = [
        name for rule in found["syscalls"] for name in rule["names"] if rule["action"] == "SCMP_ACT_ALLOW"
    ]
    assert {"read", "execve", "ioctl", "statx", "futex_waitv"} <= {*names}
    assert not {"mount", "unshare", "setns", "bpf", "keyctl", "io_uring_setup", "clone3", "kexec_load"} & {
        *names
    }
    assert found["defaultAction"] == "SCMP_ACT_ERRNO"


def test_no_family_of_sockets_is_disguised() -> None:
    """The kernel uses the lower half of the argument only."""
    rules = [rule["args"][0] for rule in seccomp.profile()["syscalls"] if rule["names"] == ["socket"]]

    def allowed(family: int) -> bool:
        return any(family & rule["value"] == rule["valueTwo"] for rule in rules)

    assert {rule["op"] for rule in rules} == {"SCMP_CMP_MASKED_EQ"}
    assert allowed(2)
    assert allowed(1 << 32 | 2)
    assert not any(allowed(upper << 32 | 40) for upper in (0, 1, 0xFFFFFFFF))


@pytest.mark.parametrize("arguments", [[], ["/tmp"], ["/tmp", "0", "", "", "", "--", "true"], ["a"] * 5])
def test_a_bundle_needs_its_arguments(arguments: list[str]) -> None:
    done = subprocess.run([BINARY, "bundle", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 64
    assert "bundle needs" in done.stderr


# --- The tiers of native ------------------------------------------------------------------------------------


async def test_the_tier_gvisor_of_native() -> None:
    """The same recipes, layers and actions; what needs the launcher is absent."""
    need("runsc")
    recipe = Recipe(stages=(Stage("setup", commands=("uname -v > built",)),), env={"COLOUR": "red"})
    async with open_native(isolation="gvisor", limits=Limits(pids=200)) as tier:
        assert not isinstance(tier, Pooling)
        async with tier.sandbox(recipe) as sandbox:
            assert not isinstance(sandbox, Forkable | Snapshottable | Resettable)
            seen = await sandbox.exec("dmesg; cat built; echo $COLOUR")
            assert b"gVisor" in seen.stdout
            assert seen.stdout.endswith(b"red\n")
            async with (
                dutyfree.open("native", isolation="namespace") as native,
                native.sandbox(recipe) as same,
            ):
                assert await same.read("built") == await sandbox.read("built")
            assert await tier.sandboxes() == [sandbox.id]
        facts = await tier.facts()
        assert facts["tier"] == "gvisor"
        assert facts["runtime"].startswith("runsc ")


@pytest.mark.slow
async def test_the_tier_microvm_of_native() -> None:
    found = await substrates.probe("vm")
    if not found.available:
        pytest.skip(f"vm: {found.detail}; to enable it: {found.remedy}")
    image = str((await study_image.build(choose=False)).tar)
    recipe = Recipe(stages=(Stage("setup", commands=("echo built > built",)),))
    async with (
        open_native(isolation="microvm", image=image) as tier,
        tier.sandbox(recipe) as sandbox,
        dutyfree.open("native", image=image) as native,
        native.sandbox(recipe) as same,
    ):
        assert not isinstance(tier, Pooling)
        assert await same.read("built") == await sandbox.read("built") == b"built\n"
        kernels = [(await one.exec("uname -v")).stdout for one in (sandbox, same)]
        assert kernels[0] != kernels[1]


async def test_a_program_that_does_not_exist() -> None:
    found = await substrates.probe("oci", program="/nowhere/crun")
    assert not found.available
    assert found.detail == "there is no program /nowhere/crun"
    assert "option program" in found.remedy


@pytest.mark.parametrize(
    ("name", "options", "complaint"),
    [
        ("native", {"isolation": "microvm"}, "name an image"),
        ("native", {"isolation": "gvisor", "without": ("seccomp",)}, "without"),
        ("native", {"isolation": "gvisor", "limits": {"network": "on"}}, "network"),
        ("native-cold", {"isolation": "gvisor"}, "native-cold has no isolation"),
    ],
)
def test_tiers_that_do_not_exist(name: str, options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(OptionError, match=complaint):
        dutyfree.open(name, **options)

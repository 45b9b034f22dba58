"""Descriptors and secrets of init are useless to processes in its sandbox."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

import anyio
import anyio.lowlevel
import pytest

from dutyfree import Limits
from dutyfree.contract import Sandbox, Substrate
from dutyfree.contract.errors import ActionError
from dutyfree.engine.launcher import protocol
from dutyfree.engine.launcher.client import BINARY
from dutyfree.engine.launcher.protocol import Frame
from dutyfree.engine.sandbox.channel import Channel
from dutyfree.substrates.native import Native
from tests.awaiting import appeared, enter, until
from tests.engine import counts


async def refused(sandbox: Sandbox, path: str) -> None:
    """Init's own descriptors and names: ELOOP, or an earlier error because the name does not exist."""
    attempts: list[Callable[[], Awaitable[object]]] = [
        partial(sandbox.list, path),
        partial(sandbox.read, path),
        partial(sandbox.write, path, b"0"),
        partial(sandbox.write, f"{path}/made/file", b"0"),
    ]
    for attempt in attempts:
        with pytest.raises(OSError) as refusal:  # noqa: PT011
            await attempt()
        assert refusal.value.errno in (errno.ELOOP, errno.ENOENT, errno.ENOTDIR, errno.EACCES), path


async def test_no_descriptor_of_init_leads_out(native: Substrate) -> None:
    """Init itself runs file actions, so /proc/self/fd would be its own."""
    async with native.sandbox() as sandbox:
        await sandbox.exec("ln -s /proc/self/fd link")
        for number in range(3, 20):
            for below in ("", "/.", "/..", "/../..", "/cgroup.procs", "/../cgroup.procs"):
                for above in ("/proc/self/fd", "/proc/thread-self/fd", "/proc/1/fd", "/dev/fd", "link"):
                    await refused(sandbox, f"{above}/{number}{below}")
        for name in (
            "/proc/self/exe",
            "/proc/self/root/etc/passwd",
            "/proc/self/cwd/file",
            "/proc/self/ns/net",
        ):
            await refused(sandbox, name)


def shared_memory(owner: int) -> list[str]:
    """Memory that the inits of its sandboxes, and the parked processes, share with others."""
    children = {child for launcher in counts.children(owner) for child in counts.children(launcher)}
    inits = children & set(counts.processes(("dutyfree-init", "dutyfree-parked")))
    maps = [Path(f"/proc/{init}/maps").read_text() for init in inits]
    assert len([text for text in maps if text]) >= 2
    return [line for text in maps for line in text.splitlines() if line.split()[1][3] == "s"]


@pytest.mark.root("others' memory cannot be looked at")
async def test_no_memory_is_shared_with_the_launcher(native: Substrate) -> None:
    """A compromised PID 1 could write there, and prevent new sandboxes."""
    async with native.sandbox(), native.sandbox():
        assert shared_memory(os.getpid()) == []


async def test_nobody_else_calls_clone3(native: Substrate) -> None:
    """The filter allows the call only with a secret: guesses and zero fail."""
    script = """
import ctypes, itertools
libc = ctypes.CDLL(None, use_errno=True)
arguments = (ctypes.c_uint64 * 11)()
arguments[4] = 17
found = set()
for third, fourth in itertools.product((0, 1, -1, 1 << 32), repeat=2):
    pid = libc.syscall(435, arguments, ctypes.c_long(88), ctypes.c_long(third), ctypes.c_long(fourth))
    found.add((pid, ctypes.get_errno()))
print(found)
"""
    async with native.sandbox() as sandbox:
        seen = await sandbox.exec(["python3", "-c", script])
        assert seen.stdout == b"{(-1, 38)}\n", seen


async def test_no_core_goes_anywhere(native: Substrate) -> None:
    """The limit is and stays 1, so the kernel starts no core-dump program either."""
    script = """
import resource
for limit in ((0, 0), (1, 1)):
    resource.setrlimit(resource.RLIMIT_CORE, limit)
    resource.prlimit(0, resource.RLIMIT_CORE, limit)
print(resource.getrlimit(resource.RLIMIT_CORE))
"""
    async with native.sandbox() as sandbox:
        seen = await sandbox.exec(["python3", "-c", script])
        assert seen.stdout == b"(1, 1)\n", seen
        seen = await sandbox.exec("ulimit -c 0; kill -SEGV $$; echo $?")
        assert seen.signal == 11
        assert (await sandbox.list(".")) == ()


async def test_the_kernel_out_of_memory_spares_init(patient: Substrate) -> None:
    limited = getattr(patient, "features").controllers  # noqa: B009 (native's own)
    if "memory" not in limited:
        pytest.skip("memory cannot be limited here; to enable it: see `dutyfree doctor`")
    eat = "import os\nwhile True: os.fork() or [bytearray(1 << 20) for _ in range(64)]"
    async with patient.sandbox(limits=Limits(memory=96 << 20, pids=64)) as sandbox:
        for _ in range(3):
            await sandbox.exec(["python3", "-c", eat], timeout=3)
            assert (await sandbox.exec("echo alive")).stdout == b"alive\n"


async def test_ids_that_mean_none_to_the_kernel(native: Substrate) -> None:
    """Image and sandbox write their own /etc/passwd: -1 there is no user, and not the caller's."""
    async with native.sandbox() as sandbox:
        users = "evil:x:4294967295:1::/:/bin/sh\nbelow:x:-1:1::/:/bin/sh\ngroup:x:1000:-1::/:/bin/sh\n"
        await sandbox.write("/etc/passwd", b"root:x:0:0::/root:/bin/sh\n" + users.encode())
        await sandbox.write("/etc/group", b"all:x:-1:\n")
        for user in ("evil", "below", "group", "1000:all"):
            seen = await sandbox.exec("id", user=user)
            assert (seen.exit_code, seen.started) == (126, False)
            assert b"no such user" in seen.stderr
        assert (await sandbox.exec("id -u", user="1000:7")).stdout == b"1000\n"


async def test_descriptors_under_way_are_used_up(native: Native) -> None:
    """The kernel limits them per user: init reports the error, and goes on."""
    script = """
    import array, socket, os, time
    if os.fork(): os._exit(0)
    os.setsid()
    many, pairs = array.array("i", [0] * 250), []
    try:
        while True:
            pairs.append(socket.socketpair())
            for _ in range(50):
                pairs[-1][0].sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, many)])
    except OSError as error:
        open("full", "w").write(str(error.errno))
    time.sleep(1000)
    """
    async with native.sandbox() as sandbox:
        await sandbox.write("large", b"x" * (1 << 20))
        await sandbox.exec(["python3", "-c", textwrap.dedent(script)], timeout=100)
        await appeared(sandbox, "full")
        assert int(await sandbox.read("full")) in (errno.ETOOMANYREFS, errno.EMFILE)
        with anyio.fail_after(60), pytest.raises(OSError, match="Too many references"):
            await sandbox.read("large")
        with anyio.fail_after(60), pytest.raises(ActionError, match="could not open a terminal"):
            await enter(sandbox.terminal("trap '' HUP; sleep 100"))
        assert (await sandbox.exec("echo on", timeout=60)).stdout == b"on\n"
        await sandbox.exec("pkill python3", timeout=60)
        with anyio.fail_after(60):  # the kernel frees them a little later
            while True:
                with contextlib.suppress(OSError):
                    assert len(await sandbox.read("large")) == 1 << 20
                    break
                await anyio.sleep(0.05)


def test_a_host_that_lets_everybody_look() -> None:
    """With fs.suid_dumpable = 1, a command could be traced while it shares init's memory: refused."""
    script = """
    import anyio, dutyfree
    async def main():
        async with dutyfree.open("native"):
            pass
    anyio.run(main)
    """
    covered = 'echo 1 > $0/one && mount --bind $0/one /proc/sys/fs/suid_dumpable && exec $1 -c "$2"'
    with tempfile.TemporaryDirectory() as directory:
        command = [
            "unshare",
            "--mount",
            "sh",
            "-c",
            covered,
            directory,
            sys.executable,
            textwrap.dedent(script),
        ]
        ended = subprocess.run(command, capture_output=True, timeout=60, check=False)
    assert b"fs.suid_dumpable is 1" in ended.stderr, ended


@pytest.mark.root("only root can cover a file of /proc")
def test_a_container_on_such_a_host(tmp_path: Path) -> None:
    covered = "echo 1 >one; mount --bind one /proc/sys/fs/suid_dumpable && exec $0 guest"
    command = ["unshare", "--mount", "--pid", "--fork", "--mount-proc", "sh", "-c", covered, str(BINARY)]
    ended = subprocess.run(
        command, cwd=tmp_path, stdin=subprocess.DEVNULL, capture_output=True, timeout=60, check=False
    )
    assert b"fs.suid_dumpable = 1" in ended.stderr, ended
    assert ended.returncode == 70


async def test_descriptors_that_nobody_asked_for() -> None:
    """From a compromised init: they do not fill the owner's descriptor table."""
    ours, theirs = socket.socketpair()
    with theirs:
        hostile = Channel(ours, "hostile", lambda: None)
        before = len(os.listdir("/proc/self/fd"))
        with contextlib.suppress(OSError):
            for _ in range(100):
                socket.send_fds(theirs, [protocol.FRAME.pack(0, Frame.OUTPUT, 1, 7)], [0, 0])
                await anyio.lowlevel.checkpoint()
        await until(lambda: hostile.closed)
        assert len(os.listdir("/proc/self/fd")) < before

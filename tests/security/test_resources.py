"""Resources that the kernel counts for the whole host: no sandbox uses them up for others."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest

from dutyfree import Limits
from dutyfree.contract import Exec, Sandbox, Substrate
from dutyfree.engine.launcher.protocol import ExitFlag
from dutyfree.engine.sandbox import tree_stream
from dutyfree.engine.sandbox.observation import refusal
from tests.opening import open_native

LIMITS = Limits(memory=256 << 20, pids=64)


async def python(sandbox: Sandbox, script: str) -> str:
    prelude = "import ctypes, errno, os, time\nlibc = ctypes.CDLL(None, use_errno=True)\n"
    seen = await sandbox.exec(["python3", "-c", prelude + textwrap.dedent(script)], timeout=120)
    assert seen.ok, seen.stderr.decode()
    return seen.stdout.decode().strip()


def launcher_of(native: Any) -> int:
    """There may be launchers of others too."""
    return int(native.node.launcher.pid)


async def test_what_is_counted_by_user(native: Substrate) -> None:
    async with native.sandbox(limits=LIMITS) as one, native.sandbox(limits=LIMITS) as other:
        script = """
        made = 0
        while libc.inotify_init() >= 0: made += 1
        if os.fork() == 0:
            os.setsid()
            for fd in (0, 1, 2): os.close(fd)
            time.sleep(30)
        print(made)
        """
        assert int(await python(one, script)) > 8
        assert int(await python(other, script)) > 8


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="numbers of x86-64")
async def test_calls_that_reach_others(native: Substrate) -> None:
    async with native.sandbox(limits=LIMITS) as sandbox:
        script = """
        import fcntl, resource, socket
        def attempt(what, *arguments):
            try: what(*arguments); return "done"
            except OSError as error: return errno.errorcode[error.errno]
        def aio():
            if libc.syscall(206, 1, ctypes.byref(ctypes.c_long())): raise OSError(ctypes.get_errno(), "")
        child = os.fork()
        if child == 0: time.sleep(30)
        own = resource.getrlimit(resource.RLIMIT_NOFILE)
        file = os.open("leased", os.O_CREAT | os.O_RDWR)
        print(
            attempt(resource.prlimit, 1, resource.RLIMIT_NOFILE, (9, 9)),
            attempt(resource.prlimit, child, resource.RLIMIT_NOFILE, (9, 9)),
            attempt(resource.prlimit, child, resource.RLIMIT_NOFILE),
            attempt(resource.prlimit, 0, resource.RLIMIT_NOFILE, own),
            attempt(resource.setrlimit, resource.RLIMIT_NOFILE, own),
            attempt(fcntl.fcntl, file, fcntl.F_SETLEASE, fcntl.F_WRLCK),
            attempt(fcntl.fcntl, file, fcntl.F_GETFL),
            attempt(socket.socket, socket.AF_NETLINK, socket.SOCK_RAW, 0),
            attempt(socket.socket, socket.AF_NETLINK, socket.SOCK_RAW, 4),
            attempt(socket.socket, socket.AF_INET, socket.SOCK_DGRAM, 17),
            attempt(aio),
        )
        os.kill(child, 9)
        """
        assert (await python(sandbox, script)).split() == [
            *("EPERM", "EPERM", "done", "done", "done"),
            *("EINVAL", "done", "done", "EAFNOSUPPORT", "done", "ENOSYS"),
        ]


async def test_terminals(native: Substrate) -> None:
    async with native.sandbox(limits=LIMITS) as sandbox:
        script = """
        made = 0
        try:
            while True: os.open("/dev/ptmx", os.O_RDWR); made += 1
        except OSError: print(made)
        """
        assert 8 <= int(await python(sandbox, script)) <= 64


async def test_a_network_that_was_used_is_not_used_again(native: Substrate) -> None:
    send = """
    import socket
    socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"left behind", ("127.0.0.1", 9))
    """
    for _ in range(12):
        async with native.sandbox(limits=LIMITS) as sandbox:
            sent = "print(open('/proc/net/dev').read().split('lo:')[1].split()[1])"
            assert await python(sandbox, sent) == "0"
            await python(sandbox, send)


def test_all_sandboxes_leave_the_host_processes() -> None:
    groups = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    found = [path for _, names, path in groups if "pids" in names.split(",")]
    root = Path("/sys/fs/cgroup", "pids", found[0].strip("/")) if found else Path("/sys/fs/cgroup")
    if not root.is_dir():
        pytest.skip("no control group for processes")

    async def look() -> list[str]:
        async with open_native() as native:
            return [group.read_text() for group in root.glob(f"dutyfree-{launcher_of(native)}-*/pids.max")]

    limits = anyio.run(look)
    most = int(Path("/proc/sys/kernel/pid_max").read_text())
    assert all(limit.strip().isdigit() and int(limit) < most for limit in limits)


async def test_memory_has_a_limit_by_default(native: Substrate) -> None:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

    def found() -> list[str]:
        limits = []
        for place, _, files in os.walk("/sys/fs/cgroup"):
            if f"/dutyfree-{launcher_of(native)}-" in place:
                for name in {"memory.limit_in_bytes", "memory.max"}.intersection(files):
                    with contextlib.suppress(OSError):
                        limits.append(Path(place, name).read_text().strip())
        return limits

    async with native.sandbox() as sandbox:
        seen = await sandbox.exec(["df", "-B1", "--output=size", "/workspace"])
        assert int(seen.stdout.split()[-1]) <= total // 8 + 65536
        limits = await anyio.to_thread.run_sync(found)
        if not limits:
            pytest.skip("no control group for memory")
        assert any(limit.isdigit() and total // 5 < int(limit) <= total // 4 + 65536 for limit in limits)


@pytest.mark.parametrize("number", [errno.ENOMEM, errno.EAGAIN])
def test_a_program_without_memory_or_process_is_observed(number: int) -> None:
    seen = refusal(Exec("true"), "", number, ExitFlag.NOT_STARTED, 0.0)
    assert (seen.exit_code, seen.started) == (126, False)
    assert b"cannot start a process" in seen.stderr


async def test_many_names_of_one_file(
    native: Substrate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tree_stream, "LARGEST", 8 << 20)
    async with native.sandbox(limits=LIMITS) as sandbox:
        await sandbox.exec("mkdir d; head -c 1M /dev/urandom > d/0; for i in $(seq 99); do ln d/0 d/$i; done")
        with pytest.raises(OSError, match="too large"):
            await sandbox.download("d", tmp_path / "d")
        assert not await anyio.to_thread.run_sync((tmp_path / "d").exists)
        assert (await sandbox.exec("true")).ok


async def test_a_directory_too_large_for_its_reader(native: Substrate) -> None:
    async with native.sandbox(limits=Limits(memory=2 << 30, disk=1 << 30)) as sandbox:
        script = """
        import os
        os.mkdir("many")
        for number in range(140_000):
            os.mknod(f"many/{number:0240}")
        """
        await python(sandbox, script)
        with pytest.raises(OSError, match="too large"):
            await sandbox.list("many")
        assert len(await sandbox.list(".")) == 1


async def test_what_exceeds_its_memory_does_not_go_to_the_hosts_swap(native: Substrate) -> None:
    swaps = (await anyio.Path("/proc/swaps").read_text()).splitlines()[1:]
    if sum(int(line.split()[2]) for line in swaps) < 200 << 10:
        pytest.skip("no swap here; to enable it: swapon, or make test-vm")
    async with native.sandbox(limits=Limits(memory=64 << 20)) as sandbox:
        seen = await sandbox.exec(["python3", "-c", "x = bytearray(range(256)) * (600 << 10)"])
        assert seen.signal == 9


def test_an_owner_that_is_preferred(tmp_path: Path) -> None:
    """A sandbox does not inherit the owner's OOM score or scheduling priority."""
    script = """
    import contextlib, os, resource, anyio, dutyfree
    os.setpriority(os.PRIO_PROCESS, 0, -5)
    with contextlib.suppress(OSError, ValueError):  # as far as this root is allowed to
        for limit in (resource.RLIMIT_RTPRIO, resource.RLIMIT_NICE):
            resource.setrlimit(limit, (30, 30))
        with open("/proc/self/oom_score_adj", "w") as adjust:
            adjust.write("-500")
    async def main():
        async with dutyfree.open("native") as substrate, substrate.sandbox() as sandbox:
            seen = await sandbox.exec("cat /proc/self/oom_score_adj; nice; grep priority /proc/self/limits")
            print(*seen.stdout.decode().split())
    anyio.run(main)
    """
    owner = tmp_path / "owner.py"
    owner.write_text(textwrap.dedent(script))
    ended = subprocess.run([sys.executable, owner], capture_output=True, timeout=200, check=False)
    assert ended.stdout == b"0 0 Max nice priority 0 0 Max realtime priority 0 0\n", ended


def test_an_owner_in_real_time(tmp_path: Path) -> None:
    """It does not inherit real-time priorities for CPU and disk either."""
    script = """
    import ctypes, os, anyio, dutyfree
    os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    assert ctypes.CDLL(None).syscall(251, 1, 0, 2 << 13 | 1) == 0
    async def main():
        async with dutyfree.open("native") as substrate, substrate.sandbox() as sandbox:
            seen = await sandbox.exec(["python3", "-c", INSIDE])
            print(seen.stdout.decode(), seen.stderr.decode())
    INSIDE = "import ctypes, os; print(os.sched_getscheduler(0), ctypes.CDLL(None).syscall(252, 1, 0) & 7)"
    anyio.run(main)
    """
    if os.uname().machine != "x86_64":
        pytest.skip("numbers of x86-64")
    owner = tmp_path / "owner.py"
    owner.write_text(textwrap.dedent(script))
    ended = subprocess.run([sys.executable, owner], capture_output=True, timeout=200, check=False)
    if b"PermissionError" in ended.stderr:
        pytest.skip("this root may not run in real time: its control group has no part of it")
    assert ended.stdout.split() in ([b"0", b"4"], [b"0", b"0"]), ended


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="numbers of x86-64")
async def test_priority_can_only_be_lowered(native: Substrate) -> None:
    """After 30 ms a sandbox yields to new commands (priority.c): none of its processes can undo that."""
    script = """
    import struct
    LONG = 10_000_000
    def attempt(what, *arguments):
        try: what(*arguments); return "done"
        except OSError as error: return errno.errorcode[error.errno]
    def call(*arguments):
        if libc.syscall(*arguments) < 0: raise OSError(ctypes.get_errno(), "")
    def turn():
        found = ctypes.create_string_buffer(48)
        call(315, 0, found, 48, 0)
        return struct.unpack("=IIQiIQQQ", found.raw)[5]
    def child(what):
        reading, writing = os.pipe()
        if os.fork() == 0:
            os.write(writing, str(what()).encode()); os._exit(0)
        os.close(writing)
        os.wait()
        return os.read(reading, 99).decode()
    until = time.monotonic() + 60
    while turn() not in (0, LONG) and time.monotonic() < until: pass
    short = struct.pack("=IIQiIQQQ", 48, 0, 0, 0, 0, 100_000, 0, 0)
    deferred = struct.pack("=IIQiIQQQ", 48, 0, 1, 0, 0, 100_000, 0, 0)
    clamp = struct.pack("=IIQiIQQQII", 56, 0, 0x28, 0, 0, 0, 0, 0, 1024, 1024)
    print(*[attempt(call, 314, 0, what, 0) for what in (short, deferred, clamp)])
    print(attempt(call, 314, 0, short, 0, 0, 0, 0), attempt(call, 144, 0, 0x40000000, bytes(4)))
    print(attempt(os.sched_setscheduler, 0, os.SCHED_OTHER, os.sched_param(0)))
    print(attempt(os.sched_setscheduler, 0, os.SCHED_RR, os.sched_param(1)), end=" ")
    print(attempt(os.sched_setparam, 0, os.sched_param(0)))
    levels = (1 << 13, 2 << 13, 2 << 13 | 3, 2 << 13 | 7, 2 << 13 | 4, 3 << 13)
    print(*[attempt(call, 251, 1, 0, level) for level in levels])
    print(attempt(os.nice, 5), attempt(os.setpriority, os.PRIO_PROCESS, 0, 0), os.nice(0))
    print(attempt(os.sched_setscheduler, 0, os.SCHED_BATCH, os.sched_param(0)))
    print(turn(), child(turn))
    print(attempt(os.sched_setscheduler, 0, os.SCHED_IDLE, os.sched_param(0)))
    print(attempt(os.sched_setscheduler, 0, os.SCHED_OTHER, os.sched_param(0)))
    """
    async with native.sandbox(limits=LIMITS) as sandbox:
        lines = (await python(sandbox, script)).splitlines()
    assert lines[:3] == ["EPERM EPERM EPERM", "EPERM EPERM", "done"]
    assert lines[3:5] == ["EPERM done", "EPERM EPERM EPERM done done done"]
    assert lines[5:7] == ["done EACCES 5", "done"]
    assert lines[7] in ("10000000 10000000", "0 0")  # kernels before 6.12 have no such slices
    assert lines[8:] == ["done", "EPERM"]


HOLD_SOCKETS = """
import errno, socket
def make():
    if {netlink}:
        made = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)
    else:
        made = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8 << 20)
    return made
held = []
try:
    while True: held.append(make())
except OSError as error:
    print(len(held), errno.errorcode[error.errno], held[0].getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF))
held.pop().close()
while True:  # the kernel frees it a little later
    try: made = make(); break
    except OSError: time.sleep(0.01)
other = socket.socket()
print(other.fileno() >= 0, made.get_inheritable())
"""


@pytest.mark.parametrize("netlink", [False, True])
async def test_sockets_whose_buffers_nobody_counts(native: Substrate, netlink: bool) -> None:
    usual = int(await anyio.Path("/proc/sys/net/core/rmem_default").read_text())
    async with native.sandbox(limits=LIMITS) as one, native.sandbox(limits=LIMITS) as other:
        first, second = (await python(one, HOLD_SOCKETS.format(netlink=netlink))).splitlines()
        count, reason, unread = first.split()
        assert 256 < int(count) <= 512
        assert reason == "ENOBUFS"
        assert int(unread) == usual
        assert second == "True False"
        script = """
        import socket
        a, b = (socket.socket(socket.AF_INET, socket.SOCK_DGRAM) for _ in range(2))
        a.bind(("127.0.0.1", 0))
        b.sendto(b"here", a.getsockname())
        print(a.recv(9).decode(), dict(socket.if_nameindex()), os.listdir("/proc/self/fd").count("5"))
        """
        assert await python(other, script) == "here {1: 'lo'} 1"


async def test_sockets_of_one_who_is_killed_or_out_of_descriptors(native: Substrate) -> None:
    script = """
    import resource, signal, socket
    resource.setrlimit(resource.RLIMIT_NOFILE, (8, 8))
    held = []
    try:
        while True: held.append(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
    except OSError as error:
        print(errno.errorcode[error.errno])
    for one in held: one.close()
    for _ in range(200):
        child = os.fork()
        if child == 0:
            while True: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).close()
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    print(socket.socket(socket.AF_INET, socket.SOCK_DGRAM).fileno() > 0)
    """
    async with native.sandbox(limits=LIMITS) as sandbox:
        assert (await python(sandbox, script)).split() == ["EMFILE", "True"]


async def test_buffers_of_tcp(native: Substrate) -> None:
    """The kernel has a limit for the whole host; one sandbox gets a part."""
    script = """
    import socket
    def pages():
        return int([line for line in open("/proc/net/sockstat") if line.startswith("TCP:")][0].split()[-1])
    before = pages()  # includes those of others
    server = socket.create_server(("127.0.0.1", 0), backlog=1000)
    held = []
    for _ in range(500):
        ours = socket.create_connection(server.getsockname())
        held += [ours, server.accept()[0]]
        ours.setblocking(False)
        try:
            for _ in range(200): ours.send(bytes(65536))
        except BlockingIOError: pass
    print(pages() - before)
    """
    async with native.sandbox(limits=Limits(memory=1 << 30)) as sandbox:
        seen = await sandbox.exec(["python3", "-c", textwrap.dedent(script)], timeout=120)
    if seen.oom:  # cgroup v2 counts them as the sandbox's own memory
        return
    assert seen.ok, seen.stderr
    pages = int(seen.stdout)
    assert pages * os.sysconf("SC_PAGESIZE") < 300 << 20


async def test_programs_for_the_kernel(native: Substrate) -> None:
    """The kernel's memory for compiled filters is limited per host; without it no sandbox can be created."""
    script = """
    import socket, struct
    step = ctypes.create_string_buffer(struct.pack("=HBBI", 0x06, 0, 0, 0xFFFF), 8)
    program = struct.pack("@HP", 1, ctypes.addressof(step))
    for option in (26, 51):
        try:
            socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM).setsockopt(socket.SOL_SOCKET, option, program)
        except OSError as error:
            print(errno.errorcode[error.errno])
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.setsockopt(socket.IPPROTO_TCP, 8, 5)
        for level, option in ((socket.SOL_SOCKET, socket.SO_REUSEADDR), (socket.IPPROTO_TCP, 8)):
            print(other.getsockopt(level, option))
    """
    async with native.sandbox(limits=LIMITS) as sandbox:
        assert (await python(sandbox, script)).split() == ["ENOPROTOOPT", "ENOPROTOOPT", "1", "5"]


UNDER_ANOTHER_LISTENER = """
import asyncio, ctypes, struct, sys
import dutyfree

libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(38, 1, 0, 0, 0) == 0  # no new privileges
allow = ctypes.create_string_buffer(struct.pack("=HBBI", 0x06, 0, 0, 0x7FFF0000), 8)
program = ctypes.create_string_buffer(struct.pack("@HP", 1, ctypes.addressof(allow)), 16)
assert libc.syscall(317, 1, 8, program) >= 0, ctypes.get_errno()


async def main():
    async with dutyfree.open("native") as native, native.sandbox() as sandbox:
        script = "import socket as s; print(len([s.socket(s.AF_INET, s.SOCK_DGRAM) for _ in range(600)]))"
        seen = await sandbox.exec(["python3", "-c", script], timeout=60)
        print(seen.stdout.decode(), seen.stderr.decode())


asyncio.run(main())
"""


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="numbers of x86-64")
async def test_where_somebody_else_is_asked_already() -> None:
    """The kernel allows one notifying filter: under another one, sockets work, but are not counted."""
    command = [sys.executable, "-c", UNDER_ANOTHER_LISTENER]
    done = await anyio.run_process(command, check=False)
    assert done.stdout.split() == [b"600"], done.stderr.decode()


EARLY = """
import time, anyio, dutyfree
CONNECT = "import socket as s\\nfor _ in 'ab': s.socket(s.AF_UNIX).connect_ex('x' * 50)\\nprint('answered')"
async def main():
    async with dutyfree.open("native") as native, native.sandbox() as sandbox:
        began = time.monotonic()
        seen = await sandbox.exec(["python3", "-c", CONNECT], timeout=20)
        print("late" if began > 3.5 else seen.stdout.decode().strip())
anyio.run(main)
"""


@pytest.mark.root("only root can set a clock back")
async def test_connections_on_a_host_that_has_just_started() -> None:
    """They are counted on the monotonic clock, which starts with the host."""
    command = ["unshare", "--time", "--fork", "--monotonic", str(-int(time.monotonic()))]
    done = await anyio.run_process([*command, sys.executable, "-c", EARLY], check=False)
    if b"monotonic offset" in done.stderr:
        pytest.skip("this unshare takes no negative offset; to enable it: another version of util-linux")
    assert done.returncode == 0, done.stderr
    if done.stdout == b"late\n":
        pytest.skip("this machine was too slow to connect within its first seconds")
    assert done.stdout == b"answered\n"

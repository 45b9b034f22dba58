"""Escape attempts by root of the sandbox: each must fail, and disturb no one else."""

from __future__ import annotations

import os
import socket
import subprocess
import textwrap
import uuid
from pathlib import Path

import anyio
import anyio.to_thread
import pytest

from dutyfree import Limits
from dutyfree.contract import Sandbox, Substrate
from dutyfree.substrates.native import Native

PRELUDE = """
import ctypes, errno, os, sys
libc = ctypes.CDLL(None, use_errno=True)
def call(number, *arguments):
    result = libc.syscall(number, *[a if isinstance(a, bytes) else ctypes.c_long(a) for a in arguments])
    return result if result >= 0 else -ctypes.get_errno()
"""


async def attack(sandbox: Sandbox, script: str) -> str:
    seen = await sandbox.exec(["python3", "-c", PRELUDE + textwrap.dedent(script)], timeout=60)
    assert seen.ok, seen.stderr.decode()
    return seen.stdout.decode().strip()


# Numbers of x86-64; elsewhere they come from the kernel headers.
FORBIDDEN = {
    "mount": (165, b"none", b"/mnt", b"tmpfs", 0, 0),
    "umount2": (166, b"/proc", 2),
    "pivot_root": (155, b".", b"."),
    "chroot": (161, b"/tmp"),
    "setns": (308, 0, 0),
    "unshare user": (272, 0x10000000),
    "unshare mount": (272, 0x20000),
    "clone into a user namespace": (56, 0x10000000 | 17, 0, 0, 0, 0),
    "keyctl": (250, 0, -3, 0),
    "add_key": (248, b"user", b"x", b"y", 1, -3),
    "request_key": (249, b"user", b"x", 0, 0),
    "bpf": (321, 0, 0, 0),
    "perf_event_open": (298, 0, 0, -1, -1, 0),
    "userfaultfd": (323, 0),
    "open_by_handle_at": (304, 0, 0, 0),
    "kexec_load": (246, 0, 0, 0, 0),
    "init_module": (175, 0, 0, b""),
    "finit_module": (313, 0, b"", 0),
    "delete_module": (176, b"x", 0),
    "reboot": (169, 0xFEE1DEAD, 672274793, 0, 0),
    "swapon": (167, b"/tmp", 0),
    "settimeofday": (164, 0, 0),
    "clock_settime": (227, 0, 0),
    "sethostname": (170, b"x", 1),
    "iopl": (172, 3),
    "ioperm": (173, 0, 1, 1),
    "syslog": (103, 3, 0, 0),
    "acct": (163, b"/tmp/x"),
    "quotactl": (179, 0, 0, 0, 0),
    "fsopen": (430, b"tmpfs", 0),
    "open_tree": (428, -100, b"/", 1),
    "move_mount": (429, -100, b"/", -100, b"/mnt", 0),
    "mount_setattr": (442, -100, b"/", 0, 0, 0),
    "fanotify_init": (300, 0, 0),
    "personality": (135, 0x0040000),
    "modern clone": (435, 0, 0),
    "io_uring_setup": (425, 1, 0),
}


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="numbers of x86-64")
async def test_forbidden_calls(native: Substrate) -> None:
    async with native.sandbox() as sandbox:
        for name, arguments in FORBIDDEN.items():
            # If a clone were allowed, its child would return here too, with 0.
            result = int(await attack(sandbox, f"print(call(*{arguments!r}))"))
            assert result in (-1, -38), f"{name} gave {result}"  # EPERM, ENOSYS
        # Only the families of IP and of local sockets: no other family may load a kernel module.
        families = "[f for f in range(50) if call(41, f, 2, 0) >= 0 or call(53, f, 2, 0, 0) != -97]"
        assert await attack(sandbox, f"print({families})") == "[1, 2, 10, 16]"
        # Typing into other terminals.
        assert int(await attack(sandbox, "print(call(16, 0, 0x5412, b'x'))")) == -1


async def test_no_privileges(native: Substrate) -> None:
    async with native.sandbox() as sandbox:
        status = (await sandbox.read("/proc/self/status")).decode()
        seen = await sandbox.exec(["cat", "/proc/self/status"])
        status = seen.stdout.decode()
        lines = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
        assert lines["NoNewPrivs"] == "1"
        assert lines["Seccomp"] == "2"
        effective = int(lines["CapEff"], 16)
        dangerous = (12, 13, 16, 17, 18, 19, 21, 22, 23, 24, 25, 27, 31, 32, 33, 34, 37, 38, 39)
        assert not any(effective >> number & 1 for number in dangerous), lines["CapEff"]
        mapped = (await sandbox.exec(["cat", "/proc/self/uid_map"])).stdout.split()
        assert int(mapped[1]) >= 1 << 30


async def test_set_id_programs_gain_nothing(native: Substrate) -> None:
    async with native.sandbox() as sandbox:
        await sandbox.exec("cp /usr/bin/id /tmp/id && chmod 6755 /tmp/id")
        seen = await sandbox.exec(["/tmp/id", "-u"], user="nobody")
        assert seen.stdout == b"65534\n"


async def test_init_is_out_of_reach(native: Substrate) -> None:
    async with native.sandbox() as sandbox:
        script = """
        tried = []
        for path in ("mem", "environ", "maps", "fd", "fd/3", "exe", "root", "cwd", "ns/mnt", "auxv"):
            full = "/proc/1/" + path
            try:
                os.listdir(full) if path in ("fd", "root", "cwd") else os.close(os.open(full, os.O_RDONLY))
                tried.append(path)
            except OSError:
                pass
        for path in ("mem", "oom_score_adj", "exe", "setgroups", "uid_map"):
            try:
                os.close(os.open("/proc/1/" + path, os.O_WRONLY)); tried.append("write " + path)
            except OSError:
                pass
        PTRACE_ATTACH, PTRACE_SEIZE = 16, 0x4206
        for request in (PTRACE_ATTACH, PTRACE_SEIZE):
            if call(101, request, 1, 0, 0) == 0: tried.append("ptrace")
        pidfd = os.pidfd_open(1)
        for number in range(12):
            if call(438, pidfd, number, 0) >= 0: tried.append(f"descriptor {number}")
        for number in (9, 19, 15, 6, 11):
            os.kill(1, number)
        print(" ".join(tried))
        """
        assert await attack(sandbox, script) == ""
        assert (await sandbox.exec("echo alive")).stdout == b"alive\n"


async def test_descriptors_do_not_leak(native: Substrate) -> None:
    async with native.sandbox() as sandbox:
        # As in CVE-2024-21626: no descriptor of the engine, and no working directory outside.
        script = """
        found = [int(number) for number in os.listdir("/proc/self/fd")]
        print([number for number in found if number > 2 and os.path.exists(f"/proc/self/fd/{number}")])
        """
        assert await attack(sandbox, script) == "[]"
        for number in range(3, 20):
            seen = await sandbox.exec("pwd", cwd=f"/proc/self/fd/{number}")
            assert seen.exit_code in (126, 127)


OF_THE_KERNEL = """
    /proc/sys/kernel/core_pattern /proc/sys/kernel/hostname /proc/sys/vm/overcommit_memory
    /proc/sys/net/ipv4/ip_forward /proc/sys/fs/binfmt_misc/register /proc/sysrq-trigger /proc/1/oom_score_adj
    /proc/irq/default_smp_affinity /proc/kcore /sys/kernel/uevent_helper /sys/fs/cgroup/release_agent
    /dev/mem /dev/kmsg /dev/sda /dev/vda
"""


@pytest.mark.parametrize("path", OF_THE_KERNEL.split())
async def test_the_kernels_files(native: Substrate, path: str) -> None:
    async with native.sandbox() as sandbox:
        seen = await sandbox.exec(f"test -e {path} && echo x > {path} && echo written")
        assert b"written" not in seen.stdout
        if path in ("/proc/kcore", "/dev/mem", "/dev/vda", "/dev/kmsg"):
            assert (await sandbox.exec(["head", "-c", "1", path])).stdout == b""


async def test_nothing_of_the_hosts_in_proc_can_be_written(native: Substrate) -> None:
    """Everything that this kernel has there, such as pressure triggers of the whole host."""
    async with native.sandbox() as sandbox:
        script = """
            import os
            for folder, folders, names in os.walk("/proc"):
                if folder == "/proc":
                    folders[:] = [name for name in folders if not name.isdigit()]
                for path in (os.path.join(folder, name) for name in names if name != "mounts"):
                    try:
                        os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))
                        print(path)
                    except OSError:
                        pass
        """
        seen = await sandbox.exec(["python3", "-c", textwrap.dedent(script)])
        assert (seen.exit_code, seen.stdout) == (0, b"")
        assert (await sandbox.exec("ls /proc/pressure")).stdout == b""


async def test_the_hosts_disks_and_devices_are_not_described(native: Substrate) -> None:
    """Hidden by name and by content; the files that programs read are there."""
    async with native.sandbox() as sandbox:
        covered = "fs bus irq interrupts softirqs schedstat diskstats partitions keys key-users locks"
        seen = await sandbox.exec(f"cd /proc; find -L {covered} -type f | xargs -r cat; ls -A fs bus irq")
        assert seen.stdout.split() == [b"bus:", b"fs:", b"irq:"], seen
        for path in ("cpuinfo", "meminfo", "stat", "loadavg", "uptime", "filesystems", "mounts"):
            assert await sandbox.read(f"/proc/{path}"), path


async def test_masks_cannot_be_lifted(native: Substrate) -> None:
    async with native.sandbox() as sandbox:
        for path in ("/proc/keys", "/proc/timer_list", "/proc/interrupts", "/proc/kcore"):
            assert (await sandbox.exec(f"cat {path}; rm -f {path}; umount {path}; cat {path}")).stdout == b""


async def test_devices_cannot_be_made(native: Substrate) -> None:
    async with native.sandbox() as sandbox:
        seen = await sandbox.exec(
            "mknod /tmp/disk b 254 0; mknod /dev/disk b 254 0; mknod /dev/shm/mem c 1 1; true"
        )
        assert b"not permitted" in seen.stderr
        for path in ("/tmp/disk", "/dev/disk", "/dev/shm/mem"):
            assert not (await sandbox.exec(["test", "-e", path])).ok


async def test_nothing_of_the_host(native: Substrate, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    await anyio.to_thread.run_sync(secret.write_text, "of the host")
    async with native.sandbox() as sandbox:
        for path in (
            secret,
            "/etc/shadow",
            "/etc/ssh",
            "/root/.ssh",
            "/var/lib/dpkg",
            "/var/run/docker.sock",
            "/l",
            "/k",
        ):
            assert not (await sandbox.exec(["test", "-e", str(path)])).ok, path
        seen = await sandbox.exec(
            "cd /; for i in 1 2 3 4 5 6; do cd ..; done; ls -d l k up new 2>/dev/null; ls /root /home"
        )
        assert seen.stdout.split() == [b"/home:", b"/root:"]


async def test_lowers_stay_as_they_are(native: Substrate) -> None:
    env, made = Path("/usr/bin/env"), Path("/usr/made")
    before = await anyio.to_thread.run_sync(env.stat)
    async with native.sandbox() as sandbox:
        seen = await sandbox.exec(
            "echo evil > /usr/bin/env; chmod 777 /usr/bin; rm -rf /usr/share/doc; touch /usr/made;"
            "cat /usr/bin/env"
        )
        assert seen.stdout == b"evil\n"
    assert await anyio.to_thread.run_sync(env.stat) == before
    assert not await anyio.to_thread.run_sync(made.exists)
    async with native.sandbox() as sandbox:
        assert (await sandbox.exec(["env", "true"])).ok
        assert not (await sandbox.exec(["test", "-e", "/usr/made"])).ok


async def test_neighbours_do_not_meet(native: Substrate) -> None:
    name = f"n{uuid.uuid4().hex}"  # so that no digit follows the zero before it
    async with native.sandbox() as one, native.sandbox() as other:
        served = await attack(
            one,
            f"""
            import socket, time
            listening, told = os.pipe()
            if os.fork() == 0:
                os.setsid()
                for fd in (0, 1, 2): os.close(fd)
                a = socket.socket(socket.AF_UNIX); a.bind("\\0{name}"); a.listen()
                b = socket.socket(); b.bind(("127.0.0.1", 4444)); b.listen()
                os.write(told, b"!")
                time.sleep(1000)
            os.read(listening, 1)
            os.open("/dev/shm/{name}", os.O_CREAT | os.O_WRONLY)
            libc.shmget(4242, 4096, 0o1666); print("up")
            """,
        )
        assert served == "up"
        script = f"""
        import socket
        met = []
        for family, address in ((socket.AF_UNIX, "\\0{name}"), (socket.AF_INET, ("127.0.0.1", 4444))):
            try: socket.socket(family).connect(address); met.append(str(address))
            except OSError: pass
        if os.path.exists("/dev/shm/{name}"): met.append("shm")
        if libc.shmget(4242, 4096, 0o666) >= 0: met.append("ipc")
        met += [p for p in os.listdir("/proc") if p.isdigit() and int(p) not in (1, os.getpid())]
        print(met)
        """
        assert await attack(other, script) == "[]"
        met = await attack(one, script)
        assert all(way in met for way in (name, "4444", "shm", "ipc")), met
        maps = {(await box.exec(["cat", "/proc/self/uid_map"])).stdout for box in (one, other)}
        assert len(maps) == 2


async def test_the_hosts_sockets_are_not_there(native: Substrate) -> None:
    name = f"dutyfree-{uuid.uuid4().hex}"
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(f"\0{name}")
        listening.listen()
        async with native.sandbox() as sandbox:
            script = f"""
            import socket
            try: socket.socket(socket.AF_UNIX).connect("\\0{name}"); print("met")
            except OSError: print("no")
            """
            assert await attack(sandbox, script) == "no"


async def test_processes_of_the_host_are_not_there(native: Substrate) -> None:
    with subprocess.Popen(["sleep", "1000"]) as process:  # noqa: ASYNC220 (it is not waited for)
        try:
            async with native.sandbox() as sandbox:
                await sandbox.exec(f"kill -9 {process.pid}; kill -9 -1; true")
            assert process.poll() is None
        finally:
            process.kill()


async def test_files_that_claim_to_be_large_or_grow(native: Substrate) -> None:
    """A sandbox cannot use up the owner's memory."""
    async with native.sandbox(limits=Limits(disk=64 << 20)) as sandbox:
        await sandbox.exec("truncate -s 1T sparse; head -c 1000000 /dev/zero > grows")
        with pytest.raises(OSError, match="too large"):
            await sandbox.read("sparse")
        await sandbox.exec("(yes >> grows) >/dev/null 2>&1 </dev/null &")
        assert 1_000_000 <= len(await sandbox.read("grows")) <= 64 << 20


async def test_tree_tricks_end_with_the_command(native: Native) -> None:
    """A process cannot lose its mark."""
    async with native.sandbox() as sandbox:
        script = """
        import resource
        if os.fork() == 0:
            if os.fork() == 0:
                os.setsid()
                soft, hard = resource.getrlimit(15)
                for mark in (1000, hard - 1, hard + 1):
                    try: resource.setrlimit(15, (mark, mark))
                    except (OSError, ValueError): pass
                if resource.getrlimit(15) != (hard, hard): open("changed", "w")
                while True:
                    open("beats", "a").write("x")
                    import time; time.sleep(0.02)
            os._exit(0)
        import time; time.sleep(60)
        """
        process = await sandbox.start(["python3", "-c", PRELUDE + textwrap.dedent(script)])
        await sandbox.exec("until test -s beats; do sleep 0.05; done")
        await process.kill()
        size = len(await sandbox.read("beats"))
        await anyio.sleep(0.3)
        assert len(await sandbox.read("beats")) == size > 0
        assert [entry.name for entry in await sandbox.list(".")] == ["beats"]


BOMBS = {
    "fork": ":(){ :|:& };:; sleep 20",
    "memory": "python3 -c 'x = []\nwhile True: x.append(bytearray(1 << 20))'",
    "disk": "while :; do head -c 10000000 /dev/zero >> /tmp/full; done",
    "inodes": "i=0; while :; do : > /tmp/f$i; i=$((i + 1)); done",
    "output": "yes",
    "descriptors": "python3 -c 'import os\nwhile True:\n  try: os.dup(0)\n  except OSError: pass'",
}


async def test_bombs_beside_a_neighbour(patient: Substrate) -> None:
    """All kinds at once, and the neighbour answers."""
    limits = Limits(memory=128 << 20, pids=64, disk=32 << 20, cpus=0.2)

    async def explode(command: str) -> None:
        async with patient.sandbox(limits=limits) as sandbox:
            await sandbox.exec(command, timeout=4)
            assert (await sandbox.exec("true", timeout=100)).exit_code in (0, 1, 2)

    async with patient.sandbox() as neighbour, anyio.create_task_group() as tasks:
        for command in BOMBS.values():
            tasks.start_soon(explode, command)
        for _ in range(20):
            await anyio.sleep(0.15)
            assert (await neighbour.exec("echo alive", timeout=60)).stdout == b"alive\n"


async def test_an_id_that_means_no_change(native: Substrate) -> None:
    """Id 4294967295 (-1) means "no change" to the kernel: the command would run as init's own user."""
    async with native.sandbox() as sandbox:
        await sandbox.exec("echo last:x:4294967295:4294967295::/:/bin/sh >>/etc/passwd")
        await sandbox.exec("echo last:x:4294967295: >>/etc/group")
        for user in ("last", "0:last"):
            seen = await sandbox.exec("id; grep Cap /proc/self/status", user=user)
            assert (seen.exit_code, seen.stdout, seen.started) == (126, b"", False)

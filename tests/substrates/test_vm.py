"""The substrate ``vm``: machines that boot or are restored, both ways of actions, failures, killed owners.

Without KVM the machines are emulated, so most tests restore them from one that was booted.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import itertools
import os
import shutil
import signal
import socket
import stat
import subprocess
import threading
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest

import dutyfree
from dutyfree import Limits, Recipe, Stage, gc, substrates
from dutyfree.conformance import CHECKS, Check
from dutyfree.contract.errors import (
    CreateError,
    ExecError,
    SandboxGone,
    SubstrateError,
    Unavailable,
    verdict,
)
from dutyfree.engine.layers.command_defaults import command_defaults
from dutyfree.engine.layers.lower_directories import LowerDirectories
from dutyfree.engine.sandbox.init_sandbox import InitSandbox
from dutyfree.engine.store import provenance
from dutyfree.engine.store.provenance import Provenance
from dutyfree.substrates.local import id_ranges
from dutyfree.substrates.vm import disks, kernel, sshd
from dutyfree.substrates.vm.accelerator import WORKS, ProbeRecord
from dutyfree.substrates.vm.config import VmConfig
from dutyfree.substrates.vm.disks import OpenDisks
from dutyfree.substrates.vm.machine import WORD
from dutyfree.substrates.vm.qemu import Files, Hardware, Memory, Qemu, Shape, arguments
from dutyfree.substrates.vm.sshd import SshdSandbox
from dutyfree.substrates.vm.substrate import VmSubstrate, _descriptor, filled
from tests.awaiting import appeared, enter, together
from tests.conftest import probed
from tests.processes import eventually, speaking_python

needs_vm = pytest.mark.vm

NAMES = """
    signals_are_default timeout_kills_the_tree tree_round_trip streaming managed_processes pids disk
    network_off out_of_memory
"""
CORE = {*NAMES.split()}
"""What depends on the stream or on the machine. The other checks are slow tests in ``test_conformance``."""

EXEC = {"round_trips", "timeout_kills_the_tree", "user"}
"""The same for actions over ssh, which are slow in an emulated machine."""


@pytest.fixture(scope="module")
async def vm() -> AsyncIterator[VmSubstrate]:
    async with dutyfree.open("vm", restore=True) as opened:
        await opened.prepare()
        yield opened


@needs_vm
@pytest.mark.parametrize("check", [check for check in CHECKS if check.name in CORE], ids=str)
async def test_conformance(vm: VmSubstrate, check: Check) -> None:
    await check(vm)


@pytest.fixture(scope="module")
async def over_ssh() -> AsyncIterator[VmSubstrate]:
    async with dutyfree.open("vm", restore=True, actions="exec") as opened:
        yield opened


@needs_vm
@pytest.mark.slow
@pytest.mark.parametrize("check", [check for check in CHECKS if check.name in EXEC], ids=str)
async def test_conformance_over_ssh(over_ssh: VmSubstrate, check: Check) -> None:
    await check(over_ssh)


@needs_vm
async def test_over_ssh_the_machine_reaches_nothing(over_ssh: VmSubstrate) -> None:
    """It has an interface for ssh, and no way out through it."""
    async with over_ssh.sandbox() as sandbox:
        reach = "import socket; socket.create_connection(('10.0.2.2', 22), 3)"
        assert not (await sandbox.exec(["python3", "-c", reach])).ok
        assert [span.name for span in sandbox.spans] == ["layers", "disk", "restore", "ready", "sshd"]


@needs_vm
@pytest.mark.slow
async def test_the_substrate_ssh_reaches_it_too(over_ssh: VmSubstrate) -> None:
    """With our init copied to it, and a pid namespace for it, which root of the machine may make."""
    async with over_ssh.sandbox() as machine:
        assert isinstance(machine, SshdSandbox)
        options = {**msgspec.structs.asdict(machine.ssh), "actions": "init"}
        async with dutyfree.open("ssh", **options) as ssh, ssh.sandbox() as sandbox:
            kernels = [(await each.exec("uname -r")).stdout for each in (machine, sandbox)]
            assert kernels[0] == kernels[1] != f"{os.uname().release}\n".encode()
            assert sandbox.id != machine.id


# --- A restored machine -----------------------------------------------------------------------------------


@needs_vm
async def test_siblings_share_neither_random_numbers_nor_names(vm: VmSubstrate) -> None:
    told: list[list[bytes]] = []

    async def ask() -> None:
        async with vm.sandbox() as sandbox:
            asked = "head -c 32 /dev/urandom | base64; cat /etc/machine-id; hostname; cat /proc/uptime"
            told.append((await sandbox.exec(asked)).stdout.split())

    await together(ask, ask)
    (random, machine, host, *_), others = told
    assert random != others[0]
    assert (len(machine), machine != others[1]) == (32, True)
    assert host.startswith(b"vm-")
    assert host != others[2]


@needs_vm
async def test_the_clock_of_a_late_copy_is_right(vm: VmSubstrate) -> None:
    """The saved machine is older than the wait; a copy whose clock went on from there would be late by it."""
    await vm.prepare()
    await anyio.sleep(1.5)
    async with vm.sandbox() as sandbox:
        before = time.time()
        told = float((await sandbox.exec(["python3", "-c", "import time; print(time.time())"])).stdout)
        after = time.time()
    # An emulated clock may differ by some milliseconds a second.
    assert before - 0.5 < told < after + 0.5


@needs_vm
async def test_copies_do_not_see_each_others_writes(vm: VmSubstrate) -> None:
    async with vm.sandbox() as one, vm.sandbox() as other:
        await one.write("/etc/mine", b"one")
        assert (await one.exec("sync; cat /etc/mine")).stdout == b"one"
        assert not (await other.exec("cat /etc/mine")).ok
    async with vm.sandbox() as later:
        assert not (await later.exec("cat /etc/mine")).ok


@needs_vm
async def test_the_first_message_is_not_overlooked(vm: VmSubstrate) -> None:
    """With several processors, it comes while init looks whether its port takes its first answer."""
    limits = Limits(cpus=2)
    async with vm.sandbox(limits=limits):
        pass  # boots the machine that the others are restored from
    for _ in range(8):
        with anyio.fail_after(60):
            async with vm.sandbox(limits=limits) as sandbox:
                assert await sandbox.list("/")


# --- A booted machine -------------------------------------------------------------------------------------


@needs_vm
@pytest.mark.parametrize("machine", ["microvm", pytest.param("pc", marks=pytest.mark.slow)])
async def test_a_machine_that_boots(machine: str) -> None:
    """Its files are those of the image and of the recipe's stages, which are built once."""
    recipe = Recipe(stages=(Stage("setup", commands=("mkdir old; echo built > old/file",)),))
    async with dutyfree.open("vm", machine=machine, storage="memory") as opened:
        assert isinstance(opened, VmSubstrate)
        async with opened.sandbox(recipe, limits=Limits(cpus=1, memory="256M", network="on")) as sandbox:
            assert (await sandbox.exec("mv old new && cat new/file")).stdout == b"built\n"
            seen = await sandbox.exec("cat /proc/1/comm; ls / | grep -c lost; nproc; cat /etc/resolv.conf")
            assert seen.stdout.split() == [b"dutyfree-init", b"0", b"1", b"nameserver", b"10.0.2.3"]
            assert [span.name for span in sandbox.spans] == ["layers", "disk", "boot", "ready"]
            assert await opened.sandboxes() == [sandbox.id]
            listener = await anyio.create_tcp_listener(local_host="127.0.0.1")
            async with listener:
                port = listener.listeners[0].extra(anyio.abc.SocketAttribute.local_port)
                reach = f"import socket; socket.create_connection(('{opened.host_address}', {port}), 20)"
                assert (await sandbox.exec(["python3", "-c", reach])).ok
        assert not await opened.sandboxes()


@needs_vm
async def test_a_recipe_may_ask_for_isolation(vm: VmSubstrate) -> None:
    async with vm.sandbox(Recipe(isolation="full")) as sandbox:
        assert (await sandbox.exec("true")).ok


@needs_vm
async def test_facts_say_how_the_machines_run(vm: VmSubstrate) -> None:
    facts = await vm.facts()
    assert (facts["machine"], facts["created by"], facts["actions"]) == ("microvm", "restore", "init")
    assert facts["accelerator"] in ("kvm", "tcg")
    assert ("without kvm" in facts) == (facts["accelerator"] == "tcg")
    assert facts["python"]


# --- Failures ---------------------------------------------------------------------------------------------


@needs_vm
@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        (Limits(cpus=0.5), "whole processors"),
        (Limits(memory="64M"), "no machine boots with 64 MB"),
        (Limits(network=("example.org",)), "no list of allowed hosts"),
    ],
)
async def test_limits_that_cannot_be_kept_are_refused(vm: VmSubstrate, limits: Limits, reason: str) -> None:
    with pytest.raises(CreateError, match=reason):
        await enter(vm.sandbox(limits=limits))


@needs_vm
@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"limits": Limits(cpus=0.5)}, "whole processors"),
        ({"limits": Limits(pids=100), "actions": "exec"}, "limits no processes if actions go over ssh"),
    ],
)
async def test_the_option_limits_is_checked_too(options: dict[str, Any], reason: str) -> None:
    async with dutyfree.open("vm", **options) as opened:
        with pytest.raises(CreateError, match=reason):
            await enter(opened.sandbox())
        with pytest.raises(CreateError, match=reason):
            await opened.prepare()


def test_the_option_limits_may_leave_out_what_has_a_default() -> None:
    option = Limits(memory="4G", output="1M")
    assert filled(option, option) == Limits(cpus=1, memory="4G", disk="8G", output="1M")
    assert filled(Limits(disk="1G"), option) == Limits(cpus=1, memory="4G", disk="1G")


def qemus(mark: str) -> list[int]:
    """The QEMU processes with this mark in their environment."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            told = entry.name.isdigit() and b"qemu" in (entry / "cmdline").read_bytes()
            if told and mark.encode() in (entry / "environ").read_bytes():
                found.append(int(entry.name))
        except OSError:
            continue
    return found


@needs_vm
async def test_a_machine_that_ends_is_an_infrastructure_error(vm: VmSubstrate) -> None:
    failures: list[Exception] = []

    async def run(sandbox: dutyfree.Sandbox) -> None:
        try:
            await sandbox.exec("touch begun; sleep 1000")
        except SubstrateError as error:
            failures.append(error)

    async with vm.sandbox() as sandbox, anyio.create_task_group() as tasks:
        assert isinstance(sandbox, InitSandbox)
        tasks.start_soon(run, sandbox)
        await appeared(sandbox, "begun")
        mark = f"DUTYFREE_OWNER={vm.machines.environment['DUTYFREE_OWNER']}"
        for pid in await anyio.to_thread.run_sync(qemus, mark):
            os.kill(pid, signal.SIGKILL)
    assert isinstance(failures[0], ExecError), failures
    assert verdict(failures[0]) == "infrastructure"
    async with vm.sandbox() as sandbox:
        assert (await sandbox.exec("echo again")).stdout == b"again\n"


RESTART = ["python3", "-c", "import ctypes; ctypes.CDLL(None).reboot(0x1234567)"]
"""What ``reboot -f`` does."""


@needs_vm
async def test_a_machine_that_a_command_restarts_is_gone(vm: VmSubstrate) -> None:
    """That is the outcome of the attempt: it gives the agent no second one."""
    async with vm.sandbox() as sandbox:
        for command in (RESTART, "true"):
            with pytest.raises(SandboxGone, match="stopped its virtual machine") as raised:
                await sandbox.exec(command)
            assert verdict(raised.value) == "task"


@needs_vm
@pytest.mark.slow
async def test_a_machine_that_a_command_restarts_over_ssh_is_gone(over_ssh: VmSubstrate) -> None:
    async with over_ssh.sandbox() as sandbox:
        with pytest.raises(SandboxGone, match="stopped its virtual machine"):
            await sandbox.exec(RESTART)


PRETEND = """
import ctypes, os
init = os.pidfd_open(1)
for number in range(9):
    port = ctypes.CDLL(None).syscall(438, init, number, 0)  # pidfd_getfd
    if port >= 0 and "vport" in os.readlink(f"/proc/self/fd/{port}"):
        os.write(port, b"\\xff" * 2000)
"""


@needs_vm
async def test_root_of_the_machine_pretends_to_be_init(vm: VmSubstrate) -> None:
    async with vm.sandbox() as sandbox:
        with pytest.raises(SandboxGone, match="was destroyed") as raised:
            await sandbox.exec(["python3", "-c", PRETEND])
        assert verdict(raised.value) == "task"


UNPLUG = """
import fcntl, socket, struct, time
time.sleep(1)
fcntl.ioctl(socket.socket(2, 2), 0x8914, struct.pack("16sh14x", b"eth0", 0))  # SIOCSIFFLAGS: down
"""


@needs_vm
@pytest.mark.slow
@pytest.mark.parametrize(
    "command", ["pkill -9 sshd; sleep 100", f"python3 -c '{UNPLUG}' & sleep 100"], ids=["sshd", "network"]
)
async def test_the_way_of_the_commands_is_broken_by_one_of_them(over_ssh: VmSubstrate, command: str) -> None:
    """Its timeout holds, or it fails at once; later ones fail, and all count as the agent's doing."""
    async with over_ssh.sandbox() as sandbox:
        with contextlib.suppress(SandboxGone), anyio.fail_after(5 + 2 * sshd.LATE_SECONDS):
            assert (await sandbox.exec(command, timeout=5)).timed_out
        for action in (sandbox.exec("true", timeout=5), sandbox.read("/etc/passwd")):
            with pytest.raises(SandboxGone) as raised:
                await action
            assert verdict(raised.value) == "task"


async def test_what_qemu_tells_until_its_end() -> None:
    """The guest causes events all the time; that it stopped the machine is one of them."""
    process = await asyncio.create_subprocess_exec("cat", stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    (port, their_port), (monitor, theirs) = socket.socketpair(), socket.socketpair()
    monitor.setblocking(False)
    qemu = Qemu(process, port, monitor)
    with their_port, theirs:
        events = b'{"event": "RTC_CHANGE", "data": {}}\n' * 1000
        theirs.sendall(b'{"QMP": {}}\n' + events + b'{"return": {}}\n')
        await qemu.greet()
        theirs.sendall(b'{"event": "SHUTDOWN", "data": {"guest": true, "reason": "guest-reset"}}\n')
    assert process.stdin is not None
    process.stdin.close()
    with pytest.raises(CreateError, match="QEMU ended"):
        await qemu.migration()
    assert qemu.stopped_by_guest
    await qemu.kill()


@needs_vm
async def test_a_machine_that_does_not_boot_in_time() -> None:
    async with dutyfree.open("vm", boot_seconds=0.01) as opened:
        with pytest.raises(CreateError, match=r"did not boot within 0\.01 s: \w.*boot_seconds="):
            await enter(opened.sandbox())


async def test_no_qemu() -> None:
    found = await substrates.probe("vm", program="no-such-qemu")
    assert not found.available
    with pytest.raises(Unavailable):
        await enter(dutyfree.open("vm", program="no-such-qemu"))


@needs_vm
async def test_no_two_machines_and_no_container_have_the_same_user(vm: VmSubstrate) -> None:
    """A guest that takes its QEMU over can neither signal nor trace the others."""
    if (await vm.facts())["user"] != "own":
        pytest.skip("QEMU runs as root here; to enable it: accelerator=tcg, or /dev/kvm with a group")
    mark = f"DUTYFREE_OWNER={vm.machines.environment['DUTYFREE_OWNER']}"

    def owners() -> list[int]:
        return [Path(f"/proc/{pid}").stat().st_uid for pid in qemus(mark)]

    async with vm.sandbox(), vm.sandbox():
        users = await anyio.to_thread.run_sync(owners)
    assert len({*users}) == len(users) == 2
    (number,) = {(user - id_ranges.FIRST) // id_ranges.COUNT for user in users}
    others = id_ranges.IdRanges()
    others._next = itertools.count(number)
    assert others.claim() != id_ranges.FIRST + number * id_ranges.COUNT
    others.close()


# --- Killed -----------------------------------------------------------------------------------------------

OWNER = """
    import sys, anyio, dutyfree

    async def main():
        async with dutyfree.open("vm", restore=True, actions=sys.argv[1]) as opened:
            async with opened.sandbox() as sandbox, opened.sandbox() as other:
                print(opened.machines.environment["DUTYFREE_OWNER"], flush=True)
                await sandbox.exec("sleep 1000")

    anyio.run(main)
"""


@needs_vm
@pytest.mark.parametrize("actions", ["init", "exec"])
def test_a_killed_owner_leaves_nothing(actions: str) -> None:
    with speaking_python(OWNER, actions) as (process, name):
        mark, directory = f"DUTYFREE_OWNER={name}", Path(f"/tmp/{name}")
        assert len(qemus(mark)) == 2
        assert directory.exists()
        process.kill()
    assert eventually(lambda: not qemus(mark))
    assert eventually(lambda: not directory.exists())


@needs_vm
def test_a_killed_owner_while_a_machine_boots() -> None:
    code = """
        import anyio, dutyfree

        async def main():
            async with dutyfree.open("vm") as opened:
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(boot, opened)
                    print(opened.machines.environment["DUTYFREE_OWNER"], flush=True)

        async def boot(opened):
            async with opened.sandbox():
                await anyio.sleep(1000)

        anyio.run(main)
    """
    with speaking_python(code) as (process, name):
        mark = f"DUTYFREE_OWNER={name}"
        assert eventually(lambda: qemus(mark))
        process.kill()
    assert eventually(lambda: not qemus(mark))


@pytest.fixture
def abandoned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    path = tmp_path / "dutyfree-vm-0123456789abcdef"
    path.mkdir()
    (path / "user_key").write_text("secret")
    return path


async def test_gc_removes_what_a_killed_reaper_left(abandoned: Path, cache: Path) -> None:
    disk = anyio.Path(cache / "vm/disks/layer-0.ext4")
    await disk.parent.mkdir(parents=True)
    await disk.write_bytes(b"")
    found = await gc.collect()
    assert {(one.kind, one.what) for one in found} >= {
        ("directory of vm", str(abandoned)),
        ("disk of vm", str(disk)),
    }
    assert not await anyio.Path(abandoned).exists()
    assert not await disk.exists()


# --- Disks ------------------------------------------------------------------------------------------------


def test_a_stage_that_was_built_again_has_another_disk(cache: Path) -> None:
    """Its key is the same, and its files may differ. The key of an image's layer names its files."""
    stage, image = (cache / "layers/kept" / name / "tree" for name in (f"stage/{0:064}", f"sha256/{0:064}"))
    (stage / "0").mkdir(parents=True)
    image.mkdir(parents=True)
    names = []
    for build_id in ("one", "two"):
        for tree in (stage, image):
            made = Provenance(kind="setup", seconds=1.0, image="study", identity="", build_id=build_id)
            provenance.write(tree, made)
        names.append((disks._name(stage / "0"), disks._name(image)))
    assert names[0][0] != names[1][0]
    assert names[0][1] == names[1][1]


def need_mke2fs() -> None:
    if not shutil.which("mke2fs", path=f"{os.environ['PATH']}:/usr/sbin:/sbin"):
        pytest.skip("no mke2fs; to enable it: apt-get install e2fsprogs")


def test_machines_cannot_write_to_a_disk_that_they_share(cache: Path, tmp_path: Path) -> None:
    need_mke2fs()
    files = tmp_path / "files"
    files.mkdir()
    disk = disks.private(files)
    assert fcntl.fcntl(disk, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
    assert stat.S_IMODE(os.fstat(disk).st_mode) == 0o444
    assert os.pread(disk, 2, 1080) == b"\x53\xef", "a file system of ext4"
    os.close(disk)


def test_a_named_disk_is_made_once_and_is_in_use_while_it_is_open(cache: Path, tmp_path: Path) -> None:
    need_mke2fs()
    files = tmp_path / "files"
    files.mkdir()
    with ThreadPoolExecutor(8) as threads:
        opened = OpenDisks(threads.map(lambda _: disks.named("one", files), range(8)))
    (path,) = (cache / "vm/disks").iterdir()
    assert {os.fstat(disk).st_ino for disk in opened.descriptors} == {path.stat().st_ino}
    copies = opened.duplicate()
    opened.close()
    assert not [*disks.unused()], "as a saved machine has it"
    copies.close()
    assert [*disks.unused()] == [path]


def test_disks_that_cannot_all_be_opened_are_closed() -> None:
    ends = os.pipe()

    def some() -> Iterator[int]:
        yield ends[1]
        raise CreateError("no more")

    with pytest.raises(CreateError):
        OpenDisks(some())
    assert os.read(ends[0], 1) == b""
    os.close(ends[0])


async def test_a_disk_that_a_cancelled_creation_opens_is_closed() -> None:
    ends = os.pipe()
    begun, go_on = threading.Event(), threading.Event()

    def opened() -> int:
        begun.set()
        go_on.wait(60)
        return ends[1]

    task = asyncio.create_task(_descriptor(opened))
    await anyio.to_thread.run_sync(begun.wait)
    task.cancel()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert os.read(ends[0], 1) == b""
    os.close(ends[0])


@needs_vm
async def test_many_recipes_leave_few_disks_open() -> None:
    """Else an opening with many recipes would run out of descriptors, and no disk could be collected."""

    def held() -> list[str]:
        found = [os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
        return [path for path in found if "/vm/disks/" in path]

    before = await anyio.to_thread.run_sync(held)
    async with dutyfree.open("vm") as opened:
        counts = []
        for number in range(12):
            await opened.prepare(Recipe(stages=(Stage("setup", commands=(f"echo {number} > number",)),)))
            counts.append(len(await anyio.to_thread.run_sync(held)) - len(before))
        assert [count // counts[0] for count in counts] == [1, 2, 3, 4, 5, 6, 7, *[8] * 5]
    assert len(await anyio.to_thread.run_sync(held)) == len(before)


def test_links_of_an_image_do_not_lead_to_files_of_this_host(tmp_path: Path) -> None:
    layer, secret = tmp_path / "layer", tmp_path / "host/lib/dpkg/status"
    secret.parent.mkdir(parents=True)
    secret.write_text("secret")
    (layer / "etc").mkdir(parents=True)
    (layer / "etc/passwd").symlink_to(secret)
    (layer / "var").symlink_to(tmp_path / "host")
    found = LowerDirectories((layer,), command_defaults(), "", tmp_path)
    with pytest.raises(CreateError, match="/etc/passwd of the image is not a plain file"):
        sshd._users(found)
    assert sshd._find(found, "var/lib/dpkg/status") is None


# --- KVM --------------------------------------------------------------------------------------------------


def test_how_long_it_is_known_whether_kvm_works(cache: Path) -> None:
    """Only for the same machine, program and kernel; and a failure may pass."""
    (cache / "vm").mkdir(parents=True)
    files = Files(os.memfd_create("kernel"), -1, ())
    record = ProbeRecord(VmConfig(), files)
    assert not record.read()
    for found, later in (("it failed", ""), (WORKS, WORKS)):
        record.write(found)
        assert record.read() == found
        assert not ProbeRecord(VmConfig(machine="pc"), files).read()
        assert not ProbeRecord(VmConfig(program="another-qemu"), files).read()
        (path,) = (cache / "vm").glob("kvm-*")
        os.utime(path, (0, 0))
        assert record.read() == later
    os.close(files.kernel)


# --- The command line of QEMU -----------------------------------------------------------------------------

FILES = Files(10, 11, (12, 13))


def words(config: VmConfig, hardware: Hardware, shape: Shape, memory: Memory | None = None) -> str:
    return " ".join(arguments(config, hardware, shape, FILES, port=20, monitor=21, upper=22, memory=memory))


def test_what_a_machine_is_made_of() -> None:
    emulated = words(VmConfig(), Hardware("tcg", 2600000), Shape(512, 2, 100, "disk", "off"))
    assert "-M microvm" in emulated
    assert "-smp 2 -m 512" in emulated
    assert "tsc_early_khz=2600000" in emulated
    assert "dutyfree.lower=2 dutyfree.upper=disk dutyfree.pids=100 -- machine" in emulated
    assert emulated.count("virtio-blk-device") == 3
    assert "-netdev" not in emulated
    fast = words(
        VmConfig(machine="pc"), Hardware("kvm"), Shape(512, 1, None, "4096", "ssh"), Memory(30, True)
    )
    assert "-accel kvm -cpu host" in fast
    assert "mitigations" not in fast
    assert "restrict=on" in fast
    assert "mem-path=/proc/self/fd/30,share=off -incoming defer" in fast


def test_the_message_has_the_size_that_the_guest_reads() -> None:
    assert WORD.size == 8 + 8 + 64 + 64 + 32


def test_the_archive_of_init_is_one_that_cpio_reads(tmp_path: Path) -> None:
    archive = kernel._cpio([("dir", 0o040755, b""), ("dir/file", 0o100644, b"hello")])
    assert len(archive) % 4 == 0
    assert archive.startswith(b"070701")
    assert b"dir/file\0" in archive
    assert archive.rstrip(b"\0").endswith(b"TRAILER!!!")


def test_vm_is_probed_once() -> None:
    found = probed("vm")
    assert found.detail
    assert found.available or found.remedy

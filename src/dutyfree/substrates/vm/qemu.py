"""One QEMU process: its arguments, its start, and requests to it (QMP).

QEMU gets everything as inherited descriptors: the kernel, the disks, the sockets. So it needs no directory
and no rights to any path. As root it runs with a user id that no other QEMU and no container of dutyfree has.
It ends with this process.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import socket
import stat
import subprocess
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import anyio

from dutyfree.contract.errors import CreateError, Unavailable
from dutyfree.substrates.local import id_ranges
from dutyfree.substrates.vm.config import VmConfig
from dutyfree.substrates.vm.kernel import modules

SAID = 4000
"""Bytes of QEMU's and the guest's messages that are kept."""

REASONS = ("dutyfree-init:", "Kernel panic", "qemu-system")
"""Lines that say why a machine ended."""

QMP_SECONDS = 60.0
QMP_LINE, QMP_MESSAGES = 1 << 20, 64
"""The bytes of a message from QEMU, and the messages that wait for a request, at most."""

BROKEN = (OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError)
"""What reading its messages may raise if a guest has taken it over."""

DEVICE = "/dev/kvm"

COMMAND_LINE = (
    "console=ttyS0 quiet loglevel=4 panic=-1 reboot=t rdinit=/init no_timer_check random.trust_cpu=on"
)
EMULATED = "mitigations=off cryptomgr.notests"
"""For an emulated processor, which speculates nothing."""


class Shape(NamedTuple):
    """What machines have in common that can be restored from each other."""

    memory: int
    """MiB."""
    cpus: int
    pids: int | None
    upper: str
    """Bytes of the tmpfs, or "disk"."""
    network: str
    """"on", "off", or "ssh": a network that reaches nothing, with a way in."""


class Identity(NamedTuple):
    """Who QEMU processes are."""

    users: Iterator[int]
    """A user id for each."""
    group: int
    """That of the device of KVM; 0 if each gets one like its user id."""


class Hardware(NamedTuple):
    """How machines are emulated here."""

    accelerator: str
    tsc: int = 0
    """kHz of the processor's time stamp counter, for an emulated machine."""
    identity: Identity | None = None
    """None to run QEMU as we are."""


class Files(NamedTuple):
    """Descriptors of the files that a machine reads."""

    kernel: int
    initramfs: int
    lower: tuple[int, ...]
    """The uppermost first."""


class Memory(NamedTuple):
    """Memory of a machine in a file."""

    descriptor: int
    restored: bool
    """Whether the machine starts from it, with copy on write; else it is booted in it, to be saved."""


def arguments(
    config: VmConfig,
    hardware: Hardware,
    shape: Shape,
    files: Files,
    *,
    port: int,
    monitor: int,
    upper: int = -1,
    memory: Memory | None = None,
    forward: str = "",
) -> list[str]:
    """The command line of QEMU; ``forward`` is a rule for the network "ssh"."""
    on_pc = config.machine == "pc"
    emulated = hardware.accelerator == "tcg"
    suffix = "pci" if on_pc else "device"
    machine = "pc" if on_pc else "microvm,rtc=on,isa-serial=on,pit=on,pic=on"
    if memory is not None:
        machine += ",memory-backend=ram"
    # Emulated, 16-byte compare and exchange corrupts flags now and then.
    # And processors that run at the same time sometimes stand still: so they take turns.
    accelerator, cpu = ("tcg,thread=single,tb-size=128", "max,cx16=off") if emulated else ("kvm", "host")
    # Then QEMU before 8.1 leaves the guest's memory barriers out, so a device that skips interrupts which it
    # takes for needless (event_idx) may skip needed ones.
    events = ",event_idx=off" if emulated else ""
    given = [
        *(config.program, "-name", "dutyfree", "-nodefaults", "-no-user-config", "-no-reboot"),
        *("-display", "none", "-M", machine, "-accel", accelerator, "-cpu", cpu),
        *("-smp", str(shape.cpus), "-m", str(shape.memory)),
        *("-sandbox", "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny"),
        *("-kernel", _path(files.kernel), "-initrd", _path(files.initramfs)),
        *("-append", _command_line(config, hardware, shape, len(files.lower))),
        *("-serial", "stdio"),
        *("-chardev", f"socket,id=monitor,fd={monitor}", "-mon", "chardev=monitor,mode=control"),
        *("-device", f"virtio-serial-{suffix}{events}"),
        *("-chardev", f"socket,id=port,fd={port}", "-device", "virtserialport,chardev=port,name=dutyfree"),
    ]
    for number, descriptor in enumerate(files.lower):
        given += _disk(suffix + events, f"lower{number}", descriptor, ",readonly=on")
    if upper >= 0:
        # The machine is gone before the host could be: what it has flushed need not survive that.
        given += _disk(suffix + events, "upper", upper, ",cache=writeback,discard=unmap")
    if shape.network != "off":
        rules = f",restrict={'on' if shape.network == 'ssh' else 'off'}{forward}"
        rom = ",romfile=" if on_pc else ""
        given += [
            "-netdev",
            f"user,id=net,ipv6=off{rules}",
            "-device",
            f"virtio-net-{suffix}{events},netdev=net{rom}",
        ]
    if memory is not None:
        share = "off" if memory.restored else "on"
        backend = f"size={shape.memory}M,mem-path={_path(memory.descriptor)},share={share}"
        given += ["-object", f"memory-backend-file,id=ram,{backend}"]
        if memory.restored:
            given += ["-incoming", "defer"]
    return given


def _path(descriptor: int) -> str:
    return f"/proc/self/fd/{descriptor}"


def _disk(driver: str, serial: str, descriptor: int, options: str) -> list[str]:
    drive = f"file={_path(descriptor)},format=raw,if=none,id={serial},file.locking=off{options}"
    return ["-drive", drive, "-device", f"virtio-blk-{driver},drive={serial},serial={serial}"]


def _command_line(config: VmConfig, hardware: Hardware, shape: Shape, lower: int) -> str:
    words = [COMMAND_LINE]
    if hardware.accelerator == "tcg":
        words.append(f"{EMULATED} tsc_early_khz={hardware.tsc}")
    words.append(f"dutyfree.modules={','.join(modules(config.machine, network=shape.network != 'off'))}")
    words.append(f"dutyfree.lower={lower} dutyfree.upper={shape.upper}")
    if shape.pids is not None:
        words.append(f"dutyfree.pids={shape.pids}")
    if shape.network != "off":
        words.append(f"dutyfree.network={'local' if shape.network == 'ssh' else 'all'}")
    return " ".join((*words, "-- machine"))


class Qemu:
    """A running QEMU. ``port`` is our end of the guest's virtio port."""

    def __init__(
        self, process: asyncio.subprocess.Process, port: socket.socket, monitor: socket.socket
    ) -> None:
        self.process = process
        self.port = port
        self._taken = False
        self._monitor = monitor
        self._messages: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue(QMP_MESSAGES)
        self._greeted = False
        self._shutdown = ""
        self._said: deque[bytes] = deque()
        self._heard = asyncio.Event()
        self._listening = asyncio.create_task(self._listen())
        self._reading = asyncio.create_task(self._read())

    @classmethod
    async def start(
        cls,
        config: VmConfig,
        hardware: Hardware,
        shape: Shape,
        files: Files,
        *,
        environment: dict[str, str],
        upper: int = -1,
        memory: Memory | None = None,
        forward: str = "",
    ) -> Qemu:
        """Raises CreateError, Unavailable."""
        port, their_port = socket.socketpair()
        monitor, their_monitor = socket.socketpair()
        with their_port, their_monitor:
            try:
                words = arguments(
                    config, hardware, shape, files,
                    port=their_port.fileno(), monitor=their_monitor.fileno(),
                    upper=upper, memory=memory, forward=forward,
                )  # fmt: skip
                given = [
                    files.kernel,
                    files.initramfs,
                    *files.lower,
                    their_port.fileno(),
                    their_monitor.fileno(),
                ]
                given += [upper] if upper >= 0 else []
                given += [memory.descriptor] if memory is not None else []
                process = await asyncio.create_subprocess_exec(
                    *_prefix(hardware),
                    *words,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=asyncio.subprocess.STDOUT,
                    pass_fds=given,
                    env=environment,
                    start_new_session=True,
                    cwd="/",
                )
            except BaseException as error:
                port.close()
                monitor.close()
                if isinstance(error, FileNotFoundError):
                    raise Unavailable("vm: there is no setpriv", remedy="install util-linux") from error
                if isinstance(error, OSError):
                    raise CreateError(f"QEMU cannot be started: {error.strerror}") from error
                raise
        port.setblocking(False)
        monitor.setblocking(False)
        return cls(process, port, monitor)

    async def _listen(self) -> None:
        assert self.process.stdout is not None
        while data := await self.process.stdout.read(SAID):
            self._said.append(data)
            self._heard.set()
            while sum(map(len, self._said)) > 2 * SAID:
                self._said.popleft()
        await self.process.wait()
        self._heard.set()

    def take_port(self) -> socket.socket:
        """From now on the caller closes the port."""
        taken, self._taken = self.port, True
        return taken

    @property
    def said(self) -> str:
        """The last lines of QEMU and of the guest's kernel."""
        text = b"".join(self._said).decode(errors="replace")
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        # What init says last comes before the kernel's registers.
        reasons = [line for line in lines if any(word in line for word in REASONS)]
        return " | ".join((reasons or lines)[-6:])

    async def heard(self) -> None:
        """Wait until it says more, or has ended."""
        self._heard.clear()
        await self._heard.wait()

    @property
    def is_running(self) -> bool:
        return self.process.returncode is None

    @property
    def stopped_by_guest(self) -> bool:
        """Whether the guest itself stopped or restarted the machine, as far as QEMU told before it ended."""
        return self._shutdown.startswith("guest-")

    async def wait(self) -> None:
        await self.process.wait()
        await asyncio.wait([self._listening, self._reading], timeout=1.0)

    async def kill(self) -> None:
        """End it, and wait until it has ended."""
        if not self._taken:
            self.port.close()
        if self.is_running:
            with contextlib.suppress(ProcessLookupError):
                self.process.kill()
        with anyio.CancelScope(shield=True):
            await self.wait()
            self._listening.cancel()
            self._reading.cancel()
            await asyncio.wait([self._reading])  # else the event loop would still watch what is closed now
            self._monitor.close()

    # --- QMP --------------------------------------------------------------------------------------------

    async def _read(self) -> None:
        """Take all messages as they come: the guest causes events, which would pile up in QEMU."""
        received = b""
        with contextlib.suppress(*BROKEN):
            while len(received) < QMP_LINE:
                data = await asyncio.get_running_loop().sock_recv(self._monitor, 1 << 16)
                if not data:
                    break
                *lines, received = (received + data).split(b"\n")
                for message in map(json.loads, lines):
                    event = message.get("event")
                    if event == "SHUTDOWN":
                        self._shutdown = str(message["data"]["reason"])
                    elif event in (None, "MIGRATION"):
                        await self._messages.put(message)
        await self._messages.put(None)

    async def greet(self) -> None:
        """Before the first request; from then on QEMU tells its events. Raises CreateError."""
        if not self._greeted:
            self._greeted = True
            await self._message()
            await self.request("qmp_capabilities")

    async def request(
        self, command: str, given: Mapping[str, Any] = MappingProxyType({}), *, descriptor: int = -1
    ) -> Any:
        """Raises CreateError."""
        line = json.dumps({"execute": command, "arguments": dict(given)}).encode() + b"\n"
        if descriptor >= 0:
            socket.send_fds(self._monitor, [line], [descriptor])
        else:
            await asyncio.get_running_loop().sock_sendall(self._monitor, line)
        while True:
            answer = await self._message()
            if "return" in answer:
                return answer["return"]
            if "error" in answer:
                raise CreateError(f"QEMU refused {command}: {answer['error'].get('desc')}")

    async def forwarded(self) -> int:
        """The port of this host that leads into the guest. Raises CreateError."""
        told = await self.request("human-monitor-command", given={"command-line": "info usernet"})
        for line in told.splitlines():
            words = line.split()
            if words and words[0] == "TCP[HOST_FORWARD]":
                return int(words[3])
        raise CreateError("QEMU forwards no port into the machine")

    async def migration(self) -> str:
        """Wait for the next status of a save. Raises CreateError."""
        while "event" not in (message := await self._message()):
            pass
        return str(message["data"]["status"])

    async def _message(self) -> dict[str, Any]:
        with anyio.move_on_after(QMP_SECONDS):
            message = await self._messages.get()
            if message is None:
                self._messages.put_nowait(None)  # for the next one who asks
                await self.wait()
                raise CreateError(f"QEMU ended: {self.said}")
            return message
        raise CreateError("QEMU does not answer")


def version(config: VmConfig) -> str:
    """Blocks."""
    done = subprocess.run([config.program, "--version"], capture_output=True, text=True, check=False)
    return done.stdout.partition("version ")[2].partition(" ")[0]


def identity(accelerator: str, first_id: int) -> Identity | None:
    """See ``Hardware``; with the ids of the range that begins with ``first_id``. Blocks.

    Only root gives a process another user id.
    """
    if os.geteuid() != 0:
        return None
    try:
        first, _, count = (int(word) for word in Path("/proc/self/uid_map").read_text().split()[:3])
        if first > id_ranges.FIRST or first + count <= id_ranges.LAST:
            return None
        found = Path(DEVICE).stat() if accelerator == "kvm" else None
    except (OSError, ValueError):
        return None
    users = itertools.cycle(range(first_id, first_id + id_ranges.COUNT))
    if found is None or found.st_mode & stat.S_IWOTH:
        return Identity(users, 0)
    if found.st_mode & stat.S_IWGRP and found.st_gid:
        return Identity(users, found.st_gid)
    return None


def _prefix(hardware: Hardware) -> Sequence[str]:
    """The death of this process ends it. Whoever takes QEMU over gets no rights, not even ours."""
    given = ["setpriv", "--pdeathsig=KILL", "--no-new-privs"]
    if hardware.identity is not None:
        user = str(next(hardware.identity.users))
        given += [
            f"--reuid={user}",
            f"--regid={hardware.identity.group or user}",
            "--clear-groups",
            "--bounding-set=-all",
        ]
    return [*given, "--"]

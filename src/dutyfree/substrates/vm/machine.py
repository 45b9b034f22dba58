"""One machine: boot it, or restore it, until our init in it answers.

The first process of the guest says ``GREETING`` when its disks are mounted, and waits for one message with
the time, a seed and names. A machine that is to be copied is saved while it waits. So each copy gets its own,
however late it is restored.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import struct
import time

import anyio

from dutyfree.contract.errors import CreateError, ExecError, SandboxGone, SubstrateError
from dutyfree.engine.sandbox.guest import Guest
from dutyfree.substrates.vm.config import VmConfig
from dutyfree.substrates.vm.disks import OpenDisks
from dutyfree.substrates.vm.kernel import seal
from dutyfree.substrates.vm.qemu import Files, Hardware, Memory, Qemu, Shape

GREETING = b"\0dutyfree\n"

AGAIN = b"?"
"""Asks the guest for another greeting: it may have been restored since the first one."""

WORD = struct.Struct("<8sQ64s64s32s")
"""What the guest waits for, as in setup/machine.c."""

ATTEMPTS = 3
"""Of an emulated machine with several processors, which may not boot at the first attempt."""


class MachineControl:
    """End one machine. See ``GuestControl``.

    Pausing stops the guest's processes, not the machine: the clock of a stopped machine would stay behind.
    """

    freezer = False

    def __init__(self, name: str, qemu: Qemu) -> None:
        self._name = name
        self.qemu = qemu
        self._ending: asyncio.Task[None] | None = None

    async def freeze(self) -> None:
        pass

    async def thaw(self) -> None:
        pass

    async def responds(self) -> bool:
        return self.qemu.is_running

    async def explain(self) -> Exception:
        """Why the stream ended."""
        await self.qemu.wait()
        if self.qemu.stopped_by_guest:
            return SandboxGone(f"a process in sandbox {self._name} stopped its virtual machine")
        return ExecError(f"the virtual machine of sandbox {self._name} ended: {self.qemu.said}")

    def give_up(self) -> None:
        """Destroy it, without waiting for the end."""
        if self._ending is None:
            self._ending = asyncio.get_running_loop().create_task(self.qemu.kill())

    async def destroy(self) -> None:
        await self.qemu.kill()


class Saved:
    """A machine that waits for its message, in memory. ``upper`` is its disk, or -1."""

    def __init__(self, memory: int, state: int, upper: int, lower: OpenDisks) -> None:
        self.memory = memory
        self.state = state
        self.upper = upper
        self.lower = lower
        """Its guest has read parts of these, so copies need the same ones, not others with the same files."""

    def close(self) -> None:
        """Blocks: the kernel frees the memory."""
        self.lower.close()
        for descriptor in (self.memory, self.state, self.upper):
            if descriptor >= 0:
                os.close(descriptor)


class Machines:
    """Makes machines of one configuration."""

    def __init__(self, config: VmConfig, hardware: Hardware, environment: dict[str, str]) -> None:
        """``environment`` is that of the QEMU processes."""
        self._config = config
        self._hardware = hardware
        self.environment = environment

    async def boot(self, shape: Shape, files: Files, upper: int, forward: str = "") -> Qemu:
        """A machine that waits for its message. Raises CreateError."""
        return await self._booted(shape, files, upper, None, forward)

    async def _booted(
        self, shape: Shape, files: Files, upper: int, memory: Memory | None, forward: str
    ) -> Qemu:
        attempts = ATTEMPTS if self._hardware.accelerator == "tcg" and shape.cpus > 1 else 1
        for attempt in range(1, attempts + 1):
            qemu = await self._start(shape, files, upper, memory, forward)
            try:
                await greeted(qemu, b"", self._config.boot_seconds / attempts)
                return qemu
            except BaseException as error:
                await qemu.kill()
                if not isinstance(error, CreateError) or attempt == attempts:
                    raise
        raise AssertionError("unreachable")

    async def save(self, shape: Shape, files: Files, upper: int) -> Saved:
        """Boot a machine, and save it while it waits. It keeps ``upper``. Raises CreateError."""
        memory = os.memfd_create("dutyfree-machine", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        state = os.memfd_create("dutyfree-state", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.truncate(memory, shape.memory << 20)
            qemu = await self._booted(shape, files, upper, Memory(memory, restored=False), "")
            try:
                await _save(qemu, state)
            finally:
                await qemu.kill()
            # A machine that takes QEMU over could change it for all others.
            seal(memory)
            seal(state)
            return Saved(memory, state, upper, OpenDisks(files.lower).duplicate())
        except BaseException:
            os.close(memory)
            os.close(state)
            raise

    async def restore(self, saved: Saved, shape: Shape, files: Files, upper: int, forward: str = "") -> Qemu:
        """A copy of a saved machine, which waits for its message. Raises CreateError."""
        files = files._replace(lower=saved.lower.descriptors)
        qemu = await self._start(shape, files, upper, Memory(saved.memory, restored=True), forward)
        try:
            await _load(qemu, saved.state)
            await self._greeted(qemu, AGAIN)
        except BaseException:
            await qemu.kill()
            raise
        return qemu

    async def _start(
        self, shape: Shape, files: Files, upper: int, memory: Memory | None, forward: str
    ) -> Qemu:
        return await Qemu.start(
            self._config, self._hardware, shape, files,
            environment=self.environment, upper=upper, memory=memory, forward=forward,
        )  # fmt: skip

    async def _greeted(self, qemu: Qemu, question: bytes) -> None:
        await greeted(qemu, question, self._config.boot_seconds)


async def greeted(qemu: Qemu, question: bytes, seconds: float) -> None:
    """Wait until the guest waits for its message. Raises CreateError."""
    loop = asyncio.get_running_loop()
    received = b""
    try:
        with anyio.fail_after(seconds):
            await loop.sock_sendall(qemu.port, question)
            while GREETING not in received:
                data = await loop.sock_recv(qemu.port, 64)
                if not data:
                    await qemu.wait()
                    raise CreateError(f"the virtual machine ended: {qemu.said}")
                received += data
    except TimeoutError as error:
        raise CreateError(
            f"the virtual machine did not boot within {seconds:g} s: "
            f"{qemu.said or 'neither QEMU nor the kernel has said anything yet'}",
            remedy="allow more with the option boot_seconds=",
        ) from error
    except OSError as error:
        await qemu.wait()
        raise CreateError(f"the virtual machine ended: {qemu.said}") from error


async def _save(qemu: Qemu, state: int) -> None:
    """Save everything but the memory, which is in its file already."""
    await _prepare(qemu, state)
    await qemu.request("migrate", {"uri": "fd:state"})
    while (status := await qemu.migration()) != "completed":
        if status == "failed":
            raise CreateError(f"QEMU could not save the machine: {qemu.said}")


async def _load(qemu: Qemu, state: int) -> None:
    # QEMU reads from the position of the descriptor, so each one needs its own.
    own = os.open(f"/proc/self/fd/{state}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        await _prepare(qemu, own)
    finally:
        os.close(own)
    await qemu.request("migrate-incoming", {"uri": "fd:state"})


async def _prepare(qemu: Qemu, state: int) -> None:
    await qemu.greet()
    capabilities = [{"capability": name, "state": True} for name in ("x-ignore-shared", "events")]
    await qemu.request("migrate-set-capabilities", {"capabilities": capabilities})
    await qemu.request("getfd", {"fdname": "state"}, descriptor=state)


async def ready(qemu: Qemu, name: str, seconds: float) -> Guest:
    """Send the message, and wait for init. Raises CreateError; then the machine has ended."""
    control = MachineControl(name, qemu)
    port, guest = qemu.take_port(), None
    try:
        await qemu.greet()  # so that it tells when the guest stops the machine
        seed, identity = secrets.token_bytes(64), secrets.token_hex(16)
        word = WORD.pack(b"dutyfree", time.time_ns(), seed, name.encode(), identity.encode())
        await asyncio.get_running_loop().sock_sendall(port, word)
        # Commands are root of a whole machine: they can take the port from init.
        guest = Guest(name, port, control, explain=control.explain, is_protected=False)
        await guest.wait_ready(seconds)
        return guest
    except BaseException as error:
        if guest is None:
            port.close()
        else:
            guest.close()
        await qemu.kill()
        if isinstance(error, OSError | SubstrateError) and not isinstance(error, CreateError):
            raise CreateError(f"the virtual machine of {name} ended: {qemu.said}") from error
        raise

"""Find out how machines run here: with KVM, or emulated. Only a machine that boots shows that KVM works."""

from __future__ import annotations

import contextlib
import hashlib
import os
import subprocess
import time

import anyio
import anyio.to_thread

from dutyfree.contract.errors import CreateError, Unavailable
from dutyfree.engine.host.proc import boot_id
from dutyfree.engine.launcher.client import BINARY
from dutyfree.substrates.local.runtime_environment import runtime_environment
from dutyfree.substrates.vm.config import VmConfig
from dutyfree.substrates.vm.kernel import folder
from dutyfree.substrates.vm.qemu import DEVICE, Files, Hardware, Qemu, Shape, identity

PROBE_SECONDS = 20.0
"""A machine boots within a second with KVM."""

FAILED_SECONDS = 3600.0
"""For how long a failure is remembered: it may pass."""

WORKS = "works"

_BOOTED = "dutyfree-init:"
"""Init says that it has no disk."""


async def hardware(config: VmConfig, files: Files, first_id: int) -> tuple[Hardware, str]:
    """The accelerator of an option, and why it is not KVM, or "". Raises Unavailable.

    ``files`` has the kernel and init, and no disks. ``first_id`` begins a range of user ids.
    """
    given = Hardware("kvm", identity=await anyio.to_thread.run_sync(identity, "kvm", first_id))
    reason = "the option accelerator= says so"
    if config.accelerator != "tcg":
        reason = await _kvm(config, files, given)
    if reason in (WORKS, ""):
        return given, ""
    if config.accelerator == "kvm":
        raise Unavailable(f"vm: KVM does not work here: {reason}", remedy='use accelerator="auto"')
    return await anyio.to_thread.run_sync(_emulated, first_id), reason


async def _kvm(config: VmConfig, files: Files, hardware: Hardware) -> str:
    """Why no machine boots with KVM, or WORKS."""
    if not await anyio.to_thread.run_sync(os.access, DEVICE, os.R_OK | os.W_OK):
        return f"{DEVICE} cannot be opened"
    record = await anyio.to_thread.run_sync(ProbeRecord, config, files)
    if found := await anyio.to_thread.run_sync(record.read):
        return found
    try:
        found = await _boots(config, files, hardware)
    except CreateError as error:
        return error.message  # QEMU did not start, which says nothing about KVM
    await anyio.to_thread.run_sync(record.write, found)
    return found


class ProbeRecord:
    """What was found since this host booted, for one machine of QEMU, one program and one kernel."""

    def __init__(self, config: VmConfig, files: Files) -> None:
        """Blocks."""
        kernel = os.fstat(files.kernel)
        tried = (config.machine, config.program, kernel.st_ino, kernel.st_ctime_ns)
        self._boot = f"kvm-{boot_id()}"
        self._path = folder() / f"{self._boot}-{hashlib.sha256(repr(tried).encode()).hexdigest()[:16]}"

    def read(self) -> str:
        """WORKS, or a failure of the last hour; else "". Blocks."""
        with contextlib.suppress(OSError):
            found = self._path.read_text()
            if found == WORKS or time.time() - self._path.stat().st_mtime < FAILED_SECONDS:
                return found
        return ""

    def write(self, found: str) -> None:
        """Blocks. Raises OSError."""
        for old in folder().glob("kvm-*"):
            if not old.name.startswith(self._boot):
                old.unlink(missing_ok=True)
        self._path.write_text(found)


def _emulated(first_id: int) -> Hardware:
    told = subprocess.run([BINARY, "tsc"], capture_output=True, check=True).stdout
    return Hardware("tcg", int(told), identity("tcg", first_id))


async def _boots(config: VmConfig, files: Files, hardware: Hardware) -> str:
    """Why no machine boots with KVM, or WORKS. Raises CreateError if QEMU does not start."""
    shape = Shape(256, 1, None, "1048576", "off")
    qemu = await Qemu.start(config, hardware, shape, files, environment=runtime_environment({}))
    try:
        with anyio.move_on_after(PROBE_SECONDS):
            while qemu.is_running and "internal error" not in qemu.said and _BOOTED not in qemu.said:
                await qemu.heard()
    finally:
        await qemu.kill()
    if _BOOTED in qemu.said:
        return WORKS
    return f"a machine did not boot with it: {qemu.said[:200] or 'it said nothing'}"

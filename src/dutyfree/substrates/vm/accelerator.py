"""Find out how machines run here: with KVM, or emulated. Only a machine that boots shows that KVM works."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import anyio
import anyio.to_thread

from dutyfree.contract.errors import CreateError, Unavailable
from dutyfree.engine.host.proc import boot_id
from dutyfree.engine.launcher.client import BINARY
from dutyfree.substrates.vm.config import VmConfig
from dutyfree.substrates.vm.kernel import folder
from dutyfree.substrates.vm.qemu import DEVICE, Files, Hardware, Qemu, Shape

PROBE_SECONDS = 20.0
"""A machine boots within a second with KVM."""

WORKS = "works"

_BOOTED = "dutyfree-init:"
"""Init says that it has no disk."""


async def hardware(config: VmConfig, files: Files) -> tuple[Hardware, str]:
    """The accelerator of an option, and why it is not KVM, or "". Raises Unavailable.

    ``files`` has the kernel and init, and no disks.
    """
    reason = "the option accelerator= says so" if config.accelerator == "tcg" else await _kvm(config, files)
    if reason in (WORKS, ""):
        return Hardware("kvm", 0), ""
    if config.accelerator == "kvm":
        raise Unavailable(f"vm: KVM does not work here: {reason}", remedy='use accelerator="auto"')
    return Hardware("tcg", await anyio.to_thread.run_sync(_tsc)), reason


async def _kvm(config: VmConfig, files: Files) -> str:
    """Why no machine boots with KVM, or WORKS. Remembered until the next boot of this host."""
    if not os.access(DEVICE, os.R_OK | os.W_OK):
        return f"{DEVICE} cannot be opened"
    known = folder() / f"kvm-{boot_id()}"
    try:
        return await anyio.to_thread.run_sync(known.read_text)
    except OSError:
        found = await _boots(config, files)
        await anyio.to_thread.run_sync(_remember, known, found)
        return found


def _remember(known: Path, found: str) -> None:
    for old in known.parent.glob("kvm-*"):
        old.unlink(missing_ok=True)
    known.write_text(found)


async def _boots(config: VmConfig, files: Files) -> str:
    shape = Shape(256, 1, None, "1048576", "off")
    try:
        qemu = await Qemu.start(config, Hardware("kvm", 0), shape, files, environment=dict(os.environ))
    except CreateError as error:
        return error.message
    try:
        with anyio.move_on_after(PROBE_SECONDS):
            while qemu.is_running and "internal error" not in qemu.said and _BOOTED not in qemu.said:
                await qemu.heard()
    finally:
        await qemu.kill()
    if _BOOTED in qemu.said:
        return WORKS
    return f"a machine did not boot with it: {qemu.said[:200] or 'it said nothing'}"


def _tsc() -> int:
    """kHz of this processor's time stamp counter, which an emulated machine sees. Blocks."""
    return int(subprocess.run([BINARY, "tsc"], capture_output=True, check=True).stdout)

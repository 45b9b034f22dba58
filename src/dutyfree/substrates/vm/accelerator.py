"""Find out how machines run here: with KVM, or emulated. Only a machine that boots shows that KVM works."""

from __future__ import annotations

import contextlib
import os
import subprocess
from pathlib import Path

import anyio
import anyio.to_thread

from dutyfree.contract.errors import CreateError, Unavailable
from dutyfree.engine.host.proc import boot_id
from dutyfree.engine.launcher.client import BINARY
from dutyfree.substrates.local.runtime_environment import runtime_environment
from dutyfree.substrates.vm.config import VmConfig
from dutyfree.substrates.vm.kernel import folder
from dutyfree.substrates.vm.qemu import DEVICE, Files, Hardware, Qemu, Shape, group

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
        return Hardware("kvm", group=await anyio.to_thread.run_sync(group, "kvm")), ""
    if config.accelerator == "kvm":
        raise Unavailable(f"vm: KVM does not work here: {reason}", remedy='use accelerator="auto"')
    return await anyio.to_thread.run_sync(_emulated), reason


async def _kvm(config: VmConfig, files: Files) -> str:
    """Why no machine boots with KVM, or WORKS. Remembered until the next boot of this host."""
    if not (found := await anyio.to_thread.run_sync(_known)):
        found = await _boots(config, files)
        await anyio.to_thread.run_sync(_remember, found)
    return found


def _memory() -> Path:
    return folder() / f"kvm-{boot_id()}"


def _known() -> str:
    if not os.access(DEVICE, os.R_OK | os.W_OK):
        return f"{DEVICE} cannot be opened"
    with contextlib.suppress(OSError):
        return _memory().read_text()
    return ""


def _remember(found: str) -> None:
    for old in folder().glob("kvm-*"):
        old.unlink(missing_ok=True)
    _memory().write_text(found)


def _emulated() -> Hardware:
    told = subprocess.run([BINARY, "tsc"], capture_output=True, check=True).stdout
    return Hardware("tcg", int(told), group("tcg"))


async def _boots(config: VmConfig, files: Files) -> str:
    shape = Shape(256, 1, None, "1048576", "off")
    try:
        hardware = Hardware("kvm", group=await anyio.to_thread.run_sync(group, "kvm"))
        qemu = await Qemu.start(config, hardware, shape, files, environment=runtime_environment({}))
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

"""The options of the substrate ``vm``."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from dutyfree.contract import Limits

PROGRAM = "qemu-system-x86_64"
LIMITS = Limits(cpus=1, memory=1 << 30, disk=8 << 30)


class VmConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The options of ``vm``."""

    machine: Literal["microvm", "pc"] = "microvm"
    """QEMU's machine: a small one with virtio devices alone, or a PC with PCI."""
    accelerator: Literal["auto", "kvm", "tcg"] = "auto"
    """KVM, or emulation by TCG; "auto" is KVM if a machine boots with it here, else TCG."""
    actions: Literal["init", "exec"] = "init"
    """How actions reach the machine: our init over one virtio port, or an ssh session for each."""
    restore: bool = False
    """Whether to boot one machine and restore the others from it, instead of booting each."""
    storage: Literal["disk", "memory"] = "disk"
    """Where a machine writes: to a disk of its own, or to its memory (tmpfs)."""
    image: str = "study"
    """The image of a recipe without one, as for ``native``; "study" is the study's image."""
    limits: Limits = LIMITS
    """The limits of a request without its own. What they leave out is as in ``LIMITS``."""
    program: str = PROGRAM
    """QEMU."""
    boot_seconds: Annotated[float, msgspec.Meta(gt=0)] = 120.0
    """How long a machine may take to boot, or to be restored."""

"""What the native engine needs of a host."""

from __future__ import annotations

import os
from pathlib import Path

from dutyfree.contract import Availability
from dutyfree.engine.host import namespaces
from dutyfree.engine.launcher.client import Launcher

KERNEL = (6, 3)
"""The first whose tmpfs takes mapped ids."""


def met(program: Path) -> Availability:
    """Whether it can be used here, by what the host says and, without root, by trying. Blocks."""
    if not program.exists():
        return Availability(
            False,
            "its C program was not built",
            "install gcc (or musl-tools) and install dutyfree again",
        )
    release = os.uname().release
    version = tuple(int(part) for part in release.split("-")[0].split(".")[:2] if part.isdigit())
    if version < KERNEL:
        return Availability(
            False, f"Linux {release} is too old", f"boot Linux {KERNEL[0]}.{KERNEL[1]} or newer"
        )
    if "overlay" not in Path("/proc/filesystems").read_text():
        return Availability(False, "the kernel has no overlay file system", "modprobe overlay")
    closed = namespaces.closed()
    if closed:
        return Availability(False, *closed)
    isolation = "user, pid, mount, net, ipc, uts and cgroup namespaces, seccomp"
    if os.geteuid() == 0:
        return Availability(True, isolation)
    refused = Launcher.trial(program)
    if refused:
        return Availability(False, *namespaces.explain(refused))
    return Availability(True, f"{isolation}; without root: `dutyfree doctor` says what is lost")

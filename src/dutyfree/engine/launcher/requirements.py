"""Check that this host meets the requirements of the native engine."""

from __future__ import annotations

import os
from pathlib import Path

from dutyfree.contract import Availability
from dutyfree.engine.host import proc
from dutyfree.engine.launcher.client import Launcher

KERNEL = (6, 3)
"""The first Linux whose tmpfs supports id-mapped mounts."""

ISOLATION = "user, pid, mount, net, ipc, uts and cgroup namespaces, seccomp"


def check(program: Path) -> Availability:
    """Whether the engine works here. Blocks. Without root, it starts a launcher on trial."""
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
    if "overlay" not in proc.text("filesystems"):
        return Availability(False, "the kernel has no overlay file system", "modprobe overlay")
    disabled = _disabled_namespaces()
    if disabled:
        return Availability(False, *disabled)
    if os.geteuid() == 0:
        return Availability(True, ISOLATION)
    if error := Launcher.trial(program):
        return Availability(False, *_explain(error))
    return Availability(True, f"{ISOLATION}; without root: `dutyfree doctor` says what is lost")


def _disabled_namespaces() -> tuple[str, str] | None:
    """The reason and the remedy if a kernel setting disables user namespaces."""
    if proc.sysctl("user/max_user_namespaces") == "0":
        return "user namespaces are switched off", "sysctl user.max_user_namespaces=16384"
    if os.geteuid() != 0 and proc.sysctl("kernel/unprivileged_userns_clone") == "0":
        return (
            "user namespaces are for root only",
            "sysctl kernel.unprivileged_userns_clone=1, or run as root",
        )
    return None


def _explain(error: str) -> tuple[str, str]:
    """The reason and the remedy after the launcher failed without root."""
    if proc.sysctl("kernel/apparmor_restrict_unprivileged_userns") == "1":
        return (
            f"AppArmor keeps user namespaces for root ({error})",
            "sysctl kernel.apparmor_restrict_unprivileged_userns=0, a profile with `userns,`, or root",
        )
    return (
        f"user namespaces cannot be made here ({error})",
        "run as root, or outside of the container that forbids them",
    )

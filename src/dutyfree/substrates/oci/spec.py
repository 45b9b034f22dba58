"""The configuration of one container, as the OCI runtime specification has it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from dutyfree.contract import Limits
from dutyfree.engine.layers.command_defaults import WORKDIR
from dutyfree.substrates.local.id_ranges import COUNT
from dutyfree.substrates.oci import groups, seccomp
from dutyfree.substrates.oci.runtime import Runtime

PROGRAM = "/.dutyfree-init"
"""The path of init in the container."""

ROOT = "m/root"
"""Where the overlay is, in the directory of the bundle (``bundle.c``)."""

INIT = "init"
"""A copy of init beside the bundles: the root of a container may not reach the place of dutyfree itself."""

HOSTNAME = "sandbox"

CAPABILITIES = tuple(
    f"CAP_{name}"
    for name in (
        *("CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "NET_BIND_SERVICE", "SETFCAP", "SETGID"),
        *("SETPCAP", "SETUID", "SYS_CHROOT"),
    )
)
"""Those of Docker, without AUDIT_WRITE, MKNOD and NET_RAW."""

NAMESPACES = ("pid", "network", "ipc", "uts", "mount", "cgroup", "user")

MASKED = (
    *("/proc/acpi", "/proc/asound", "/proc/interrupts", "/proc/kcore", "/proc/keys", "/proc/latency_stats"),
    *("/proc/sched_debug", "/proc/scsi", "/proc/timer_list", "/proc/timer_stats"),
    *("/sys/devices/virtual/powercap", "/sys/firmware"),
)
READ_ONLY = (
    *("/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"),
    "/sys/fs/cgroup",  # with groups of version 1, runc mounts a tmpfs there that can be written to
)

TMPFS = 64 << 20
"""Bytes of each of the small ones."""


def bounds(size: int) -> tuple[str, str]:
    """The options of a tmpfs with this many bytes. Inodes use memory too, even those of empty files."""
    return f"size={size}", f"nr_inodes={size // 4096 + 1024}"


_QUIET = ("nosuid", "noexec", "nodev")
_MOUNTS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("/proc", "proc", _QUIET),
    ("/dev", "tmpfs", ("nosuid", "strictatime", "mode=755", *bounds(TMPFS))),
    ("/dev/pts", "devpts", ("nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620")),
    ("/dev/shm", "tmpfs", (*_QUIET, "mode=1777", *bounds(TMPFS))),  # noqa: S108 (in the container)
    ("/dev/mqueue", "mqueue", _QUIET),
    ("/sys", "sysfs", (*_QUIET, "ro")),
    ("/sys/fs/cgroup", "cgroup", (*_QUIET, "relatime", "ro")),
)


def config(
    runtime: Runtime, init: Path, group: str, first_id: int, limits: Limits, environment: Mapping[str, str]
) -> dict[str, Any]:
    """The content of config.json. ``environment`` is that of the runtime's exec."""
    guest = [PROGRAM, "guest", *(("3",) if runtime.copies else ())]
    mapped = [{"containerID": 0, "hostID": first_id, "size": COUNT}]
    mounts = [
        {"destination": place, "type": kind, "source": kind, "options": list(options)}
        for place, kind, options in _MOUNTS
    ]
    program = {"destination": PROGRAM, "type": "bind", "source": str(init)}
    linux: dict[str, Any] = {
        "namespaces": [{"type": name} for name in NAMESPACES],
        "uidMappings": mapped,
        "gidMappings": mapped,
        "maskedPaths": list(MASKED),
        "readonlyPaths": list(READ_ONLY),
        "resources": {"devices": [{"allow": False, "access": "rwm"}]},
    }
    if not runtime.is_gvisor:
        linux["seccomp"] = seccomp.profile()
        linux["cgroupsPath"] = f"/{group}"
        linux["resources"] |= groups.resources(limits, runtime.host)
    return {
        "ociVersion": "1.0.2",
        "root": {"path": ROOT, "readonly": False},
        "hostname": HOSTNAME,
        "mounts": [*mounts, {**program, "options": ["bind", "ro", "nosuid", "nodev"]}],
        "process": process(guest, [f"{name}={value}" for name, value in environment.items()], WORKDIR),
        "linux": linux,
    }


def process(argv: Sequence[str], env: Sequence[str], cwd: str, user: str = "") -> dict[str, Any]:
    """A process of a container. ``user``: its ids, as ``UID:GID``; by default those of root."""
    uid, gid = map(int, user.split(":")) if user else (0, 0)
    return {
        "terminal": False,
        "user": {"uid": uid, "gid": gid},
        "args": argv,
        "env": env,
        "cwd": cwd,
        "noNewPrivileges": True,
        "capabilities": dict.fromkeys(("bounding", "effective", "permitted"), CAPABILITIES),
    }


def write(path: Path, content: dict[str, Any]) -> None:
    """Write a new file for the runtime. Other users must not see its variables. Blocks. Raises OSError."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with open(descriptor, "wb") as file:
        file.write(msgspec.json.encode(content))

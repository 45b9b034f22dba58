"""The configuration of one container, as the OCI runtime specification has it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dutyfree.contract import Limits
from dutyfree.engine.layers.command_defaults import WORKDIR
from dutyfree.substrates.oci import groups, seccomp
from dutyfree.substrates.oci.ids import COUNT
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
READ_ONLY = ("/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger")

SHM = "size=67108864"

_QUIET = ("nosuid", "noexec", "nodev")
_MOUNTS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("/proc", "proc", _QUIET),
    ("/dev", "tmpfs", ("nosuid", "strictatime", "mode=755", "size=65536k")),
    ("/dev/pts", "devpts", ("nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620")),
    ("/dev/shm", "tmpfs", (*_QUIET, "mode=1777", SHM)),  # noqa: S108 (in the container)
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
        "process": {
            "terminal": False,
            "user": {"uid": 0, "gid": 0},
            "args": guest,
            "env": [f"{name}={value}" for name, value in environment.items()],
            "cwd": WORKDIR,
            "noNewPrivileges": True,
            "capabilities": {kind: list(CAPABILITIES) for kind in ("bounding", "effective", "permitted")},
        },
        "linux": linux,
    }

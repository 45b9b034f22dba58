"""Facts about this machine that matter for measurements."""

from __future__ import annotations

import hashlib
import os
import platform
import resource
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

LIKE = ("hostname", "machine_id", "cpu", "cores", "memory_gib", "kernel", "os", "cgroups", "virtualization")
"""Facts that must be equal before measurements can be compared."""


def facts() -> dict[str, Any]:
    """Facts about this host. ``host_key`` is a hash of those that must be equal for a comparison."""
    found: dict[str, Any] = {
        "hostname": platform.node(),
        "machine_id": _line("/etc/machine-id")[:8],
        "cpu": _field("/proc/cpuinfo", "model name") or platform.machine(),
        "architecture": platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "swap_kib": int((_field("/proc/meminfo", "SwapTotal") or "0").split()[0]),
        "kernel": platform.release(),
        "os": _os_name(),
        "cgroups": cgroup_mode(),
        "cgroup_cpu_limit": _cgroup_limit("cpu", "cpu.max", "cpu.cfs_quota_us"),
        "cgroup_memory_limit": _cgroup_limit("memory", "memory.max", "memory.limit_in_bytes"),
        "virtualization": _virtualization(),
        "clock": _line("/sys/devices/system/clocksource/clocksource0/current_clocksource"),
        "governor": _line("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"),
        "temporary_directory": f"{tempfile.gettempdir()} ({_filesystem(tempfile.gettempdir())})",
        "open_files_limit": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        "processes_limit": resource.getrlimit(resource.RLIMIT_NPROC)[0],
        "root": os.geteuid() == 0,
        "user_namespaces_limit": _line("/proc/sys/user/max_user_namespaces"),
        "pid_max": _line("/proc/sys/kernel/pid_max"),
        "core_pattern": _line("/proc/sys/kernel/core_pattern"),
        "python": platform.python_version(),
        "load": round(os.getloadavg()[0], 2),
    }
    likeness = "\0".join(str(found[name]) for name in LIKE)
    found["host_key"] = hashlib.sha256(likeness.encode()).hexdigest()[:16]
    return found


def cgroup_mode() -> str:
    """v2, v1, hybrid or none."""
    mounts = [line.split() for line in _text("/proc/mounts").splitlines()]
    first = [mount for mount in mounts if mount[2] == "cgroup"]
    second = [mount for mount in mounts if mount[2] == "cgroup2"]
    if first and second:
        return "hybrid"
    if first or second:
        return "v1" if first else "v2"
    return "none"


def _cgroup_limit(controller: str, second: str, first: str) -> str:
    """The limit of this process's cgroup, as the kernel prints it. Limits of its parents are not included."""
    for line in _text("/proc/self/cgroup").splitlines():
        number, controllers, path = line.split(":", 2)
        root = "/sys/fs/cgroup" if number == "0" else f"/sys/fs/cgroup/{controllers}"
        if number == "0" or controller in controllers.split(","):
            text = _text(f"{root}{path}/{second if number == '0' else first}").strip()
            if text:
                return text
    return "unknown"


def _os_name() -> str:
    try:
        return platform.freedesktop_os_release()["PRETTY_NAME"]
    except (OSError, KeyError):
        return platform.system()


def _virtualization() -> str:
    if shutil.which("systemd-detect-virt"):
        found = subprocess.run(["systemd-detect-virt"], capture_output=True, text=True, check=False)
        return found.stdout.strip()
    return "virtual machine" if "hypervisor" in (_field("/proc/cpuinfo", "flags") or "").split() else "none"


def _filesystem(path: str) -> str:
    """The type of the file system of ``path``: that of its longest mount point."""
    best = ("", "unknown")
    for line in _text("/proc/mounts").splitlines():
        _, point, kind, *_ = line.split()
        inside = path == point or path.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best[0]):
            best = (point, kind)
    return best[1]


def _text(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""


def _line(path: str) -> str:
    return _text(path).strip() or "unknown"


def _field(path: str, name: str) -> str | None:
    for line in _text(path).splitlines():
        key, separator, value = line.partition(":")
        if separator and key.strip() == name:
            return value.strip()
    return None

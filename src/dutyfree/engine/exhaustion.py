"""Which limit of the host is reached when no sandbox can be made, and how to raise it."""

from __future__ import annotations

import errno
import resource
from pathlib import Path

OWN_FILES = "raise its limit: ulimit -n, or resource.setrlimit(RLIMIT_NOFILE) up to the hard limit"

NAMESPACES = ("user", "net", "mnt", "pid", "ipc", "uts", "cgroup")


def open_files() -> str:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return f"of {soft} that it may have ({hard} at most)"


def spare_files() -> int:
    """So many open files may be held for what is not in use now: most are for sandboxes."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4


def remedy(number: int) -> str:
    """What to do about an error number of the launcher; empty if no limit explains it."""
    if number in (errno.EMFILE, errno.ENFILE):
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        return (
            f"the launcher needs 3 or 4 descriptors for each sandbox and may have {hard}: raise the hard"
            f" limit of open files (ulimit -Hn, LimitNOFILE=) and fs.file-max ({_sysctl('fs/file-max')})"
        )
    if number == errno.ENOSPC:
        least = min(NAMESPACES, key=lambda kind: int(_sysctl(f"user/max_{kind}_namespaces") or 1 << 60))
        value = _sysctl(f"user/max_{least}_namespaces")
        return (
            f"the host has no room for more namespaces, groups or mounts: raise user.max_{least}_namespaces"
            f" ({value}), and look at cgroup.max.descendants of the groups above and fs.mount-max"
        )
    if number == errno.EAGAIN:
        return (
            f"the host has no room for more processes, two for each sandbox: raise kernel.pid_max"
            f" ({_sysctl('kernel/pid_max')}), kernel.threads-max ({_sysctl('kernel/threads-max')}), and"
            f" pids.max of the control groups above"
        )
    if number == errno.ENOMEM:
        return "the host has no memory left for it: end some sandboxes, or give them less"
    return ""


def _sysctl(name: str) -> str:
    try:
        return Path("/proc/sys", name).read_text().strip()
    except OSError:
        return ""

"""Which limit of the host is reached when no sandbox can be made, and how to raise it."""

from __future__ import annotations

import errno
import os
import resource
from pathlib import Path

from dutyfree.engine.host.namespaces import setting

OWN_FILES = "raise its limit: ulimit -n, or resource.setrlimit(RLIMIT_NOFILE) up to the hard limit"

IDLE_FILES = 3
"""Descriptors of the launcher for each idle sandbox; one more where there are enough."""
OWN = 96
"""Descriptors that owner and launcher have without any."""
IDLE_TASKS = 2
"""Threads of each init."""

MOST_FILES = 1 << 20
"""Of any process, unless fs.nr_open was raised."""
SYS_RESOURCE = 24
"""The capability to raise one's own limits, which root of a container has not."""

NAMESPACES = ("user", "net", "mnt", "pid", "ipc", "uts", "cgroup")


def open_files() -> str:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return f"of {soft} that it may have ({hard} at most)"


def spare_files() -> int:
    """So many open files may be held for what is not in use now: most are for sandboxes."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4


def room_by_files() -> int:
    """So many sandboxes open files allow beside layers, and beside what the two processes have anyhow."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = spare_files() + OWN
    return max(1, min(soft - taken, (hard - taken) // (IDLE_FILES + 1)))


def bounds() -> dict[str, int]:
    """How many idle sandboxes each limit leaves room for."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return {
        "the launcher's open files": (MOST_FILES if _raises_limits() else hard) // IDLE_FILES,
        "the owner's open files": soft,
        "pid_max": int(setting("kernel/pid_max") or 32768) * 3 // 4 // IDLE_TASKS,
        "user namespaces": int(setting("user/max_user_namespaces") or 0),
    }


def _raises_limits() -> bool:
    """Whether a launcher of this user gets as many open files as it wants."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return False
    effective = int(status.partition("CapEff:")[2].split(maxsplit=1)[0], 16)
    return os.geteuid() == 0 and bool(effective >> SYS_RESOURCE & 1)


def remedy(number: int) -> str:
    """What to do about an error number of the launcher; empty if no limit explains it."""
    if number in (errno.EMFILE, errno.ENFILE):
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        return (
            f"the launcher needs 3 or 4 descriptors for each sandbox and may have {hard}: raise the hard"
            f" limit of open files (ulimit -Hn, LimitNOFILE=) and fs.file-max ({setting('fs/file-max')})"
        )
    if number == errno.ENOSPC:
        least = min(NAMESPACES, key=lambda kind: int(setting(f"user/max_{kind}_namespaces") or 1 << 60))
        value = setting(f"user/max_{least}_namespaces")
        return (
            f"the host has no room for more namespaces, groups or mounts: raise user.max_{least}_namespaces"
            f" ({value}), and look at cgroup.max.descendants of the groups above and fs.mount-max"
        )
    if number == errno.EAGAIN:
        return (
            f"the host has no room for more processes, two for each sandbox: raise kernel.pid_max"
            f" ({setting('kernel/pid_max')}), kernel.threads-max ({setting('kernel/threads-max')}), and"
            f" pids.max of the control groups above"
        )
    if number == errno.ENOMEM:
        return "the host has no memory left for it: end some sandboxes, or give them less"
    return ""

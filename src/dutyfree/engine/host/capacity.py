"""How many sandboxes this host has room for; which limit to raise when it has none."""

from __future__ import annotations

import errno
import os
import resource

from dutyfree.engine.host import proc
from dutyfree.engine.host.proc import sysctl

RAISE_OPEN_FILES = "raise its limit: ulimit -n, or resource.setrlimit(RLIMIT_NOFILE) up to the hard limit"

IDLE_FILES = 3
"""Descriptors of the launcher for each idle sandbox; one more where there are enough."""
BASE_FILES = 96
"""Descriptors of owner and launcher without any sandbox."""
IDLE_TASKS = 2
"""Threads of each init."""
MEMORY_SHARE = 4
"""A default limit of memory is this part of the host's memory."""

MOST_FILES = 1 << 20
"""The kernel's default of fs.nr_open: the most open files that a process may have."""
SYS_RESOURCE = 24
"""CAP_SYS_RESOURCE: a process with it may raise its hard limits. Root in a container lacks it."""

NAMESPACES = ("user", "net", "mnt", "pid", "ipc", "uts", "cgroup")


def host_memory() -> int:
    """Bytes of memory of this host."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def share_of_memory() -> int:
    """Default limit in bytes of one sandbox, of all snapshots together, and of an idle pool."""
    return host_memory() // MEMORY_SHARE


def open_files() -> str:
    """The limits on open files of this process, for an error message."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return f"of {soft} that it may have ({hard} at most)"


def spare_files() -> int:
    """How many open files may stay in caches. The rest is for sandboxes."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4


def room_by_files() -> int:
    """How many sandboxes the limits on open files allow, of this process and of its launcher."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = spare_files() + BASE_FILES
    return max(1, min(soft - taken, (hard - taken) // (IDLE_FILES + 1)))


def bounds() -> dict[str, int]:
    """How many idle sandboxes each limit allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return {
        "the launcher's open files": (MOST_FILES if _raises_limits() else hard) // IDLE_FILES,
        "the owner's open files": soft,
        "pid_max": int(sysctl("kernel/pid_max") or 32768) * 3 // 4 // IDLE_TASKS,
        "user namespaces": int(sysctl("user/max_user_namespaces") or 0),
    }


def _raises_limits() -> bool:
    """Whether a launcher of this user can raise its own limit on open files."""
    effective = int(proc.field(proc.text("self/status"), "CapEff", "0"), 16)
    return os.geteuid() == 0 and bool(effective >> SYS_RESOURCE & 1)


def remedy(number: int) -> str:
    """What to do about an errno of the launcher; empty if no limit of the host explains it."""
    if number in (errno.EMFILE, errno.ENFILE):
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        return (
            f"the launcher needs 3 or 4 descriptors for each sandbox and may have {hard}: raise the hard"
            f" limit of open files (ulimit -Hn, LimitNOFILE=) and fs.file-max ({sysctl('fs/file-max')})"
        )
    if number == errno.ENOSPC:
        least = min(NAMESPACES, key=lambda kind: int(sysctl(f"user/max_{kind}_namespaces") or 1 << 60))
        value = sysctl(f"user/max_{least}_namespaces")
        return (
            f"the host has no room for more namespaces, groups or mounts: raise user.max_{least}_namespaces"
            f" ({value}), and check cgroup.max.descendants of the parent groups and fs.mount-max"
        )
    if number == errno.EAGAIN:
        return (
            f"the host has no room for more processes, two for each sandbox: raise kernel.pid_max"
            f" ({sysctl('kernel/pid_max')}), kernel.threads-max ({sysctl('kernel/threads-max')}), and"
            f" pids.max of the parent control groups"
        )
    if number == errno.ENOMEM:
        return "the host has no memory left: close some sandboxes, or lower their memory limits"
    return ""

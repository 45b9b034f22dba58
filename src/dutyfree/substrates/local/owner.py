"""Who made what is found: an opening leaves its process's name on all it makes, for later ones to judge.

Engines and temporary directories may be shared by several machines, boots and pid namespaces; only what
certainly has no owner any more may be removed by another.
"""

from __future__ import annotations

import os
from pathlib import Path


def identity(pid: int | str = "self") -> str | None:
    """Which process this is, for good: boot, pid namespace, pid, start time and machine.

    None if there is no such process, or this one cannot see it.
    """
    try:
        number, _, rest = Path(f"/proc/{pid}/stat").read_text().partition(" ")
        start = rest.rpartition(")")[2].split()[19]
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        space = os.readlink("/proc/self/ns/pid").strip("pid:[]")
    except OSError:
        return None
    return f"{boot}/{space}/{number}/{start}/{_machine()}"


def _machine() -> str:
    """Stays the same over boots; empty where the system has no such name."""
    try:
        return Path("/etc/machine-id").read_text().strip().removeprefix("uninitialized")
    except OSError:
        return ""


def is_dead(owner: str) -> bool:
    """Whether the process of that identity has ended for certain; False if it cannot be told from here."""
    parts, ours = owner.split("/"), (identity() or "").split("/")
    if len(parts) != 5 or len(ours) != 5:
        return False
    boot, space, pid, _, machine = parts
    if boot != ours[0]:
        return bool(machine) and machine == ours[4]
    if space != ours[1] or not pid.isdigit():
        return False
    found = identity(pid)
    return found != owner if found else not _exists(int(pid))


def _exists(pid: int) -> bool:
    """Also of a process that /proc does not show, since it is another user's."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True

"""Identities of owner processes, to find leftovers of dead owners.

A substrate labels everything that it makes with the identity of its process. Machines, boots and pid
namespaces may share a Docker engine or a temporary directory, so only things whose owner is certainly dead
are removed.
"""

from __future__ import annotations

import contextlib
import glob
import os
from collections.abc import Iterator
from pathlib import Path

from dutyfree.engine.host.proc import boot_id
from dutyfree.substrates.local.reaper import OWNER


def identity(pid: int | str = "self") -> str | None:
    """A unique identity of a process: boot, pid namespace, pid, start time and machine.

    None if the process does not exist, or is not visible from here.
    """
    try:
        number, _, rest = Path(f"/proc/{pid}/stat").read_text().partition(" ")
        start = rest.rpartition(")")[2].split()[19]
        boot = boot_id()
        space = os.readlink("/proc/self/ns/pid").strip("pid:[]")
    except OSError:
        return None
    return f"{boot}/{space}/{number}/{start}/{_machine()}"


def _machine() -> str:
    """The id of this machine, the same after a reboot; empty if the system has none."""
    try:
        return Path("/etc/machine-id").read_text().strip().removeprefix("uninitialized")
    except OSError:
        return ""


def is_dead(owner: str, *, after_reboot: bool = True) -> bool:
    """Whether the process with that identity is certainly dead; False if this process cannot know.

    ``after_reboot``: take another boot with the same machine id for an earlier one of this machine. Clones of
    a machine, and containers of an image, may all have the same id.
    """
    parts, ours = owner.split("/"), (identity() or "").split("/")
    if len(parts) != 5 or len(ours) != 5:
        return False
    boot, space, pid, _, machine = parts
    if boot != ours[0]:
        return after_reboot and bool(machine) and machine == ours[4]
    if space != ours[1] or not pid.isdigit():
        return False
    found = identity(pid)
    return found != owner if found else not _exists(int(pid))


def _exists(pid: int) -> bool:
    """Whether a process exists, also one of another user that /proc hides."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def abandoned(parent: Path, prefix: str) -> Iterator[Path]:
    """The directories in ``parent`` whose owner is certainly dead, and whose reaper was killed too.

    Only those of this user: everyone can make links in /tmp, with any name and any owner.
    """
    for link in parent.glob(f"{glob.escape(prefix)}*{OWNER}"):
        with contextlib.suppress(OSError):
            if link.lstat().st_uid == os.geteuid() and is_dead(str(link.readlink())):
                yield link.with_suffix("")

"""Control groups of containers, of version 1 and 2: limits, the count of OOM kills, the end of all in one.

Each container has one group below the group of its substrate, in every hierarchy. crun and runc make and
remove the container's group. For gVisor, which does not manage groups here, this module does.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import threading
import time
from pathlib import Path
from typing import NamedTuple

from dutyfree.contract import Limits
from dutyfree.substrates.local.reaper import GROUPS as ROOT
from dutyfree.substrates.local.reaper import remove_groups

PREFIX = "dutyfree-oci-"
PERIOD = 100_000
UNIFIED = ROOT / "unified"
CONTROLLERS = ("memory", "cpu", "pids", "freezer")
"""Hierarchies of version 1 in which this module makes a group for gVisor."""


NOTICE_SECONDS = 2.0
"""How long the kernel may take to notify that a group is gone."""


class Hosted(NamedTuple):
    """The control groups of this host."""

    version: int
    """1 or 2; 0 without control groups."""
    enforces: tuple[str, ...]
    """Some of cpu, memory and pids."""
    swap: bool
    """Whether swap can be limited."""
    hybrid: bool
    """Version 1, with an additional hierarchy of version 2."""


def hosted() -> Hosted:
    """Blocks."""
    limits = ("cpu", "memory", "pids")
    with contextlib.suppress(OSError):
        found = (ROOT / "cgroup.controllers").read_text().split()
        swap = any(path.exists() for path in ROOT.glob("*/memory.swap.max"))
        return Hosted(2, tuple(name for name in limits if name in found), swap, hybrid=False)
    enforces = tuple(name for name in limits if (ROOT / name / "cgroup.procs").exists())
    swap = (ROOT / "memory/memory.memsw.limit_in_bytes").exists()
    return Hosted(1 if enforces else 0, enforces, swap, (UNIFIED / "cgroup.procs").exists())


def resources(limits: Limits, host: Hosted) -> dict[str, object]:
    """The limits as an OCI runtime takes them."""
    found: dict[str, object] = {}
    if limits.memory is not None:
        swap = {"swap": limits.memory} if host.swap else {}
        found["memory"] = {"limit": limits.memory, **swap}
    if limits.cpus is not None:
        found["cpu"] = {"quota": _quota(limits.cpus), "period": PERIOD}
    if limits.pids is not None:
        found["pids"] = {"limit": limits.pids}
    return found


def _quota(cpus: float) -> int:
    return max(1000, math.ceil(cpus * PERIOD))


class Group:
    """The group of one container; ``name`` is its path in each hierarchy. All methods block."""

    def __init__(self, name: str, host: Hosted) -> None:
        self.name = name
        self._host = host
        self._notices = -1
        self._noticed = 0
        self._noticing = threading.Lock()
        self._kills_of_all = 0

    def make(self, limits: Limits) -> str:
        """Make the group with its limits. Returns the files that put a process into it. Raises OSError."""
        if self._host.version == 2:
            return self._make_unified(limits)
        files = []
        for controller in CONTROLLERS:
            if not (ROOT / controller / "cgroup.procs").exists():
                continue
            path = ROOT / controller / self.name
            path.mkdir(parents=True, exist_ok=True)
            # A write to cgroup.procs waits for all CPUs; a process of one thread can use this file.
            files.append(str(path / "tasks"))
        places = {name: ROOT / name / self.name for name in CONTROLLERS}
        if limits.memory is not None:
            (places["memory"] / "memory.limit_in_bytes").write_text(str(limits.memory))
            if self._host.swap:
                (places["memory"] / "memory.memsw.limit_in_bytes").write_text(str(limits.memory))
        if limits.cpus is not None:
            (places["cpu"] / "cpu.cfs_period_us").write_text(str(PERIOD))
            (places["cpu"] / "cpu.cfs_quota_us").write_text(str(_quota(limits.cpus)))
        if limits.pids is not None:
            (places["pids"] / "pids.max").write_text(str(limits.pids))
        return ":".join(files)

    def _make_unified(self, limits: Limits) -> str:
        path = ROOT / self.name
        path.mkdir(parents=True, exist_ok=True)
        enabled = " ".join(f"+{name}" for name in self._host.enforces)
        for parent in (ROOT, path.parent):
            (parent / "cgroup.subtree_control").write_text(enabled)
        if limits.memory is not None:
            (path / "memory.max").write_text(str(limits.memory))
            if (path / "memory.swap.max").exists():
                (path / "memory.swap.max").write_text("0")
        if limits.cpus is not None:
            (path / "cpu.max").write_text(f"{_quota(limits.cpus)} {PERIOD}")
        if limits.pids is not None:
            (path / "pids.max").write_text(str(limits.pids))
        return str(path / "cgroup.procs")

    def watch(self) -> None:
        """Let ``ran_out_of_memory`` work when the group is gone: a runtime removes it when PID 1 dies."""
        with contextlib.suppress(OSError):
            if self._host.version == 2:
                self._kills_of_all = _kills(Path(self.name).parent) or 0
                return
            group = ROOT / "memory" / self.name
            self._notices = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            control = os.open(group / "memory.oom_control", os.O_RDONLY | os.O_CLOEXEC)
            try:
                (group / "cgroup.event_control").write_text(f"{self._notices} {control}")
            finally:
                os.close(control)

    def oom_kills(self) -> int | None:
        """How often the memory limit has killed a process; None if the group is gone."""
        return _kills(Path(self.name))

    def ran_out_of_memory(self) -> bool:
        """Whether the memory limit has killed a process, also if the group is gone since then."""
        kills = self.oom_kills()
        if kills is not None:
            return kills > 0
        if self._host.version == 2:
            # The group above counts what was killed in groups that are gone. Another container of the same
            # opening may have been the one, but it is rare that this one was killed from outside as well.
            return (_kills(Path(self.name).parent) or 0) > self._kills_of_all
        return self._was_noticed()

    def _was_noticed(self) -> bool:
        """The kernel notifies each time that the limit is reached, and once more when the group is gone."""
        until = time.monotonic() + NOTICE_SECONDS
        with self._noticing:
            notices = select.poll()
            if self._notices >= 0:
                notices.register(self._notices, select.POLLIN)
                while self._noticed < 2 and notices.poll(max(0, until - time.monotonic()) * 1000):
                    self._noticed += os.eventfd_read(self._notices)
            return self._noticed > 1

    def refused_processes(self) -> int | None:
        """How often the limit of processes has refused one; None if the group is gone."""
        for path in (ROOT / "pids" / self.name / "pids.events", ROOT / self.name / "pids.events"):
            with contextlib.suppress(OSError, ValueError):
                return int(path.read_text().split()[1])
        return None

    def remove(self, seconds: float) -> None:
        """Kill all processes in the group, and remove it. Raises OSError."""
        remove_groups(self.name, seconds)
        with self._noticing:
            if self._notices >= 0:
                os.close(self._notices)
                self._notices = -1


def _kills(group: Path) -> int | None:
    for path in (ROOT / "memory" / group / "memory.oom_control", ROOT / group / "memory.events"):
        with contextlib.suppress(OSError, ValueError):
            for line in path.read_text().splitlines():
                if line.startswith("oom_kill "):
                    return int(line.split()[1])
    return None

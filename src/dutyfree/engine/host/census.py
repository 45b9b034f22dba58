"""List the launchers and sandboxes on this machine, of any owner, from /proc and the control groups.

It sends no requests. A launcher is a process with the launcher's name, program and user id range, and with no
other launcher among its ancestors. A sandbox is a child of a launcher. Processes in a sandbox, and other
users, choose their own names and command lines: escape all text from here before you print it.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal

import msgspec

from dutyfree.engine.host import proc, sandbox_labels
from dutyfree.engine.host.proc import Stat

LAUNCHER = "dutyfree-engine"
OTHERS = ("dutyfree-egress", "dutyfree-parked")
"""Names of the launcher's other children. No other process can rename these."""
_PROGRAM = "/memfd:dutyfree-init"
_ARGUMENTS = 3
"""How many arguments a launcher has: its own name, "launcher", and its descriptor."""

FIRST_ID = 1 << 30
"""The first user id of sandboxes, as in ``init/launcher/slot.c``."""
PAYLOAD_FD = 6
"""As in ``init/pid1/init.h``: a descriptor of init for the control group of its commands."""


class LauncherProcess(msgspec.Struct, frozen=True):
    """One open substrate. ``numbers`` are the launcher's pids in all its pid namespaces."""

    pid: int
    numbers: tuple[int, ...]
    owner: int
    """0 if it waits for a new owner, since its sandboxes outlive the former one."""
    program: str
    isolated: bool = True
    """False if parts of the isolation are switched off for its sandboxes."""


class SandboxStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One sandbox. A value is None if only root can see it."""

    id: str
    image: str
    owner: int
    program: str
    launcher: int
    init: int
    since: float
    """Seconds since the epoch."""
    processes: int
    memory: int | None
    """Bytes of its processes and of the files that they wrote."""
    labels: dict[str, str] = {}
    isolation: Literal["full", "reduced"] = "full"
    """reduced: its owner opened native with ``isolation="none"`` or ``without=…``."""
    state: str
    """idle (no process), running, paused (all processes frozen or stopped), starting or ending."""


def launchers() -> list[LauncherProcess]:
    """The live launchers in the pid namespaces that are visible from here."""
    return _launchers(_processes())


def sandboxes() -> list[SandboxStatus]:
    """The live sandboxes. Takes some milliseconds for each thousand processes of the machine."""
    processes = _processes()
    found = {launcher.pid: launcher for launcher in _launchers(processes)}
    children = [process for process in processes.values() if process.parent in found]
    inits = [child for child in children if child.name not in OTHERS]
    inside = _inside(processes, {process.pid for process in inits})
    groups = _memory_groups()
    boot = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
    parents = {found[init.parent].pid: found[init.parent] for init in inits}
    labels = {pid: sandbox_labels.read(parent.owner, parent.numbers) for pid, parent in parents.items()}
    return [
        _status(found[init.parent], init, inside[init.pid], groups, boot, labels[init.parent])
        for init in sorted(inits, key=lambda init: (init.parent, init.started, init.pid))
    ]


def _launchers(processes: dict[int, Stat]) -> list[LauncherProcess]:
    """Processes that look like launchers and descend from no launcher: an impostor in a sandbox does."""
    named = {process.pid for process in processes.values() if process.name == LAUNCHER}
    found = _candidates(processes[pid] for pid in sorted(named) if processes[pid].state != "Z")
    pids = {launcher.pid for launcher in found}
    return [
        launcher for launcher in found if not any(pid in pids for pid in _ancestors(processes, launcher.pid))
    ]


def _candidates(processes: Iterable[Stat]) -> list[LauncherProcess]:
    found = []
    for process in processes:
        status = proc.text(f"{process.pid}/status")
        user = proc.field(status, "Uid", "0").split()[0]
        if int(user) >= FIRST_ID or not _link(f"{process.pid}/exe", _PROGRAM).startswith(_PROGRAM):
            continue
        numbers = tuple(int(number) for number in proc.field(status, "NSpid", str(process.pid)).split())
        # The last of its arguments is FD, or FD:WALLS if walls are switched off (init/main.c). Then comes
        # "owner PID" once it has a new owner, and after its NUL what is left of a longer text before.
        arguments = proc.text(f"{process.pid}/cmdline").split("\0")
        command = " ".join(arguments[:_ARGUMENTS])
        adopter = arguments[_ARGUMENTS].removeprefix("owner ") if len(arguments) > _ARGUMENTS else ""
        owner = int(adopter) if adopter.isdigit() else process.parent
        program = _command_line(owner) if owner else "(no owner: they end with their leases)"
        found.append(LauncherProcess(process.pid, numbers, owner, program, ":" not in command))
    return found


def _ancestors(processes: dict[int, Stat], pid: int) -> Iterator[int]:
    """Parent, grandparent and so on. We read them at different moments, so stop at a cycle."""
    seen = {pid}
    while (process := processes.get(pid)) is not None and process.parent not in seen:
        pid = process.parent
        seen.add(pid)
        yield pid


def _status(
    launcher: LauncherProcess,
    init: Stat,
    inside: list[Stat],
    groups: dict[str, tuple[str, str]],
    boot: float,
    labels: dict[int, dict[str, str]],
) -> SandboxStatus:
    words = proc.text(f"{init.pid}/cmdline").strip("\0").split("\0")
    title = words[2] if len(words) > 2 and words[1] == "sandbox" else ""
    number, since, image = (*title.split(" ", 2), "", "")[:3]
    state = "starting" if not title else "ending" if init.state in "ZX" else "running"
    if state == "running" and (init.state == "T" or _is_frozen(init.pid, groups)):
        state = "paused"
    elif state == "running":
        state = "idle" if not inside else "paused" if all(found.state == "T" for found in inside) else state
    return SandboxStatus(
        id=f"native-{launcher.owner}-{number or '?'}",
        image=image,
        owner=launcher.owner,
        program=launcher.program,
        launcher=launcher.pid,
        init=init.pid,
        # Its process may have been parked long before it became a sandbox.
        since=int(since) if since.isdigit() else boot + init.started / os.sysconf("SC_CLK_TCK"),
        processes=len(inside),
        memory=_memory(init.pid, groups),
        labels=labels.get(int(number), {}) if number.isdigit() else {},
        isolation="full" if launcher.isolated else "reduced",
        state=state,
    )


def _inside(processes: dict[int, Stat], inits: set[int]) -> dict[int, list[Stat]]:
    """The descendants of each init: all processes of its pid namespace. Any user may read parents."""
    found: dict[int, list[Stat]] = {init: [] for init in inits}
    for process in processes.values():
        if process.state != "Z":
            init = next((pid for pid in _ancestors(processes, process.pid) if pid in found), None)
            if init is not None:
                found[init].append(process)
    return found


def _memory_groups() -> dict[str, tuple[str, str]]:
    """Where the kernel counts memory: controller in /proc/PID/cgroup → mount point and file name."""
    found = {}
    for line in proc.text("self/mountinfo").splitlines():
        left, _, right = line.partition(" - ")
        kind, _, options = right.split()[:3]
        if kind == "cgroup" and "memory" in options.split(","):
            found["memory"] = (left.split()[4], "memory.usage_in_bytes")
        elif kind == "cgroup2":
            found[""] = (left.split()[4], "memory.current")
    return found


def _memory(init: int, groups: dict[str, tuple[str, str]]) -> int | None:
    """Memory of the group of init's worker thread: on cgroup v1 its first thread is in no group."""
    try:
        thread = max(int(name) for name in os.listdir(f"/proc/{init}/task"))
    except (OSError, ValueError):
        return None
    for line in proc.text(f"{init}/task/{thread}/cgroup").splitlines():
        _, names, path = line.split(":", 2)
        path = _own(init, path)
        for name, (mount, file) in groups.items():
            if name in names.split(",") and "/dutyfree-" in path and (used := _text(f"{mount}{path}/{file}")):
                return int(used)
    return None


def _is_frozen(init: int, groups: dict[str, tuple[str, str]]) -> bool:
    mount, _ = groups.get("", ("", ""))
    for line in proc.text(f"{init}/cgroup").splitlines():
        if mount and line.startswith("0::"):
            return "frozen 1" in _text(f"{mount}{_own(init, line[3:])}/cgroup.events")
    return False


def _own(init: int, path: str) -> str:
    """The group of a sandbox's commands. On v2 all inits share one group, and each holds its own open."""
    if not path.endswith("/init"):
        return path
    return path[: -len("init")] + _link(f"{init}/fd/{PAYLOAD_FD}").rpartition("/")[2]


def _processes() -> dict[int, Stat]:
    found = {}
    for pid in proc.pids():
        with contextlib.suppress(OSError):  # it has ended
            found[pid] = proc.stat(pid)
    return found


def _command_line(pid: int) -> str:
    return proc.text(f"{pid}/cmdline").strip("\0").replace("\0", " ") or proc.text(f"{pid}/comm").strip()


def _text(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:  # it is gone, or we may not read it
        return ""


def _link(name: str, hidden: str = "") -> str:
    """The target of a link in /proc; ``hidden`` if we may not read it."""
    try:
        return os.readlink(f"/proc/{name}")
    except PermissionError:
        return hidden
    except OSError:
        return ""

"""Which launchers and sandboxes live on this machine, of any owner: as /proc and the control groups tell.

Nothing is asked of anybody. A launcher is known by its name, its program in memory and its user, and by not
descending from another; a sandbox is its child. What runs in a sandbox can call itself anything, and so can
other users: all texts here are theirs, to be shown with care.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from dutyfree.engine.host import sandbox_labels
from dutyfree.engine.launcher.protocol import FIRST_ID

LAUNCHER = "dutyfree-engine"
OTHERS = ("dutyfree-egress", "dutyfree-blank")
"""The launcher's other children; none of them can be renamed by others."""
_PROGRAM = "/memfd:dutyfree-init"

PAYLOAD_FD = 6
"""As in ``init/init.h``."""


class LauncherProcess(msgspec.Struct, frozen=True):
    """One open substrate. ``numbers`` are its pids in all pid namespaces that it is in."""

    pid: int
    numbers: tuple[int, ...]
    owner: int
    program: str


class SandboxStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One sandbox. What cannot be seen without root is None."""

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
    """Bytes, of its processes and of what they wrote."""
    labels: dict[str, str] = {}
    state: str
    """idle: no process; running; paused: all are frozen, or stopped; starting; ending."""


class _Process(msgspec.Struct, frozen=True):
    pid: int
    parent: int
    name: str
    state: str
    started: int
    """Clock ticks after the boot."""


def launchers() -> list[LauncherProcess]:
    """Those that live now, in the pid namespaces that can be seen from here."""
    return _launchers(_processes())


def sandboxes() -> list[SandboxStatus]:
    """Those that live now; takes some milliseconds for each thousand processes of the machine."""
    processes = _processes()
    found = {launcher.pid: launcher for launcher in _launchers(processes)}
    children = [process for process in processes.values() if process.parent in found]
    inits = [child for child in children if child.name not in OTHERS]
    inside = _inside(processes, {process.pid for process in inits})
    groups = _mounts()
    boot = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
    parents = {found[init.parent].pid: found[init.parent] for init in inits}
    told = {pid: sandbox_labels.read(parent.owner, parent.numbers) for pid, parent in parents.items()}
    return [
        _living(found[init.parent], init, inside[init.pid], groups, boot, told[init.parent])
        for init in sorted(inits, key=lambda init: (init.parent, init.started, init.pid))
    ]


def _launchers(processes: dict[int, _Process]) -> list[LauncherProcess]:
    """Those that descend from no other: in a sandbox, whoever poses as one descends from its launcher."""
    posing = {process.pid for process in processes.values() if process.name == LAUNCHER}
    found = _likely(processes[pid] for pid in sorted(posing) if processes[pid].state != "Z")
    pids = {launcher.pid for launcher in found}
    return [
        launcher for launcher in found if not any(pid in pids for pid in _ancestors(processes, launcher.pid))
    ]


def _likely(processes: Iterable[_Process]) -> list[LauncherProcess]:
    found = []
    for process in processes:
        status = _text(f"/proc/{process.pid}/status")
        user = _field(status, "Uid", "0").split()[0]
        if int(user) >= FIRST_ID or not _link(f"/proc/{process.pid}/exe", _PROGRAM).startswith(_PROGRAM):
            continue
        numbers = tuple(int(number) for number in _field(status, "NSpid", str(process.pid)).split())
        found.append(LauncherProcess(process.pid, numbers, process.parent, _command_line(process.parent)))
    return found


def _ancestors(processes: dict[int, _Process], pid: int) -> Iterator[int]:
    """Parent, grandparent and so on; they were not all looked at in the same moment, so none comes twice."""
    seen = {pid}
    while (process := processes.get(pid)) is not None and process.parent not in seen:
        pid = process.parent
        seen.add(pid)
        yield pid


def _living(
    launcher: LauncherProcess,
    init: _Process,
    inside: list[_Process],
    groups: dict[str, tuple[str, str]],
    boot: float,
    labels: dict[int, dict[str, str]],
) -> SandboxStatus:
    words = _text(f"/proc/{init.pid}/cmdline").strip("\0").split("\0")
    label = words[2] if len(words) > 2 and words[1] == "sandbox" else ""
    number, since, image = (*label.split(" ", 2), "", "")[:3]
    state = "starting" if not label else "ending" if init.state in "ZX" else "running"
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
        # Its process may have waited for long to become a sandbox.
        since=int(since) if since.isdigit() else boot + init.started / os.sysconf("SC_CLK_TCK"),
        processes=len(inside),
        memory=_memory(init.pid, groups),
        labels=labels.get(int(number), {}) if number.isdigit() else {},
        state=state,
    )


def _inside(processes: dict[int, _Process], inits: set[int]) -> dict[int, list[_Process]]:
    """By init, what descends from it: all that its pid namespace holds, and anybody may know of parents."""
    found: dict[int, list[_Process]] = {init: [] for init in inits}
    for process in processes.values():
        if process.state != "Z":
            init = next((pid for pid in _ancestors(processes, process.pid) if pid in found), None)
            if init is not None:
                found[init].append(process)
    return found


def _mounts() -> dict[str, tuple[str, str]]:
    """Where memory is counted: the controller's name in /proc/PID/cgroup → the mount point and the file."""
    found = {}
    for line in _text("/proc/self/mountinfo").splitlines():
        left, _, right = line.partition(" - ")
        kind, _, options = right.split()[:3]
        if kind == "cgroup" and "memory" in options.split(","):
            found["memory"] = (left.split()[4], "memory.usage_in_bytes")
        elif kind == "cgroup2":
            found[""] = (left.split()[4], "memory.current")
    return found


def _memory(init: int, groups: dict[str, tuple[str, str]]) -> int | None:
    """Of the control group of init's working thread: its first thread stays outside on version 1."""
    try:
        thread = max(int(name) for name in os.listdir(f"/proc/{init}/task"))
    except (OSError, ValueError):
        return None
    for line in _text(f"/proc/{init}/task/{thread}/cgroup").splitlines():
        _, names, path = line.split(":", 2)
        path = _own(init, path)
        for name, (mount, file) in groups.items():
            if name in names.split(",") and "/dutyfree-" in path and (used := _text(f"{mount}{path}/{file}")):
                return int(used)
    return None


def _is_frozen(init: int, groups: dict[str, tuple[str, str]]) -> bool:
    mount, _ = groups.get("", ("", ""))
    for line in _text(f"/proc/{init}/cgroup").splitlines():
        if mount and line.startswith("0::"):
            return "frozen 1" in _text(f"{mount}{_own(init, line[3:])}/cgroup.events")
    return False


def _own(init: int, path: str) -> str:
    """On version 2 all inits are in one group, and each holds that of its commands."""
    if not path.endswith("/init"):
        return path
    return path[: -len("init")] + _link(f"/proc/{init}/fd/{PAYLOAD_FD}").rpartition("/")[2]


def _processes() -> dict[int, _Process]:
    found = {}
    for name in os.listdir("/proc"):
        if name.isdigit() and (line := _text(f"/proc/{name}/stat")):
            command, _, rest = line.partition("(")[2].rpartition(")")
            words = rest.split()
            found[int(name)] = _Process(int(name), int(words[1]), command, words[0], int(words[19]))
    return found


def _command_line(pid: int) -> str:
    return _text(f"/proc/{pid}/cmdline").strip("\0").replace("\0", " ") or _text(f"/proc/{pid}/comm").strip()


def _field(status: str, name: str, default: str) -> str:
    return next(
        (line.partition(":")[2] for line in status.splitlines() if line.startswith(f"{name}:")), default
    )


def _text(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:  # gone, or not ours to see
        return ""


def _link(path: str, hidden: str = "") -> str:
    """Where it leads; ``hidden`` if that is not ours to see."""
    try:
        return os.readlink(path)
    except PermissionError:
        return hidden
    except OSError:
        return ""

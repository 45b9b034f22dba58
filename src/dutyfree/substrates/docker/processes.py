"""The processes of a command, seen from the engine's host."""

from __future__ import annotations

import contextlib
import os
import resource
import signal

LOCKS = 10
"""RLIMIT_LOCKS, which Python's resource module does not name."""


def kill_tree(variable: str, limit: int, pid: int, container: str) -> int:
    """Kill the processes that bear a mark, ``pid``, and all their descendants.

    The marks: ``variable`` (``NAME=value``) in the environment, ``limit`` as the soft RLIMIT_LOCKS.

    ``pid`` counts only if it is a process of ``container``: the engine may be on another machine.
    Returns how many were killed; blocking.
    """
    roots = {pid} if pid and _belongs(pid, container) else set()
    killed: set[int] = set()
    for _ in range(100):
        # All stand still before the first dies: else a shell whose child died would go on to the next line.
        stopped: set[int] = set()
        while new := _tree(variable.encode(), limit, roots) - stopped:
            _signal(new, signal.SIGSTOP)
            stopped |= new
        _signal(stopped, signal.SIGKILL)
        killed |= stopped
        if not stopped:
            break
    return len(killed)


def _signal(processes: set[int], number: signal.Signals) -> None:
    for process in sorted(processes):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(process, number)


def _tree(variable: bytes, limit: int, roots: set[int]) -> set[int]:
    children: dict[int, list[int]] = {}
    found = set()
    for name in os.listdir("/proc"):
        if not name.isdigit() or (pid := int(name)) == os.getpid():
            continue
        try:
            with open(f"/proc/{pid}/stat", "rb") as file:
                state, parent = file.read().rpartition(b")")[2].split()[:2]
            if state in b"ZX":
                continue
            children.setdefault(int(parent), []).append(pid)
            with open(f"/proc/{pid}/environ", "rb") as file:
                marked = variable in file.read().split(b"\0")
            if marked or pid in roots or resource.prlimit(pid, LOCKS)[0] == limit:
                found.add(pid)
        except OSError:
            continue  # it ended meanwhile
    waiting = list(found)
    while waiting:
        for child in children.get(waiting.pop(), ()):
            if child not in found:
                found.add(child)
                waiting.append(child)
    return found


def _belongs(pid: int, container: str) -> bool:
    try:
        with open(f"/proc/{pid}/cgroup") as file:
            return container in file.read()
    except OSError:
        return False


def identity(pid: int | str = "self") -> str | None:
    """Which process this is, for good: boot, pid namespace, pid and start time; None if it has ended."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            number, _, rest = file.read().partition(" ")
        start = rest.rpartition(")")[2].split()[19]
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
        space = os.readlink("/proc/self/ns/pid").strip("pid:[]")
    except OSError:
        return None
    return f"{boot}/{space}/{number}/{start}"


def is_dead(owner: str) -> bool:
    """Whether the process of that identity has ended for certain; False if it cannot be told from here."""
    ours = identity()
    parts = owner.split("/")
    if ours is None or len(parts) != 4 or parts[:2] != ours.split("/")[:2]:
        return False
    return identity(parts[2]) != owner


def is_of_former_boot(owner: str) -> bool:
    return owner.partition("/")[0] != (identity() or "").partition("/")[0]

"""Find and kill the processes of a command in a container, from the engine's host."""

from __future__ import annotations

import os

from dutyfree.engine.host import proc
from dutyfree.substrates.local.reaper import kill_all

KEEPER = ("sleep", "2147483647")
"""The container's own command: it does nothing, and keeps the container running."""


def kill_tree(variable: str, pid: int, container: str, *, strays: bool) -> int:
    """Kill processes with ``variable`` (``NAME=value``) in their environment, ``pid``, and all descendants.

    With ``strays`` also the container's processes without a mark, which emptied their environment. ``pid`` is
    ignored if it is not a process of ``container``: the engine may be on another machine. Returns how many
    were killed. Blocks.
    """
    roots = {pid} if pid and _belongs(pid, container) else set()
    return kill_all(lambda: _tree(variable.encode(), roots, container if strays else ""))


def _tree(variable: bytes, roots: set[int], container: str) -> set[int]:
    children: dict[int, list[int]] = {}
    found = set()
    for pid in proc.pids():
        if pid == os.getpid():
            continue
        try:
            seen = proc.stat(pid)
            if seen.state in "ZX":
                continue
            children.setdefault(seen.parent, []).append(pid)
            environment = proc.environment(pid)
            if pid in roots or variable in environment.split(b"\0") or _stray(pid, environment, container):
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


def _stray(pid: int, environment: bytes, container: str) -> bool:
    if not container or b"DUTYFREE_EXEC=" in environment or not _belongs(pid, container):
        return False
    return not proc.read(f"{pid}/cmdline").rstrip(b"\0").endswith("\0".join(KEEPER).encode())


def _belongs(pid: int, container: str) -> bool:
    return container in proc.text(f"{pid}/cgroup")

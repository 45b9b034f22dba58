"""Find and kill the processes of a command in a container, from the host of its runtime."""

from __future__ import annotations

import os
import re
from typing import NamedTuple

from dutyfree.engine.host import proc
from dutyfree.substrates.local.reaper import kill_all


class Strays(NamedTuple):
    """Processes of a container that emptied their environment, so that they have no mark."""

    container: str
    """The name of its control group, or its path."""
    keeper: tuple[str, ...]
    """The end of the container's own command, which stays."""


def kill_tree(variable: str, pid: int = 0, container: str = "", *, strays: Strays | None) -> int:
    """Kill processes with ``variable`` (``NAME=value``) in their environment, ``pid``, and all descendants.

    ``pid`` is ignored if it is not a process of ``container``: the engine may be on another machine. Returns
    how many were killed. Blocks.
    """
    roots = {pid} if pid and _belongs(pid, container) else set()
    return kill_all(lambda: _tree(variable.encode(), roots, strays))


def _tree(variable: bytes, roots: set[int], strays: Strays | None) -> set[int]:
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
            if pid in roots or variable in environment.split(b"\0") or _stray(pid, environment, strays):
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


def _stray(pid: int, environment: bytes, strays: Strays | None) -> bool:
    if strays is None or b"DUTYFREE_EXEC=" in environment or not _belongs(pid, strays.container):
        return False
    return not proc.read(f"{pid}/cmdline").rstrip(b"\0").endswith("\0".join(strays.keeper).encode())


def _belongs(pid: int, container: str) -> bool:
    return is_in_group(proc.text(f"{pid}/cgroup"), container)


def is_in_group(groups: str, name: str) -> bool:
    """Whether this content of /proc/PID/cgroup has a group with this name, or one below it.

    systemd calls the group of a container ``docker-NAME.scope``.
    """
    return re.search(rf"[/-]{re.escape(name)}(\.scope)?(/|$)", groups, re.MULTILINE) is not None

"""Find and kill the processes of a command in a container, from the host of its runtime."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import NamedTuple

from dutyfree.engine.host import proc
from dutyfree.substrates.local.reaper import kill_all


def kill_tree(variable: str, pid: int = 0, container: str = "", *, strays: str = "") -> int:
    """Kill processes with ``variable`` (``NAME=value``) in their environment, ``pid``, and all descendants.

    ``pid`` is ignored if it is not a process of ``container``: the engine may be on another machine. Both
    this and ``strays`` are the name of a control group, or its path. In ``strays``, processes without a mark
    are killed too, because they emptied their environment; PID 1 stays, and its session. Returns how many
    were killed. Blocks.
    """
    roots = {pid} if pid and _belongs(pid, container) else set()
    return kill_all(lambda: _tree(variable.encode(), roots, strays))


def _tree(variable: bytes, roots: set[int], container: str) -> set[int]:
    children: dict[int, list[int]] = {}
    found, unmarked = set(), []
    for pid in proc.pids():
        if pid == os.getpid():
            continue
        try:
            seen = proc.stat(pid)
            if seen.state in "ZX":
                continue
            children.setdefault(seen.parent, []).append(pid)
            environment = proc.environment(pid)
            if pid in roots or variable in environment.split(b"\0"):
                found.add(pid)
            elif container and b"DUTYFREE_EXEC=" not in environment and _belongs(pid, container):
                unmarked.append(Unmarked.of(pid))
        except OSError:
            continue  # it ended meanwhile
    found |= strays(unmarked)
    waiting = list(found)
    while waiting:
        for child in children.get(waiting.pop(), ()):
            if child not in found:
                found.add(child)
                waiting.append(child)
    return found


class Unmarked(NamedTuple):
    """A process of a container that has no mark in its environment."""

    pids: tuple[int, ...]
    """Its pid in each pid namespace, from ours to its own."""
    session: int
    """The pid of the leader, in our pid namespace."""

    @classmethod
    def of(cls, pid: int) -> Unmarked:
        status = proc.text(f"{pid}/status")
        pids = tuple(map(int, proc.field(status, "NSpid", str(pid)).split()))
        return cls(pids, int((proc.field(status, "NSsid").split() or ["0"])[0]))


def strays(unmarked: Sequence[Unmarked]) -> set[int]:
    """The pids of those that a command started: all but PID 1 of the container, and its session.

    Every command has a session of its own, and no process can join another one: so no command can pose as the
    container's own process, whatever its command line is. A command may make a pid namespace, whose PID 1 has
    more pids than the container's. Without the container's there is none to distinguish them from: then none.
    """
    first = min(
        (one for one in unmarked if one.pids[-1:] == (1,)), key=lambda one: len(one.pids), default=None
    )
    if first is None:
        return set()
    own = first.pids[0]
    return {one.pids[0] for one in unmarked if own not in (one.pids[0], one.session)}


def _belongs(pid: int, container: str) -> bool:
    return is_in_group(proc.text(f"{pid}/cgroup"), container)


def is_in_group(groups: str, name: str) -> bool:
    """Whether this content of /proc/PID/cgroup has a group with this name, or one below it.

    systemd calls the group of a container ``docker-NAME.scope``.
    """
    return re.search(rf"[/-]{re.escape(name)}(\.scope)?(/|$)", groups, re.MULTILINE) is not None

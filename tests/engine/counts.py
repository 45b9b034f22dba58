"""What the engine could leave behind on this machine, of one owner: others may run beside it."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Collection
from pathlib import Path

import anyio

from tests.processes import eventually

NAMES = ("dutyfree-engine", "dutyfree-init", "dutyfree-egress", "dutyfree-parked")
KINDS = ("user", "net", "mnt", "pid", "ipc", "uts", "cgroup")


def processes(names: tuple[str, ...] = NAMES) -> list[int]:
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if Path(f"/proc/{pid}/comm").read_text().strip() in names:
                found.append(int(pid))
    return found


def sandboxes(owner: int) -> set[int]:
    """The first processes of an owner's sandboxes, without those that only wait to become one."""
    return _grandchildren(owner) & set(processes(("dutyfree-init",)))


def egress(owner: int) -> set[int]:
    """The processes through which an owner's sandboxes reach the network."""
    return _grandchildren(owner) & set(processes(("dutyfree-egress",)))


def _grandchildren(owner: int) -> set[int]:
    return {child for launcher in children(owner) for child in children(launcher)}


class Family:
    """The children of an owner, theirs, and the namespaces that any of them is in or holds, as of now."""

    def __init__(self, owner: int, without: Collection[int] = ()) -> None:
        self.launchers = [child for child in children(owner) if child not in without]
        self.inits = [init for launcher in self.launchers for init in children(launcher)]
        self.processes = {pid: started(pid) for pid in (*self.launchers, *self.inits)}
        self.taken = time.clock_gettime(time.CLOCK_BOOTTIME) * os.sysconf("SC_CLK_TCK")
        ours = namespaces("self")
        self.namespaces = {space for pid in self.processes for space in namespaces(pid)} - ours

    def groups(self) -> set[str]:
        """Control groups in all hierarchies."""
        names = tuple(f"dutyfree-{launcher}-" for launcher in self.launchers)
        found = set()
        for directory, inside, _ in os.walk("/sys/fs/cgroup"):
            if Path(directory).name.startswith(names):
                found |= {directory, *(f"{directory}/{name}" for name in inside)}
        return found

    def remains(self, seconds: float = 60, *, groups: bool = True) -> set[str]:
        """What of it is still there, given some time to vanish."""
        deadline = time.monotonic() + seconds
        while (found := self._remains(groups)) and time.monotonic() < deadline:
            time.sleep(0.02)
        return found

    def _remains(self, groups: bool) -> set[str]:
        found = {f"process {pid}" for pid, begun in self.processes.items() if begun and started(pid) == begun}
        if groups:
            found |= {f"cgroup {group}" for group in self.groups()}
        if not found:  # the longest look comes last
            held = {space for pid in self._holders() for space in namespaces(pid)}
            found |= {f"namespace {space}" for space in held & self.namespaces}
        return found

    def _holders(self) -> list[str]:
        """Who could hold what is ours: the kernel gives its number to others once it is gone.

        To processes that came later, and to other launchers and those whom they make ready.
        """
        others = {str(pid) for pid in processes() if pid not in self.processes}
        pids = [pid for pid in os.listdir("/proc") if pid.isdigit() and pid not in others]
        return [pid for pid in pids if (begun := started(int(pid))) and int(begun) <= self.taken]


def children(pid: int) -> list[int]:
    """By their own word: the kernel's list of them misses some while others end."""
    found = []
    for other in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if int(Path(f"/proc/{other}/stat").read_text().rpartition(")")[2].split()[1]) == pid:
                found.append(int(other))
    return found


def ended(pid: int, begun: str, seconds: float = 60) -> bool:
    """Whether the process that began then is gone, given some time, or only its parent has yet to notice."""
    return bool(eventually(lambda: not begun or started(pid) != begun, seconds))


async def descriptors(most: int) -> int:
    """Those that this process has open, given time to become so few: threads may have some to close."""
    with anyio.move_on_after(60):
        while (found := len(os.listdir("/proc/self/fd"))) > most:  # noqa: ASYNC110 (no event tells)
            await anyio.sleep(0.01)
    return found


def started(pid: int) -> str:
    """When: tells a process from another with the same pid. Empty for one that is gone."""
    with contextlib.suppress(OSError):
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return "" if words[0] in "ZX" else words[19]
    return ""


def namespaces(pid: int | str) -> set[str]:
    """Those that the process is in or has a descriptor of."""
    found = set()
    for directory in (f"/proc/{pid}/ns", f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):
            for name in os.listdir(directory):
                with contextlib.suppress(OSError):
                    link = os.readlink(f"{directory}/{name}")
                    if link.partition(":[")[0] in KINDS:
                        found.add(link)
    return found


def arrives(layers: Path) -> bool:
    """Whether a part of a layer has come to the store, which may go at any moment."""
    with contextlib.suppress(FileNotFoundError):
        return any(part.stat().st_size for part in (layers / "parts").iterdir())
    return False

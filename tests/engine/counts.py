"""What the engine could leave behind on this machine, counted."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

NAMES = ("dutyfree-engine", "dutyfree-init")


def processes(names: tuple[str, ...] = NAMES) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/comm"):
        with contextlib.suppress(OSError):
            if path.read_text().strip() in names:
                found.append(int(path.parent.name))
    return found


def cgroups() -> list[str]:
    return [str(path) for path in Path("/sys/fs/cgroup").rglob("dutyfree-*")]


def mounts() -> int:
    """Of this host, but for those of containers that come and go beside the tests."""
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    return len([line for line in lines if "docker" not in line])


def directories() -> list[str]:
    return sorted(str(path) for path in Path("/tmp").glob("dutyfree-native*"))


def everything() -> dict[str, object]:
    return {
        "processes": sorted(processes()),
        "cgroups": sorted(cgroups()),
        "mounts": mounts(),
        "directories": directories(),
    }


def settled(before: dict[str, object], seconds: float = 20) -> dict[str, object]:
    """The counts, as soon as they are those of before; else what they are after the time given."""
    deadline = time.monotonic() + seconds
    while (found := everything()) != before and time.monotonic() < deadline:
        time.sleep(0.02)
    return found

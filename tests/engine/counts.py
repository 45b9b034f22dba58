"""What the engine could leave behind on this machine."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

NAMES = ("dutyfree-engine", "dutyfree-init", "dutyfree-egress")


def processes(names: tuple[str, ...] = NAMES) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/comm"):
        with contextlib.suppress(OSError):
            if path.read_text().strip() in names:
                found.append(int(path.parent.name))
    return found


def everything() -> set[str]:
    """Processes, control groups, mounts and directories of the engine, each by a name."""
    found = {f"process {pid}" for pid in processes()}
    for directory, names, _ in os.walk("/sys/fs/cgroup"):
        found |= {f"cgroup {directory}/{name}" for name in names if name.startswith("dutyfree-")}
    # But for the mounts of containers that come and go beside the tests.
    mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    found |= {f"mount {line.split()[4]}" for line in mounts if "docker" not in line}
    return found | {f"directory {path}" for path in Path("/tmp").glob("dutyfree-native*")}


def left(before: set[str], seconds: float = 20) -> set[str]:
    """What is there and was not before; given some time to vanish."""
    deadline = time.monotonic() + seconds
    while (found := everything() - before) and time.monotonic() < deadline:
        time.sleep(0.02)
    return found

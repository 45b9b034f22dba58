"""Whether files of this host are in memory or on disk, for the facts of a substrate."""

from __future__ import annotations

import os
import re
from pathlib import Path

IN_MEMORY = ("tmpfs", "ramfs")


def kind(path: Path | str) -> str:
    """The kind of the file system that a path is on, such as "ext4", or "unknown". Blocks."""
    target, best, found = os.path.realpath(path), "", "unknown"
    try:
        lines = Path("/proc/self/mounts").read_bytes().splitlines()
    except OSError:
        return found
    for line in lines:
        _, mounted, name, *_ = os.fsdecode(line).split(" ")
        point = re.sub(r"\\(\d{3})", lambda code: chr(int(code[1], 8)), mounted)
        below = target == point or target.startswith(point.rstrip("/") + "/")
        if below and len(point) >= len(best):  # a later mount covers an earlier one
            best, found = point, name
    return found


def storage_fact(path: Path | str, through: str = "") -> str:
    """The fact ``storage`` of files on the file system of this path: "disk (ext4)", "memory (tmpfs)". Blocks.

    ``through`` names what lies between: "disk (overlay2 on ext4)".
    """
    found = kind(path)
    where = "memory" if found in IN_MEMORY else "disk"
    return f"{where} ({through} on {found})" if through else f"{where} ({found})"

"""The programs that the substrate ``oci`` runs, and what is left of it on this machine."""

from __future__ import annotations

import functools
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import anyio
import pytest

from dutyfree import substrates
from dutyfree.contract import Availability
from dutyfree.engine.host import proc
from dutyfree.substrates.oci import OciConfig


@functools.cache
def probed(runtime: str) -> Availability:
    """Found in a thread of its own: this one may have an event loop."""
    with ThreadPoolExecutor(1) as threads:
        probe = functools.partial(substrates.probe, "oci", runtime=runtime)
        return threads.submit(lambda: anyio.run(probe)).result()


def need(runtime: str) -> None:
    """Skip the test unless this machine can run the runtime."""
    if not (found := probed(runtime)).available:
        pytest.skip(f"oci: {found.detail}; to enable it: {found.remedy}")


def left(name: str) -> list[str]:
    """Processes, directories and control groups of an opening; ``name`` is in all of their names. Blocks."""
    found = [str(path) for path in Path(OciConfig().directory or "/tmp").glob(f"*{name}*")]
    found += map(str, Path("/sys/fs/cgroup").glob(f"*/*{name}*"))
    found += map(str, Path("/sys/fs/cgroup").glob(f"*{name}*"))
    for pid in proc.pids():
        try:
            if name.encode() in proc.read(f"{pid}/cmdline") + proc.read(f"{pid}/mountinfo"):
                found.append(f"process {pid}")
        except OSError:
            continue
    return found

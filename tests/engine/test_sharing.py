"""Several launchers on one host."""

from __future__ import annotations

from pathlib import Path

import pytest

import dutyfree
from dutyfree.substrates.native import Native

pytestmark = pytest.mark.native


def launcher_of(substrate: object) -> int:
    assert isinstance(substrate, Native)
    return substrate.node.launcher.pid


def maps(launcher: int) -> list[int]:
    """The first host id of each init of a launcher."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(path.read_text().rpartition(")")[2].split()[1])
            if parent == launcher:
                found.append(int((path.parent / "uid_map").read_text().split()[1]))
        except OSError:
            continue
    return found


async def test_no_two_sandboxes_have_the_same_ids() -> None:
    async with dutyfree.open("native", ready=0) as one, dutyfree.open("native", ready=0) as other:
        if one.features.mode == "rootless":
            pytest.skip("without root there is one range for all; to enable it: run as root")
        async with one.sandbox(), one.sandbox(), other.sandbox(), other.sandbox():
            found = maps(launcher_of(one)) + maps(launcher_of(other))
    assert len(found) == 4
    assert len(set(found)) == 4
    assert all(first >= 1 << 30 for first in found)

"""The measurement of the walls: its ratios, and that its work runs in a sandbox."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

import anyio.to_thread
import pytest

import dutyfree

BENCH = Path(__file__).parents[2] / "bench"


@pytest.fixture
def walls(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setattr(sys, "path", [str(BENCH), *sys.path])
    return runpy.run_path(str(BENCH / "walls.py"))


def test_a_ratio_compares_the_sides_of_each_round(walls: dict[str, Any]) -> None:
    """The machine becomes ten times slower halfway; the ratio stays."""
    under = [1.0] * 20 + [10.0] * 20
    value, low, high = walls["paired_ratio"]([1.1 * seconds for seconds in under], under)
    assert (round(value, 6), round(low, 6), round(high, 6)) == (1.1, 1.1, 1.1)


@pytest.mark.native
async def test_the_work_runs(walls: dict[str, Any], tmp_path: Path) -> None:
    program = await anyio.to_thread.run_sync(walls["_build"], tmp_path)
    async with dutyfree.open("native") as native, native.sandbox() as sandbox:
        await sandbox.write(walls["PROGRAM"], program, mode=0o755)
        await sandbox.write(walls["SMALL"], b"x")
        await sandbox.write("/workspace/suite.py", walls["SUITE"].encode())
        for _, (kind, _, *file) in walls["KINDS"].values():
            assert await walls["_inside"](sandbox, [kind, "1", *file]) > 0
        cpu: list[float] = []
        assert await walls["_mix"](sandbox, cpu) > 0
        assert cpu[0] > 0

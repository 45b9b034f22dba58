"""The benchmark of comparisons counts the verdicts of ``ab`` and ``compare``."""

from __future__ import annotations

import asyncio
import importlib
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench"


def test_every_way_to_judge_is_counted_and_a_large_delay_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(BENCH), *sys.path])
    comparisons = importlib.import_module("comparisons")
    same = asyncio.run(comparisons.repeat("T0", 2, 0.0, 1))
    assert {way: said.total() for way, said in same.verdicts.items()} == {
        "ab": 1,
        "in turn": 1,
        "one after the other": 1,
        "trials": 3,
    }
    assert same.rate("ab", "cannot tell") == 1.0  # of two rounds
    slower = asyncio.run(comparisons.repeat("T0", 8, 400.0, 1))
    assert slower.rate("ab", "slower") == 1.0
    assert "400 ms slower | ab | 1 | 1 | 0 | 0 |" in comparisons.table([slower], "T0", 8)

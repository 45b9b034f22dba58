"""The floor must go on being built from what the engine is made of."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench"


@pytest.mark.native
def test_the_floor_measures_all_that_it_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(BENCH), *sys.path])
    floor = runpy.run_path(str(BENCH / "floor.py"))
    with floor["opened"]() as ([probe], _):
        for letter in "vVpPfFp":
            result, gone = probe.measure(letter)
            assert 0 < result <= gone

"""Every measured number in the documentation has a source, and the check finds those that do not."""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from dutyfree.study import records
from tests.modules import load

ROOT = Path(__file__).parents[2]


def _script(name: str) -> Any:
    return load(ROOT / f"scripts/{name}.py")


check_claims = _script("check_claims")
STUDIES = sorted(path.parent for path in ROOT.glob("docs/results/*/summary.json"))


@pytest.mark.parametrize("page", check_claims.pages(), ids=lambda page: page.stem)
def test_every_number_has_a_true_source(page):
    problems, _ = check_claims.check(page)
    assert not [f"{one.place}: {one.text}" for one in problems]


SUMMARY = {
    "cells": [
        {"workload": "T0", "substrate": "native", "p50": {"value": 0.00481, "low": 0.0044, "high": 0.0085}},
        {"workload": "T0", "substrate": "docker", "p50": {"value": 0.328}},
    ]
}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("It takes 4.8 ms (4.4 to 8.5).\n<!-- from results/one: cells[native].p50 -->", None),
        ("| a | 4.8 ms [4.4, 8.5] |\n| b | 328 ms |\n\n<!-- from results/one: cells[T0].p50 -->", None),
        ("- One: 4.8 ms.\n  <!-- from results/one: cells.p50 -->\n- Two: 4.8 ms.", "'4.8 ms' has no source"),
        ("It takes 4.9 ms.\n<!-- from results/one: cells[native].p50 -->", "'4.9 ms' is not among"),
        ("It takes 4.8 s.\n<!-- from results/one: cells[native].p50 -->", "'4.8 s' is not among"),
        ("It takes 4.8 ms [4.4, 8.6].\n<!-- from results/one: cells[native].p50 -->", "'8.6' is not among"),
        ("It takes 328 ms.\n<!-- from results/one: cells[native].p50 -->", "'328 ms' is not among"),
        ("It takes 4.8 ms.\n<!-- from results/one: cells[bare].p50 -->", "selects nothing"),
        ("It takes 4.8 ms.\n<!-- from results/none: cells -->", "there is no docs/results/none"),
        ("It takes 4.8 ms.\n<!-- not stored: bench/run.py -->", "needs its command and its date"),
        ("It takes 4.8 ms.\n<!-- not stored: bench/run.py, 2026-01-02 -->", None),
        ("# Limits\n<!-- configuration -->\n\nAt most 5 s.\n\n# Other\n\nIt is 6 s.", "'6 s' has no source"),
        ("An extra 10 ms adds 417 hours.\n<!-- arithmetic (417 hours) -->", "'10 ms' has no source"),
        ("A tax of \N{MINUS SIGN}5 %, or 3 times as long.", "'\N{MINUS SIGN}5 %' has no source"),
        ("The 95 % interval, Linux 6.18, `10 ms`, 150 actions, 2026-11-16, [9 s](page-3.2.md).", None),
    ],
)
def test_what_is_wrong_is_found(tmp_path, text, problem):
    (tmp_path / "docs/results/one").mkdir(parents=True)
    (tmp_path / "docs/results/one/summary.json").write_text(json.dumps(SUMMARY))
    page = tmp_path / "page.md"
    page.write_text(text)
    found, _ = check_claims.check(page, tmp_path)
    if problem is None:
        assert not [one.text for one in found if "'9 s'" not in one.text]
    else:
        assert problem in " ".join(one.text for one in found)


@pytest.mark.parametrize("study", STUDIES, ids=lambda study: study.name)
def test_the_summary_is_that_of_the_records(study):
    totals = defaultdict(list)
    for trial in records.read(study).trials:
        if not trial.warmup and trial.failure is None:
            totals[trial.workload, trial.substrate, trial.parallel].append(trial.total)
    cells = json.loads((study / "summary.json").read_text())["cells"]
    stored = {(one["workload"], one["substrate"], one["parallel"]): one["total"] for one in cells}
    assert set(totals) == {key for key, total in stored.items() if total}
    for key, values in totals.items():
        assert stored[key]["n"] == len(values)
        assert stored[key]["p50"]["value"] == pytest.approx(statistics.median(values))


BENCH = """## Run a command
<!-- not stored: bench/run.py, 2026-01-01 -->

| | what | value | target | p50 ms | p95 ms | n |
|---|---|--:|--:|--:|--:|--:|
| P1 | native exec | 1.9 | 1.1 ✗ | 0.9 | 0.9 | 2 |
| P2 | the same | 9 | | 0.9 | 0.9 | 2 |

| | what | value | n |
|---|---|--:|--:|
| P1 | native exec | 1.9 | 2 |
| other | something | 7.5 | 2 |
"""


def test_tables_of_benchmarks_are_filled_from_what_is_stored(tmp_path):
    rows = [
        {"id": "P1", "value": 1.0456, "target": 1.1, "holds": True, "n": 240, "p50": 0.0007, "p95": 0.0009},
        {"id": "P2", "value": 0.98, "target": None, "holds": None, "n": 240, "p50": 0.0007, "p95": 0.0009},
    ]
    page, missing = _script("bench_tables").filled(
        BENCH, {row["id"]: row for row in rows}, "results/bench/2026-01-02.json"
    )
    assert "| P1 | native exec | 1.046 | 1.1 ✓ | 0.700 | 0.900 | 240 |\n| P2 | the same | 0.98 | |" in page
    assert missing == ["other"]
    assert "| P1 | native exec | 1.9 | 2 |" in page
    (tmp_path / "docs/results/bench").mkdir(parents=True)
    (tmp_path / "docs/results/bench/2026-01-02.json").write_text(json.dumps(rows))
    (tmp_path / "page.md").write_text(page)
    problems, unstored = check_claims.check(tmp_path / "page.md", tmp_path)
    assert not problems
    assert len(unstored) == 2

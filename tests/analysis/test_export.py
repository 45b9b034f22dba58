"""Export: tables for other tools."""

from __future__ import annotations

import csv
import json
import sys

import pytest

from dutyfree.analysis.export import ACTION_COLUMNS, TRIAL_COLUMNS, export
from dutyfree.contract import Span
from dutyfree.contract.errors import RecordsError, UsageError
from dutyfree.study.records import ActionRecord, TrialFailure
from tests.analysis.synthetic import plausible, records, trial


@pytest.fixture(scope="module")
def content():
    return plausible(trials=2, lengths=(10,), tiers=("T0", "T1"), spans=True, failing={"docker": 0.3})


def test_csv_holds_a_row_for_every_trial_and_every_action(content, tmp_path):
    trials, actions = export(content, tmp_path / "new", "csv")
    with trials.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == list(TRIAL_COLUMNS)
    assert [row["id"] for row in rows] == [one.id for one in content.trials]
    for row, one in zip(rows, content.trials, strict=True):
        assert float(row["total"]) == one.total
        assert row["ok"] == str(one.ok)
    with actions.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == list(ACTION_COLUMNS)
    wanted = sum(len(one.actions) + len(one.setup) + (one.first is not None) for one in content.trials)
    assert len(rows) == wanted
    assert {row["section"] for row in rows} == {"first", "setup", "action"}
    assert not list(tmp_path.rglob("*.new"))


def test_spans_are_kept_whatever_their_name(tmp_path):
    spans = (Span("collect", 0.0, 1.0), Span("thaw", 1.0, 1.0), Span("collect", 2.0, 0.5))
    one = ActionRecord(label="x", kind="command", seconds=4.0, spans=spans)
    trials, actions = export(records(trial(creation_spans=spans[:2], actions=(one,))), tmp_path, "csv")
    with trials.open(newline="") as file:
        (row,) = csv.DictReader(file)
    assert json.loads(row["creation_spans"]) == [["collect", 0.0, 1.0], ["thaw", 1.0, 1.0]]
    with actions.open(newline="") as file:
        (row,) = csv.DictReader(file)
    assert row["span_collect"] == "1.5"
    assert json.loads(row["other_spans"]) == [["thaw", 1.0, 1.0]]


def test_parquet_holds_the_same(content, tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet", reason="to enable it: pip install pyarrow")
    trials, actions = export(content, tmp_path, "parquet")
    table = parquet.read_table(trials)
    assert table.column_names == list(TRIAL_COLUMNS)
    assert table["total"].to_pylist() == [one.total for one in content.trials]
    kinds = [one.failure.kind if one.failure else None for one in content.trials]
    assert table["failure_kind"].to_pylist() == kinds
    assert parquet.read_table(actions)["span_run"].null_count < parquet.read_table(actions).num_rows


@pytest.mark.parametrize("form", ["csv", "parquet"])
def test_no_trials_and_hostile_text(form, tmp_path):
    for path in export(records(), tmp_path / "none", form):
        assert path.exists()
    hostile = trial(failure=TrialFailure("task", "exec", 'a "quoted",\nbroken line\0'))
    assert len(export(records(hostile), tmp_path / "hostile", form)) == 2


def test_a_spreadsheet_takes_no_text_for_a_formula(tmp_path):
    hostile = trial("T0", '=cmd|"x"', creation=-0.5, failure=TrialFailure("task", "exec", "-1+@SUM(A1)"))
    trials, _ = export(records(hostile), tmp_path, "csv")
    with trials.open(newline="") as file:
        (row,) = csv.DictReader(file)
    assert row["substrate"] == '\'=cmd|"x"'
    assert row["failure_cause"] == "'-1+@SUM(A1)"
    assert float(row["creation"]) == -0.5


def test_without_pyarrow_the_remedy_is_told(content, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UsageError, match=r"pip install -e '/path/to/dutyfree\[parquet\]'"):
        export(content, tmp_path, "parquet")


def test_unknown_formats_and_unwritable_directories(content, tmp_path):
    with pytest.raises(UsageError, match="xlsx"):
        export(content, tmp_path, "xlsx")  # type: ignore[arg-type]
    (tmp_path / "file").write_text("")
    with pytest.raises(RecordsError, match="cannot write"):
        export(content, tmp_path / "file", "csv")

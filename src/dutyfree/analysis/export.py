"""Export records as tables for other tools: one row per trial, one row per action."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from dutyfree.analysis.atomic_file import atomic_write
from dutyfree.analysis.decomposition import COMPONENTS, Decomposer
from dutyfree.analysis.spans import by_name
from dutyfree.analysis.units import csv_cell
from dutyfree.contract import Span
from dutyfree.contract.errors import RecordsError, UsageError
from dutyfree.study.records import ActionRecord, Records, Trial

Format = Literal["csv", "parquet"]

SPANS = ("queue", "dispatch", "spawn", "run", "collect", "return")
"""Spans of actions with a column of their own. Other spans are written as JSON."""

TRIAL_COLUMNS: dict[str, type] = {
    "id": str,
    "workload": str,
    "substrate": str,
    "parallel": int,
    "index": int,
    "warmup": bool,
    "started": str,
    "load": float,
    "ok": bool,
    "failure_kind": str,
    "failure_phase": str,
    "failure_cause": str,
    "action_count": int,
    "setup_count": int,
    "first_result": float,
    "total": float,
    **dict.fromkeys(COMPONENTS, float),
    "stood_in": int,
    "unknown": int,
    "creation_spans": str,
}

ACTION_COLUMNS: dict[str, type] = {
    "trial": str,
    "workload": str,
    "substrate": str,
    "parallel": int,
    "warmup": bool,
    "section": str,
    "place": int,
    "label": str,
    "kind": str,
    "seconds": float,
    "inside": float,
    **{f"span_{name}": float for name in SPANS},
    "other_spans": str,
    "cpu_seconds": float,
    "peak_memory": int,
}

Row = tuple[Any, ...]


def export(records: Records, directory: Path, format: Format) -> list[Path]:  # noqa: A002 (the name of the option)
    """Write the tables ``trials`` and ``actions`` to a directory.

    Raises UsageError for an unknown format or a missing library, and RecordsError if it cannot write.
    """
    if format not in ("csv", "parquet"):
        raise UsageError(f"there is no export format {format!r}", remedy="choose csv or parquet")
    write = _write_csv if format == "csv" else _write_parquet
    tables = (
        ("trials", TRIAL_COLUMNS, trial_rows(records)),
        ("actions", ACTION_COLUMNS, action_rows(records)),
    )
    written = []
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name, columns, rows in tables:
            path = directory / f"{name}.{format}"
            with atomic_write(path) as draft:
                write(draft, columns, rows)
            written.append(path)
    except OSError as error:
        raise RecordsError(
            f"cannot write to {directory}: {error.strerror}", remedy="choose another directory"
        ) from error
    return written


def trial_rows(records: Records) -> Iterator[Row]:
    """Rows in the order of TRIAL_COLUMNS. What a failed trial did not reach is 0."""
    decomposer = Decomposer(records)
    for trial in records.trials:
        parts, failure = decomposer(trial), trial.failure
        yield (
            trial.id,
            trial.workload,
            trial.substrate,
            trial.parallel,
            trial.index,
            trial.warmup,
            trial.started,
            trial.load,
            trial.ok,
            failure.kind if failure else None,
            failure.phase if failure else None,
            failure.cause if failure else None,
            len(trial.actions),
            len(trial.setup),
            trial.first_result,
            trial.total,
            *(parts.component(name) for name in COMPONENTS),
            parts.stood_in,
            parts.unknown,
            _as_json(trial.creation_spans),
        )


def action_rows(records: Records) -> Iterator[Row]:
    """Rows in the order of ACTION_COLUMNS."""
    for trial in records.trials:
        if trial.first is not None:
            yield _action_row(trial, "first", 0, trial.first)
        for place, action in enumerate(trial.setup):
            yield _action_row(trial, "setup", place, action)
        for place, action in enumerate(trial.actions):
            yield _action_row(trial, "action", place, action)


def _action_row(trial: Trial, section: str, place: int, action: ActionRecord) -> Row:
    spans = by_name(action.spans)
    return (
        trial.id,
        trial.workload,
        trial.substrate,
        trial.parallel,
        trial.warmup,
        section,
        place,
        action.label,
        action.kind,
        action.seconds,
        action.inside,
        *(spans.get(name) for name in SPANS),
        _as_json([span for span in action.spans if span.name not in SPANS]),
        action.usage.cpu_seconds if action.usage else None,
        action.usage.peak_memory if action.usage else None,
    )


def _as_json(spans: Sequence[Span]) -> str | None:
    """Names, starts and seconds of spans without a column."""
    return msgspec.json.encode(spans).decode() if spans else None


def _write_csv(path: Path, columns: dict[str, type], rows: Iterator[Row]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(columns)
        writer.writerows([csv_cell(value) for value in row] for row in rows)


def _write_parquet(path: Path, columns: dict[str, type], rows: Iterator[Row]) -> None:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise UsageError(
            "Parquet needs the library pyarrow, which is not installed",
            remedy="pip install pyarrow, or from a clone: pip install -e '/path/to/dutyfree[parquet]'",
        ) from None
    kinds = {str: pyarrow.string(), int: pyarrow.int64(), float: pyarrow.float64(), bool: pyarrow.bool_()}
    schema = pyarrow.schema([(name, kinds[kind]) for name, kind in columns.items()])
    with pyarrow.parquet.ParquetWriter(path, schema) as writer:
        for batch in _batches(rows, 50_000):
            arrays = [
                pyarrow.array(values, type=field.type)
                for values, field in zip(zip(*batch, strict=True), schema, strict=True)
            ]
            writer.write_table(pyarrow.Table.from_arrays(arrays, schema=schema))


def _batches(rows: Iterator[Row], size: int) -> Iterator[list[Row]]:
    batch: list[Row] = []
    for row in rows:
        batch.append(row)
        if len(batch) == size:
            yield batch
            batch = []
    if batch:
        yield batch

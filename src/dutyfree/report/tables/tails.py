"""The table of distributions: mean, spread, quantiles, and the slowest of several rollouts."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

from dutyfree.analysis.findings import Tail, Wait
from dutyfree.analysis.model import Cell, Summary
from dutyfree.analysis.statistics import Estimate, Quantity
from dutyfree.analysis.units import UNKNOWN, duration
from dutyfree.report import phrases
from dutyfree.report.tables.table import (
    KEY,
    DataColumns,
    Table,
    cautions_on,
    estimate,
    estimate_data,
    estimate_header,
    make_table,
    p50,
    p95,
    quantity,
    where,
)

GROUPS = (8, 64, 512)


class _TailRow(NamedTuple):
    cell: Cell
    total: Quantity
    p99: Estimate | None
    waits: dict[int, Wait]


def distribution(summary: Summary) -> Table:
    tails = {(tail.workload, tail.substrate, tail.parallel): tail for tail in summary.tails}
    return make_table(
        "distribution",
        "Mean, spread and tail of the whole rollout",
        "SD is the standard deviation. The last columns are the expected time of the slowest of 8, "
        "64 and 512 rollouts: what a synchronous training step waits for. ≥ means that there are too few "
        "trials, so the true value may be larger.",
        [_row(cell, cell.total, tails.get(cell.key)) for cell in summary.cells if cell.total],
        [
            ("workload", lambda row: where(row.cell.workload, row.cell.parallel)),
            ("substrate", lambda row: row.cell.substrate),
            ("mean", lambda row: phrases.seconds(row.total.mean)),
            ("SD", lambda row: UNKNOWN if row.total.sd is None else duration(row.total.sd)),
            ("p50", lambda row: p50(row.total)),
            ("p95", lambda row: p95(row.total)),
            ("p99", lambda row: phrases.seconds(row.p99)),
            *((f"slowest of {n}", partial(_wait, rollouts=n)) for n in GROUPS),
            ("n", lambda row: str(row.total.n)),
        ],
        [
            *(f"cell.{name}" for name in KEY),
            quantity("total"),
            estimate("p99"),
            *map(_wait_data, GROUPS),
        ],
        text_columns=2,
        marked=2,
        cautions=lambda row: cautions_on(summary, row.cell, division=False),
        absent="No trial succeeded.",
    )


def _row(cell: Cell, total: Quantity, tail: Tail | None) -> _TailRow:
    if tail is None:
        return _TailRow(cell, total, None, {})
    return _TailRow(cell, total, tail.p99, {wait.rollouts: wait for wait in tail.waits})


def _wait(row: _TailRow, rollouts: int) -> str:
    wait = row.waits.get(rollouts)
    if wait is None:
        return UNKNOWN
    return f"≥ {duration(wait.seconds.value)}" if wait.at_least else phrases.seconds(wait.seconds)


def _wait_data(rollouts: int) -> DataColumns:
    def values(row: _TailRow) -> list[float | bool | None]:
        wait = row.waits.get(rollouts)
        return [None] * 4 if wait is None else [*estimate_data(wait.seconds), wait.at_least]

    return DataColumns([*estimate_header(f"slowest_of_{rollouts}"), f"at_least_{rollouts}"], values)

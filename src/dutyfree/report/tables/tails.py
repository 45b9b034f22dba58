"""The table of distributions: mean, spread, quantiles, and the slowest of several rollouts."""

from __future__ import annotations

from dutyfree.analysis.findings import Tail, Wait
from dutyfree.analysis.model import Cell, Summary
from dutyfree.analysis.units import UNKNOWN, duration
from dutyfree.report import phrases
from dutyfree.report.tables.table import (
    Row,
    Table,
    cautions_on,
    estimate_data,
    estimate_header,
    p50_p95,
    quantity_data,
    quantity_header,
    where,
)

GROUPS = (8, 64, 512)


def distribution(summary: Summary) -> Table:
    tails = {(tail.workload, tail.substrate, tail.parallel): tail for tail in summary.tails}
    return Table(
        name="distribution",
        title="Mean, spread and tail of the whole rollout",
        caption="SD is the standard deviation. The last columns are the expected time of the slowest of 8, "
        "64 and 512 rollouts: what a synchronous training step waits for. ≥ means that there are too few "
        "trials, so the true value may be larger.",
        header=[
            "workload",
            "substrate",
            "mean",
            "SD",
            "p50",
            "p95",
            "p99",
            *(f"slowest of {n}" for n in GROUPS),
            "n",
        ],
        text_columns=2,
        marked=2,
        data_header=[
            "workload",
            "substrate",
            "parallel",
            *quantity_header("total"),
            *estimate_header("p99"),
            *(title for n in GROUPS for title in (*estimate_header(f"slowest_of_{n}"), f"at_least_{n}")),
        ],
        rows=[_row(summary, cell, tails.get(cell.key)) for cell in summary.cells if cell.total],
        absent="No trial succeeded.",
    )


def _row(summary: Summary, cell: Cell, tail: Tail | None) -> Row:
    assert cell.total is not None
    waits = {wait.rollouts: wait for wait in tail.waits} if tail else {}
    return Row(
        [
            where(cell.workload, cell.parallel),
            cell.substrate,
            phrases.seconds(cell.total.mean),
            UNKNOWN if cell.total.sd is None else duration(cell.total.sd),
            *p50_p95(cell.total),
            phrases.seconds(tail.p99 if tail else None),
            *(_wait(waits.get(n)) for n in GROUPS),
            str(cell.total.n),
        ],
        [
            *cell.key,
            *quantity_data(cell.total),
            *estimate_data(tail.p99 if tail else None),
            *(value for n in GROUPS for value in _wait_data(waits.get(n))),
        ],
        cautions_on(summary, cell, division=False),
    )


def _wait(wait: Wait | None) -> str:
    if wait is None:
        return UNKNOWN
    return f"≥ {duration(wait.seconds.value)}" if wait.at_least else phrases.seconds(wait.seconds)


def _wait_data(wait: Wait | None) -> list[float | bool | None]:
    return [None] * 4 if wait is None else [*estimate_data(wait.seconds), wait.at_least]

"""The type of a table, and helpers for its rows."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable
from typing import Any

import msgspec

from dutyfree.analysis.model import Caution, CautionKind, Cell, Summary
from dutyfree.analysis.statistics import Estimate, Quantity
from dutyfree.analysis.units import UNKNOWN, csv_cell
from dutyfree.report import phrases

DIVISION = frozenset({CautionKind.STAND_IN, CautionKind.UNDIVIDED})
"""Cautions that concern the decomposition only."""


class Row(msgspec.Struct, frozen=True):
    shown: list[str]
    data: list[Any]
    """The row in the CSV file: seconds, fractions and counts."""
    cautions: list[Caution] = []


class Table(msgspec.Struct, frozen=True):
    name: str
    """The name of the CSV file."""
    title: str
    caption: str
    header: list[str]
    text_columns: int
    """The number of columns at the left that are text. The others are numbers."""
    marked: int
    """The column that shows the numbers of the row's cautions."""
    data_header: list[str]
    rows: list[Row]
    absent: str = ""
    """The text if there is no row."""

    def csv(self) -> bytes:
        buffer = io.StringIO(newline="")
        writer = csv.writer(buffer, lineterminator="\n")
        for line in (self.data_header, *(row.data for row in self.rows)):
            writer.writerow([csv_cell(value) for value in line])
        return buffer.getvalue().encode()


def where(workload: str, parallel: int) -> str:
    return workload if parallel == 1 else f"{workload}, {parallel} at once"


def lone_cells(summary: Summary, workloads: Iterable[str]) -> list[Cell]:
    return [cell for name in workloads for cell in summary.lone(name)]


def cautions_on(summary: Summary, cell: Cell, *, division: bool = True) -> list[Caution]:
    found = summary.cautions_on(*cell.key)
    return found if division else [caution for caution in found if caution.kind not in DIVISION]


def middle_cautions(summary: Summary, key: tuple[str, str, int]) -> list[Caution]:
    """The cautions that concern a p50 of the whole rollout."""
    without = {*DIVISION, CautionKind.UNSURE_TAIL}
    return [caution for caution in summary.cautions_on(*key) if caution.kind not in without]


def p50_p95(quantity: Quantity | None) -> list[str]:
    if quantity is None:
        return [UNKNOWN, UNKNOWN]
    return [phrases.seconds(quantity.p50), phrases.seconds(quantity.p95)]


def estimate_header(name: str) -> list[str]:
    return [name, f"{name}_low", f"{name}_high"]


def estimate_data(estimate: Estimate | None) -> list[float | None]:
    return [None] * 3 if estimate is None else [estimate.value, estimate.low, estimate.high]


def quantity_header(name: str) -> list[str]:
    return [
        *estimate_header(f"{name}_p50"),
        *estimate_header(f"{name}_p95"),
        *estimate_header(f"{name}_mean"),
        f"{name}_sd",
    ]


def quantity_data(quantity: Quantity | None) -> list[float | None]:
    if quantity is None:
        return [None] * 10
    return [
        *estimate_data(quantity.p50),
        *estimate_data(quantity.p95),
        *estimate_data(quantity.mean),
        quantity.sd,
    ]

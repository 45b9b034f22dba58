"""The type of a table, and helpers for its rows."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar

import msgspec

from dutyfree.analysis.model import Caution, CautionKind, Cell, Summary
from dutyfree.analysis.statistics import Estimate, Quantity
from dutyfree.analysis.units import csv_cell
from dutyfree.report import phrases

R = TypeVar("R")

KEY = ("workload", "substrate", "parallel")
"""The columns that name a cell."""

DIVISION = frozenset({CautionKind.STAND_IN, CautionKind.UNDIVIDED})
"""Cautions that concern the decomposition only."""

MIDDLE = frozenset({*DIVISION, CautionKind.UNSURE_TAIL})
"""Cautions that do not concern a p50 of the whole rollout."""


class Row(msgspec.Struct, frozen=True):
    shown: list[str]
    data: list[Any]
    """The row in the CSV file: seconds, fractions and counts."""
    cautions: list[Caution] = []


class Table(msgspec.Struct, frozen=True, kw_only=True):
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


class DataColumns(NamedTuple):
    """Columns of the CSV file that show one value of a row."""

    names: list[str]
    values: Callable[[Any], Iterable[Any]]


def make_table(
    name: str,
    title: str,
    caption: str,
    rows: Iterable[R],
    shown: Sequence[tuple[str, Callable[[R], str]]],
    data: Sequence[str | DataColumns],
    *,
    text_columns: int,
    marked: int,
    cautions: Callable[[R], list[Caution]] = lambda _: [],
    absent: str = "",
) -> Table:
    """A table with a row for each of ``rows``.

    ``shown`` are the columns of the report: the title, and the text of a row. ``data`` are those of the CSV
    file; a plain name is an attribute of a row.
    """
    columns = [value(one) if isinstance(one, str) else one for one in data]
    return Table(
        name=name,
        title=title,
        caption=caption,
        header=[title for title, _ in shown],
        text_columns=text_columns,
        marked=marked,
        data_header=[name for column in columns for name in column.names],
        rows=[
            Row(
                [text(row) for _, text in shown],
                [found for column in columns for found in column.values(row)],
                cautions(row),
            )
            for row in rows
        ],
        absent=absent,
    )


def value(name: str, get: Callable[[Any], Any] | None = None) -> DataColumns:
    """One column. Without ``get``, ``name`` is the path of an attribute, such as ``point.work``."""
    get = get or attrgetter(name)
    return DataColumns([_last(name)], lambda row: [get(row)])


def estimate(name: str, get: Callable[[Any], Estimate | None] | None = None) -> DataColumns:
    get = get or attrgetter(name)
    return DataColumns(estimate_header(_last(name)), lambda row: estimate_data(get(row)))


def quantity(name: str, get: Callable[[Any], Quantity | None] | None = None) -> DataColumns:
    get = get or attrgetter(name)
    return DataColumns(quantity_header(_last(name)), lambda row: quantity_data(get(row)))


def _last(path: str) -> str:
    return path.rpartition(".")[2]


def where(workload: str, parallel: int) -> str:
    return workload if parallel == 1 else f"{workload}, {parallel} at once"


def lone_cells(summary: Summary, workloads: Iterable[str]) -> list[Cell]:
    return [cell for name in workloads for cell in summary.lone(name)]


def cautions_on(summary: Summary, cell: Cell, *, division: bool = True) -> list[Caution]:
    found = summary.cautions_on(*cell.key)
    return found if division else [caution for caution in found if caution.kind not in DIVISION]


def middle_cautions(summary: Summary, key: tuple[str, str, int]) -> list[Caution]:
    """The cautions that concern a p50 of the whole rollout."""
    return [caution for caution in summary.cautions_on(*key) if caution.kind not in MIDDLE]


def p50(quantity: Quantity | None) -> str:
    return phrases.seconds(quantity.p50 if quantity else None)


def p95(quantity: Quantity | None) -> str:
    return phrases.seconds(quantity.p95 if quantity else None)


def estimate_header(name: str) -> list[str]:
    return [name, f"{name}_low", f"{name}_high"]


def estimate_data(estimate: Estimate | None) -> list[float | None]:
    return [None] * 3 if estimate is None else [estimate.value, estimate.low, estimate.high]


def quantity_header(name: str) -> list[str]:
    names = [title for what in ("p50", "p95", "mean") for title in estimate_header(f"{name}_{what}")]
    return [*names, f"{name}_sd"]


def quantity_data(found: Quantity | None) -> list[float | None]:
    if found is None:
        return [None] * 10
    estimates = (found.p50, found.p95, found.mean)
    return [*(number for one in estimates for number in estimate_data(one)), found.sd]

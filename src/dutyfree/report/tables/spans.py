"""Tables of spans: the inside of actions and creations."""

from __future__ import annotations

from collections.abc import Iterable

from dutyfree.analysis.model import Cell, Period, SpanBreakdown, Summary
from dutyfree.analysis.statistics import Quantity
from dutyfree.analysis.units import UNKNOWN, count, duration, percent
from dutyfree.report import phrases
from dutyfree.report.tables.table import (
    Row,
    Table,
    lone_cells,
    middle_cautions,
    quantity_data,
    quantity_header,
)

_ORDER = ("queue", "create", "start", "dispatch", "spawn", "run", "collect", "return")
"""Order of the columns, as things happen. Spans with other names follow."""

_CAPTION = (
    "p50 of the wall time of an action, of each span that the substrate reports inside it, and of the "
    "unattributed rest. p50s do not add up. If a workload has no actions, its first command is shown. "
    "Actions without spans, such as file reads and writes, are listed separately: all their time is "
    "unattributed. There are no intervals, because the actions of one trial are not independent."
)
_DOCKER = (
    "On Docker, dispatch ends when the engine has accepted the command, and collect is the time to read the "
    "result. The engine does not report the time in between (start and run), so it is unattributed."
)


def inside_action(summary: Summary) -> Table:
    found = [(cell, *_action(cell)) for cell in lone_cells(summary, summary.workloads)]
    opened = [(cell, name, inner) for cell, name, inner in found if inner]
    names = _names(inner for _, _, inner in opened)
    return Table(
        name="inside_action",
        title="Inside an action",
        caption=" ".join([_CAPTION, *([_DOCKER] if _uses_docker(summary) else [])]),
        header=[
            "workload",
            "substrate",
            "action",
            *names,
            "unattributed",
            "n",
            "without spans",
            "p50 of those",
        ],
        text_columns=2,
        marked=2,
        data_header=["workload", "substrate", "parallel", "stretch", *_data_header(names)],
        rows=[
            Row(
                [
                    cell.workload if stretch == "action" else f"{cell.workload}, first command",
                    cell.substrate,
                    *(_p50(part) for part in _parts(inner, names)),
                    count(inner.told),
                    percent(inner.silent / (inner.told + inner.silent)) if inner.silent else UNKNOWN,
                    _p50(inner.silent_seconds),
                ],
                [*cell.key, stretch, *_data(inner, names)],
                middle_cautions(summary, cell.key),
            )
            for cell, stretch, inner in opened
        ],
        absent="No trial with actions succeeded.",
    )


def inside_creation(summary: Summary) -> Table:
    cells = lone_cells(summary, summary.workloads)
    opened = [(cell, inner) for cell in cells if (inner := cell.inner.get("creation"))]
    names = _names(inner for _, inner in opened)
    return Table(
        name="inside_creation",
        title="Inside the creation",
        caption="p50 of the time from the request until the caller has the sandbox, of each span that the "
        "substrate reports inside it, and of the unattributed rest. p50s do not add up. A creation without "
        "spans is completely unattributed.",
        header=["workload", "substrate", "creation", *names, "unattributed", "n"],
        text_columns=2,
        marked=2,
        data_header=["workload", "substrate", "parallel", *_data_header(names)],
        rows=[
            Row(
                [
                    cell.workload,
                    cell.substrate,
                    *(_with_interval(part) for part in _parts(inner, names)),
                    count(inner.told or inner.silent),
                ],
                [*cell.key, *_data(inner, names)],
                middle_cautions(summary, cell.key),
            )
            for cell, inner in opened
        ],
        absent="No trial succeeded.",
    )


def _uses_docker(summary: Summary) -> bool:
    return any(substrate.use == "docker" for substrate in summary.substrates)


def _action(cell: Cell) -> tuple[Period, SpanBreakdown | None]:
    if "action" in cell.inner:
        return "action", cell.inner["action"]
    return "first", cell.inner.get("first")


def _names(found: Iterable[SpanBreakdown]) -> list[str]:
    names = list(dict.fromkeys(name for inner in found for name in inner.spans))
    return sorted(names, key=lambda name: _ORDER.index(name) if name in _ORDER else len(_ORDER))


def _parts(inner: SpanBreakdown, names: Iterable[str]) -> list[Quantity | None]:
    """The whole, its spans and the rest. Without any span, the rest is the whole."""
    if not inner.told:
        return [inner.silent_seconds, *(None for _ in names), inner.silent_seconds]
    return [inner.seconds, *(inner.spans.get(name) for name in names), inner.unattributed]


def _p50(quantity: Quantity | None) -> str:
    return UNKNOWN if quantity is None else duration(quantity.p50.value)


def _with_interval(quantity: Quantity | None) -> str:
    return phrases.seconds(quantity.p50 if quantity else None)


def _data_header(names: Iterable[str]) -> list[str]:
    columns = ("seconds", *(f"span_{name}" for name in names), "unattributed", "silent_seconds")
    return ["told", "silent", *(title for column in columns for title in quantity_header(column))]


def _data(inner: SpanBreakdown, names: Iterable[str]) -> list[float | None]:
    parts = (inner.seconds, *(inner.spans.get(name) for name in names), inner.unattributed)
    values = [value for part in (*parts, inner.silent_seconds) for value in quantity_data(part)]
    return [inner.told, inner.silent, *values]

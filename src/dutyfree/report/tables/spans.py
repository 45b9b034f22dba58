"""Tables of spans: the inside of actions and creations."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import NamedTuple, TypeAlias

from dutyfree.analysis.model import Cell, Period, SpanBreakdown, Summary
from dutyfree.analysis.statistics import Quantity
from dutyfree.analysis.units import UNKNOWN, count, duration, percent
from dutyfree.report.tables.table import (
    KEY,
    DataColumns,
    Table,
    lone_cells,
    make_table,
    middle_cautions,
    p50,
    quantity,
)

Part: TypeAlias = Callable[[SpanBreakdown], Quantity | None]

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


class _Opened(NamedTuple):
    """A cell, and what is inside one of its periods."""

    cell: Cell
    stretch: Period
    inner: SpanBreakdown


def inside_action(summary: Summary) -> Table:
    found = [(cell, *_action(cell)) for cell in lone_cells(summary, summary.workloads)]
    opened = [_Opened(cell, name, inner) for cell, name, inner in found if inner]
    names = _names(one.inner for one in opened)
    return make_table(
        "inside_action",
        "Inside an action",
        " ".join([_CAPTION, *([_DOCKER] if _uses_docker(summary) else [])]),
        opened,
        [
            ("workload", _workload),
            ("substrate", lambda one: one.cell.substrate),
            *((title, partial(_p50, get=get)) for title, get in _parts("action", names)),
            ("n", lambda one: count(one.inner.told)),
            ("without spans", lambda one: _silent(one.inner)),
            ("p50 of those", lambda one: _p50(one, lambda inner: inner.silent_seconds)),
        ],
        [*(f"cell.{name}" for name in KEY), "stretch", *_data(names)],
        text_columns=2,
        marked=2,
        cautions=lambda one: middle_cautions(summary, one.cell.key),
        absent="No trial with actions succeeded.",
    )


def inside_creation(summary: Summary) -> Table:
    cells = lone_cells(summary, summary.workloads)
    opened = [_Opened(cell, "creation", inner) for cell in cells if (inner := cell.inner.get("creation"))]
    names = _names(one.inner for one in opened)
    return make_table(
        "inside_creation",
        "Inside the creation",
        "p50 of the time from the request until the caller has the sandbox, of each span that the "
        "substrate reports inside it, and of the unattributed rest. p50s do not add up. A creation without "
        "spans is completely unattributed.",
        opened,
        [
            ("workload", lambda one: one.cell.workload),
            ("substrate", lambda one: one.cell.substrate),
            *((title, partial(_with_interval, get=get)) for title, get in _parts("creation", names)),
            ("n", lambda one: count(one.inner.told or one.inner.silent)),
        ],
        [*(f"cell.{name}" for name in KEY), *_data(names)],
        text_columns=2,
        marked=2,
        cautions=lambda one: middle_cautions(summary, one.cell.key),
        absent="No trial succeeded.",
    )


def _workload(one: _Opened) -> str:
    return one.cell.workload if one.stretch == "action" else f"{one.cell.workload}, first command"


def _silent(inner: SpanBreakdown) -> str:
    return percent(inner.silent / (inner.told + inner.silent)) if inner.silent else UNKNOWN


def _uses_docker(summary: Summary) -> bool:
    return any(substrate.use == "docker" for substrate in summary.substrates)


def _action(cell: Cell) -> tuple[Period, SpanBreakdown | None]:
    if "action" in cell.inner:
        return "action", cell.inner["action"]
    return "first", cell.inner.get("first")


def _names(found: Iterable[SpanBreakdown]) -> list[str]:
    names = list(dict.fromkeys(name for inner in found for name in inner.spans))
    return sorted(names, key=lambda name: _ORDER.index(name) if name in _ORDER else len(_ORDER))


def _parts(whole: str, names: Iterable[str]) -> list[tuple[str, Part]]:
    """The whole, its spans and the rest. Without any span, the rest is the whole."""
    return [
        (whole, lambda inner: inner.seconds if inner.told else inner.silent_seconds),
        *((name, partial(_span, name=name)) for name in names),
        ("unattributed", lambda inner: inner.unattributed if inner.told else inner.silent_seconds),
    ]


def _span(inner: SpanBreakdown, name: str) -> Quantity | None:
    return inner.spans.get(name) if inner.told else None


def _p50(one: _Opened, get: Part) -> str:
    found = get(one.inner)
    return UNKNOWN if found is None else duration(found.p50.value)


def _with_interval(one: _Opened, get: Part) -> str:
    return p50(get(one.inner))


def _data(names: Iterable[str]) -> list[str | DataColumns]:
    rest = map(quantity, ("inner.unattributed", "inner.silent_seconds"))
    return ["inner.told", "inner.silent", quantity("inner.seconds"), *map(_span_data, names), *rest]


def _span_data(name: str) -> DataColumns:
    return quantity(f"span_{name}", lambda one: one.inner.spans.get(name))

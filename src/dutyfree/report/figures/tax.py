"""The tax rate of each substrate."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from dutyfree.analysis.findings import Tax
from dutyfree.analysis.model import Cell, Summary
from dutyfree.analysis.units import percent
from dutyfree.report import canvas, phrases
from dutyfree.report.figures import drawing
from dutyfree.report.palette import INK, MUTED, SubstrateLook, drawn, substrate_looks

_LESS = (-0.98, -0.95, -0.9, -0.75, -0.5, -0.25, -0.1, -0.05)
_MORE = (0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 9.0, 24.0, 99.0, 999.0, 9999.0)
MARKS = (*_LESS, 0.0, *_MORE)
"""Rates that may be marked on the axis."""
NEAREST = 0.2
"""Minimum distance of two marks, as a share of the axis."""
NARROWEST = math.log(1.1)
"""The axis covers at least ±10 %, so that noise does not look like a tax."""


def tax_by_substrate(summary: Summary) -> Any:
    """A panel for the shortest workload and one for the longest. The zero line is the baseline."""
    workloads = shown_workloads(summary)
    if not workloads:
        return canvas.empty("no tax: it needs bare and another substrate")
    rows = {name: _cells(summary, name) for name in workloads}
    heights = [0.34 * len(rows[name]) + 0.62 for name in workloads]
    figure = canvas.new(0.3 + sum(heights))
    panels = figure.subplots(len(workloads), 1, squeeze=False, height_ratios=heights)[:, 0]
    looks = substrate_looks(summary)
    for axes, name in zip(panels, workloads, strict=True):
        taxes = {row.substrate: row for row in lone_taxes(summary, name)}
        _axis(axes, taxes.values())
        for place, cell in enumerate(rows[name]):
            _row(axes, place, cell, taxes.get(cell.substrate), looks[cell.substrate])
        drawing.name_rows(axes, [cell.substrate for cell in rows[name]])
        drawing.title(axes, _title(rows[name][0]), pad=4)
    panels[-1].set_xlabel(drawn(f"extra time, logarithmic; 0 is {_bases(summary, workloads)}", 60))
    return figure


def shown_workloads(summary: Summary) -> list[str]:
    """The first and the last workload with a tax: they differ most in what costs time."""
    found = [name for name in summary.workloads if any(row.rate for row in lone_taxes(summary, name))]
    return list(dict.fromkeys([*found[:1], *found[-1:]]))


def lone_taxes(summary: Summary, workload: str) -> list[Tax]:
    """The taxes of the cells that figures show."""
    keys = {cell.key for cell in summary.lone(workload)}
    return [row for row in summary.taxes if (row.workload, row.substrate, row.parallel) in keys]


def _bases(summary: Summary, workloads: Iterable[str]) -> str:
    found = dict.fromkeys(row.base for name in workloads for row in lone_taxes(summary, name))
    return " or ".join(label for label in found if label) or str(summary.baseline)


def _cells(summary: Summary, workload: str) -> list[Cell]:
    bases = {row.base for row in lone_taxes(summary, workload)} | {summary.baseline}
    return [cell for cell in summary.lone(workload) if cell.substrate not in bases]


def _title(cell: Cell) -> str:
    name = f"{cell.actions}-action trajectory" if cell.workload.startswith("trajectory-") else cell.workload
    return drawn(name, 40)


def _axis(axes: Any, taxes: Iterable[Tax]) -> None:
    """A logarithmic axis: half as long is as far from the zero line as twice as long."""
    logs = [
        math.log1p(bound)
        for row in taxes
        if row.rate
        for bound in (row.rate.value, row.rate.low, row.rate.high)
        if bound is not None
    ]
    low, high = min([*logs, -NARROWEST]), max([*logs, NARROWEST])
    room = 0.06 * (high - low)
    axes.set_xlim(low - room, high + room)
    axes.axvline(0, color=INK, linewidth=1.2)
    axes.xaxis.set_major_locator(FixedLocator(_marks(low - room, high + room)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda place, _: _mark(math.expm1(place))))
    axes.grid(axis="x")


def _marks(low: float, high: float) -> list[float]:
    """Zero, and outwards from it each rate that is far enough from the last mark."""
    places = [place for rate in MARKS if low <= (place := math.log1p(rate)) <= high]
    above = canvas.spread_out([-place for place in places if place >= 0], NEAREST * (high - low))
    below = canvas.spread_out([place for place in places if place <= 0], NEAREST * (high - low))
    return sorted({*(-place for place in above), *below})


def _mark(rate: float) -> str:
    if rate > 8.5:  # +9,900 % is too long for the axis: 100 times as long
        return f"{round(rate + 1):,}×"  # noqa: RUF001 (the multiplication sign is meant)
    return "0" if abs(rate) < 1e-9 else f"{rate * 100:+.0f} %".replace("-", "\N{MINUS SIGN}")


def _row(axes: Any, place: int, cell: Cell, tax: Tax | None, look: SubstrateLook) -> None:
    if tax is None or tax.rate is None:
        drawing.say(axes, place, "no data" if cell.succeeded else "all failed")
        return
    rate = tax.rate
    if rate.low is not None and rate.high is not None:
        ends = [math.log1p(rate.low), math.log1p(rate.high)]
        axes.plot(ends, [place, place], color=look.colour, linewidth=4.5, alpha=0.45, solid_capstyle="butt")
    drawing.dot(axes, math.log1p(rate.value), place, look, filled=tax.shown, markersize=7)
    text, colour = (phrases.signed(percent(rate.value)), INK) if tax.shown else ("none shown", MUTED)
    drawing.say(axes, place, text, colour)

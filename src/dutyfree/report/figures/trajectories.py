"""Figures 5 and 6: time by number of actions, and worker-hours at scale."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from dutyfree.analysis.findings import Projection
from dutyfree.analysis.model import Cell, Summary
from dutyfree.analysis.projection import MILLION
from dutyfree.analysis.statistics import Quantity
from dutyfree.analysis.units import hours, plural
from dutyfree.report import canvas
from dutyfree.report.figures import drawing
from dutyfree.report.figures.rows import MANY, ROW, RowPanel, rows_of_marks
from dutyfree.report.palette import INK, MUTED, SubstrateLook, drawn, substrate_looks


def completion_by_length(summary: Summary) -> Any:
    """Figure 5: two panels by number of actions: the time of the whole rollout, and the time per action."""
    series = {
        label: [
            cell for name in summary.trajectories if (cell := summary.lone_cell(name, label)) and cell.total
        ]
        for label in summary.labels
    }
    failed = [
        label
        for label in summary.labels
        if not series[label] and any(summary.lone_cell(name, label) for name in summary.trajectories)
    ]
    series = {label: cells for label, cells in series.items() if cells}
    if not series:
        return canvas.empty("no data for trajectories")
    looks = substrate_looks(summary)
    if len(series) > MANY:
        return _completion_rows(series, looks)
    figure = canvas.new(5.6)
    upper, lower = figure.subplots(2, 1, sharex=True)
    for label, cells in series.items():
        _line(upper, cells, [cell.total for cell in cells], looks[label])
        _line(lower, cells, [cell.per_action for cell in cells], looks[label])
    lengths = sorted({cell.actions for cells in series.values() for cell in cells})
    # Put a single length in the middle.
    right = lengths[-1] * (1.06 if len(lengths) > 1 else 2)
    lower.set_xlim(0, right)
    marked = canvas.spread_out(lengths, 0.08 * right)
    lower.set_xticks(marked, [f"{length:g}" for length in marked])
    upper.set_ylim(bottom=0)
    lower.set_ylim(bottom=0)
    drawing.title(upper, "completion time (whole rollout), p50", 10.5)
    drawing.title(lower, "amortised per action, p50", 10.5)
    lower.set_xlabel("actions in the trajectory")
    for axes in (upper, lower):
        canvas.linear_duration_axis(axes.yaxis, axes.get_ylim()[1])
        axes.grid(axis="y")
    _name_missing(upper, failed, 0.95, 60)
    handles = [drawing.handle(label, looks[label], linewidth=1.8, markersize=6.5) for label in series]
    canvas.legend(figure, handles)
    return figure


def _completion_rows(series: dict[str, list[Cell]], looks: dict[str, SubstrateLook]) -> Any:
    lengths = sorted({cell.actions for cells in series.values() for cell in cells})

    def values(metric: Callable[[Cell], Quantity | None]) -> list[list[float | None]]:
        found = []
        for cells in series.values():
            known = {cell.actions: quantity.p50.value for cell in cells if (quantity := metric(cell))}
            found.append([known.get(length) for length in lengths])
        return found

    return rows_of_marks(
        list(series),
        [looks[label] for label in series],
        [
            RowPanel("completion time, p50", values(lambda cell: cell.total)),
            RowPanel("per action, p50", values(lambda cell: cell.per_action)),
        ],
        [plural(length, "action") for length in lengths],
    )


def _line(axes: Any, cells: list[Cell], quantities: list[Quantity | None], look: SubstrateLook) -> None:
    pairs = [
        (cell.actions, quantity.p50) for cell, quantity in zip(cells, quantities, strict=True) if quantity
    ]
    if not pairs:
        return
    xs, ys = [x for x, _ in pairs], [estimate.value for _, estimate in pairs]
    axes.plot(xs, ys, color=look.colour, linestyle=look.line, linewidth=1.8, zorder=3)
    for x, estimate in pairs:
        if estimate.low is not None and estimate.high is not None:
            axes.plot([x, x], [estimate.low, estimate.high], color=look.colour, linewidth=4.5, alpha=0.45)
    drawing.dots(axes, xs, ys, look)


def worker_hours(summary: Summary) -> Any:
    """Figure 6: worker-hours by number of rollouts of the longest trajectory, as lines with bands."""
    workload = projected_workload(summary)
    rows = [row for row in summary.projections if row.workload == workload]
    if workload is None or not rows:
        return canvas.empty("no data for trajectories")
    series: dict[str, list[Projection]] = {}
    for row in rows:
        series.setdefault(row.substrate, []).append(row)
    looks = substrate_looks(summary)
    kind = (
        f"{rows[0].actions}-action trajectories"
        if workload.startswith("trajectory-")
        else f"{workload} rollouts"
    )
    if len(series) > MANY:
        return _hour_rows(series, looks, kind)
    figure = canvas.new(max(3.7, 1.0 + 0.3 * len(series)))
    axes: Any = figure.subplots()
    for label, points in series.items():
        look = looks[label]
        xs = [point.rollouts for point in points]
        if all(point.hours.known for point in points):
            lows, highs = [point.hours.low for point in points], [point.hours.high for point in points]
            axes.fill_between(xs, lows, highs, color=look.colour, alpha=0.22, linewidth=0)
        axes.plot(
            xs, [point.hours.value for point in points], color=look.colour, linestyle=look.line, linewidth=2
        )
    top = max(points[-1].hours.high or points[-1].hours.value for points in series.values()) * 1.06 or 1.0
    first, last = rows[0].rollouts, rows[-1].rollouts
    axes.set_xlim(first, last)
    axes.set_ylim(0, top)
    marked = [last / 4, last / 2, last * 3 / 4, last]
    axes.set_xticks(marked, [f"{place / 1e6:g} M" for place in marked])
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.grid(visible=True)
    axes.set_xlabel(drawn(kind, 40))
    axes.set_ylabel("worker-hours")
    _end_labels(axes, series, looks, top)
    missing = [cell.substrate for cell in summary.lone(workload) if cell.substrate not in series]
    _name_missing(axes, missing, 0.97, 48)
    return figure


def _hour_rows(series: dict[str, list[Projection]], looks: dict[str, SubstrateLook], kind: str) -> Any:
    """Worker-hours of a million, slowest last: all lines go through the origin, so one point says all."""
    ends = {
        label: next(point for point in points if point.rollouts == MILLION).hours
        for label, points in series.items()
    }
    figure = canvas.new(0.8 + ROW * len(ends))
    axes: Any = figure.subplots()
    known = [bound for one in ends.values() for bound in (one.value, one.low, one.high) if bound]
    low, high = min(known) / 1.3, max(known) * 1.3
    axes.set_xscale("log")
    axes.set_xlim(low, high)
    steps = [math.log(step * 10.0**power) for power in range(9) for step in (1, 1.5, 2, 3, 5, 7)]
    inside = [step for step in steps if math.log(low) <= step <= math.log(high)]
    kept = canvas.spread_out(inside, 0.25 * math.log(high / low))
    axes.xaxis.set_major_locator(FixedLocator([math.exp(step) for step in kept]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    for row, (label, estimate) in enumerate(ends.items()):
        drawing.interval(axes, row, estimate, looks[label])
        drawing.dot(axes, estimate.value, row, looks[label])
        drawing.say(axes, row, hours(estimate.value), INK, fontsize=9.5)
    drawing.name_rows(axes, list(ends))
    axes.grid(axis="x")
    axes.set_xlabel(drawn(f"worker-hours, million {kind}", 52))
    return figure


def _name_missing(axes: Any, substrates: list[str], height: float, width: int) -> None:
    if substrates:
        text = drawn(f"no data for {', '.join(substrates)}", width)
        axes.text(0.02, height, text, transform=axes.transAxes, va="top", color=MUTED)


def projected_workload(summary: Summary) -> str | None:
    """The longest trajectory with a successful trial; without trajectories, the last tier."""
    done = [name for name in summary.workloads if any(cell.total for cell in summary.lone(name))]
    return done[-1] if done else None


_ARROW = {"arrowstyle": "-", "linewidth": 1.2, "shrinkA": 0, "shrinkB": 0, "relpos": (0, 0.5)}


def _end_labels(
    axes: Any, series: dict[str, list[Projection]], looks: dict[str, SubstrateLook], top: float
) -> None:
    """Write names and hours at the right end of the lines, and move them apart if they overlap."""
    ends = sorted((points[-1].hours.value, label) for label, points in series.items())
    places = _apart([value for value, _ in ends], top / max(11.0, len(ends) + 1.0), top)
    for (value, label), place in zip(ends, places, strict=True):
        axes.annotate(
            f"{drawn(label, 14)}  {hours(value)}",
            (1.0, value),
            xycoords=axes.get_yaxis_transform(),
            xytext=(1.05, place),
            textcoords=axes.get_yaxis_transform(),
            va="center",
            fontsize=10,
            annotation_clip=False,
            arrowprops={"color": looks[label].colour, **_ARROW},
        )


def _apart(values: list[float], gap: float, top: float) -> list[float]:
    """Positions for ascending values: close to the value, and at least ``gap`` apart."""
    clusters: list[tuple[float, int]] = []
    """Centre and size of each cluster. Clusters that would overlap are merged around their mean."""
    for value in values:
        clusters.append((value, 1))
        while len(clusters) > 1:
            (low, few), (high, more) = clusters[-2:]
            if high - low >= gap * (few + more) / 2:
                break
            clusters[-2:] = [((low * few + high * more) / (few + more), few + more)]
    return [
        min(max(centre, gap * (size - 1) / 2), top - gap * (size - 1) / 2) + gap * (place - (size - 1) / 2)
        for centre, size in clusters
        for place in range(size)
    ]

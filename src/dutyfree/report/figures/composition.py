"""Figures 1 and 4: the components of a rollout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.patches import Patch

from dutyfree.analysis.model import Cell, Summary
from dutyfree.analysis.units import duration, plural
from dutyfree.report import canvas
from dutyfree.report.figures import drawing
from dutyfree.report.palette import COMPONENTS, GRID, INK, PAPER, drawn

BAR = 0.66
WORTH_A_LABEL = 0.075
SHOWN = 1e-3
"""A component with a smaller share in all bars is left out of the legend."""


def decomposition_at_t2(summary: Summary) -> Any:
    """Figure 1: stacked bars by substrate, with a tick at the p50 of the total and its interval."""
    cells = summary.lone("T2")
    if not cells:
        return canvas.empty("no data for T2")
    figure = canvas.new(0.8 + 0.46 * len(cells))
    axes = figure.subplots()
    longest = max((_end(cell) for cell in cells), default=0.0) or 1.0
    for row, cell in enumerate(cells):
        if not cell.total:
            _say_why(axes, row, cell)
            continue
        _bar(axes, row, cell.composition, 1.0, longest)
        _mark_p50(axes, row, cell)
        axes.text(_end(cell) + longest * 0.015, row, duration(cell.total.p50.value), va="center")
    _rows(axes, [drawn(cell.substrate) for cell in cells])
    axes.set_xlim(0, longest * 1.22)
    axes.set_xlabel("time of one T2 rollout")
    canvas.linear_duration_axis(axes.xaxis, longest)
    axes.grid(axis="x")
    _legend(figure, cells)
    return figure


def _end(cell: Cell) -> float:
    """The right end of the bar with its interval."""
    middle = cell.total.p50 if cell.total else None
    return max(cell.typical_total, (middle.high or middle.value) if middle else 0.0)


def composition_by_length(summary: Summary) -> Any:
    """Figure 4: one bar of equal height for every trajectory length, grouped by substrate."""
    groups = [
        [cell for name in summary.trajectories if (cell := summary.lone_cell(name, label))]
        for label in summary.labels
    ]
    groups = [group for group in groups if group]
    if not groups:
        return canvas.empty("no data for trajectories")
    rows = sum(len(group) for group in groups)
    figure = canvas.new(0.75 + 0.31 * rows + 0.4 * len(groups))
    axes = figure.subplots()
    place, places, labels = 0.0, [], []
    for group in groups:
        axes.text(0, place - 0.02, drawn(group[0].substrate, 40), fontweight="bold", va="center")
        for cell in group:
            place += 1
            places.append(place)
            labels.append(plural(cell.actions, "action"))
            if cell.total:
                _bar(axes, place, cell.composition, cell.typical_total, 1.0, named=True)
            else:
                _say_why(axes, place, cell)
        place += 1.25
    axes.set_yticks(places, labels)
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(place - 0.6, -0.55)
    axes.spines["left"].set_visible(False)
    axes.set_xlim(0, 1)
    axes.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0", "25 %", "50 %", "75 %", "100 %"])
    axes.set_xlabel("share of the rollout")
    _legend(figure, [cell for group in groups for cell in group])
    return figure


def _bar(
    axes: Any, row: float, parts: dict[str, float], whole: float, longest: float, *, named: bool = False
) -> None:
    left = 0.0
    for name, look in COMPONENTS.items():
        width = max(0.0, parts.get(name, 0.0)) / (whole or 1.0)
        if width <= 0:
            continue
        fill = {"color": look.colour, "hatch": look.hatch or None, "edgecolor": PAPER, "linewidth": 0.6}
        axes.barh(row, width, left=left, height=0.8 if named else BAR, **fill)
        if named and width >= WORTH_A_LABEL * longest:
            middle = {"ha": "center", "va": "center", "fontsize": 9}
            axes.text(left + width / 2, row, f"{width * 100:.0f} %", color=look.text, **middle)
        left += width


def _mark_p50(axes: Any, row: float, cell: Cell) -> None:
    assert cell.total is not None
    middle = cell.total.p50
    axes.plot([middle.value] * 2, [row - 0.42, row + 0.42], color=INK, linewidth=1.6, solid_capstyle="butt")
    if middle.low is not None and middle.high is not None:
        axes.plot([middle.low, middle.high], [row, row], color=INK, linewidth=1.6, solid_capstyle="butt")


def _say_why(axes: Any, row: float, cell: Cell) -> None:
    why = f"no data: all {cell.trials} trials failed" if cell.trials else "no data: no trial was measured"
    drawing.say(axes, row, why, x=0.01)


def _rows(axes: Any, labels: list[str]) -> None:
    axes.set_yticks(range(len(labels)), labels)
    axes.set_ylim(len(labels) - 0.45, -0.55)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_color(GRID)


def _legend(figure: Any, cells: Sequence[Cell]) -> None:
    shown = [
        name
        for name in COMPONENTS
        if any(cell.composition.get(name, 0.0) > SHOWN * cell.typical_total for cell in cells)
    ]
    handles = [
        Patch(
            facecolor=COMPONENTS[name].colour,
            edgecolor=PAPER,
            hatch=COMPONENTS[name].hatch or None,
            label=COMPONENTS[name].title,
        )
        for name in shown
    ]
    if handles:
        canvas.legend(figure, handles, most=3)

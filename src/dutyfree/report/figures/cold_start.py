"""Figures 2 and 3: cold starts."""

from __future__ import annotations

from typing import Any

import numpy as np

from dutyfree.analysis.model import Cell, Summary
from dutyfree.analysis.units import duration
from dutyfree.report import canvas
from dutyfree.report.figures import drawing
from dutyfree.report.figures.rows import MANY
from dutyfree.report.palette import INK, SubstrateLook, drawn, substrate_looks


def cold_start_medians(summary: Summary) -> Any:
    """Figure 2: a panel for each tier. Filled: the time to first command. Hollow: the whole rollout."""
    tiers = summary.tiers
    if not any(cell.total for tier in tiers for cell in summary.lone(tier)):
        return canvas.empty("no data for cold starts")
    rows = {tier: summary.lone(tier) for tier in tiers}
    heights = [0.55 + 0.36 * len(rows[tier]) for tier in tiers]
    figure = canvas.new(0.86 + sum(heights))
    panels = figure.subplots(len(tiers), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    looks = substrate_looks(summary)
    low, high = _range([cell for tier in tiers for cell in rows[tier]])
    panels[0].set_xlim(low, high)
    panels[0].set_xscale("log")
    canvas.duration_axis(panels[0].xaxis, low, high)
    for axes, tier in zip(panels, tiers, strict=True):
        for row, cell in enumerate(rows[tier]):
            _dumbbell(axes, row, cell, looks[cell.substrate])
        drawing.name_rows(axes, [cell.substrate for cell in rows[tier]])
        drawing.title(axes, drawn(tier), pad=4)
        axes.grid(axis="x")
    panels[-1].set_xlabel("p50, logarithmic")
    marks = drawing.filled_and_hollow("to first command's result", "whole rollout")
    canvas.legend(figure, marks, handletextpad=0.2)
    return figure


def _dumbbell(axes: Any, row: int, cell: Cell, look: SubstrateLook) -> None:
    if cell.total is None or cell.first_result is None:
        why = f"no data: all {cell.trials} trials failed" if cell.trials else "no data"
        drawing.say(axes, row, why, x=0.01)
        return
    first, whole = cell.first_result.p50, cell.total.p50
    if whole.value <= 0:
        drawing.say(axes, row, "0 s", x=0.01)
        return
    axes.plot([first.value, whole.value], [row, row], color=look.colour, linewidth=2, alpha=0.45, zorder=2)
    for estimate, filled in ((first, True), (whole, False)):
        if estimate.low is not None and estimate.low > 0:
            drawing.interval(axes, row, estimate, look, alpha=0.6, zorder=3)
        mark = {"marker": "o", "markersize": 7, "markeredgewidth": 1.8}
        drawing.dot(axes, estimate.value, row, look, filled=filled, **mark)
    beside = {"textcoords": "offset points", "va": "center", "fontsize": 9.5, "color": INK}
    axes.annotate(duration(whole.value), (whole.high or whole.value, row), xytext=(8, 0), **beside)
    if first.value < whole.value / 1.6:
        place = (first.low or first.value, row)
        axes.annotate(duration(first.value), place, xytext=(-8, 0), ha="right", **beside)


def _range(cells: list[Cell]) -> tuple[float, float]:
    values = [
        value
        for cell in cells
        for quantity in (cell.first_result, cell.total)
        if quantity
        for value in (quantity.p50.value, quantity.p50.low, quantity.p50.high)
        if value is not None and value > 0
    ]
    low, high = min(values, default=1e-3), max(values, default=1.0)
    # Leave nearly a quarter of the axis on each side for the numbers beside the marks.
    room = max(4.0, (high / low) ** 0.42)
    return low / room, high * room


def cold_start_distributions(summary: Summary) -> Any:
    """Figure 3: cumulative distributions over all trials. With failures, a curve ends below 100 %."""
    tiers = [tier for tier in summary.tiers if any(cell.trials for cell in summary.lone(tier))]
    if not tiers:
        return canvas.empty("no data for cold starts")
    looks = substrate_looks(summary)
    shown = [label for label in summary.labels if any(summary.lone_cell(tier, label) for tier in tiers)]
    if len(shown) > MANY:
        return _strips(summary, tiers, looks)
    figure = canvas.new(1.0 + 1.75 * len(tiers))
    panels = figure.subplots(len(tiers), 2, sharey=True, squeeze=False)
    for (left, right), tier in zip(panels, tiers, strict=True):
        _ecdfs(left, summary.lone(tier), "first_result", looks)
        _ecdfs(right, summary.lone(tier), "total", looks)
        left.set_yticks([0, 0.25, 0.5, 0.75, 1], ["0", "", "50 %", "", "100 %"])
        left.set_ylabel(drawn(tier), rotation=0, ha="right", va="center", fontweight="bold", fontsize=11)
    panels[0][0].set_title("to first command's result", fontsize=10.5)
    panels[0][1].set_title("whole rollout", fontsize=10.5)
    succeeded = {cell.substrate for tier in tiers for cell in summary.lone(tier) if cell.total}
    canvas.legend(figure, [_handle(label, looks[label], label in succeeded) for label in shown])
    return figure


def _strips(summary: Summary, tiers: list[str], looks: dict[str, SubstrateLook]) -> Any:
    """A row for each substrate, a mark for each trial."""
    rows = {tier: summary.lone(tier) for tier in tiers}
    heights = [0.35 + 0.2 * len(rows[tier]) for tier in tiers]
    figure = canvas.new(0.5 + sum(heights))
    panels = figure.subplots(len(tiers), 2, sharey="row", squeeze=False, height_ratios=heights)
    for (left, right), tier in zip(panels, tiers, strict=True):
        for axes, metric in ((left, "first_result"), (right, "total")):
            _strip(axes, rows[tier], metric, looks)
        drawing.name_rows(left, [cell.substrate for cell in rows[tier]])
        right.tick_params(axis="y", length=0)
        right.spines["left"].set_visible(False)
        drawing.title(left, f"{drawn(tier, 12)}, first result", 10, pad=4)
        drawing.title(right, f"{drawn(tier, 12)}, whole rollout", 10, pad=4)
    return figure


def _strip(axes: Any, cells: list[Cell], metric: str, looks: dict[str, SubstrateLook]) -> None:
    found = [[value for value in getattr(cell.distribution, metric) if value > 0] for cell in cells]
    known = [value for values in found for value in values]
    low, high = min(known, default=1e-3) / 1.6, max(known, default=1.0) * 1.6
    axes.set_xscale("log")
    axes.set_xlim(low, high)
    canvas.duration_axis(axes.xaxis, low, high, most=3)
    axes.grid(axis="x")
    for row, (cell, values) in enumerate(zip(cells, found, strict=True)):
        if not values:
            drawing.say(axes, row, "all failed" if cell.trials else "no data", x=0.02, fontsize=9)
            continue
        colour = looks[cell.substrate].colour
        axes.plot(values, [row] * len(values), "|", color=colour, markersize=8, alpha=0.6)


def _handle(label: str, look: SubstrateLook, succeeded: bool) -> Any:
    name = drawn(label) if succeeded else f"{drawn(label)} (all failed)"
    return drawing.handle(label, look, linewidth=2, markersize=5, label=name)


def _ecdfs(axes: Any, cells: list[Cell], metric: str, looks: dict[str, SubstrateLook]) -> None:
    drawn_any = False
    lows, highs = [], []
    for cell in cells:
        values = np.asarray(getattr(cell.distribution, metric))
        values = values[values > 0]
        if not values.size:
            continue
        drawn_any = True
        look = looks[cell.substrate]
        top = cell.succeeded / cell.trials
        steps = np.arange(1, values.size + 1) / values.size * top
        axes.step(
            np.concatenate([values[:1], values]),
            np.concatenate([[0.0], steps]),
            where="post",
            color=look.colour,
            linestyle=look.line,
            linewidth=1.8,
        )
        # Mark the slowest trial, so that a single outlier is visible.
        axes.plot(values[-1:], steps[-1:], marker=look.marker, color=look.colour, markersize=5, clip_on=False)
        lows.append(values[0])
        highs.append(values[-1])
    axes.set_ylim(-0.03, 1.06)
    axes.grid(visible=True)
    if not drawn_any:
        axes.set_xticks([])
        canvas.say(axes, "no data")
        return
    low, high = min(lows) / 1.6, max(highs) * 1.6
    axes.set_xscale("log")
    axes.set_xlim(low, high)
    canvas.duration_axis(axes.xaxis, low, high, most=3)

"""Estimates as dots with intervals: a row for each name, a panel for each quantity."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator

from dutyfree.analysis.statistics import Estimate
from dutyfree.report import canvas
from dutyfree.report.figures import drawing
from dutyfree.report.palette import INK, SubstrateLook, drawn

ROW = 0.3
"""Inches."""
APART = 0.42
"""Minimum distance of two ticks, as a share of the axis."""


class Panel(msgspec.Struct, frozen=True):
    title: str
    estimates: Sequence[Estimate | None]
    """One for each row."""
    form: Callable[[float], str] | None = None
    """How to write a value of a linear axis, in few letters; None for a logarithmic axis of durations."""
    reference: float | None = None
    """Where a line marks no effect."""
    absent: str = "none"
    """Instead of a missing estimate."""


def panels(rows: Sequence[str], looks: Sequence[SubstrateLook], parts: Sequence[Panel]) -> Any:
    """The figure. A mark is hollow if its interval includes the reference."""
    figure = canvas.new(0.85 + ROW * len(rows))
    axes_of = figure.subplots(1, len(parts), sharey=True, squeeze=False)[0]
    for axes, part in zip(axes_of, parts, strict=True):
        _axis(axes, part)
        for row, (estimate, look) in enumerate(zip(part.estimates, looks, strict=True)):
            _mark(axes, row, estimate, look, part)
        drawing.title(axes, part.title, 10, pad=4)
        axes.tick_params(axis="y", length=0)
        axes.spines["left"].set_visible(False)
        axes.grid(axis="x")
    axes_of[0].set_yticks(range(len(rows)), [drawn(row) for row in rows])
    axes_of[0].set_ylim(len(rows) - 0.45, -0.55)
    return figure


def _bounds(part: Panel) -> list[float]:
    return [
        bound
        for one in part.estimates
        if one
        for bound in (one.value, one.low, one.high)
        if bound is not None
    ]


def _axis(axes: Any, part: Panel) -> None:
    bounds = _bounds(part)
    if part.form is None:
        positive = [bound for bound in bounds if bound > 0]
        values = [one.value for one in part.estimates if one and one.value > 0]
        low, high = min(values, default=1e-3), max(positive, default=1.0)
        # A lower bound near 0 would stretch the axis without end.
        low, high = max(min(positive, default=low), low / 10) / 2, max(high, low * 4) * 2
        axes.set_xscale("log")
        axes.set_xlim(low, high)
        canvas.duration_axis(axes.xaxis, low, high, most=2)
        _thin(axes, [math.log(tick) for tick in axes.get_xticks()], math.log(low), math.log(high), math.exp)
        return
    if part.reference is not None:
        bounds.append(part.reference)
        axes.axvline(part.reference, color=INK, linewidth=1.1)
    low, high = min(bounds, default=0.0), max(bounds, default=1.0)
    room = 0.12 * (high - low) or 0.1 * abs(high) or 1.0
    axes.set_xlim(low - room, high + room)
    form = part.form
    ticks = MaxNLocator(4, steps=[1, 2, 5, 10]).tick_values(low - room, high + room)
    _thin(axes, [float(tick) for tick in ticks], low - room, high + room, float)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: form(value)))


def _thin(axes: Any, places: list[float], low: float, high: float, tick: Callable[[float], float]) -> None:
    """Keep ticks that are far enough apart for their labels; the panels are narrow."""
    inside = [place for place in places if low <= place <= high]
    kept = canvas.spread_out(inside, APART * (high - low))
    axes.xaxis.set_major_locator(FixedLocator([tick(place) for place in kept]))


def _mark(axes: Any, row: int, estimate: Estimate | None, look: SubstrateLook, part: Panel) -> None:
    if estimate is None:
        drawing.say(axes, row, part.absent, x=0.03, fontsize=9)
        return
    left = axes.get_xlim()[0]
    if part.form is None and estimate.value <= left:
        drawing.say(axes, row, "≤ 0", x=0.03, fontsize=9)
        return
    if estimate.low is not None and estimate.high is not None:
        ends = [max(estimate.low, left) if part.form is None else estimate.low, estimate.high]
        axes.plot(ends, [row, row], color=look.colour, linewidth=4.5, alpha=0.45, solid_capstyle="butt")
    shown = part.reference is None or estimate.leaves_out(part.reference)
    drawing.dot(axes, estimate.value, row, look, filled=shown)

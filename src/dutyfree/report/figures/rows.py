"""Figures for many substrates: a row for each, with its values as marks on a logarithmic axis.

With a line for each substrate, more than ``MANY`` of them cannot be told apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from matplotlib.lines import Line2D

from dutyfree.report import canvas
from dutyfree.report.figures import drawing
from dutyfree.report.palette import MUTED, PAPER, SubstrateLook

MANY = 8
"""More substrates than this have a row each instead of a line."""

ROW = 0.25
"""Inches."""
_SHAPES = ("o", "s", "D", "^", "v", "P")


class RowPanel(msgspec.Struct, frozen=True):
    title: str
    values: Sequence[Sequence[float | None]]
    """For each row, the values in the order of the marks; a value that is not known leaves a gap."""


def rows_of_marks(
    names: Sequence[str], looks: Sequence[SubstrateLook], parts: Sequence[RowPanel], marks: Sequence[str]
) -> Any:
    """A panel each for ``parts``, side by side; ``marks`` are the entries of the legend."""
    figure = canvas.new(0.8 + ROW * len(names))
    axes_of = figure.subplots(1, len(parts), sharey=True, squeeze=False)[0]
    for axes, part in zip(axes_of, parts, strict=True):
        known = [value for row in part.values for value in row if value is not None and value > 0]
        _axis(axes, known, most=6 if len(parts) == 1 else 3)
        for row, (values, look) in enumerate(zip(part.values, looks, strict=True)):
            _row(axes, row, values, look)
        drawing.title(axes, part.title, 10, pad=4)
        axes.grid(axis="x")
        axes.tick_params(axis="y", length=0)
        axes.spines["left"].set_visible(False)
    drawing.name_rows(axes_of[0], names)
    canvas.legend(figure, [_entry(place, mark) for place, mark in enumerate(marks)])
    return figure


def _axis(axes: Any, known: Sequence[float], most: int) -> None:
    low, high = min(known, default=1e-3) / 1.6, max(known, default=1.0) * 1.6
    axes.set_xscale("log")
    axes.set_xlim(low, high)
    canvas.duration_axis(axes.xaxis, low, high, most=most)


def _row(axes: Any, row: int, values: Sequence[float | None], look: SubstrateLook) -> None:
    known = [value for value in values if value is not None and value > 0]
    if not known:
        drawing.say(axes, row, "no data", x=0.02, fontsize=9)
        return
    axes.plot([min(known), max(known)], [row, row], color=look.colour, linewidth=1.6, alpha=0.45, zorder=2)
    for place, value in enumerate(values):
        if value is not None and value > 0:
            shape = {"marker": _shape(place), "markersize": 5.5, "markeredgewidth": 0.8}
            axes.plot([value], [row], color=look.colour, markeredgecolor=PAPER, zorder=4, **shape)


def _shape(place: int) -> str:
    return _SHAPES[place % len(_SHAPES)]


def _entry(place: int, text: str) -> Any:
    return Line2D([], [], marker=_shape(place), color=MUTED, linestyle="none", markersize=5.5, label=text)

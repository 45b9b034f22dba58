"""Each archetype with its own exec and with our init: what of the tax is the action path."""

from __future__ import annotations

from typing import Any

from matplotlib.ticker import FixedLocator, FuncFormatter

from dutyfree.analysis.findings import ActionPath, Law
from dutyfree.analysis.model import Summary
from dutyfree.analysis.statistics import Estimate
from dutyfree.report import canvas
from dutyfree.report.figures import drawing
from dutyfree.report.palette import SubstrateLook, substrate_looks

ROW = 0.34
"""Inches."""


def action_path(summary: Summary) -> Any:
    """A row for each archetype: a and b of both ways, and the share of b."""
    paths = summary.action_paths
    if not paths:
        return None
    laws = {one.substrate: one for one in summary.laws}
    looks = substrate_looks(summary)
    figure = canvas.new(0.95 + ROW * len(paths))
    axes_of = figure.subplots(1, 3, sharey=True)
    for axes, name in zip(axes_of, "ab", strict=False):
        pairs = [_pair(one, laws, name) for one in paths]
        _time_axis(axes, [estimate.value for pair in pairs for estimate in pair])
        for row, (pair, path) in enumerate(zip(pairs, paths, strict=True)):
            _dumbbell(axes, row, pair, looks[path.own])
    _share_axis(axes_of[2])
    for row, one in enumerate(paths):
        _share(axes_of[2], row, one.share, looks[one.own])
    for axes, text in zip(axes_of, ("a, rollout", "b, action", "path, of b"), strict=True):
        drawing.title(axes, text, 10, pad=4)
        axes.grid(axis="x")
        axes.tick_params(axis="y", length=0)
        axes.spines["left"].set_visible(False)
    drawing.name_rows(axes_of[0], [one.own for one in paths])
    canvas.legend(figure, drawing.filled_and_hollow("its own exec", "our init"), handletextpad=0.2)
    return figure


def _pair(path: ActionPath, laws: dict[str, Law], name: str) -> tuple[Estimate, Estimate]:
    own, init = (getattr(laws[label], name) for label in (path.own, path.init))
    return own, init


def _time_axis(axes: Any, values: list[float]) -> None:
    positive = [value for value in values if value > 0] or [1e-3]
    low, high = min(positive) / 2.5, max(positive) * 2.5
    axes.set_xscale("log")
    axes.set_xlim(low, high)
    canvas.duration_axis(axes.xaxis, low, high, most=2)


def _dumbbell(axes: Any, row: int, pair: tuple[Estimate, Estimate], look: SubstrateLook) -> None:
    shown = [one for one in pair if one.value > 0]
    if len(shown) == 2:
        ends = [one.value for one in shown]
        axes.plot(ends, [row, row], color=look.colour, linewidth=1.6, alpha=0.45, zorder=2)
    left = axes.get_xlim()[0]
    for one, filled in zip(pair, (True, False), strict=True):
        if one.value <= 0:
            continue
        if one.low is not None and one.high is not None:
            ends = [max(one.low, left), one.high]
            axes.plot(ends, [row, row], color=look.colour, linewidth=4.5, alpha=0.45, solid_capstyle="butt")
        drawing.dot(axes, one.value, row, look, filled=filled)


def _share_axis(axes: Any) -> None:
    axes.set_xlim(-0.08, 1.08)
    axes.xaxis.set_major_locator(FixedLocator([0, 0.5, 1]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value * 100:.0f} %"))


def _share(axes: Any, row: int, share: Estimate | None, look: SubstrateLook) -> None:
    if share is None:
        drawing.say(axes, row, "not known", x=0.03, fontsize=9)
        return
    drawing.interval(axes, row, share, look)
    drawing.dot(axes, min(max(share.value, -0.06), 1.06), row, look)

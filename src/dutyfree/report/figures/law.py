"""The law: its three numbers for each substrate, and where the rankings of substrates cross."""

from __future__ import annotations

from typing import Any

from matplotlib.lines import Line2D

from dutyfree.analysis.model import Summary
from dutyfree.report import canvas, rankings
from dutyfree.report.figures import drawing
from dutyfree.report.figures.dots import Panel, panels
from dutyfree.report.figures.rows import MANY
from dutyfree.report.palette import INK, MUTED, drawn, substrate_looks

ABSENT = "not known"


def law_by_substrate(summary: Summary) -> Any:
    """A panel each for a, b and c."""
    laws = [law for law in summary.laws if law.substrate not in summary.controls]
    if not any(law.a for law in laws):
        return None
    looks = substrate_looks(summary)
    return panels(
        [law.substrate for law in laws],
        [looks[law.substrate] for law in laws],
        [
            Panel("a, rollout", [law.a for law in laws], absent=ABSENT),
            Panel("b, action", [law.b for law in laws], absent=ABSENT),
            Panel("c, work", [law.c for law in laws], "{:.3g}".format, 1.0, ABSENT),
        ],
    )


def rankings_by_length(summary: Summary) -> Any:
    """Time relative to the baseline by length: lines from the law, marks as measured, rings at crossings."""
    lines = rankings.lines(summary)
    if not lines or len(lines) > MANY:  # then the table of rankings says it alone
        return None
    looks = substrate_looks(summary)
    figure = canvas.new(3.6)
    axes: Any = figure.subplots()
    axes.axhline(1.0, color=INK, linewidth=1.1)
    for label, points in lines.items():
        look = looks[label]
        xs = [point.length for point in points]
        axes.plot(xs, [point.predicted for point in points], color=look.colour, linestyle=look.line)
        drawing.dots(axes, xs, [point.measured for point in points], look)
    crossings = rankings.crossings(summary)
    for crossing in crossings:
        axes.plot(
            [crossing.length],
            [crossing.relative],
            marker="o",
            markersize=15,
            markerfacecolor="none",
            markeredgecolor=INK,
            markeredgewidth=1.4,
            linestyle="none",
            zorder=5,
            clip_on=False,
        )
    lengths = sorted({point.length for points in lines.values() for point in points})
    axes.set_xlim(0, lengths[-1] * 1.06)
    marked = canvas.spread_out(lengths, 0.09 * lengths[-1])
    axes.set_xticks(marked, [f"{length:g}" for length in marked])
    axes.set_xlabel("actions in the trajectory")
    values = [value for points in lines.values() for one in points for value in (one.predicted, one.measured)]
    low, high = min([*values, 0.95]) / 1.04, max([*values, 1.05]) * 1.04
    axes.set_yscale("log")
    axes.set_ylim(low, high)
    canvas.factor_axis(axes.yaxis, low, high)
    drawing.title(axes, drawn(f"whole rollout ÷ {summary.baseline}, logarithmic", 60), 10.5)
    axes.grid(axis="y")
    handles = [drawing.handle(label, looks[label]) for label in lines]
    if crossings:
        ring = Line2D(
            [], [], marker="o", markersize=11, markerfacecolor="none", color=MUTED, linestyle="none"
        )
        ring.set_label("ranking reverses")
        handles.append(ring)
    canvas.legend(figure, handles, most=3)
    return figure

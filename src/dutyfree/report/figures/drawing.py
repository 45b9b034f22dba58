"""What several figures draw: marks with intervals, names of rows, entries of a legend."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.lines import Line2D

from dutyfree.analysis.statistics import Estimate
from dutyfree.report.palette import MUTED, PAPER, SubstrateLook, drawn


def dot(axes: Any, x: float, y: float, look: SubstrateLook, *, filled: bool = True, **options: Any) -> None:
    """One mark. It is hollow unless it is ``filled``."""
    defaults = {"marker": look.marker, "markersize": 6.5, "markeredgewidth": 1.6}
    face = look.colour if filled else PAPER
    axes.plot([x], [y], color=look.colour, markerfacecolor=face, zorder=4, **{**defaults, **options})


def dots(axes: Any, xs: Sequence[float], ys: Sequence[float], look: SubstrateLook) -> None:
    """The marks on a line. Those near the axis are not cut."""
    axes.plot(
        xs,
        ys,
        linestyle="none",
        marker=look.marker,
        markersize=6.5,
        color=look.colour,
        markeredgecolor=PAPER,
        markeredgewidth=0.8,
        zorder=4,
        clip_on=False,
    )


def interval(axes: Any, row: float, estimate: Estimate, look: SubstrateLook, **options: Any) -> None:
    """The interval of an estimate as a thick line, if it is known."""
    if estimate.low is not None and estimate.high is not None:
        ends = [estimate.low, estimate.high]
        axes.plot(ends, [row, row], color=look.colour, linewidth=4.5, **{"alpha": 0.45, **options})


def name_rows(axes: Any, names: Sequence[str]) -> None:
    """A row for each name, the first one at the top, without an axis line."""
    axes.set_yticks(range(len(names)), [drawn(name) for name in names])
    axes.set_ylim(len(names) - 0.45, -0.55)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)


def title(axes: Any, text: str, size: float = 11, **options: Any) -> None:
    axes.set_title(text, loc="left", fontsize=size, fontweight="bold", **options)


def say(axes: Any, row: float, text: str, colour: str = MUTED, x: float = 1.03, **options: Any) -> None:
    """A text in a row; by default at its right end."""
    axes.text(x, row, text, transform=axes.get_yaxis_transform(), va="center", color=colour, **options)


def handle(substrate: str, look: SubstrateLook, **options: Any) -> Any:
    """The entry of a substrate in a legend."""
    known = {"color": look.colour, "marker": look.marker, "linestyle": look.line, "label": drawn(substrate)}
    return Line2D([], [], **{**known, **options})


def filled_and_hollow(filled: str, hollow: str) -> list[Any]:
    """The entries of a legend for marks of two kinds."""
    return [
        Line2D([], [], marker="o", color=MUTED, linestyle="none", label=filled),
        Line2D([], [], marker="o", color=MUTED, markerfacecolor=PAPER, linestyle="none", label=hollow),
    ]

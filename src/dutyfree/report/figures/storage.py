"""Each substrate on the disk and in memory."""

from __future__ import annotations

from typing import Any

from matplotlib.lines import Line2D

from dutyfree.analysis.model import Cell, Summary
from dutyfree.analysis.units import duration
from dutyfree.report import canvas
from dutyfree.report.palette import INK, MUTED, PAPER, SubstrateLook, drawn, substrate_looks
from dutyfree.report.storage import compared_workloads, ratio_between, storage_pairs


def storage_by_substrate(summary: Summary) -> Any:
    """A panel for each workload, a row for each substrate. Filled: disk. Hollow: memory."""
    pairs = storage_pairs(summary)
    workloads = compared_workloads(summary)
    if not pairs or not workloads:
        return None
    looks = substrate_looks(summary)
    figure = canvas.new(0.6 + len(workloads) * (0.75 + 0.36 * len(pairs)))
    axes_of = figure.subplots(len(workloads), 1, squeeze=False)[:, 0]
    for axes, name in zip(axes_of, workloads, strict=True):
        cells = {cell.substrate: cell for cell in summary.lone(name) if cell.total}
        high = max(
            _high(cells[label]) for pair in pairs for label in (pair.disk, pair.memory) if label in cells
        )
        axes.set_xlim(0, high * 1.06)
        for row, pair in enumerate(pairs):
            look = looks[pair.disk]
            _mark(axes, row - 0.12, cells.get(pair.disk), look, filled=True)
            _mark(axes, row + 0.12, cells.get(pair.memory), look, filled=False)
            found = ratio_between(summary, name, pair.disk, pair.memory)
            text, colour = "no data", MUTED
            if found and found.ratio:
                difference = abs(cells[pair.disk].total.p50.value - cells[pair.memory].total.p50.value)  # type: ignore[union-attr]
                slower = "disk" if found.substrate == pair.disk else "memory"
                text, colour = (
                    (f"{slower} +{duration(difference)}", INK) if found.shown else ("none shown", MUTED)
                )
            axes.text(1.03, row, text, transform=axes.get_yaxis_transform(), va="center", color=colour)
        axes.set_yticks(range(len(pairs)), [drawn(pair.use) for pair in pairs])
        axes.set_ylim(len(pairs) - 0.45, -0.55)
        axes.tick_params(axis="y", length=0)
        axes.spines["left"].set_visible(False)
        axes.set_title(drawn(name, 40), loc="left", fontsize=11, fontweight="bold", pad=4)
        canvas.linear_duration_axis(axes.xaxis, high)
        axes.grid(axis="x")
    axes_of[-1].set_xlabel("p50 of the whole rollout")
    handles = [
        Line2D([], [], marker="o", color=MUTED, linestyle="none", label="disk"),
        Line2D([], [], marker="o", color=MUTED, markerfacecolor=PAPER, linestyle="none", label="memory"),
    ]
    canvas.legend(figure, handles, handletextpad=0.2)
    return figure


def _high(cell: Cell) -> float:
    assert cell.total is not None
    return cell.total.p50.high or cell.total.p50.value


def _mark(axes: Any, place: float, cell: Cell | None, look: SubstrateLook, *, filled: bool) -> None:
    if cell is None or cell.total is None:
        return
    middle = cell.total.p50
    if middle.low is not None and middle.high is not None:
        axes.plot([middle.low, middle.high], [place] * 2, color=look.colour, linewidth=4.5, alpha=0.45)
    axes.plot(
        [middle.value],
        [place],
        marker="o",
        markersize=7,
        color=look.colour,
        markerfacecolor=look.colour if filled else PAPER,
        markeredgewidth=1.6,
        zorder=4,
        clip_on=False,
    )

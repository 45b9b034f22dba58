"""Each substrate on the disk and in memory."""

from __future__ import annotations

from typing import Any

from dutyfree.analysis.model import Cell, Summary
from dutyfree.analysis.units import duration
from dutyfree.report import canvas
from dutyfree.report.figures import drawing
from dutyfree.report.palette import INK, MUTED, SubstrateLook, drawn, substrate_looks
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
            drawing.say(axes, row, text, colour)
        drawing.name_rows(axes, [pair.use for pair in pairs])
        drawing.title(axes, drawn(name, 40), pad=4)
        canvas.linear_duration_axis(axes.xaxis, high)
        axes.grid(axis="x")
    axes_of[-1].set_xlabel("p50 of the whole rollout")
    canvas.legend(figure, drawing.filled_and_hollow("disk", "memory"), handletextpad=0.2)
    return figure


def _high(cell: Cell) -> float:
    assert cell.total is not None
    return cell.total.p50.high or cell.total.p50.value


def _mark(axes: Any, place: float, cell: Cell | None, look: SubstrateLook, *, filled: bool) -> None:
    if cell is None or cell.total is None:
        return
    middle = cell.total.p50
    drawing.interval(axes, place, middle, look)
    drawing.dot(axes, middle.value, place, look, filled=filled, marker="o", markersize=7, clip_on=False)

"""What a synchronous training step waits for: the slowest of several rollouts."""

from __future__ import annotations

from typing import Any

from dutyfree.analysis.findings import Tail
from dutyfree.analysis.model import Summary
from dutyfree.report import canvas
from dutyfree.report.figures import drawing
from dutyfree.report.figures.rows import MANY, RowPanel, rows_of_marks
from dutyfree.report.palette import SubstrateLook, drawn, substrate_looks


def tail_workload(summary: Summary) -> str | None:
    """The longest trajectory with tails; otherwise the last workload with them."""
    found = {tail.workload for tail in summary.tails}
    return next(
        (name for name in [*reversed(summary.trajectories), *reversed(summary.workloads)] if name in found),
        None,
    )


def tails_of(summary: Summary, workload: str | None) -> list[Tail]:
    """The tails of the cells that figures show."""
    keys = {cell.key for cell in summary.lone(workload)} if workload else set()
    return [tail for tail in summary.tails if (tail.workload, tail.substrate, tail.parallel) in keys]


def waits_by_group(summary: Summary) -> Any:
    """The expected time of the slowest of 1, 8, 64 and 512 rollouts. Hollow: at least so long."""
    workload = tail_workload(summary)
    tails = [tail for tail in tails_of(summary, workload) if tail.substrate not in summary.controls]
    if workload is None or not tails:
        return None
    looks = substrate_looks(summary)
    groups = [wait.rollouts for wait in tails[0].waits]
    values = {tail.substrate: _values(summary, tail) for tail in tails}
    if len(tails) > MANY:
        return rows_of_marks(
            list(values),
            [looks[label] for label in values],
            [RowPanel(drawn(f"expected slowest, {workload}", 50), list(values.values()))],
            ["mean", *(f"of {group:,}" for group in groups)],
        )
    figure = canvas.new(3.3)
    axes: Any = figure.subplots()
    high = max(value for found in values.values() for value in found)
    for tail in tails:
        unsure = [False, *(wait.at_least for wait in tail.waits)]
        _line(axes, values[tail.substrate], unsure, looks[tail.substrate])
    axes.set_xticks(range(len(groups) + 1), ["1", *(f"{group:,}" for group in groups)])
    axes.set_xlim(-0.3, len(groups) + 0.3)
    axes.set_ylim(0, high * 1.06 or 1.0)
    canvas.linear_duration_axis(axes.yaxis, high)
    axes.set_xlabel("rollouts that a step waits for")
    drawing.title(axes, drawn(f"expected slowest, {workload}", 50), 10.5)
    axes.grid(axis="y")
    canvas.legend(figure, [drawing.handle(tail.substrate, looks[tail.substrate]) for tail in tails])
    return figure


def _values(summary: Summary, tail: Tail) -> list[float]:
    cell = summary.lone_cell(tail.workload, tail.substrate)
    assert cell is not None
    assert cell.total is not None
    return [cell.total.mean.value, *(wait.seconds.value for wait in tail.waits)]


def _line(axes: Any, values: list[float], unsure: list[bool], look: SubstrateLook) -> None:
    places = range(len(values))
    axes.plot(places, values, color=look.colour, linestyle=look.line, linewidth=1.8, zorder=3)
    for place, value, hollow in zip(places, values, unsure, strict=True):
        drawing.dot(axes, place, value, look, filled=not hollow, markeredgewidth=1.2, clip_on=False)

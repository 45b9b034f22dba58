"""Every trajectory relative to the baseline, also of other mixes and on other repositories."""

from __future__ import annotations

from typing import Any

from dutyfree.analysis.model import Summary
from dutyfree.report import canvas
from dutyfree.report.figures import drawing
from dutyfree.report.palette import INK, drawn, substrate_looks


def relative_times(summary: Summary) -> dict[str, dict[str, float]]:
    """Trajectory → substrate → p50 of the whole rollout ÷ that of the baseline.

    Empty unless there are trajectories of another mix or on another repository.
    """
    if not summary.mixes or summary.baseline is None:
        return {}
    found: dict[str, dict[str, float]] = {}
    for name in [*summary.trajectories, *summary.mixes]:
        base = summary.lone_cell(name, summary.baseline)
        if base is None or base.total is None or base.total.p50.value <= 0:
            continue
        values = {
            cell.substrate: cell.total.p50.value / base.total.p50.value
            for cell in summary.lone(name)
            if cell.total and cell.total.p50.value > 0 and cell.substrate not in summary.controls
        }
        if len(values) > 1:
            found[name] = values
    return found


def relative_by_workload(summary: Summary) -> Any:
    """A row for each trajectory, a mark for each substrate."""
    rows = relative_times(summary)
    if not rows:
        return None
    looks = substrate_looks(summary)
    figure = canvas.new(0.8 + 0.3 * len(rows))
    axes: Any = figure.subplots()
    axes.axvline(1.0, color=INK, linewidth=1.1)
    for row, values in enumerate(rows.values()):
        for label, value in values.items():
            look = looks[label]
            axes.plot([value], [row], marker=look.marker, markersize=6.5, color=look.colour, zorder=4)
    every = [value for values in rows.values() for value in values.values()]
    low, high = min([*every, 0.95]) / 1.08, max([*every, 1.05]) * 1.08
    axes.set_xscale("log")
    axes.set_xlim(low, high)
    canvas.factor_axis(axes.xaxis, low, high)
    drawing.name_rows(axes, list(rows))
    axes.grid(axis="x")
    axes.set_xlabel(drawn(f"whole rollout ÷ {summary.baseline}, logarithmic", 60))
    shown = dict.fromkeys(label for values in rows.values() for label in values)
    handles = [drawing.handle(label, looks[label], linestyle="none") for label in shown]
    canvas.legend(figure, handles, handletextpad=0.2)
    return figure

"""Tables of results: cold starts, components, trajectories, parallel rollouts, failures."""

from __future__ import annotations

from functools import partial
from typing import Any

from dutyfree.analysis.decomposition import COMPONENTS as COMPONENT_NAMES
from dutyfree.analysis.findings import Throughput
from dutyfree.analysis.model import Cell, Summary
from dutyfree.analysis.units import UNKNOWN, duration, percent, significant
from dutyfree.report.palette import COMPONENTS
from dutyfree.report.tables.table import (
    KEY,
    DataColumns,
    Table,
    cautions_on,
    lone_cells,
    make_table,
    p50,
    p95,
    quantity,
    value,
    where,
)


def cold_start(summary: Summary) -> Table:
    return make_table(
        "cold_start",
        "Cold start by tier",
        "Time from the request to the first command's result (first), and until the sandbox is "
        "removed (rollout). Brackets are 95 % intervals. n is the number of successful trials.",
        lone_cells(summary, summary.tiers),
        [
            ("tier", lambda cell: cell.workload),
            ("substrate", lambda cell: cell.substrate),
            ("first, p50", lambda cell: p50(cell.first_result)),
            ("first, p95", lambda cell: p95(cell.first_result)),
            ("rollout, p50", lambda cell: p50(cell.total)),
            ("rollout, p95", lambda cell: p95(cell.total)),
            ("n", _n),
        ],
        [*KEY, "succeeded", "failed", quantity("first_result"), quantity("total")],
        text_columns=2,
        marked=4,
        cautions=lambda cell: cautions_on(summary, cell, division=False),
        absent="No tier was measured.",
    )


def _n(cell: Cell) -> str:
    """The number of successful trials, and of failed ones."""
    return f"{cell.succeeded}, {cell.failed} failed" if cell.failed else str(cell.succeeded)


def decomposition(summary: Summary) -> Table:
    cells = [cell for cell in lone_cells(summary, summary.workloads) if cell.total]
    present = [name for name in COMPONENTS if any(_component(cell, name) != UNKNOWN for cell in cells)]
    return make_table(
        "decomposition",
        "Decomposition",
        "Mean time of each component over the middle half of the trials by total. A row adds up to "
        "its total. p50 and p95 of each component are in the CSV file.",
        cells,
        [
            ("workload", lambda cell: cell.workload),
            ("substrate", lambda cell: cell.substrate),
            ("total", lambda cell: duration(cell.typical_total)),
            *((COMPONENTS[name].title, partial(_component, name=name)) for name in present),
        ],
        [*KEY, "typical_total", *map(_component_data, COMPONENT_NAMES)],
        text_columns=2,
        marked=2,
        cautions=lambda cell: cautions_on(summary, cell),
        absent="No trial succeeded.",
    )


def _component(cell: Cell, name: str) -> str:
    if name in ("actions", "orchestration") and cell.undivided and cell.undivided == cell.actions:
        return "unknown"
    value = cell.composition.get(name, 0.0)
    # Sums of clock readings differ from the total by rounding errors.
    return UNKNOWN if abs(value) < 1e-9 else duration(value)


def _component_data(name: str) -> DataColumns:
    def values(cell: Cell) -> list[Any]:
        part = cell.components.get(name)
        mean = cell.composition.get(name)
        return [mean, part.p50.value if part else None, part.p95.value if part else None]

    return DataColumns([f"{name}_{what}" for what in ("mean", "p50", "p95")], values)


def trajectories(summary: Summary) -> Table:
    return make_table(
        "trajectories",
        "Trajectories",
        "Time of the whole rollout, the same divided by its number of actions, the orchestration "
        "of one action, and the share of orchestration in the rollout. The time until the last action's "
        "result, without cleanup, is in the CSV file.",
        lone_cells(summary, [*summary.trajectories, *summary.mixes]),
        [
            ("trajectory", lambda cell: cell.workload),
            ("substrate", lambda cell: cell.substrate),
            ("rollout, p50", lambda cell: p50(cell.total)),
            ("rollout, p95", lambda cell: p95(cell.total)),
            ("per action, p50", lambda cell: p50(cell.per_action)),
            ("orchestration per action, p50", lambda cell: p50(cell.orchestration_per_action)),
            ("p95", lambda cell: p95(cell.orchestration_per_action)),
            ("share", lambda cell: UNKNOWN if (share := _share(cell)) is None else percent(share)),
            ("n", _n),
        ],
        [
            *KEY,
            "actions",
            "succeeded",
            "failed",
            *map(quantity, ("last_result", "total", "per_action", "orchestration_per_action")),
            value("orchestration_share", _share),
        ],
        text_columns=2,
        marked=2,
        cautions=lambda cell: cautions_on(summary, cell),
        absent="No trajectory was measured.",
    )


def _share(cell: Cell) -> float | None:
    """The share of orchestration."""
    if cell.undivided or not cell.typical_total:
        return None
    return cell.composition["orchestration"] / cell.typical_total


def throughput(summary: Summary) -> Table:
    by_key = {cell.key: cell for cell in summary.cells}

    def cell_of(row: Throughput) -> Cell:
        return by_key[row.workload, row.substrate, row.parallel]

    return make_table(
        "throughput",
        "Rollouts in parallel",
        "Successful rollouts per second, while any rollout of the cell was running.",
        summary.throughput,
        [
            ("workload", lambda row: row.workload),
            ("substrate", lambda row: row.substrate),
            ("at once", lambda row: str(row.parallel)),
            ("rollouts/s", lambda row: significant(row.per_second)),
            ("running at once", lambda row: significant(row.at_once, 2)),
            ("rollout, p50", lambda row: p50(cell_of(row).total)),
            ("rollout, p95", lambda row: p95(cell_of(row).total)),
            ("n", lambda row: _n(cell_of(row))),
        ],
        [
            *KEY,
            "succeeded",
            "per_second",
            "at_once",
            "busy_seconds",
            quantity("total", lambda row: cell_of(row).total),
        ],
        text_columns=2,
        marked=3,
        cautions=lambda row: cautions_on(summary, cell_of(row), division=False),
    )


def failures(summary: Summary) -> Table:
    trials = {cell.key: cell.trials for cell in summary.cells}
    return make_table(
        "failures",
        "Failures",
        "All measured trials that failed. Infrastructure: the substrate failed. Task: a result was "
        "not as expected. Timeout: the trial or an action took too long.",
        summary.failures,
        [
            ("workload", lambda row: where(row.workload, row.parallel)),
            ("substrate", lambda row: row.substrate),
            ("kind", lambda row: row.kind),
            ("phase", lambda row: row.phase),
            ("cause", lambda row: row.cause),
            ("trials", lambda row: f"{row.count} of {trials[row.workload, row.substrate, row.parallel]}"),
        ],
        [*KEY, "kind", "phase", "cause", "count"],
        text_columns=5,
        marked=5,
        absent="None: every measured trial succeeded." if summary.trials else "No trial was measured.",
    )

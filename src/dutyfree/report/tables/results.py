"""Tables of results: cold starts, components, trajectories, parallel rollouts, failures."""

from __future__ import annotations

from typing import Any

from dutyfree.analysis.decomposition import COMPONENTS as COMPONENT_NAMES
from dutyfree.analysis.model import Cell, Summary
from dutyfree.analysis.units import UNKNOWN, duration, percent, significant
from dutyfree.report import phrases
from dutyfree.report.palette import COMPONENTS
from dutyfree.report.tables.table import (
    Row,
    Table,
    cautions_on,
    lone_cells,
    p50_p95,
    quantity_data,
    quantity_header,
    where,
)


def cold_start(summary: Summary) -> Table:
    return Table(
        name="cold_start",
        title="Cold start by tier",
        caption="Time from the request to the first command's result (first), and until the sandbox is "
        "removed (rollout). Brackets are 95 % intervals. n is the number of successful trials.",
        header=[
            "tier",
            "substrate",
            "first, p50",
            "first, p95",
            "rollout, p50",
            "rollout, p95",
            "n",
        ],
        text_columns=2,
        marked=4,
        data_header=[
            "workload",
            "substrate",
            "parallel",
            "succeeded",
            "failed",
            *quantity_header("first_result"),
            *quantity_header("total"),
        ],
        rows=[
            Row(
                [
                    cell.workload,
                    cell.substrate,
                    *p50_p95(cell.first_result),
                    *p50_p95(cell.total),
                    _n(cell),
                ],
                [
                    *cell.key,
                    cell.succeeded,
                    cell.failed,
                    *quantity_data(cell.first_result),
                    *quantity_data(cell.total),
                ],
                cautions_on(summary, cell, division=False),
            )
            for cell in lone_cells(summary, summary.tiers)
        ],
        absent="No tier was measured.",
    )


def _n(cell: Cell) -> str:
    """The number of successful trials, and of failed ones."""
    return f"{cell.succeeded}, {cell.failed} failed" if cell.failed else str(cell.succeeded)


def decomposition(summary: Summary) -> Table:
    cells = [cell for cell in lone_cells(summary, summary.workloads) if cell.total]
    present = [name for name in COMPONENTS if any(_component(cell, name) != UNKNOWN for cell in cells)]
    return Table(
        name="decomposition",
        title="Decomposition",
        caption="Mean time of each component over the middle half of the trials by total. A row adds up to "
        "its total. p50 and p95 of each component are in the CSV file.",
        header=["workload", "substrate", "total", *(COMPONENTS[name].title for name in present)],
        text_columns=2,
        marked=2,
        data_header=[
            "workload",
            "substrate",
            "parallel",
            "typical_total",
            *(f"{name}_{what}" for name in COMPONENT_NAMES for what in ("mean", "p50", "p95")),
        ],
        rows=[
            Row(
                [
                    cell.workload,
                    cell.substrate,
                    duration(cell.typical_total),
                    *(_component(cell, name) for name in present),
                ],
                [
                    *cell.key,
                    cell.typical_total,
                    *(value for name in COMPONENT_NAMES for value in _component_data(cell, name)),
                ],
                cautions_on(summary, cell),
            )
            for cell in cells
        ],
        absent="No trial succeeded.",
    )


def _component(cell: Cell, name: str) -> str:
    if name in ("actions", "orchestration") and cell.undivided and cell.undivided == cell.actions:
        return "unknown"
    value = cell.composition.get(name, 0.0)
    # Sums of clock readings differ from the total by rounding errors.
    return UNKNOWN if abs(value) < 1e-9 else duration(value)


def _component_data(cell: Cell, name: str) -> list[Any]:
    part = cell.components.get(name)
    return [cell.composition.get(name), part.p50.value if part else None, part.p95.value if part else None]


def trajectories(summary: Summary) -> Table:
    return Table(
        name="trajectories",
        title="Trajectories",
        caption="Time of the whole rollout, the same divided by its number of actions, the orchestration "
        "of one action, and the share of orchestration in the rollout. The time until the last action's "
        "result, without cleanup, is in the CSV file.",
        header=[
            "trajectory",
            "substrate",
            "rollout, p50",
            "rollout, p95",
            "per action, p50",
            "orchestration per action, p50",
            "p95",
            "share",
            "n",
        ],
        text_columns=2,
        marked=2,
        data_header=[
            "workload",
            "substrate",
            "parallel",
            "actions",
            "succeeded",
            "failed",
            *quantity_header("last_result"),
            *quantity_header("total"),
            *quantity_header("per_action"),
            *quantity_header("orchestration_per_action"),
            "orchestration_share",
        ],
        rows=[
            Row(
                [
                    cell.workload,
                    cell.substrate,
                    *p50_p95(cell.total),
                    phrases.seconds(cell.per_action.p50 if cell.per_action else None),
                    *p50_p95(cell.orchestration_per_action),
                    UNKNOWN if (share := _orchestration_share(cell)) is None else percent(share),
                    _n(cell),
                ],
                [
                    *cell.key,
                    cell.actions,
                    cell.succeeded,
                    cell.failed,
                    *quantity_data(cell.last_result),
                    *quantity_data(cell.total),
                    *quantity_data(cell.per_action),
                    *quantity_data(cell.orchestration_per_action),
                    _orchestration_share(cell),
                ],
                cautions_on(summary, cell),
            )
            for cell in lone_cells(summary, [*summary.trajectories, *summary.mixes])
        ],
        absent="No trajectory was measured.",
    )


def _orchestration_share(cell: Cell) -> float | None:
    if cell.undivided or not cell.typical_total:
        return None
    return cell.composition["orchestration"] / cell.typical_total


def throughput(summary: Summary) -> Table:
    by_key = {cell.key: cell for cell in summary.cells}
    return Table(
        name="throughput",
        title="Rollouts in parallel",
        caption="Successful rollouts per second, while any rollout of the cell was running.",
        header=[
            "workload",
            "substrate",
            "at once",
            "rollouts/s",
            "running at once",
            "rollout, p50",
            "rollout, p95",
            "n",
        ],
        text_columns=2,
        marked=3,
        data_header=[
            "workload",
            "substrate",
            "parallel",
            "succeeded",
            "per_second",
            "at_once",
            "busy_seconds",
            *quantity_header("total"),
        ],
        rows=[
            Row(
                [
                    row.workload,
                    row.substrate,
                    str(row.parallel),
                    significant(row.per_second),
                    significant(row.at_once, 2),
                    *p50_p95(cell.total),
                    _n(cell),
                ],
                [
                    *cell.key,
                    row.succeeded,
                    row.per_second,
                    row.at_once,
                    row.busy_seconds,
                    *quantity_data(cell.total),
                ],
                cautions_on(summary, cell, division=False),
            )
            for row in summary.throughput
            for cell in [by_key[row.workload, row.substrate, row.parallel]]
        ],
    )


def failures(summary: Summary) -> Table:
    return Table(
        name="failures",
        title="Failures",
        caption="All measured trials that failed. Infrastructure: the substrate failed. Task: a result was "
        "not as expected. Timeout: the trial or an action took too long.",
        header=["workload", "substrate", "kind", "phase", "cause", "trials"],
        text_columns=5,
        marked=5,
        data_header=["workload", "substrate", "parallel", "kind", "phase", "cause", "count"],
        rows=[
            Row(
                [
                    where(row.workload, row.parallel),
                    row.substrate,
                    row.kind,
                    row.phase,
                    row.cause,
                    f"{row.count} of {_trials(summary, (row.workload, row.substrate, row.parallel))}",
                ],
                [row.workload, row.substrate, row.parallel, row.kind, row.phase, row.cause, row.count],
            )
            for row in summary.failures
        ],
        absent="None: every measured trial succeeded." if summary.trials else "No trial was measured.",
    )


def _trials(summary: Summary, key: tuple[str, str, int]) -> int:
    return next(cell.trials for cell in summary.cells if cell.key == key)

"""The tables: for people as text with notes, for programs as CSV with full numbers."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from dutyfree.analysis.decomposition import COMPONENTS as COMPONENT_NAMES
from dutyfree.analysis.model import Caution, CautionKind, Cell, Summary
from dutyfree.analysis.statistics import Estimate, Quantity
from dutyfree.analysis.units import UNKNOWN, count, duration, hours, percent, plural, significant
from dutyfree.report import wording
from dutyfree.report.palette import COMPONENTS

DIVISION = frozenset({CautionKind.STAND_IN, CautionKind.UNDIVIDED})
"""Cautions that concern only numbers of the decomposition."""


class Row(msgspec.Struct, frozen=True):
    shown: list[str]
    data: list[Any]
    """The same for CSV: raw seconds, fractions and counts."""
    cautions: list[Caution] = []


class Table(msgspec.Struct, frozen=True):
    name: str
    """Of the CSV file."""
    title: str
    caption: str
    header: list[str]
    text_columns: int
    """So many of the first columns are names, the others numbers."""
    marked: int
    """The column whose number bears the marks of the row's cautions."""
    data_header: list[str]
    rows: list[Row]
    absent: str = ""
    """What to say when there is no row."""

    def csv(self) -> bytes:
        buffer = io.StringIO(newline="")
        writer = csv.writer(buffer, lineterminator="\n")
        writer.writerow(self.data_header)
        writer.writerows(row.data for row in self.rows)
        return buffer.getvalue().encode()


def tables(summary: Summary) -> dict[str, Table]:
    """By name, in the order of the report."""
    makers: tuple[Callable[[Summary], Table], ...] = (
        cold_start,
        decomposition,
        trajectories,
        tax,
        table1,
        table2,
        worker_hours,
        ratios,
        failures,
    )
    made = [maker(summary) for maker in makers]
    if summary.throughput:
        made.append(throughput(summary))
    return {table.name: table for table in made}


def cold_start(summary: Summary) -> Table:
    return Table(
        name="cold_start",
        title="Cold start by tier",
        caption="From the request to the first command's result, and the whole fresh episode with its "
        "removal. Brackets hold 95 % intervals; n counts successful trials.",
        header=[
            "tier",
            "substrate",
            "n",
            "failed",
            "first, p50",
            "first, p95",
            "episode, p50",
            "episode, p95",
        ],
        text_columns=2,
        marked=6,
        data_header=[
            "workload",
            "substrate",
            "parallel",
            "succeeded",
            "failed",
            *_quantity_header("first_result"),
            *_quantity_header("total"),
        ],
        rows=[
            Row(
                [
                    cell.workload,
                    cell.substrate,
                    str(cell.succeeded),
                    str(cell.failed),
                    *_p50_p95(cell.first_result),
                    *_p50_p95(cell.total),
                ],
                [
                    *cell.key,
                    cell.succeeded,
                    cell.failed,
                    *_quantity_data(cell.first_result),
                    *_quantity_data(cell.total),
                ],
                _cautions(summary, cell, division=False),
            )
            for cell in _lone(summary, summary.tiers)
        ],
        absent="No tier was measured.",
    )


def decomposition(summary: Summary) -> Table:
    return Table(
        name="decomposition",
        title="Decomposition",
        caption="Mean time of each component over the middle half of the trials by total; a row adds up to "
        "its total. p50 and p95 of each component are in the CSV.",
        header=["workload", "substrate", "total", *(look.title for look in COMPONENTS.values())],
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
                    *(_component(cell, name) for name in COMPONENTS),
                ],
                [
                    *cell.key,
                    cell.typical_total,
                    *(value for name in COMPONENT_NAMES for value in _component_data(cell, name)),
                ],
                _cautions(summary, cell),
            )
            for cell in _lone(summary, summary.workloads)
            if cell.total
        ],
        absent="No trial succeeded.",
    )


def _component(cell: Cell, name: str) -> str:
    if name in ("actions", "orchestration") and cell.undivided and cell.undivided == cell.actions:
        return "unknown"
    value = cell.composition.get(name, 0.0)
    # Sums of clock readings differ from the total by rounding.
    return UNKNOWN if abs(value) < 1e-9 else duration(value)


def _component_data(cell: Cell, name: str) -> list[Any]:
    part = cell.components.get(name)
    return [cell.composition.get(name), part.p50.value if part else None, part.p95.value if part else None]


def trajectories(summary: Summary) -> Table:
    return Table(
        name="trajectories",
        title="Trajectories",
        caption="The whole rollout, the same divided by its actions, and what orchestration adds to one.",
        header=[
            "actions",
            "substrate",
            "n",
            "failed",
            "rollout, p50",
            "rollout, p95",
            "per action, p50",
            "orchestration per action, p50",
            "p95",
            "orchestration, share",
        ],
        text_columns=2,
        marked=4,
        data_header=[
            "workload",
            "substrate",
            "parallel",
            "actions",
            "succeeded",
            "failed",
            *_quantity_header("total"),
            *_quantity_header("per_action"),
            *_quantity_header("orchestration_per_action"),
            "orchestration_share",
        ],
        rows=[
            Row(
                [
                    str(cell.actions),
                    cell.substrate,
                    str(cell.succeeded),
                    str(cell.failed),
                    *_p50_p95(cell.total),
                    wording.seconds(cell.per_action.p50 if cell.per_action else None),
                    *_p50_p95(cell.orchestration_per_action),
                    UNKNOWN if (share := _orchestration_share(cell)) is None else percent(share),
                ],
                [
                    *cell.key,
                    cell.actions,
                    cell.succeeded,
                    cell.failed,
                    *_quantity_data(cell.total),
                    *_quantity_data(cell.per_action),
                    *_quantity_data(cell.orchestration_per_action),
                    _orchestration_share(cell),
                ],
                _cautions(summary, cell),
            )
            for cell in _lone(summary, summary.trajectories)
        ],
        absent="No trajectory was measured.",
    )


def _orchestration_share(cell: Cell) -> float | None:
    if cell.undivided or not cell.typical_total:
        return None
    return cell.composition["orchestration"] / cell.typical_total


def tax(summary: Summary) -> Table:
    shown = [row for row in summary.taxes if row.workload in summary.workloads]
    return Table(
        name="tax",
        title="The tax over bare",
        caption="p50 of the whole rollout less that of the same rollout run bare on the same machine; the "
        "rate is their ratio less one.",
        header=["workload", "substrate", "at once", "tax", "rate", "tax per action"],
        text_columns=2,
        marked=3,
        data_header=[
            "workload",
            "substrate",
            "parallel",
            *_estimate_header("tax_seconds"),
            *_estimate_header("tax_rate"),
            *_estimate_header("tax_per_action"),
        ],
        rows=[
            Row(
                [
                    row.workload,
                    row.substrate,
                    str(row.parallel),
                    wording.seconds(row.seconds),
                    wording.rate(row.rate),
                    wording.seconds(row.per_action),
                ],
                [
                    row.workload,
                    row.substrate,
                    row.parallel,
                    *_estimate_data(row.seconds),
                    *_estimate_data(row.rate),
                    *_estimate_data(row.per_action),
                ],
                _tax_cautions(summary, row.workload, row.substrate, row.parallel),
            )
            for row in shown
        ],
        absent="Nothing was measured beside bare, or bare itself was not: there is no tax to show.",
    )


def _tax_cautions(summary: Summary, workload: str, substrate: str, parallel: int) -> list[Caution]:
    labels = (substrate, summary.baseline)
    return [
        caution
        for label in labels
        for caution in summary.cautions_on(workload, label, parallel)
        if caution.kind not in DIVISION and caution.kind != CautionKind.UNSURE_TAIL
    ]


def table1(summary: Summary) -> Table:
    return Table(
        name="table1",
        title="Table 1. What a little costs at scale",
        caption="Arithmetic, the same for every substrate: extra time per rollout or action, in hours.",
        header=["extra", "scale", "added worker-hours"],
        text_columns=2,
        marked=2,
        data_header=["extra", "seconds", "per", "rollouts", "actions", "hours"],
        rows=[
            Row(
                [
                    price.extra,
                    _scale(price.rollouts, price.actions if price.per == "action" else None),
                    hours(price.hours),
                ],
                [price.extra, price.seconds, price.per, price.rollouts, price.actions, price.hours],
            )
            for price in summary.prices
        ],
    )


def _scale(rollouts: int, actions: int | None) -> str:
    told = f"{count(rollouts)} rollouts"
    return told if actions is None else f"{told} of {plural(actions, 'action')}"


def table2(summary: Summary) -> Table:
    return Table(
        name="table2",
        title="Table 2. Slowest against fastest",
        caption="p50 of the whole rollout, and the worker-hours of one million of them.",
        header=[
            "workload",
            "slowest",
            "fastest",
            "slowest, each",
            "fastest, each",
            "difference, each",
            "ratio",
            "slowest, 1 M",
            "fastest, 1 M",
            "difference, 1 M",
        ],
        text_columns=3,
        marked=5,
        data_header=[
            "workload",
            "actions",
            "slowest",
            "fastest",
            *_estimate_header("slowest_seconds"),
            *_estimate_header("fastest_seconds"),
            *_estimate_header("difference_seconds"),
            *_estimate_header("ratio"),
            "rollouts",
            *_estimate_header("slowest_hours"),
            *_estimate_header("fastest_hours"),
            *_estimate_header("difference_hours"),
        ],
        rows=[
            Row(
                [
                    row.workload,
                    row.slowest,
                    row.fastest,
                    duration(row.slowest_seconds.value),
                    duration(row.fastest_seconds.value),
                    wording.seconds(row.difference),
                    wording.multiple(row.ratio),
                    hours(row.hours(row.slowest_seconds).value),
                    hours(row.hours(row.fastest_seconds).value),
                    wording.worker_hours(row.hours(row.difference)),
                ],
                [
                    row.workload,
                    row.actions,
                    row.slowest,
                    row.fastest,
                    *_estimate_data(row.slowest_seconds),
                    *_estimate_data(row.fastest_seconds),
                    *_estimate_data(row.difference),
                    *_estimate_data(row.ratio),
                    row.rollouts,
                    *_estimate_data(row.hours(row.slowest_seconds)),
                    *_estimate_data(row.hours(row.fastest_seconds)),
                    *_estimate_data(row.hours(row.difference)),
                ],
                [
                    caution
                    for label in (row.slowest, row.fastest)
                    for cell in [summary.lone_cell(row.workload, label)]
                    if cell
                    for caution in _cautions(summary, cell, division=False)
                    if caution.kind != CautionKind.UNSURE_TAIL
                ],
            )
            for row in summary.spreads
        ],
        absent="Fewer than two substrates succeeded: there is nothing to compare.",
    )


def worker_hours(summary: Summary) -> Table:
    names = summary.trajectories or summary.workloads[-1:]
    scales = list(dict.fromkeys(row.rollouts for row in summary.projections))
    by_key = {(row.workload, row.substrate, row.rollouts): row for row in summary.projections}
    pairs = list(dict.fromkeys((row.workload, row.substrate) for row in summary.projections))
    return Table(
        name="worker_hours",
        title="Worker-hours at scale",
        caption="N·T/3600, with T the p50 of the whole rollout and its interval.",
        header=["workload", "substrate", *(count(scale) for scale in scales)],
        text_columns=2,
        marked=2,
        data_header=["workload", "substrate", *(f"{scale}_{what}" for scale in scales for what in _BOUNDS)],
        rows=[
            Row(
                [
                    workload,
                    label,
                    *(wording.worker_hours(by_key[workload, label, scale].hours) for scale in scales),
                ],
                [
                    workload,
                    label,
                    *(
                        value
                        for scale in scales
                        for value in _estimate_data(by_key[workload, label, scale].hours)
                    ),
                ],
                [
                    caution
                    for cell in [summary.lone_cell(workload, label)]
                    if cell
                    for caution in _cautions(summary, cell, division=False)
                    if caution.kind != CautionKind.UNSURE_TAIL
                ],
            )
            for workload, label in pairs
            if workload in names
        ],
        absent="No trial succeeded.",
    )


def ratios(summary: Summary) -> Table:
    titles = {
        "first_result": "first command",
        "total": "whole rollout",
        "orchestration_per_action": "orchestration",
    }
    return Table(
        name="ratios",
        title="Ratios between substrates",
        caption="p50 of the slower over p50 of the faster; p of a two-sided Mann-Whitney test, Holm-"
        "corrected over all ratios of this report; a dash where samples of these sizes cannot be significant.",
        header=["workload", "metric", "slower", "faster", "at once", "ratio", "p"],
        text_columns=4,
        marked=5,
        data_header=[
            "workload",
            "parallel",
            "metric",
            "slower",
            "faster",
            *_estimate_header("ratio"),
            "p_holm",
        ],
        rows=[
            Row(
                [
                    row.workload,
                    titles[row.metric],
                    row.substrate,
                    row.base,
                    str(row.parallel),
                    wording.multiple(row.ratio),
                    _p(row.p),
                ],
                [
                    row.workload,
                    row.parallel,
                    row.metric,
                    row.substrate,
                    row.base,
                    *_estimate_data(row.ratio),
                    row.p,
                ],
            )
            for row in summary.ratios
        ],
        absent="Fewer than two substrates succeeded: there is nothing to compare.",
    )


def _p(value: float | None) -> str:
    if value is None:
        return UNKNOWN
    return "< 0.001" if value < 0.001 else significant(value, 2)


def failures(summary: Summary) -> Table:
    return Table(
        name="failures",
        title="Failures",
        caption="Every measured trial that gave no result. Infrastructure: the substrate failed. Task: a "
        "wrong answer. Timeout: it overran.",
        header=["workload", "substrate", "kind", "phase", "cause", "at once", "trials"],
        text_columns=5,
        marked=6,
        data_header=["workload", "substrate", "parallel", "kind", "phase", "cause", "count"],
        rows=[
            Row(
                [
                    row.workload,
                    row.substrate,
                    row.kind,
                    row.phase,
                    row.cause,
                    str(row.parallel),
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


def throughput(summary: Summary) -> Table:
    by_key = {cell.key: cell for cell in summary.cells}
    return Table(
        name="throughput",
        title="Rollouts in parallel",
        caption="Successful rollouts a second, over the time in which any rollout of the cell was under way.",
        header=[
            "workload",
            "substrate",
            "at once",
            "n",
            "rollouts/s",
            "truly at once",
            "rollout, p50",
            "rollout, p95",
        ],
        text_columns=2,
        marked=4,
        data_header=[
            "workload",
            "substrate",
            "parallel",
            "succeeded",
            "per_second",
            "at_once",
            "busy_seconds",
            *_quantity_header("total"),
        ],
        rows=[
            Row(
                [
                    row.workload,
                    row.substrate,
                    str(row.parallel),
                    str(row.succeeded),
                    significant(row.per_second),
                    significant(row.at_once, 2),
                    *_p50_p95(cell.total),
                ],
                [
                    *cell.key,
                    row.succeeded,
                    row.per_second,
                    row.at_once,
                    row.busy_seconds,
                    *_quantity_data(cell.total),
                ],
                _cautions(summary, cell, division=False),
            )
            for row in summary.throughput
            for cell in [by_key[row.workload, row.substrate, row.parallel]]
        ],
    )


def _lone(summary: Summary, workloads: Iterable[str]) -> list[Cell]:
    return [cell for name in workloads for cell in summary.lone(name)]


def _cautions(summary: Summary, cell: Cell, *, division: bool = True) -> list[Caution]:
    found = summary.cautions_on(*cell.key)
    return found if division else [caution for caution in found if caution.kind not in DIVISION]


def _p50_p95(quantity: Quantity | None) -> list[str]:
    if quantity is None:
        return [UNKNOWN, UNKNOWN]
    return [wording.seconds(quantity.p50), wording.seconds(quantity.p95)]


_BOUNDS = ("value", "low", "high")


def _estimate_header(name: str) -> list[str]:
    return [name, f"{name}_low", f"{name}_high"]


def _estimate_data(estimate: Estimate | None) -> list[float | None]:
    return [None] * 3 if estimate is None else [estimate.value, estimate.low, estimate.high]


def _quantity_header(name: str) -> list[str]:
    return [*_estimate_header(f"{name}_p50"), *_estimate_header(f"{name}_p95")]


def _quantity_data(quantity: Quantity | None) -> list[float | None]:
    if quantity is None:
        return [None] * 6
    return [*_estimate_data(quantity.p50), *_estimate_data(quantity.p95)]

"""Tables of costs: the tax, the ratios between substrates, worker-hours at scale."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

from dutyfree.analysis.findings import Projection, Ratio, Spread, Tax
from dutyfree.analysis.model import Caution, Summary
from dutyfree.analysis.projection import MILLION
from dutyfree.analysis.statistics import Estimate
from dutyfree.analysis.units import UNKNOWN, count, duration, hours, multiple, plural, significant
from dutyfree.report import phrases
from dutyfree.report.tables.table import (
    KEY,
    DataColumns,
    Table,
    estimate,
    estimate_data,
    make_table,
    middle_cautions,
    value,
    where,
)

_BOUNDS = ("value", "low", "high")


def tax(summary: Summary) -> Table:
    return make_table(
        "tax",
        "The tax over bare",
        "p50 of the whole rollout minus the p50 of the same rollout on bare, on the same machine, "
        "and with the same storage if that was measured. The rate is their ratio minus 1. The last column "
        "says whether it counts as a difference.",
        [row for row in summary.taxes if row.workload in summary.workloads],
        [
            ("workload", lambda row: where(row.workload, row.parallel)),
            ("substrate", lambda row: row.substrate),
            ("over", lambda row: row.base),
            ("tax", lambda row: phrases.seconds(row.seconds)),
            ("rate", lambda row: phrases.rate(row.rate)),
            ("tax per action", lambda row: phrases.seconds(row.per_action)),
            ("difference", lambda row: phrases.verdict(row.shown, row.why)),
        ],
        [
            *KEY,
            "base",
            estimate("tax_seconds", lambda row: row.seconds),
            estimate("tax_rate", lambda row: row.rate),
            estimate("tax_per_action", lambda row: row.per_action),
            value("p_holm", lambda row: row.p),
            "shown",
        ],
        text_columns=3,
        marked=3,
        cautions=lambda row: _cautions_of_both(summary, row),
        absent="There is no tax to show: it needs trials on bare and on another substrate.",
    )


def _cautions_of_both(summary: Summary, row: Tax | Ratio) -> list[Caution]:
    return [
        caution
        for label in (row.substrate, row.base)
        for caution in middle_cautions(summary, (row.workload, label, row.parallel))
    ]


def table1(summary: Summary) -> Table:
    return make_table(
        "table1",
        "Table 1. What a small extra time costs at scale",
        "Arithmetic, the same for every substrate: extra time per rollout or action, in worker-hours.",
        summary.prices,
        [
            ("extra", lambda price: price.extra),
            (
                "scale",
                lambda price: _scale(price.rollouts, price.actions if price.per == "action" else None),
            ),
            ("added hours", lambda price: hours(price.hours)),
        ],
        ["extra", "seconds", "per", "rollouts", "actions", "hours"],
        text_columns=2,
        marked=2,
    )


def _scale(rollouts: int, actions: int | None) -> str:
    # Short, so that the hours beside it fit on a phone.
    text = "1 M rollouts" if rollouts == MILLION else f"{count(rollouts)} rollouts"
    return text if actions is None else f"{text} of {plural(actions, 'action')}"


class _Spread(NamedTuple):
    row: Spread
    slowest: Estimate
    fastest: Estimate
    difference: Estimate
    """These three are worker-hours."""


def table2(summary: Summary) -> Table:
    return make_table(
        "table2",
        "Table 2. The slowest and the fastest substrate",
        "p50 of the whole rollout, and the worker-hours of one million rollouts by its mean. If the plan has "
        "substrates on disk and in memory, the two are on the same storage.",
        [_Spread(row, *mean_hours(row)) for row in summary.spreads],
        [
            ("workload", lambda one: one.row.workload),
            ("slowest", lambda one: one.row.slowest),
            ("fastest", lambda one: one.row.fastest),
            ("slowest, each", lambda one: duration(one.row.slowest_seconds.value)),
            ("fastest, each", lambda one: duration(one.row.fastest_seconds.value)),
            ("difference, each", lambda one: phrases.seconds(one.row.difference)),
            ("ratio", lambda one: multiple(one.row.ratio)),
            ("slowest, 1 M", lambda one: hours(one.slowest.value)),
            ("fastest, 1 M", lambda one: hours(one.fastest.value)),
            ("difference, 1 M", lambda one: phrases.worker_hours(one.difference)),
        ],
        [
            *("row.workload", "row.actions", "row.slowest", "row.fastest"),
            estimate("row.slowest_seconds"),
            estimate("row.fastest_seconds"),
            estimate("difference_seconds", lambda one: one.row.difference),
            estimate("row.ratio"),
            "row.rollouts",
            estimate("slowest_hours", lambda one: one.slowest),
            estimate("fastest_hours", lambda one: one.fastest),
            estimate("difference_hours", lambda one: one.difference),
        ],
        text_columns=3,
        marked=5,
        cautions=lambda one: _lone_cautions(summary, one.row.workload, one.row.slowest, one.row.fastest),
        absent="There is nothing to compare: fewer than two substrates succeeded.",
    )


def mean_hours(row: Spread) -> tuple[Estimate, Estimate, Estimate]:
    """The worker-hours of the slowest, of the fastest, and their difference, by means."""
    return (
        row.hours(row.slowest_mean or row.slowest_seconds),
        row.hours(row.fastest_mean or row.fastest_seconds),
        row.hours(row.mean_difference or row.difference),
    )


def _lone_cautions(summary: Summary, workload: str, *labels: str) -> list[Caution]:
    """Cautions about the p50 of the whole rollout, in the cells that figures show."""
    cells = (summary.lone_cell(workload, label) for label in labels)
    return [caution for cell in cells if cell for caution in middle_cautions(summary, cell.key)]


class _Projected(NamedTuple):
    workload: str
    substrate: str
    by_scale: dict[int, Projection]


def worker_hours(summary: Summary) -> Table:
    names = [*summary.trajectories, *summary.mixes] or summary.workloads[-1:]
    scales = list(dict.fromkeys(row.rollouts for row in summary.projections))
    found: dict[tuple[str, str], dict[int, Projection]] = {}
    for row in summary.projections:
        found.setdefault((row.workload, row.substrate), {})[row.rollouts] = row
    return make_table(
        "worker_hours",
        "Worker-hours at scale",
        "N·T/3600 for N rollouts, where T is the mean of the whole rollout: a sum needs means. "
        "Brackets are 95 % intervals. For comparison, the last column takes the p50 as T.",
        [_Projected(*key, by_scale) for key, by_scale in found.items() if key[0] in names],
        [
            ("workload", lambda row: row.workload),
            ("substrate", lambda row: row.substrate),
            *((count(scale), partial(_hours, scale=scale)) for scale in scales),
            *((f"{count(scale)}, by p50", partial(_hours_by_p50, scale=scale)) for scale in _shown(scales)),
        ],
        [
            "workload",
            "substrate",
            *(_bounds(f"{scale}", scale, "hours") for scale in scales),
            *(_bounds(f"{scale}_p50", scale, "typical_hours") for scale in scales),
        ],
        text_columns=2,
        marked=2,
        cautions=lambda row: _lone_cautions(summary, row.workload, row.substrate),
        absent="No trial succeeded.",
    )


def _hours(row: _Projected, scale: int) -> str:
    return phrases.worker_hours(row.by_scale[scale].hours)


def _hours_by_p50(row: _Projected, scale: int) -> str:
    return phrases.worker_hours(row.by_scale[scale].typical_hours)


def _bounds(name: str, scale: int, field: str) -> DataColumns:
    return DataColumns(
        [f"{name}_{what}" for what in _BOUNDS],
        lambda row: estimate_data(getattr(row.by_scale[scale], field)),
    )


def _shown(scales: list[int]) -> list[int]:
    """The scale of the column by p50, if there is any."""
    return [MILLION] if MILLION in scales else scales[-1:]


def ratios(summary: Summary) -> Table:
    titles = {
        "first_result": "first command",
        "total": "whole rollout",
        "orchestration_per_action": "orchestration",
    }
    return make_table(
        "ratios",
        "Ratios between substrates",
        "p50 of the slower ÷ p50 of the faster. p belongs to the interval, with Holm's correction "
        "over all ratios; a dash means that there are too few rounds for a test. The last column says "
        "whether it counts as a difference.",
        summary.ratios,
        [
            ("workload", lambda row: where(row.workload, row.parallel)),
            ("metric", lambda row: titles[row.metric]),
            ("slower", lambda row: row.substrate),
            ("faster", lambda row: row.base),
            ("ratio", lambda row: multiple(row.ratio)),
            ("p", lambda row: _p(row.p)),
            ("difference", lambda row: phrases.verdict(row.shown, row.why)),
        ],
        [
            *("workload", "parallel", "metric"),
            value("slower", lambda row: row.substrate),
            value("faster", lambda row: row.base),
            estimate("ratio"),
            value("p_holm", lambda row: row.p),
            "shown",
        ],
        text_columns=4,
        marked=4,
        cautions=lambda row: _cautions_of_both(summary, row),
        absent="There is nothing to compare: fewer than two substrates succeeded.",
    )


def _p(value: float | None) -> str:
    if value is None:
        return UNKNOWN
    return "< 0.001" if value < 0.001 else significant(value, 2)

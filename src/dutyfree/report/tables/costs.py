"""Tables of costs: the tax, the ratios between substrates, worker-hours at scale."""

from __future__ import annotations

from dutyfree.analysis.findings import Spread
from dutyfree.analysis.model import Caution, Summary
from dutyfree.analysis.projection import MILLION
from dutyfree.analysis.statistics import Estimate
from dutyfree.analysis.units import UNKNOWN, count, duration, hours, multiple, plural, significant
from dutyfree.report import phrases
from dutyfree.report.tables.table import (
    Row,
    Table,
    estimate_data,
    estimate_header,
    middle_cautions,
    where,
)

_BOUNDS = ("value", "low", "high")


def tax(summary: Summary) -> Table:
    shown = [row for row in summary.taxes if row.workload in summary.workloads]
    return Table(
        name="tax",
        title="The tax over bare",
        caption="p50 of the whole rollout minus the p50 of the same rollout on bare, on the same machine, "
        "and with the same storage if that was measured. The rate is their ratio minus 1. The last column "
        "says whether it counts as a difference.",
        header=["workload", "substrate", "over", "tax", "rate", "tax per action", "difference"],
        text_columns=3,
        marked=3,
        data_header=[
            "workload",
            "substrate",
            "parallel",
            "base",
            *estimate_header("tax_seconds"),
            *estimate_header("tax_rate"),
            *estimate_header("tax_per_action"),
            "p_holm",
            "shown",
        ],
        rows=[
            Row(
                [
                    where(row.workload, row.parallel),
                    row.substrate,
                    row.base,
                    phrases.seconds(row.seconds),
                    phrases.rate(row.rate),
                    phrases.seconds(row.per_action),
                    phrases.verdict(row.shown, row.why),
                ],
                [
                    row.workload,
                    row.substrate,
                    row.parallel,
                    row.base,
                    *estimate_data(row.seconds),
                    *estimate_data(row.rate),
                    *estimate_data(row.per_action),
                    row.p,
                    row.shown,
                ],
                [
                    caution
                    for label in (row.substrate, row.base)
                    for caution in middle_cautions(summary, (row.workload, label, row.parallel))
                ],
            )
            for row in shown
        ],
        absent="There is no tax to show: it needs trials on bare and on another substrate.",
    )


def table1(summary: Summary) -> Table:
    return Table(
        name="table1",
        title="Table 1. What a small extra time costs at scale",
        caption="Arithmetic, the same for every substrate: extra time per rollout or action, in "
        "worker-hours.",
        header=["extra", "scale", "added hours"],
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
    # Short, so that the hours beside it fit on a phone.
    text = "1 M rollouts" if rollouts == MILLION else f"{count(rollouts)} rollouts"
    return text if actions is None else f"{text} of {plural(actions, 'action')}"


def table2(summary: Summary) -> Table:
    return Table(
        name="table2",
        title="Table 2. The slowest and the fastest substrate",
        caption="p50 of the whole rollout, and the worker-hours of one million rollouts by its mean.",
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
            *estimate_header("slowest_seconds"),
            *estimate_header("fastest_seconds"),
            *estimate_header("difference_seconds"),
            *estimate_header("ratio"),
            "rollouts",
            *estimate_header("slowest_hours"),
            *estimate_header("fastest_hours"),
            *estimate_header("difference_hours"),
        ],
        rows=[_spread(summary, row) for row in summary.spreads],
        absent="There is nothing to compare: fewer than two substrates succeeded.",
    )


def _spread(summary: Summary, row: Spread) -> Row:
    seconds = (row.slowest_seconds, row.fastest_seconds, row.difference)
    slowest, fastest, difference = mean_hours(row)
    return Row(
        [
            row.workload,
            row.slowest,
            row.fastest,
            duration(row.slowest_seconds.value),
            duration(row.fastest_seconds.value),
            phrases.seconds(row.difference),
            multiple(row.ratio),
            hours(slowest.value),
            hours(fastest.value),
            phrases.worker_hours(difference),
        ],
        [
            row.workload,
            row.actions,
            row.slowest,
            row.fastest,
            *(value for estimate in seconds for value in estimate_data(estimate)),
            *estimate_data(row.ratio),
            row.rollouts,
            *(value for estimate in (slowest, fastest, difference) for value in estimate_data(estimate)),
        ],
        _lone_cautions(summary, row.workload, row.slowest, row.fastest),
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


def worker_hours(summary: Summary) -> Table:
    names = [*summary.trajectories, *summary.mixes] or summary.workloads[-1:]
    scales = list(dict.fromkeys(row.rollouts for row in summary.projections))
    by_key = {(row.workload, row.substrate, row.rollouts): row for row in summary.projections}
    pairs = list(dict.fromkeys((row.workload, row.substrate) for row in summary.projections))
    return Table(
        name="worker_hours",
        title="Worker-hours at scale",
        caption="N·T/3600 for N rollouts, where T is the mean of the whole rollout: a sum needs means. "
        "Brackets are 95 % intervals. For comparison, the last column takes the p50 as T.",
        header=["workload", "substrate", *(count(scale) for scale in scales), *_by_p50(scales)],
        text_columns=2,
        marked=2,
        data_header=[
            "workload",
            "substrate",
            *(f"{scale}_{what}" for scale in scales for what in _BOUNDS),
            *(f"{scale}_p50_{what}" for scale in scales for what in _BOUNDS),
        ],
        rows=[
            Row(
                [
                    workload,
                    label,
                    *(phrases.worker_hours(by_key[workload, label, scale].hours) for scale in scales),
                    phrases.worker_hours(by_key[workload, label, _shown(scales)].typical_hours),
                ],
                [
                    workload,
                    label,
                    *(
                        value
                        for scale in scales
                        for value in estimate_data(by_key[workload, label, scale].hours)
                    ),
                    *(
                        value
                        for scale in scales
                        for value in estimate_data(by_key[workload, label, scale].typical_hours)
                    ),
                ],
                _lone_cautions(summary, workload, label),
            )
            for workload, label in pairs
            if workload in names
        ],
        absent="No trial succeeded.",
    )


def _by_p50(scales: list[int]) -> list[str]:
    return [f"{count(_shown(scales))}, by p50"] if scales else []


def _shown(scales: list[int]) -> int:
    """The scale of the column by p50."""
    return MILLION if MILLION in scales else scales[-1]


def ratios(summary: Summary) -> Table:
    titles = {
        "first_result": "first command",
        "total": "whole rollout",
        "orchestration_per_action": "orchestration",
    }
    return Table(
        name="ratios",
        title="Ratios between substrates",
        caption="p50 of the slower ÷ p50 of the faster. p belongs to the interval, with Holm's correction "
        "over all ratios; a dash means that there are too few rounds for a test. The last column says "
        "whether it counts as a difference.",
        header=["workload", "metric", "slower", "faster", "ratio", "p", "difference"],
        text_columns=4,
        marked=4,
        data_header=[
            "workload",
            "parallel",
            "metric",
            "slower",
            "faster",
            *estimate_header("ratio"),
            "p_holm",
            "shown",
        ],
        rows=[
            Row(
                [
                    where(row.workload, row.parallel),
                    titles[row.metric],
                    row.substrate,
                    row.base,
                    multiple(row.ratio),
                    _p(row.p),
                    phrases.verdict(row.shown, row.why),
                ],
                [
                    row.workload,
                    row.parallel,
                    row.metric,
                    row.substrate,
                    row.base,
                    *estimate_data(row.ratio),
                    row.p,
                    row.shown,
                ],
                [
                    caution
                    for label in (row.substrate, row.base)
                    for caution in middle_cautions(summary, (row.workload, label, row.parallel))
                ],
            )
            for row in summary.ratios
        ],
        absent="There is nothing to compare: fewer than two substrates succeeded.",
    )


def _p(value: float | None) -> str:
    if value is None:
        return UNKNOWN
    return "< 0.001" if value < 0.001 else significant(value, 2)

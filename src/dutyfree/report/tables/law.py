"""Tables of the law, of its predictions, and of the A/A control."""

from __future__ import annotations

from typing import NamedTuple

from dutyfree.analysis.findings import ControlRatio, LawPoint, NoiseFloor
from dutyfree.analysis.model import Caution, Summary
from dutyfree.analysis.units import UNKNOWN, count, duration, multiple, percent
from dutyfree.report import phrases
from dutyfree.report.tables.table import Table, estimate, make_table, value, where


def law(summary: Summary) -> Table:
    return make_table(
        "law",
        "The law: T = a + b·n + c·w",
        "The time of a rollout with n actions, whose work takes w on bare. Three numbers for each "
        "substrate: a is paid once per rollout, b for every action, and c multiplies the time of the work "
        "itself. Brackets are 95 % intervals. The deviation is that of the measured workloads from the law.",
        [one for one in summary.laws if one.substrate not in summary.controls],
        [
            ("substrate", lambda one: one.substrate),
            ("a, per rollout", lambda one: phrases.seconds(one.a)),
            ("b, per action", lambda one: phrases.seconds(one.b)),
            ("c, times the work", lambda one: phrases.factor(one.c)),
            ("deviation", lambda one: UNKNOWN if one.spread is None else percent(one.spread)),
            ("w from", lambda one: one.baseline),
        ],
        [
            "substrate",
            "baseline",
            *map(estimate, "abc"),
            "spread",
            "trials",
            value("workloads", lambda one: len(one.fitted)),
        ],
        text_columns=1,
        marked=1,
        cautions=lambda one: _cautions(summary, one.substrate),
        absent="There is no law: it needs bare, and at least three workloads of different lengths.",
    )


def _cautions(summary: Summary, label: str) -> list[Caution]:
    """The cautions about a substrate as a whole."""
    return [one for one in summary.cautions if one.substrate == label and one.workload is None]


class _Prediction(NamedTuple):
    substrate: str
    point: LawPoint


def predictions(summary: Summary) -> Table:
    """Only of workloads that the plan holds out."""
    return make_table(
        "predictions",
        "Predicted by the law",
        "Workloads that the fit did not use. The error is predicted ÷ measured, minus 1.",
        [
            _Prediction(one.substrate, point)
            for one in summary.laws
            if one.substrate not in summary.controls
            for point in one.predictions
        ],
        [
            ("workload", lambda row: row.point.workload),
            ("substrate", lambda row: row.substrate),
            ("actions", lambda row: count(row.point.actions)),
            ("work on bare", lambda row: duration(row.point.work)),
            ("measured, p50", lambda row: phrases.seconds(row.point.measured)),
            ("predicted", lambda row: phrases.seconds(row.point.predicted)),
            ("error", lambda row: phrases.rate(row.point.error)),
        ],
        [
            *("point.workload", "substrate", "point.actions", "point.work", "point.trials"),
            *map(estimate, ("point.measured", "point.predicted", "point.error")),
        ],
        text_columns=2,
        marked=6,
    )


METRICS = {
    "first_result": "first command",
    "total": "whole rollout",
    "orchestration_per_action": "orchestration per action",
}


class _Noise(NamedTuple):
    floor: NoiseFloor
    ratio: ControlRatio


def noise_floor(summary: Summary) -> Table:
    return make_table(
        "noise_floor",
        "The A/A control",
        "The same substrate under two labels, in the same rounds: p50 of the one ÷ p50 of the other. "
        "Without noise every ratio would be 1.",
        [_Noise(floor, one) for floor in summary.noise_floor for one in floor.by_workload],
        [
            ("metric", lambda row: METRICS[row.floor.metric]),
            ("workload", lambda row: where(row.ratio.workload, row.ratio.parallel)),
            ("labels", lambda row: f"{row.floor.twin} ÷ {row.floor.substrate}"),
            ("ratio", lambda row: multiple(row.ratio.ratio)),
        ],
        [
            *("floor.metric", "ratio.workload", "ratio.parallel", "floor.substrate", "floor.twin"),
            estimate("ratio.ratio"),
        ],
        text_columns=3,
        marked=3,
        absent=UNKNOWN,
    )

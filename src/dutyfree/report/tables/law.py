"""Tables of the law, of its predictions, and of the A/A control."""

from __future__ import annotations

from dutyfree.analysis.findings import LawPoint
from dutyfree.analysis.model import Caution, Summary
from dutyfree.analysis.units import UNKNOWN, count, duration, multiple, percent
from dutyfree.report import phrases
from dutyfree.report.tables.table import Row, Table, estimate_data, estimate_header, where


def law(summary: Summary) -> Table:
    return Table(
        name="law",
        title="The law: T = a + b·n + c·w",
        caption="The time of a rollout with n actions, whose work takes w on bare. Three numbers for each "
        "substrate: a is paid once per rollout, b for every action, and c multiplies the time of the work "
        "itself. Brackets are 95 % intervals. The deviation is that of the measured workloads from the law.",
        header=["substrate", "a, per rollout", "b, per action", "c, times the work", "deviation", "w from"],
        text_columns=1,
        marked=1,
        data_header=[
            "substrate",
            "baseline",
            *estimate_header("a"),
            *estimate_header("b"),
            *estimate_header("c"),
            "spread",
            "trials",
            "workloads",
        ],
        rows=[
            Row(
                [
                    one.substrate,
                    phrases.seconds(one.a),
                    phrases.seconds(one.b),
                    phrases.factor(one.c),
                    percent(one.spread),
                    one.baseline,
                ],
                [
                    one.substrate,
                    one.baseline,
                    *estimate_data(one.a),
                    *estimate_data(one.b),
                    *estimate_data(one.c),
                    one.spread,
                    one.trials,
                    len(one.fitted),
                ],
                _cautions(summary, one.substrate),
            )
            for one in summary.laws
            if one.substrate not in summary.controls
        ],
        absent="There is no law: it needs bare, and at least three workloads of different lengths.",
    )


def _cautions(summary: Summary, label: str) -> list[Caution]:
    """The cautions about a substrate as a whole."""
    return [one for one in summary.cautions if one.substrate == label and one.workload is None]


def predictions(summary: Summary) -> Table:
    """Only of workloads that the plan holds out."""
    return Table(
        name="predictions",
        title="Predicted by the law",
        caption="Workloads that the fit did not use. The error is predicted ÷ measured, minus 1.",
        header=["workload", "substrate", "actions", "work on bare", "measured, p50", "predicted", "error"],
        text_columns=2,
        marked=6,
        data_header=[
            "workload",
            "substrate",
            "actions",
            "work",
            "trials",
            *estimate_header("measured"),
            *estimate_header("predicted"),
            *estimate_header("error"),
        ],
        rows=[
            _prediction(one.substrate, point)
            for one in summary.laws
            if one.substrate not in summary.controls
            for point in one.predictions
        ],
    )


def _prediction(substrate: str, point: LawPoint) -> Row:
    return Row(
        [
            point.workload,
            substrate,
            count(point.actions),
            duration(point.work),
            phrases.seconds(point.measured),
            phrases.seconds(point.predicted),
            phrases.rate(point.error),
        ],
        [
            point.workload,
            substrate,
            point.actions,
            point.work,
            point.trials,
            *estimate_data(point.measured),
            *estimate_data(point.predicted),
            *estimate_data(point.error),
        ],
    )


METRICS = {
    "first_result": "first command",
    "total": "whole rollout",
    "orchestration_per_action": "orchestration per action",
}


def noise_floor(summary: Summary) -> Table:
    return Table(
        name="noise_floor",
        title="The A/A control",
        caption="The same substrate under two labels, in the same rounds: p50 of the one ÷ p50 of the other. "
        "Without noise every ratio would be 1.",
        header=["metric", "workload", "labels", "ratio"],
        text_columns=3,
        marked=3,
        data_header=["metric", "workload", "parallel", "substrate", "twin", *estimate_header("ratio")],
        rows=[
            Row(
                [
                    METRICS[floor.metric],
                    where(one.workload, one.parallel),
                    f"{floor.twin} ÷ {floor.substrate}",
                    multiple(one.ratio),
                ],
                [
                    floor.metric,
                    one.workload,
                    one.parallel,
                    floor.substrate,
                    floor.twin,
                    *estimate_data(one.ratio),
                ],
            )
            for floor in summary.noise_floor
            for one in floor.by_workload
        ],
        absent=UNKNOWN,
    )

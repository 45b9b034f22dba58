"""Titles, captions and alternative texts of the figures."""

from __future__ import annotations

from collections.abc import Iterable

from dutyfree.analysis.model import Caution, CautionKind, Cell, Summary
from dutyfree.analysis.units import duration, hours
from dutyfree.report.blocks import FigureBlock
from dutyfree.report.figures.tax import lone_taxes, shown_workloads
from dutyfree.report.figures.trajectories import projected_workload
from dutyfree.report.phrases import rate
from dutyfree.report.tables.table import DIVISION


def tax(summary: Summary) -> FigureBlock | None:
    names = shown_workloads(summary)
    if not names:
        return None
    rates = [
        f"{name} on {row.substrate} {rate(row.rate)}"
        for name in names
        for row in lone_taxes(summary, name)
        if row.rate
    ]
    return FigureBlock(
        "tax",
        f"The tax: extra time over {summary.baseline} by substrate",
        f"p50 of the whole rollout compared with the same rollout on {summary.baseline}, in the shortest "
        "and the longest workload. Thick lines are 95\N{NO-BREAK SPACE}% intervals. A hollow mark means "
        "that no difference is shown: the interval includes 0, or there are too few trials for an interval.",
        f"The tax rate of each substrate as dots with intervals: {'; '.join(rates)}.",
        _figure_cautions(
            summary,
            [cell for name in names for cell in summary.lone(name)],
            without={*DIVISION, CautionKind.UNSURE_TAIL},
        ),
    )


def figure1(summary: Summary) -> FigureBlock:
    cells = summary.lone("T2")
    return FigureBlock(
        "figure1",
        "Figure 1. Latency decomposition at T2",
        "Mean components over the middle half of the rollouts by total. The tick is the p50 of the total, "
        "with its 95 % interval. Grey is the time of the commands themselves.",
        _alt("The time of a T2 rollout by component as stacked bars", cells, "total"),
        _figure_cautions(summary, cells, without={CautionKind.UNSURE_TAIL}),
    )


def figure2(summary: Summary) -> FigureBlock:
    cells = [cell for tier in summary.tiers for cell in summary.lone(tier)]
    return FigureBlock(
        "figure2",
        "Figure 2. Cold start by substrate and tier",
        "p50 on a logarithmic scale: from the request to the result of the first command (filled), and until "
        "the sandbox is removed (hollow). Thick lines are 95 % intervals, if wider than the mark.",
        _alt("The p50 of the whole rollout by tier as dots", cells, "total"),
        _figure_cautions(summary, cells, without={*DIVISION, CautionKind.UNSURE_TAIL}),
    )


def figure3(summary: Summary) -> FigureBlock:
    cells = [cell for tier in summary.tiers for cell in summary.lone(tier)]
    return FigureBlock(
        "figure3",
        "Figure 3. Distributions of cold starts",
        "The share of all trials, including failures, that ended within a time. No trial is left out. The "
        "mark is the slowest trial. With failures, the curve ends below 100 %.",
        _alt("Cumulative distributions of cold starts; p95 of the whole rollout", cells, "p95"),
        _figure_cautions(summary, cells, without=DIVISION),
    )


def figure4(summary: Summary) -> FigureBlock:
    cells = [cell for name in summary.trajectories for cell in summary.lone(name)]
    return FigureBlock(
        "figure4",
        "Figure 4. Composition by trajectory length",
        "Each bar is a whole rollout. In short trajectories, creation and readiness cost most; in long "
        "ones, the orchestration of every action.",
        _alt(
            "Components by trajectory length as stacked bars of equal height; the share of orchestration",
            cells,
            "share",
        ),
        _figure_cautions(summary, cells, without={CautionKind.UNSURE_TAIL}),
    )


def figure5(summary: Summary) -> FigureBlock:
    cells = [cell for name in summary.trajectories for cell in summary.lone(name)]
    return FigureBlock(
        "figure5",
        "Figure 5. Completion time and amortised latency by action count",
        "Above: p50 of the completion time, from the request until the sandbox is removed. Below: the same "
        "divided by the number of actions. Thick lines are 95 % intervals, if wider than the mark.",
        _alt("Completion time by number of actions as lines", cells, "total"),
        _figure_cautions(summary, cells, without={*DIVISION, CautionKind.UNSURE_TAIL}),
    )


def figure6(summary: Summary) -> FigureBlock:
    workload = projected_workload(summary)
    cells = summary.lone(workload) if workload else []
    rows = [row for row in summary.projections if row.workload == workload]
    ends = [row for row in rows if row.rollouts == rows[-1].rollouts]
    values = ", ".join(f"{row.substrate} {hours(row.hours.value)}" for row in ends)
    return FigureBlock(
        "figure6",
        "Figure 6. Worker-hours from 10,000 to 1,000,000 trajectories",
        f"N·T/3600, where T is the p50 of {workload or 'a trajectory'}. Bands are 95 % intervals.",
        f"Worker-hours by number of rollouts as lines; at a million: {values or 'no data'}.",
        _figure_cautions(summary, cells, without={*DIVISION, CautionKind.UNSURE_TAIL}),
    )


def _alt(what: str, cells: Iterable[Cell], metric: str) -> str:
    values = []
    for cell in cells:
        if cell.total is None:
            value = "no data"
        elif metric == "share":
            share = cell.composition.get("orchestration", 0.0) / (cell.typical_total or 1.0)
            value = "undivided" if cell.undivided else f"{share * 100:.0f} %"
        else:
            value = duration((cell.total.p95 if metric == "p95" else cell.total.p50).value)
        values.append(f"{cell.workload} on {cell.substrate} {value}")
    return f"{what}: {'; '.join(values) or 'no data'}."


def _figure_cautions(
    summary: Summary, cells: Iterable[Cell], without: Iterable[CautionKind] = ()
) -> list[Caution]:
    kept: dict[Caution, None] = {}
    for cell in cells:
        for caution in summary.cautions_on(*cell.key):
            if caution.kind not in without and caution.workload is not None:
                kept[caution] = None
    return list(kept)

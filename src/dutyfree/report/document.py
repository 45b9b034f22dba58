"""The content of a report in order, independent of Markdown and HTML. All text is unescaped."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, TypeAlias

import msgspec

from dutyfree.analysis.cautions import FEW, FEW_FOR_TAIL
from dutyfree.analysis.model import Caution, CautionKind, Cell, Summary
from dutyfree.analysis.statistics import RESAMPLES
from dutyfree.analysis.units import duration, enumeration, hours, plural
from dutyfree.report.figures.tax import lone_taxes, shown_workloads
from dutyfree.report.figures.trajectories import projected_workload
from dutyfree.report.headline import HeadlineAnswer, answers
from dutyfree.report.phrases import CautionGroup, groups, rate
from dutyfree.report.tables import DIVISION, Table, tables

TITLE = "The rollout infrastructure tax"
MANY_ROWS = 16
"""Longer tables are folded."""


class FigureBlock(msgspec.Struct, frozen=True):
    name: str
    title: str
    caption: str
    alt: str
    cautions: list[Caution]


class TableBlock(msgspec.Struct, frozen=True):
    table: Table
    folded: bool = False


class FactsBlock(msgspec.Struct, frozen=True):
    """Names and values."""

    caption: str
    rows: list[tuple[str, str]]


class ListingBlock(msgspec.Struct, frozen=True):
    """Preformatted text."""

    caption: str
    text: str
    folded: bool = False


class ListBlock(msgspec.Struct, frozen=True):
    items: list[str]


class ParagraphBlock(msgspec.Struct, frozen=True):
    text: str


Block: TypeAlias = FigureBlock | TableBlock | FactsBlock | ListingBlock | ListBlock | ParagraphBlock


class Section(msgspec.Struct, frozen=True):
    title: str
    blocks: list[Block]


class ReportDocument(msgspec.Struct, frozen=True):
    title: str
    lead: str
    chart: FigureBlock | None
    """The tax by substrate; None if there is none."""
    answers: list[HeadlineAnswer]
    cautions: list[CautionGroup]
    """All cautions. Figures and tables refer to them by number, from 1."""
    sections: list[Section]


def document(summary: Summary, rebuild: str) -> ReportDocument:
    made = tables(summary)
    return ReportDocument(
        title=TITLE,
        lead=_lead(summary),
        chart=_tax(summary),
        answers=answers(summary),
        cautions=groups(summary.cautions, len(summary.cells)),
        sections=[*_results(summary, made), *_background(summary, rebuild)],
    )


def _lead(summary: Summary) -> str:
    measured = [label for label in summary.labels if any(cell.substrate == label for cell in summary.cells)]
    if not summary.trials:
        return f"The study that started at {summary.started} has no measured trial yet."
    failed = f"{summary.failed} failed" if summary.failed else "none failed"
    return (
        f"{plural(summary.trials, 'trial')} on {enumeration(measured)} ({failed}; {summary.warmups} more as "
        f"warm-ups), started {summary.started[:16].replace('T', ' ')} UTC on {_machine(summary)}."
    )


def _machine(summary: Summary) -> str:
    host = summary.host
    parts = [str(host["cpu"])] if host.get("cpu") else []
    if isinstance(host.get("cores"), int):
        parts.append(plural(host["cores"], "core"))
    if host.get("memory_gib"):
        parts.append(f"{host['memory_gib']} GiB")
    return ", ".join(parts) or "an unknown machine"


def _results(summary: Summary, made: dict[str, Table]) -> list[Section]:
    sections = [
        Section(
            "Where the time goes",
            [
                _figure1(summary),
                TableBlock(made["decomposition"]),
                _foldable(made["inside_action"]),
                _foldable(made["inside_creation"]),
            ],
        ),
        Section("Cold start", [_figure2(summary), _figure3(summary), TableBlock(made["cold_start"])]),
        Section(
            "Longer trajectories", [_figure4(summary), _figure5(summary), TableBlock(made["trajectories"])]
        ),
        Section(
            "At scale",
            [
                _figure6(summary),
                TableBlock(made["table1"]),
                TableBlock(made["table2"]),
                TableBlock(made["worker_hours"]),
            ],
        ),
        Section(
            "The tax",
            [TableBlock(made["tax"]), _foldable(made["ratios"])],
        ),
    ]
    if "throughput" in made:
        sections.append(Section("In parallel", [TableBlock(made["throughput"])]))
    return [*sections, Section("Failures", [TableBlock(made["failures"])])]


def _foldable(table: Table) -> TableBlock:
    return TableBlock(table, folded=len(table.rows) > MANY_ROWS)


def _tax(summary: Summary) -> FigureBlock | None:
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


def _figure1(summary: Summary) -> FigureBlock:
    cells = summary.lone("T2")
    return FigureBlock(
        "figure1",
        "Figure 1. Latency decomposition at T2",
        "Mean components over the middle half of the rollouts by total. The tick is the p50 of the total, "
        "with its 95 % interval. Grey is the time of the commands themselves.",
        _alt("The time of a T2 rollout by component as stacked bars", cells, "total"),
        _figure_cautions(summary, cells, without={CautionKind.UNSURE_TAIL}),
    )


def _figure2(summary: Summary) -> FigureBlock:
    cells = [cell for tier in summary.tiers for cell in summary.lone(tier)]
    return FigureBlock(
        "figure2",
        "Figure 2. Cold start by substrate and tier",
        "p50 on a logarithmic scale: from the request to the result of the first command (filled), and until "
        "the sandbox is removed (hollow). Thick lines are 95 % intervals, if wider than the mark.",
        _alt("The p50 of the whole rollout by tier as dots", cells, "total"),
        _figure_cautions(summary, cells, without={*DIVISION, CautionKind.UNSURE_TAIL}),
    )


def _figure3(summary: Summary) -> FigureBlock:
    cells = [cell for tier in summary.tiers for cell in summary.lone(tier)]
    return FigureBlock(
        "figure3",
        "Figure 3. Distributions of cold starts",
        "The share of all trials, including failures, that ended within a time. No trial is left out. The "
        "mark is the slowest trial. With failures, the curve ends below 100 %.",
        _alt("Cumulative distributions of cold starts; p95 of the whole rollout", cells, "p95"),
        _figure_cautions(summary, cells, without=DIVISION),
    )


def _figure4(summary: Summary) -> FigureBlock:
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


def _figure5(summary: Summary) -> FigureBlock:
    cells = [cell for name in summary.trajectories for cell in summary.lone(name)]
    return FigureBlock(
        "figure5",
        "Figure 5. Completion time and amortised latency by action count",
        "Above: p50 of the completion time, from the request until the sandbox is removed. Below: the same "
        "divided by the number of actions. Thick lines are 95 % intervals, if wider than the mark.",
        _alt("Completion time by number of actions as lines", cells, "total"),
        _figure_cautions(summary, cells, without={*DIVISION, CautionKind.UNSURE_TAIL}),
    )


def _figure6(summary: Summary) -> FigureBlock:
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


def _background(summary: Summary, rebuild: str) -> list[Section]:
    substrates: list[Block] = [
        FactsBlock(
            substrate.label if substrate.label == substrate.use else f"{substrate.label} ({substrate.use})",
            [
                *([("not available", substrate.unavailable)] if substrate.unavailable is not None else []),
                *sorted(substrate.facts.items()),
                *(
                    [("prepared in", duration(substrate.prepare_seconds))]
                    if substrate.prepare_seconds
                    else []
                ),
            ],
        )
        for substrate in summary.substrates
    ]
    sessions = [(session.started, f"load {session.load:.2f}") for session in summary.sessions]
    return [
        Section("Method", [ListBlock(METHOD)]),
        Section(
            "Host",
            [
                FactsBlock(
                    "The machine",
                    [(_fact_name(name), _fact(value)) for name, value in summary.host.items()],
                ),
                FactsBlock("Sessions", sessions),
            ],
        ),
        Section("Substrates", substrates or [ParagraphBlock("No substrate was prepared.")]),
        Section(
            "Plan and how to rebuild this report",
            [
                ListingBlock("On any machine, from the records", rebuild),
                ListingBlock(
                    "The plan",
                    json.dumps(summary.plan, indent=2, ensure_ascii=False, default=str),
                    folded=True,
                ),
                ParagraphBlock(
                    f"Measured with dutyfree {summary.version}. All numbers are in summary.json and tables/."
                ),
            ],
        ),
    ]


METHOD = [
    "A rollout lasts from the request for a sandbox until the sandbox is removed: total = creation + "
    "readiness + set-up + actions + orchestration + cleanup + unattributed. Model inference and reward are "
    "not part of it.",
    "A cold start ends with the result of the first command, not with the handle of the sandbox.",
    "Orchestration is the wall time of the actions minus the time inside the commands. If a substrate does "
    "not report the time inside, we use the p50 of the same action on bare, at most the wall time. If bare "
    "was not measured either, the actions stay undivided.",
    "Unattributed is the time of a rollout or an action that no span explains.",
    "Quantiles are over all successful trials. Warm-ups are left out, and failures are counted separately. "
    f"The 95 % intervals are percentile-bootstrap intervals ({RESAMPLES:,} resamples, fixed seed).",
    "The tax is the p50 of the total minus the p50 of the same workload on bare. The tax rate is their ratio "
    "minus 1. Worker-hours are N·T/3600.",
    "Differences are tested with Mann-Whitney and Holm's correction, if the samples are large enough for a "
    "significant result.",
    "A difference counts as shown if its interval excludes 1 (for a ratio) or 0 (for a tax).",
    "Small numbers beside a value, and the line below a figure, refer to the cautions at the top. Fewer than "
    f"{FEW} trials are too few, and fewer than {FEW_FOR_TAIL} say little about p95.",
]


def _fact_name(name: str) -> str:
    words = name.split("_")
    units = {"gib": "(GiB)", "kib": "(KiB)"}
    return " ".join([*words[:-1], units.get(words[-1], words[-1])])


def _fact(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "none", True: "yes", False: "no"}[value]
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)

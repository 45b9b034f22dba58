"""What the report says, in order, before it is Markdown or HTML. All text is plain and yet unescaped."""

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
from dutyfree.report.headline import Answer, answers
from dutyfree.report.tables import DIVISION, Table, tables
from dutyfree.report.wording import Group, groups, rate

TITLE = "The rollout infrastructure tax"
MANY_ROWS = 16
"""More are folded away."""


class FigureBlock(msgspec.Struct, frozen=True):
    name: str
    title: str
    caption: str
    alt: str
    cautions: list[Caution]


class TableBlock(msgspec.Struct, frozen=True):
    table: Table
    folded: bool = False


class Facts(msgspec.Struct, frozen=True):
    """Names and values."""

    caption: str
    rows: list[tuple[str, str]]


class Listing(msgspec.Struct, frozen=True):
    """Preformatted text."""

    caption: str
    text: str
    folded: bool = False


class Points(msgspec.Struct, frozen=True):
    items: list[str]


class Paragraph(msgspec.Struct, frozen=True):
    text: str


Block: TypeAlias = FigureBlock | TableBlock | Facts | Listing | Points | Paragraph


class Section(msgspec.Struct, frozen=True):
    title: str
    blocks: list[Block]


class Document(msgspec.Struct, frozen=True):
    title: str
    lead: str
    chart: FigureBlock | None
    """The tax by substrate; None where there is none to show."""
    answers: list[Answer]
    cautions: list[Group]
    """All of them, once; figures and tables refer to them by their places, from 1."""
    sections: list[Section]


def document(summary: Summary, rebuild: str) -> Document:
    made = tables(summary)
    return Document(
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
        return (
            f"The study begun at {summary.started} holds no measured trial yet: there are no numbers to show."
        )
    failed = f"{summary.failed} failed" if summary.failed else "none failed"
    return (
        f"{plural(summary.trials, 'trial')} on {enumeration(measured)} ({failed}; {summary.warmups} more as "
        f"warm-ups), begun {summary.started[:16].replace('T', ' ')} UTC on {_machine(summary)}."
    )


def _machine(summary: Summary) -> str:
    host = summary.host
    told = [str(host["cpu"])] if host.get("cpu") else []
    if isinstance(host.get("cores"), int):
        told.append(plural(host["cores"], "core"))
    if host.get("memory_gib"):
        told.append(f"{host['memory_gib']} GiB")
    return ", ".join(told) or "an undescribed machine"


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
    told = [
        f"{name} on {row.substrate} {rate(row.rate)}"
        for name in names
        for row in lone_taxes(summary, name)
        if row.rate
    ]
    return FigureBlock(
        "tax",
        f"The tax: extra time over {summary.baseline} by substrate",
        f"p50 of the whole rollout against the same rollout on {summary.baseline}, in the shortest and the "
        "longest workload. Strokes are 95\N{NO-BREAK SPACE}% intervals. A hollow mark shows no difference: "
        "its interval includes 0, or there are too few trials for one.",
        f"Dots of the tax rate by substrate, with intervals: {'; '.join(told)}.",
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
        "Mean components over the middle half of the rollouts by total. The tick is p50 of the total, with "
        "its 95 % interval. Grey is the work itself; everything else is around it.",
        _alt("Stacked bars of the time of a T2 rollout by component", cells, "total"),
        _figure_cautions(summary, cells, without={CautionKind.UNSURE_TAIL}),
    )


def _figure2(summary: Summary) -> FigureBlock:
    cells = [cell for tier in summary.tiers for cell in summary.lone(tier)]
    return FigureBlock(
        "figure2",
        "Figure 2. Cold start by substrate and tier",
        "p50 on a logarithmic scale: from the request to the first command's result (filled), and to the end "
        "of the sandbox's removal (hollow). Thick strokes are 95 % intervals, where wider than the mark.",
        _alt("Dots of the whole fresh episode's p50 by tier", cells, "total"),
        _figure_cautions(summary, cells, without={*DIVISION, CautionKind.UNSURE_TAIL}),
    )


def _figure3(summary: Summary) -> FigureBlock:
    cells = [cell for tier in summary.tiers for cell in summary.lone(tier)]
    return FigureBlock(
        "figure3",
        "Figure 3. Distributions of cold starts",
        "The share of all trials, failures included, that were done within a time: nothing is trimmed, the "
        "mark is the slowest trial, and a curve with failures ends below 100 %.",
        _alt("Cumulative distributions of cold starts; p95 of the whole fresh episode", cells, "p95"),
        _figure_cautions(summary, cells, without=DIVISION),
    )


def _figure4(summary: Summary) -> FigureBlock:
    cells = [cell for name in summary.trajectories for cell in summary.lone(name)]
    return FigureBlock(
        "figure4",
        "Figure 4. Composition against trajectory length",
        "Each bar is a whole rollout. Short trajectories pay for creation and readiness, long ones for the "
        "orchestration of every action.",
        _alt("Normalised stacked bars by trajectory length; orchestration's share", cells, "share"),
        _figure_cautions(summary, cells, without={CautionKind.UNSURE_TAIL}),
    )


def _figure5(summary: Summary) -> FigureBlock:
    cells = [cell for name in summary.trajectories for cell in summary.lone(name)]
    return FigureBlock(
        "figure5",
        "Figure 5. Completion time and amortised latency by action count",
        "Above, p50 of the completion time: the whole rollout, from the request to the end of the sandbox's "
        "removal. Below, the same divided by its actions. Thick strokes are 95 % intervals, where wider than "
        "the mark.",
        _alt("Lines of completion time by the number of actions", cells, "total"),
        _figure_cautions(summary, cells, without={*DIVISION, CautionKind.UNSURE_TAIL}),
    )


def _figure6(summary: Summary) -> FigureBlock:
    workload = projected_workload(summary)
    cells = summary.lone(workload) if workload else []
    rows = [row for row in summary.projections if row.workload == workload]
    ends = [row for row in rows if row.rollouts == rows[-1].rollouts]
    told = ", ".join(f"{row.substrate} {hours(row.hours.value)}" for row in ends)
    return FigureBlock(
        "figure6",
        "Figure 6. Worker-hours from 10,000 to 1,000,000 trajectories",
        f"N·T/3600 with T the p50 of {workload or 'a trajectory'}; bands are its 95 % interval.",
        f"Lines of worker-hours by number of rollouts; at a million: {told or 'no data'}.",
        _figure_cautions(summary, cells, without={*DIVISION, CautionKind.UNSURE_TAIL}),
    )


def _alt(what: str, cells: Iterable[Cell], metric: str) -> str:
    told = []
    for cell in cells:
        if cell.total is None:
            value = "no data"
        elif metric == "share":
            share = cell.composition.get("orchestration", 0.0) / (cell.typical_total or 1.0)
            value = "undivided" if cell.undivided else f"{share * 100:.0f} %"
        else:
            value = duration((cell.total.p95 if metric == "p95" else cell.total.p50).value)
        told.append(f"{cell.workload} on {cell.substrate} {value}")
    return f"{what}: {'; '.join(told) or 'no data'}."


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
        Facts(
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
        Section("Method", [Points(METHOD)]),
        Section(
            "Host",
            [
                Facts(
                    "The machine",
                    [(_fact_name(name), _fact(value)) for name, value in summary.host.items()],
                ),
                Facts("Sessions", sessions),
            ],
        ),
        Section("Substrates", substrates or [Paragraph("None was prepared.")]),
        Section(
            "Plan and how to rebuild this report",
            [
                Listing("From the records alone, on any machine", rebuild),
                Listing(
                    "The plan",
                    json.dumps(summary.plan, indent=2, ensure_ascii=False, default=str),
                    folded=True,
                ),
                Paragraph(
                    f"Measured with dutyfree {summary.version}. All numbers are in summary.json and tables/."
                ),
            ],
        ),
    ]


METHOD = [
    "A rollout runs from the request for a sandbox to the end of its removal: total = creation + readiness + "
    "set-up + actions + orchestration + cleanup + unattributed. Inference and reward are no part of it.",
    "Cold start ends with the first command's result, never with a returned handle.",
    "Orchestration is the wall time of the actions less the commands' own time inside the environment. Where "
    "a substrate does not tell that time, the p50 of the same action run bare stands in, at most the wall "
    "time; where bare was not measured either, the actions stay undivided.",
    "Unattributed is what no span explains, of a rollout and of a single action.",
    "Quantiles are over successful trials, nothing is trimmed, warm-ups are kept apart, failures are counted "
    f"beside. Intervals of 95 % are by percentile bootstrap ({RESAMPLES:,} resamples, fixed seed).",
    "The tax is p50 of the total less that of the same workload run bare; its rate is their ratio less one. "
    "Worker-hours are N·T/3600.",
    "Differences are tested with Mann-Whitney where samples of the sizes at hand can be significant at all, "
    "with Holm's correction.",
    "A difference counts as shown where its interval leaves out none: 1 of a ratio, 0 of a tax.",
    "Small numbers beside a value, and the line below a figure, refer to the cautions at the top: fewer than "
    f"{FEW} trials are too few, fewer than {FEW_FOR_TAIL} say little of p95.",
]


def _fact_name(name: str) -> str:
    words = name.split("_")
    units = {"gib": "(GiB)", "kib": "(KiB)"}
    return " ".join([*words[:-1], units.get(words[-1], words[-1])])


def _fact(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "none", True: "yes", False: "no"}[value]
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)

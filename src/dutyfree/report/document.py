"""The content of a report in order, independent of Markdown and HTML. All text is unescaped."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from dutyfree.analysis.cautions import FEW, FEW_FOR_TAIL
from dutyfree.analysis.model import Summary
from dutyfree.analysis.statistics import RESAMPLES
from dutyfree.analysis.units import duration, enumeration, percent, plural
from dutyfree.report import captions, paper
from dutyfree.report.blocks import (
    Block,
    FactsBlock,
    FigureBlock,
    ListBlock,
    ListingBlock,
    ParagraphBlock,
    Section,
    TableBlock,
)
from dutyfree.report.figures.rows import MANY
from dutyfree.report.headline import HeadlineAnswer, answers
from dutyfree.report.phrases import CautionGroup, groups, minus_one, rate
from dutyfree.report.tables.catalog import tables
from dutyfree.report.tables.table import Table

TITLE = "The rollout infrastructure tax"
MANY_ROWS = 16
"""Longer tables are folded."""


class ReportDocument(msgspec.Struct, frozen=True):
    title: str
    lead: str
    opening: list[Block]
    """The noise floor and the law; without a law, the tax."""
    answers: list[HeadlineAnswer]
    cautions: list[CautionGroup]
    """All cautions. Figures and tables refer to them by number, from 1."""
    sections: list[Section]


def document(summary: Summary, rebuild: str) -> ReportDocument:
    made = tables(summary)
    return ReportDocument(
        title=TITLE,
        lead=_lead(summary),
        opening=_opening(summary, made),
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


def _opening(summary: Summary, made: dict[str, Table]) -> list[Block]:
    blocks: list[Block] = [ParagraphBlock(noise_sentence(summary))] if summary.trials else []
    if made["law"].rows:
        blocks.append(TableBlock(made["law"]))
    law = captions.law(summary)
    if law:
        return [*blocks, law]
    chart = captions.tax(summary)
    return [*blocks, chart] if chart else blocks


def noise_sentence(summary: Summary) -> str:
    """How far two equal substrates appear to differ in this study."""
    floor = next((one for one in summary.noise_floor if one.metric == "total"), None)
    if floor is None:
        return (
            "Noise floor: unknown, because the plan has no A/A control. Add a substrate under a second label "
            "with the same options."
        )
    return (
        f"Noise floor: {floor.twin} is {floor.substrate} under a second label. Over all workloads, their "
        f"whole rollouts differ by {rate(minus_one(floor.ratio))}; the interval of a single workload reaches "
        f"up to {percent(floor.share)}. No difference within the noise floor of its workload counts."
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
                captions.figure1(summary),
                TableBlock(made["decomposition"]),
                _foldable(made["inside_action"]),
                _foldable(made["inside_creation"]),
            ],
        ),
        Section(
            "Cold start",
            [captions.figure2(summary), captions.figure3(summary), TableBlock(made["cold_start"])],
        ),
        Section(
            "Longer trajectories",
            [captions.figure4(summary), captions.figure5(summary), TableBlock(made["trajectories"])],
        ),
        Section(
            "At scale",
            [
                captions.figure6(summary),
                TableBlock(made["table1"]),
                TableBlock(made["table2"]),
                TableBlock(made["worker_hours"]),
            ],
        ),
        Section(
            "The tax", [*_tax_figure(summary), TableBlock(made["tax"]), _foldable(_ratios(summary, made))]
        ),
        Section(
            "Do the rankings hold?",
            [
                *_present(captions.rankings(summary)),
                *_present(captions.sensitivity(summary)),
                TableBlock(made["rankings"]),
            ],
        ),
        Section(
            "Mean and slow rollouts", [*_present(captions.tails(summary)), _foldable(made["distribution"])]
        ),
    ]
    if "predictions" in made:
        sections.append(Section("Predictions of the law", [_foldable(made["predictions"])]))
    if "action_path" in made:
        sections.append(
            Section(
                "The action path",
                [*_present(captions.action_path(summary)), TableBlock(made["action_path"])],
            )
        )
    if "beside_the_paper" in made:
        said = [ParagraphBlock(text) for text in paper.sentences(summary)]
        sections.append(Section("Beside the paper", [TableBlock(made["beside_the_paper"]), *said]))
    if "storage" in made:
        sections.append(
            Section("Disk and memory", [*_present(captions.storage(summary)), _foldable(made["storage"])])
        )
    if "walls" in made:
        sections.append(
            Section("The price of each wall", [*_present(captions.walls(summary)), TableBlock(made["walls"])])
        )
    if "throughput" in made:
        sections.append(Section("In parallel", [TableBlock(made["throughput"])]))
    if "noise_floor" in made:
        sections.append(Section("Noise", [_foldable(made["noise_floor"])]))
    return [*sections, Section("Failures", [TableBlock(made["failures"])])]


def _present(block: FigureBlock | None) -> list[FigureBlock]:
    return [block] if block else []


def _ratios(summary: Summary, made: dict[str, Table]) -> Table:
    """With many substrates only those of an archetype with itself: there are thousands of pairs."""
    table = made["ratios"]
    if len(summary.labels) <= MANY:
        return table
    own = [{one.own, one.init} for one in summary.action_paths]
    slower, faster, metric = (table.header.index(name) for name in ("slower", "faster", "metric"))
    return msgspec.structs.replace(
        table,
        caption=f"{table.caption} Here are only whole rollouts of an archetype with its own exec and with "
        "our init; all pairs are in tables/ratios.csv.",
        rows=[
            row
            for row in table.rows
            if row.shown[metric] == "whole rollout" and {row.shown[slower], row.shown[faster]} in own
        ],
        absent="None. All pairs are in tables/ratios.csv.",
    )


def _tax_figure(summary: Summary) -> list[FigureBlock]:
    """Without a law, the figure is at the top of the report."""
    return _present(captions.tax(summary)) if captions.law(summary) else []


def _foldable(table: Table) -> TableBlock:
    return TableBlock(table, folded=len(table.rows) > MANY_ROWS)


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
    "The wall time of every action splits into the time inside and the rest. The rest of the first command "
    "is readiness, that of the others is orchestration. The time inside is not always the work itself: it "
    "includes what the sandbox slows the work down, which c of the law shows. If a substrate does not report "
    "the time inside, we use that of the same action on bare in the same round; then a slow-down counts "
    "as orchestration. If bare was not measured either, the actions stay undivided.",
    "Unattributed is the time of a rollout or an action that no span explains.",
    "The law is T = a + b·n + c·w: n counts the first command, the set-up commands and the actions; w is the "
    "time inside the same actions on bare. Workloads that the plan holds out are predicted, not fitted.",
    "Quantiles are over all successful trials. Warm-ups are left out, and failures are counted separately. "
    f"Intervals of quantiles are percentile-bootstrap intervals ({RESAMPLES:,} resamples, fixed seed), those "
    "of means are Student's.",
    "Differences and ratios compare rounds: whole rounds are drawn with replacement, so what slows down both "
    "sides of a round cancels out. Interval and p come from the same draws. Holm's correction is over all "
    "comparisons of a table.",
    "A difference counts as shown if its interval excludes 1 (for a ratio) or 0 (for a tax), if p is at most "
    "0.05 after Holm's correction, and if it is larger than the noise floor of its workload.",
    "The tax is the p50 of the total minus the p50 of the same workload on bare with the same storage, if "
    "that was measured. The tax rate is their ratio minus 1. Worker-hours are N·T/3600 with the mean as T.",
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

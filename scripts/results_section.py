#!/usr/bin/env python3
"""Print the tables of a study of archetypes for docs/archetypes.md, with the sources of their numbers.

::

    cp -r OUT docs/results/2026-11-18-archetypes; gzip docs/results/2026-11-18-archetypes/records.jsonl
    .venv/bin/dutyfree report docs/results/2026-11-18-archetypes
    .venv/bin/python scripts/results_section.py docs/results/2026-11-18-archetypes >> docs/archetypes.md
    scripts/check_claims.py

The tables are those of the report. What the numbers mean is for a person to say.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

from dutyfree.analysis.model import Cell, Summary
from dutyfree.analysis.summary import summarise
from dutyfree.analysis.units import UNKNOWN, count, duration, enumeration
from dutyfree.report import paper
from dutyfree.report.document import noise_sentence
from dutyfree.report.files import without_controls
from dutyfree.report.phrases import minus_one, rate
from dutyfree.report.tables.catalog import tables
from dutyfree.report.tables.table import Table
from dutyfree.study import records

QUOTED = "<!-- quoted (110; 1.9; 1.8; 11,811; 42.5; 6,495; 23.4) -->"


def section(where: Path) -> Iterator[str]:
    whole = summarise(records.read(where))
    summary = without_controls(whole)
    made = tables(summary)
    name = where.name
    source = f"<!-- from results/{name}: {{}} -->".format
    started = summary.started[:10]
    yield f"## {started}: all archetypes of the paper on one machine\n"
    yield (
        "Each archetype as people use it, with its own exec for each action, and (`-init`) with our init. "
        "p50 of the whole rollout; the number of trials is in parentheses.\n"
    )
    yield from _grid(
        ["substrate", *summary.workloads],
        [
            [label, *(_total(summary.lone_cell(workload, label)) for workload in summary.workloads)]
            for label in summary.labels
            if label not in whole.controls and any(cell.substrate == label for cell in summary.cells)
        ],
    )
    yield source("cells.total.p50") + "\n"
    yield from _stored(made["law"])
    yield source("laws") + "\n"
    if "action_path" in made:
        yield "### The action path\n"
        yield made["action_path"].caption + "\n<!-- configuration -->\n"
        yield from _stored(made["action_path"])
        yield source("laws; action_paths") + "\n"
        figure = f"results/{name}/figures/action_path.svg"
        yield f"![Each archetype with its own exec and with our init]({figure})\n"
    if "beside_the_paper" in made:
        yield "### Beside the paper\n"
        yield from _stored(made["beside_the_paper"])
        yield source("ratios.ratio; cells.first_result.p50; cells.total.p50; projections.hours")
        yield QUOTED
        yield f"<!-- arithmetic ({'; '.join(_hour_ratios(summary))}) -->\n"
        for sentence in paper.sentences(summary):
            yield sentence
            yield source("ratios.ratio")
            yield QUOTED + "\n"
    yield f"![The law by substrate](results/{name}/figures/law.svg)\n"
    yield from _facts(whole, name)


def _total(cell: Cell | None) -> str:
    if cell is None or cell.total is None:
        return UNKNOWN
    return f"{duration(cell.total.p50.value)} ({cell.succeeded})"


def _hour_ratios(summary: Summary) -> list[str]:
    """The ratios of worker-hours, as the table has them: they are not in the summary."""
    hours = paper.comparisons(summary)[-1]
    return [f"{one.ratio.value:.3g}" for one in (hours.as_used, hours.isolated) if one]


def _facts(summary: Summary, name: str) -> Iterator[str]:
    left = [one for one in summary.substrates if one.unavailable is not None]
    loads = ", ".join(f"{session.load:.2f}" for session in summary.sessions)
    floor = next((one for one in summary.noise_floor if one.metric == "total"), None)
    yield "| | |\n|---|---|"
    yield f"| command | `dutyfree study --plan {summary.plan['name']}` |"
    yield f"| when | {summary.started[:16].replace('T', ' ')} UTC; load at the start {loads} |"
    if floor is not None:
        differ = rate(minus_one(floor.ratio))
        yield f"| noise | {floor.twin} and {floor.substrate} differ by {differ} over all workloads |"
    else:
        yield f"| noise | {noise_sentence(summary)} |"
    yield f"| trials | {count(summary.trials)}, {summary.failed or 'none'} failed |"
    if left:
        yield f"| left out | {enumeration([f'{one.label} ({one.unavailable})' for one in left])} |"
    at = f"results/{name}"
    yield f"| files | [report]({at}/report.md), [tables]({at}/tables), [records]({at}/records.jsonl.gz) |"
    yield f"<!-- from results/{name}: sessions.load -->"
    if floor is not None:
        written = rate(minus_one(floor.ratio)).replace("[", "").replace("]", "").replace(",", "").split()
        yield f"<!-- arithmetic ({'; '.join(part for part in written if part != '%')}) -->"


def _stored(table: Table) -> Iterator[str]:
    yield from _grid(table.header, [row.shown for row in table.rows], table.text_columns)


def _grid(header: list[str], rows: list[list[str]], text_columns: int = 1) -> Iterator[str]:
    rule = ["---" if place < text_columns else "--:" for place in range(len(header))]
    yield from (_in_seconds(f"| {' | '.join(line)} |") for line in (header, rule, *rows))


def _in_seconds(text: str) -> str:
    """The checker of claims knows one unit for a number: 2 min 26 s becomes 146 s."""
    return re.sub(r"(\d+)\smin\s(\d+)\ss", lambda found: f"{int(found[1]) * 60 + int(found[2])} s", text)


if __name__ == "__main__":
    print("\n".join(section(Path(sys.argv[1]))))

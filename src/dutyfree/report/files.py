"""Writes the files of a report: summary.json, tables, figures, report.md, report.html."""

from __future__ import annotations

import shlex
from pathlib import Path

import msgspec

from dutyfree.analysis.atomic_file import atomic_write
from dutyfree.analysis.model import Summary
from dutyfree.analysis.summary import encode, summarise
from dutyfree.contract.errors import RecordsError
from dutyfree.report import canvas, html, markdown
from dutyfree.report.document import document
from dutyfree.report.figures.catalog import FIGURES
from dutyfree.report.tables.catalog import tables
from dutyfree.study import records


def write(where: Path, found: records.Records | None = None) -> Summary:
    """Write the report beside the records that ``where`` is or contains; read them unless they are given.

    Raises RecordsError.
    """
    summary = summarise(found or records.read(where))
    shown = without_controls(summary)
    directory = records.home(where)
    drawings: dict[str, bytes] = {}
    try:
        _replace(directory / "summary.json", encode(summary))
        for table in tables(shown).values():
            _replace(directory / "tables" / f"{table.name}.csv", table.csv())
        for name, (vector, raster) in draw(shown).items():
            drawings[name] = vector
            _replace(directory / "figures" / f"{name}.svg", vector)
            _replace(directory / "figures" / f"{name}.png", raster)
        content = document(shown, f"dutyfree report {shlex.quote(directory.resolve().name)}")
        _replace(directory / "report.md", markdown.render(content).encode())
        _replace(directory / "report.html", html.render(content, drawings).encode())
    except OSError as error:
        raise RecordsError(
            f"cannot write the report to {directory}: {error.strerror}",
            remedy="free some space or fix the permissions, then run 'dutyfree report' again",
        ) from error
    return summary


def without_controls(summary: Summary) -> Summary:
    """The summary that the report shows: the twins of A/A pairs are its noise floor, not substrates."""
    twins = set(summary.controls)
    return msgspec.structs.replace(
        summary,
        cells=[one for one in summary.cells if one.substrate not in twins],
        ratios=[one for one in summary.ratios if not {one.substrate, one.base} & twins],
        taxes=[one for one in summary.taxes if one.substrate not in twins],
        projections=[one for one in summary.projections if one.substrate not in twins],
        spreads=[one for one in summary.spreads if not {one.slowest, one.fastest} & twins],
        throughput=[one for one in summary.throughput if one.substrate not in twins],
        laws=[one for one in summary.laws if one.substrate not in twins],
        tails=[one for one in summary.tails if one.substrate not in twins],
    )


def draw(summary: Summary) -> dict[str, tuple[bytes, bytes]]:
    """Every figure for which there is data, as SVG and as PNG."""
    drawn = {}
    with canvas.style():
        for name, make in FIGURES.items():
            figure = make(summary)
            if figure is not None:
                drawn[name] = (canvas.svg(figure), canvas.png(figure))
    return drawn


def _replace(path: Path, content: bytes) -> None:
    with atomic_write(path) as draft:
        draft.write_bytes(content)

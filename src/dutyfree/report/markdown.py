"""The report as GitHub shows it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from dutyfree.analysis.units import markdown as plain
from dutyfree.report.document import (
    Block,
    Document,
    Facts,
    FigureBlock,
    Listing,
    Paragraph,
    Points,
    TableBlock,
)
from dutyfree.report.tables import Table
from dutyfree.report.wording import Note, notes


def render(document: Document) -> str:
    lines = [f"# {plain(document.title)}", "", plain(document.lead), ""]
    for number, answer in enumerate(document.answers, 1):
        remembered = f" **{plain(answer.figure)}.**" if answer.figure else ""
        kinds = ", ".join(kind.value for kind in answer.cautions)
        cautions = f" *With caution: {kinds}.*" if kinds else ""
        lines += [f"{number}. **{plain(answer.question)}**{remembered} {plain(answer.text)}{cautions}"]
    lines += ["", *_notes(document.notes)]
    for section in document.sections:
        lines += [f"## {plain(section.title)}", ""]
        for block in section.blocks:
            lines += [*_block(block), ""]
    return "\n".join(lines).rstrip() + "\n"


def _block(block: Block) -> Iterator[str]:
    match block:
        case FigureBlock():
            yield f"![{plain(block.alt)}](figures/{block.name}.svg)"
            yield ""
            yield f"**{plain(block.title)}.** {plain(block.caption)}"
            yield ""
            yield from _notes(block.notes)
        case TableBlock(table, folded):
            yield from (
                _folded(_table(table), f"{table.title} ({len(table.rows)})") if folded else _table(table)
            )
        case Facts(caption, rows):
            yield f"**{plain(caption)}**"
            yield ""
            yield from _grid(["fact", "value"], [[plain(name), plain(value)] for name, value in rows], 2)
        case Listing(caption, text, folded):
            fence = "`" * max(3, _longest_run(text, "`") + 1)
            inner = [f"{plain(caption)}:", "", fence, *text.splitlines(), fence]
            yield from _folded(inner, caption) if folded else inner
        case Points(items):
            yield from (f"- {plain(item)}" for item in items)
        case Paragraph(text):
            yield plain(text)


def _table(table: Table) -> Iterator[str]:
    yield f"**{plain(table.title)}.** {plain(table.caption)}"
    yield ""
    if not table.rows:
        yield plain(table.absent)
        return
    found = notes(caution for row in table.rows for caution in row.cautions)
    places = {(note.kind, note.text): place for place, note in enumerate(found, 1)}
    rows = []
    for row in table.rows:
        cells = [plain(text) for text in row.shown]
        marks = sorted({places[caution.kind, caution.text] for caution in row.cautions})
        if marks:
            cells[table.marked] += f" <sup>{','.join(map(str, marks))}</sup>"
        rows.append(cells)
    yield from _grid(table.header, rows, table.text_columns)
    yield ""
    yield from (f"{place}. *{note.kind.value}*: {plain(note.text)}" for place, note in enumerate(found, 1))


def _grid(header: list[str], rows: Iterable[list[str]], text_columns: int) -> Iterator[str]:
    yield f"| {' | '.join(plain(title) for title in header)} |"
    yield "|" + "|".join("---" if place < text_columns else "--:" for place in range(len(header))) + "|"
    yield from (f"| {' | '.join(row)} |" for row in rows)


def _notes(found: Iterable[Note]) -> Iterator[str]:
    lines = [
        f"> - *{note.kind.value}*{f' ({plain(note.about)})' if note.about else ''}: {plain(note.text)}"
        for note in found
    ]
    yield from [*lines, ""] if lines else []


def _folded(lines: Iterable[str], title: str) -> Iterator[str]:
    yield f"<details><summary>{plain(title)}</summary>"
    yield ""
    yield from lines
    yield ""
    yield "</details>"


def _longest_run(text: str, char: str) -> int:
    longest = run = 0
    for letter in text:
        run = run + 1 if letter == char else 0
        longest = max(longest, run)
    return longest

"""The report as Markdown, as GitHub shows it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from dutyfree.analysis.model import CautionKind
from dutyfree.analysis.units import markdown as plain
from dutyfree.report.blocks import (
    Block,
    FactsBlock,
    FigureBlock,
    ListBlock,
    ListingBlock,
    ParagraphBlock,
    TableBlock,
)
from dutyfree.report.document import ReportDocument
from dutyfree.report.phrases import CautionGroup, where
from dutyfree.report.tables.table import Table


def render(document: ReportDocument) -> str:
    numbers = {group.kind: number for number, group in enumerate(document.cautions, 1)}
    lines = [f"# {plain(document.title)}", "", plain(document.lead), ""]
    for block in document.opening:
        lines += [*_block(block, numbers), ""]
    for number, answer in enumerate(document.answers, 1):
        remembered = f" **{plain(answer.figure)}.**" if answer.figure else ""
        cautions = _with_caution(dict.fromkeys(answer.cautions, ""))
        lines += [
            f"{number}. **{plain(answer.question)}**{remembered} {plain(answer.text)} {cautions}".rstrip()
        ]
    lines += ["", *_cautions(document.cautions)]
    for section in document.sections:
        lines += [f"## {plain(section.title)}", ""]
        for block in section.blocks:
            lines += [*_block(block, numbers), ""]
    return "\n".join(lines).rstrip() + "\n"


def _block(block: Block, numbers: Mapping[CautionKind, int]) -> Iterator[str]:
    match block:
        case FigureBlock():
            yield from _figure(block)
        case TableBlock(table, folded):
            shown = _table(table, numbers)
            yield from _folded(shown, f"{table.title} ({len(table.rows)})") if folded else shown
        case FactsBlock(caption, rows):
            yield f"**{plain(caption)}**"
            yield ""
            yield from _grid(["fact", "value"], [[plain(name), plain(value)] for name, value in rows], 2)
        case ListingBlock(caption, text, folded):
            fence = "`" * max(3, _longest_run(text, "`") + 1)
            inner = [f"{plain(caption)}:", "", fence, *text.splitlines(), fence]
            yield from _folded(inner, caption) if folded else inner
        case ListBlock(items):
            yield from (f"- {plain(item)}" for item in items)
        case ParagraphBlock(text):
            yield plain(text)


def _figure(block: FigureBlock) -> Iterator[str]:
    yield f"![{plain(block.alt)}](figures/{block.name}.svg)"
    yield ""
    kinds = dict.fromkeys(caution.kind for caution in block.cautions)
    places = {kind: where(one for one in block.cautions if one.kind == kind) for kind in kinds}
    yield f"**{plain(block.title)}.** {plain(block.caption)} {_with_caution(places)}".rstrip()


def _with_caution(kinds: Mapping[CautionKind, str]) -> str:
    """One line: the kinds of cautions, each with the cells that it is about."""
    text = ", ".join(
        f"{kind.value}{f' ({plain(places)})' if places else ''}" for kind, places in kinds.items()
    )
    return f"*Cautions: {text}.*" if text else ""


def _table(table: Table, numbers: Mapping[CautionKind, int]) -> Iterator[str]:
    yield f"**{plain(table.title)}.** {plain(table.caption)}"
    yield ""
    if not table.rows:
        yield plain(table.absent)
        return
    rows = []
    for row in table.rows:
        cells = [plain(text) for text in row.shown]
        marks = sorted({numbers[caution.kind] for caution in row.cautions})
        if marks:
            cells[table.marked] += f" <sup>{','.join(map(str, marks))}</sup>"
        rows.append(cells)
    yield from _grid(table.header, rows, table.text_columns)
    found = sorted({caution.kind for row in table.rows for caution in row.cautions}, key=numbers.__getitem__)
    if found:
        yield ""
        yield _with_caution({kind: str(numbers[kind]) for kind in found})


def _cautions(found: Iterable[CautionGroup]) -> Iterator[str]:
    """All cautions, with the numbers that tables show beside their values."""
    lines = []
    for number, group in enumerate(found, 1):
        heading = f" ({plain(group.heading)})" if group.heading else ""
        if len(group.notes) == 1:
            lines.append(f"{number}. *{group.kind.value}*{heading}: {plain(group.notes[0].text)}")
            continue
        lines.append(f"{number}. *{group.kind.value}*{heading}:")
        lines += [
            f"   - {f'{plain(where(note.cells))}: ' if note.cells else ''}{plain(note.text)}"
            for note in group.notes
        ]
    yield from ["**Cautions**", "", *lines, ""] if lines else []


def _grid(header: list[str], rows: Iterable[list[str]], text_columns: int) -> Iterator[str]:
    yield f"| {' | '.join(plain(title) for title in header)} |"
    yield "|" + "|".join("---" if place < text_columns else "--:" for place in range(len(header))) + "|"
    yield from (f"| {' | '.join(row)} |" for row in rows)


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

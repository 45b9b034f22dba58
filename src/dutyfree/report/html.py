"""The report as one self-contained HTML file. All text is escaped, because labels are untrusted."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from html import escape
from importlib import resources
from string import Template

from dutyfree.analysis.model import CautionKind
from dutyfree.report import canvas
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
from dutyfree.report.document import ReportDocument
from dutyfree.report.headline import HeadlineAnswer
from dutyfree.report.phrases import CautionGroup, where
from dutyfree.report.tables.table import Table


def render(document: ReportDocument, figures: Mapping[str, bytes]) -> str:
    """``figures``: name → SVG."""
    template = Template(resources.files(__package__).joinpath("template.html").read_text(encoding="utf-8"))
    page = _Page(document, figures)
    return template.substitute(
        title=escape(document.title),
        lead=escape(document.lead),
        opening="\n".join(page.block(block) for block in document.opening),
        answers="\n".join(page.answer(number, answer) for number, answer in enumerate(document.answers, 1)),
        cautions=_cautions(document.cautions),
        contents="\n".join(
            f'<li><a href="#{_slug(section.title)}">{escape(section.title)}</a></li>'
            for section in document.sections
        ),
        sections="\n".join(page.section(section) for section in document.sections),
    )


_ASIDE = re.compile(r"\(95[^)]*\)")


class _Page:
    """Renders the parts of the page; holds the numbers of the cautions and the figures."""

    def __init__(self, document: ReportDocument, figures: Mapping[str, bytes]) -> None:
        self._numbers = {group.kind: number for number, group in enumerate(document.cautions, 1)}
        self._figures = figures

    def answer(self, number: int, answer: HeadlineAnswer) -> str:
        finding = _ASIDE.sub(r'<span class="ci">\g<0></span>', escape(answer.figure))
        remembered = f'<p class="number">{finding}</p>' if finding else ""
        cautions = self._with_caution(dict.fromkeys(answer.cautions, ""))
        return (
            f'<li class="answer"><h2>{number}. {escape(answer.question)}</h2>'
            f"{remembered}<p>{escape(answer.text)}</p>{cautions}</li>"
        )

    def section(self, section: Section) -> str:
        blocks = "\n".join(self.block(block) for block in section.blocks)
        return (
            f'<section id="{_slug(section.title)}">\n<h2>{escape(section.title)}</h2>\n{blocks}\n</section>'
        )

    def block(self, block: Block) -> str:
        match block:
            case FigureBlock():
                return self.figure(block)
            case TableBlock(table, folded):
                shown = self._table(table)
                return _folded(shown, f"{table.title} ({len(table.rows)} rows)") if folded else shown
            case FactsBlock(caption, rows):
                return _facts(caption, rows)
            case ListingBlock(caption, text, folded):
                pre = f'<pre tabindex="0"><code>{escape(text)}</code></pre>'
                return _folded(pre, caption) if folded else f"<p>{escape(caption)}:</p>{pre}"
            case ListBlock(items):
                return "<ul>" + "".join(f"<li>{escape(item)}</li>" for item in items) + "</ul>"
            case ParagraphBlock(text):
                return f"<p>{escape(text)}</p>"

    def figure(self, block: FigureBlock) -> str:
        drawing = (
            canvas.inline(self._figures[block.name], block.name, escape(block.alt))
            if block.name in self._figures
            else ""
        )
        kinds = dict.fromkeys(caution.kind for caution in block.cautions)
        places = {kind: where(one for one in block.cautions if one.kind == kind) for kind in kinds}
        return (
            f'<figure id="{block.name}">\n<div class="drawing">{drawing}</div>\n'
            f"<figcaption><strong>{escape(block.title)}.</strong> {escape(block.caption)}</figcaption>\n"
            f"{self._with_caution(places)}\n</figure>"
        )

    def _with_caution(self, kinds: Mapping[CautionKind, str]) -> str:
        """One line: the kinds of cautions, each with the cells that it is about."""
        text = ", ".join(
            f"{self._link(kind, escape(kind.value))}{f' ({escape(places)})' if places else ''}"
            for kind, places in kinds.items()
        )
        return f'<p class="cautions">cautions: {text}</p>' if text else ""

    def _link(self, kind: CautionKind, text: str) -> str:
        return f'<a href="#caution-{self._numbers[kind]}">{text}</a>'

    def _table(self, table: Table) -> str:
        caption = f"<strong>{escape(table.title)}.</strong> {escape(table.caption)}"
        if not table.rows:
            absent = f'<p class="absent">{escape(table.absent)}</p>'
            return f'<div class="table"><p class="caption">{caption}</p>{absent}</div>'
        lines = []
        for row in table.rows:
            kinds = sorted({caution.kind for caution in row.cautions}, key=self._numbers.__getitem__)
            links = ",".join(self._link(kind, str(self._numbers[kind])) for kind in kinds)
            lines.append(_row(table, row.shown, f"<sup>{links}</sup>" if links else ""))
        head = "".join(
            f'<th scope="col"{_numeric(place, table.text_columns)}>{escape(title)}</th>'
            for place, title in enumerate(table.header)
        )
        found = sorted(
            {caution.kind for row in table.rows for caution in row.cautions}, key=self._numbers.__getitem__
        )
        cautions = self._with_caution({kind: str(self._numbers[kind]) for kind in found})
        # The caption is outside, so that it does not scroll with a wide table.
        return (
            f'<div class="table"><p class="caption" id="{table.name}-caption">{caption}</p>'
            f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(table.title)}">'
            f'<table aria-labelledby="{table.name}-caption"><thead><tr>{head}</tr></thead>'
            f"<tbody>{''.join(lines)}</tbody></table></div>{cautions}</div>"
        )


def _slug(title: str) -> str:
    return "".join(char if char.isalnum() else "-" for char in title.lower()).strip("-")


LONG = 28
_INTERVAL = re.compile(r" (\[[^\]]*\])\Z")


def _row(table: Table, cells: list[str], marks: str) -> str:
    made = []
    for place, text in enumerate(cells):
        content = escape(text)
        if place >= table.text_columns:
            content = _INTERVAL.sub(r' <span class="ci">\1</span>', content)
        if place == table.marked:
            content += marks
        if place < min(2, table.text_columns):
            made.append(f'<th scope="row">{content}</th>')
        elif place < table.text_columns and len(text) > LONG:
            made.append(f'<td class="long">{content}</td>')
        else:
            made.append(f"<td{_numeric(place, table.text_columns)}>{content}</td>")
    return f"<tr>{''.join(made)}</tr>"


def _numeric(place: int, text_columns: int) -> str:
    return "" if place < text_columns else ' class="n"'


def _facts(caption: str, rows: Iterable[tuple[str, str]]) -> str:
    lines = "".join(
        f'<tr><th scope="row">{escape(name)}</th><td class="wrap">{escape(value)}</td></tr>'
        for name, value in rows
    )
    if not lines:
        return f"<p><strong>{escape(caption)}</strong>: no data.</p>"
    head = f"<caption><strong>{escape(caption)}</strong></caption>"
    return f'<table class="facts">{head}<tbody>{lines}</tbody></table>'


def _cautions(found: Iterable[CautionGroup]) -> str:
    items = "".join(
        f'<li id="caution-{number}"><span class="kind">{escape(group.kind.value)}</span> '
        f"{_caution(group)}</li>"
        for number, group in enumerate(found, 1)
    )
    return f'<ol class="notes" aria-label="Cautions">{items}</ol>' if items else ""


def _caution(group: CautionGroup) -> str:
    """One line. If the text differs between cells, the texts are folded below it."""
    heading = f"<b>{escape(group.heading)}</b>" if group.heading else ""
    if len(group.notes) == 1:
        return f"{heading}{': ' if heading else ''}{escape(group.notes[0].text)}"
    each = "".join(
        f"<li>{f'<b>{escape(where(note.cells))}:</b> ' if note.cells else ''}{escape(note.text)}</li>"
        for note in group.notes
    )
    return f"<details><summary>{heading or f'{len(group.notes)} times'}</summary><ul>{each}</ul></details>"


def _folded(content: str, title: str) -> str:
    return f"<details><summary>{escape(title)}</summary>{content}</details>"

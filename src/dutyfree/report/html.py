"""The report as one self-contained HTML file. Every text goes through ``escape``: labels are untrusted."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from html import escape
from importlib import resources
from string import Template

from dutyfree.report import canvas
from dutyfree.report.document import (
    Block,
    Document,
    Facts,
    FigureBlock,
    Listing,
    Paragraph,
    Points,
    Section,
    TableBlock,
)
from dutyfree.report.headline import Answer
from dutyfree.report.tables import Table
from dutyfree.report.wording import Note, notes


def render(document: Document, figures: Mapping[str, bytes]) -> str:
    """``figures``: name → SVG."""
    template = Template(resources.files(__package__).joinpath("template.html").read_text(encoding="utf-8"))
    return template.substitute(
        title=escape(document.title),
        lead=escape(document.lead),
        answers="\n".join(_answer(number, answer) for number, answer in enumerate(document.answers, 1)),
        notes=_notes(document.notes),
        contents="\n".join(
            f'<li><a href="#{_slug(section.title)}">{escape(section.title)}</a></li>'
            for section in document.sections
        ),
        sections="\n".join(_section(section, figures) for section in document.sections),
    )


def _answer(number: int, answer: Answer) -> str:
    remembered = f'<p class="number">{escape(answer.figure)}</p>' if answer.figure else ""
    kinds = ", ".join(escape(kind.value) for kind in answer.cautions)
    cautions = f'<p class="cautions">with caution: {kinds}</p>' if kinds else ""
    return (
        f'<li class="answer"><h2>{number}. {escape(answer.question)}</h2>'
        f"{remembered}<p>{escape(answer.text)}</p>{cautions}</li>"
    )


def _section(section: Section, figures: Mapping[str, bytes]) -> str:
    blocks = "\n".join(_block(block, figures) for block in section.blocks)
    return f'<section id="{_slug(section.title)}">\n<h2>{escape(section.title)}</h2>\n{blocks}\n</section>'


def _slug(title: str) -> str:
    return "".join(char if char.isalnum() else "-" for char in title.lower()).strip("-")


def _block(block: Block, figures: Mapping[str, bytes]) -> str:
    match block:
        case FigureBlock():
            return _figure(block, figures)
        case TableBlock(table, folded):
            return (
                _folded(_table(table), f"{table.title} ({len(table.rows)} rows)") if folded else _table(table)
            )
        case Facts(caption, rows):
            return _facts(caption, rows)
        case Listing(caption, text, folded):
            pre = f'<pre tabindex="0"><code>{escape(text)}</code></pre>'
            return _folded(pre, caption) if folded else f"<p>{escape(caption)}:</p>{pre}"
        case Points(items):
            return "<ul>" + "".join(f"<li>{escape(item)}</li>" for item in items) + "</ul>"
        case Paragraph(text):
            return f"<p>{escape(text)}</p>"


def _figure(block: FigureBlock, figures: Mapping[str, bytes]) -> str:
    drawing = (
        canvas.inline(figures[block.name], block.name, escape(block.alt)) if block.name in figures else ""
    )
    return (
        f'<figure id="{block.name}">\n<div class="drawing">{drawing}</div>\n'
        f"<figcaption><strong>{escape(block.title)}.</strong> {escape(block.caption)}</figcaption>\n"
        f"{_notes(block.notes)}\n</figure>"
    )


def _table(table: Table) -> str:
    caption = f"<strong>{escape(table.title)}.</strong> {escape(table.caption)}"
    if not table.rows:
        absent = f'<p class="absent">{escape(table.absent)}</p>'
        return f'<div class="table"><p class="caption">{caption}</p>{absent}</div>'
    found = notes(caution for row in table.rows for caution in row.cautions)
    places = {(note.kind, note.text): place for place, note in enumerate(found, 1)}
    lines = []
    for row in table.rows:
        marks = sorted({places[caution.kind, caution.text] for caution in row.cautions})
        links = ",".join(f'<a href="#{table.name}-note-{mark}">{mark}</a>' for mark in marks)
        lines.append(_row(table, row.shown, f"<sup>{links}</sup>" if marks else ""))
    head = "".join(
        f'<th scope="col"{_numeric(place, table.text_columns)}>{escape(title)}</th>'
        for place, title in enumerate(table.header)
    )
    foot = "".join(
        f'<li id="{table.name}-note-{place}"><span class="kind">{escape(note.kind.value)}</span> '
        f"{escape(note.text)}</li>"
        for place, note in enumerate(found, 1)
    )
    notes_list = f'<ol class="notes">{foot}</ol>' if foot else ""
    # The caption stands outside: it is not to be scrolled with a wide table.
    return (
        f'<div class="table"><p class="caption" id="{table.name}-caption">{caption}</p>'
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(table.title)}">'
        f'<table aria-labelledby="{table.name}-caption"><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(lines)}</tbody></table></div>{notes_list}</div>"
    )


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
        return f"<p><strong>{escape(caption)}</strong>: nothing is known.</p>"
    head = f"<caption><strong>{escape(caption)}</strong></caption>"
    return f'<table class="facts">{head}<tbody>{lines}</tbody></table>'


def _notes(found: Iterable[Note]) -> str:
    items = "".join(
        f'<li><span class="kind">{escape(note.kind.value)}</span> '
        f"{f'<b>{escape(note.about)}:</b> ' if note.about else ''}{escape(note.text)}</li>"
        for note in found
    )
    return f'<ul class="notes" aria-label="Cautions">{items}</ul>' if items else ""


def _folded(content: str, title: str) -> str:
    return f"<details><summary>{escape(title)}</summary>{content}</details>"

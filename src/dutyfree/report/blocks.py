"""The parts of a report, independent of Markdown and HTML. All text is unescaped."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from dutyfree.analysis.model import Caution
from dutyfree.report.tables.table import Table


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

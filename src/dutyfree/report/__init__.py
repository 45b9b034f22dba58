"""SHOW: figures, tables, Markdown and HTML, from records alone.

::

    Summary → figures, tables → document → report.md, report.html
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dutyfree.analysis.model import Summary


def write(where: Path) -> Summary:
    """Read a directory or a file of records and write the whole report beside them. Raises RecordsError."""
    from dutyfree.report import writing  # matplotlib and scipy take their time to import

    return writing.write(where)

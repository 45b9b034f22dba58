"""Reports: figures, tables, Markdown and HTML.

::

    Summary → figures, tables → document → report.md, report.html

May import ``analysis`` and ``study.records``, and no substrate. Start with ``document``, which has the
content of a report in order; ``files`` writes it.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dutyfree.analysis.model import Summary
    from dutyfree.study.records import Records


def write(where: Path, records: Records | None = None) -> Summary:
    """Write the report beside the records that ``where`` is or contains; read them unless they are given.

    Raises RecordsError.
    """
    from dutyfree.report import files  # imports matplotlib and scipy, which is slow

    return files.write(where, records)

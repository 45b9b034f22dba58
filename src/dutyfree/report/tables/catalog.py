"""The list of all tables, in the order of the report."""

from __future__ import annotations

from collections.abc import Callable

from dutyfree.analysis.model import Summary
from dutyfree.report.tables.costs import ratios, table1, table2, tax, worker_hours
from dutyfree.report.tables.results import cold_start, decomposition, failures, throughput, trajectories
from dutyfree.report.tables.spans import inside_action, inside_creation
from dutyfree.report.tables.table import Table


def tables(summary: Summary) -> dict[str, Table]:
    """All tables by name, in the order of the report."""
    makers: tuple[Callable[[Summary], Table], ...] = (
        cold_start,
        decomposition,
        inside_action,
        inside_creation,
        trajectories,
        tax,
        table1,
        table2,
        worker_hours,
        ratios,
        failures,
    )
    made = [maker(summary) for maker in makers]
    if summary.throughput:
        made.append(throughput(summary))
    return {table.name: table for table in made}

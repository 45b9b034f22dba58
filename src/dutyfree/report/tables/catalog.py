"""The list of all tables, in the order of the report."""

from __future__ import annotations

from collections.abc import Callable

from dutyfree.analysis.model import Summary
from dutyfree.report.tables import controls, costs, law, results, spans, tails
from dutyfree.report.tables.table import Table

ALWAYS: tuple[Callable[[Summary], Table], ...] = (
    law.law,
    results.cold_start,
    results.decomposition,
    spans.inside_action,
    spans.inside_creation,
    results.trajectories,
    tails.distribution,
    costs.tax,
    costs.table1,
    costs.table2,
    costs.worker_hours,
    controls.rankings,
    costs.ratios,
    results.failures,
)
WITH_DATA: tuple[Callable[[Summary], Table], ...] = (
    controls.beside_the_paper,
    controls.action_path,
    law.noise_floor,
    law.predictions,
    controls.storage,
    controls.walls,
    results.throughput,
)
"""These are left out if they have no row: only some plans measure them."""


def tables(summary: Summary) -> dict[str, Table]:
    """All tables by name."""
    made = [maker(summary) for maker in ALWAYS]
    made += [table for maker in WITH_DATA if (table := maker(summary)).rows]
    return {table.name: table for table in made}

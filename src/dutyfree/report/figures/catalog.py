"""The list of all figures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dutyfree.analysis.model import Summary
from dutyfree.report.figures.action_path import action_path
from dutyfree.report.figures.cold_start import cold_start_distributions, cold_start_medians
from dutyfree.report.figures.composition import composition_by_length, decomposition_at_t2
from dutyfree.report.figures.law import law_by_substrate, rankings_by_length
from dutyfree.report.figures.sensitivity import relative_by_workload
from dutyfree.report.figures.storage import storage_by_substrate
from dutyfree.report.figures.tails import waits_by_group
from dutyfree.report.figures.tax import tax_by_substrate
from dutyfree.report.figures.trajectories import completion_by_length, worker_hours
from dutyfree.report.figures.walls import prices_of_walls

FIGURES: dict[str, Callable[[Summary], Any]] = {
    "law": law_by_substrate,
    "tax": tax_by_substrate,
    "figure1": decomposition_at_t2,
    "figure2": cold_start_medians,
    "figure3": cold_start_distributions,
    "figure4": composition_by_length,
    "figure5": completion_by_length,
    "figure6": worker_hours,
    "rankings": rankings_by_length,
    "sensitivity": relative_by_workload,
    "tails": waits_by_group,
    "action_path": action_path,
    "storage": storage_by_substrate,
    "walls": prices_of_walls,
}
"""Name → the function that draws it. The result is None if the study has nothing for the figure."""

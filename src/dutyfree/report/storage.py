"""Substrates that were measured on the disk and in memory: what storage alone changes."""

from __future__ import annotations

import msgspec

from dutyfree.analysis.baselines import storage_kind
from dutyfree.analysis.findings import Ratio
from dutyfree.analysis.model import Summary


class StoragePair(msgspec.Struct, frozen=True):
    """Two labels of one substrate that differ in storage."""

    use: str
    disk: str
    memory: str


def storage_pairs(summary: Summary) -> list[StoragePair]:
    """The first label on disk and the first in memory of each substrate that has both."""
    labels: dict[tuple[str, str], str] = {}
    for one in summary.substrates:
        kind = storage_kind(one.facts)
        if one.control_of is None and kind is not None:
            labels.setdefault((one.use, kind), one.label)
    uses = dict.fromkeys(use for use, _ in labels)
    return [
        StoragePair(use, labels[use, "disk"], labels[use, "memory"])
        for use in uses
        if (use, "disk") in labels and (use, "memory") in labels
    ]


def compared_workloads(summary: Summary) -> list[str]:
    """T2, which installs packages, and the longest trajectory; otherwise the last workload."""
    pairs = storage_pairs(summary)
    done = [
        name
        for name in summary.workloads
        if any(
            (cell := summary.lone_cell(name, label)) and cell.total
            for pair in pairs
            for label in (pair.disk, pair.memory)
        )
    ]
    chosen = ["T2", *summary.trajectories[-1:]]
    return [name for name in done if name in chosen] or done[-1:]


def ratio_between(summary: Summary, workload: str, one: str, other: str) -> Ratio | None:
    """The ratio of the whole rollouts of two labels, in the direction that the summary has it."""
    return next(
        (
            row
            for row in summary.ratios
            if row.workload == workload
            and row.metric == "total"
            and {row.substrate, row.base} == {one, other}
            and row.parallel == min(cell.parallel for cell in summary.lone(workload))
        ),
        None,
    )

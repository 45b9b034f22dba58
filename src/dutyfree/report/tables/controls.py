"""Tables of controlled comparisons: storage, walls, and rankings that reverse."""

from __future__ import annotations

from typing import NamedTuple

from dutyfree.analysis.findings import Ratio
from dutyfree.analysis.model import Cell, Summary
from dutyfree.analysis.units import UNKNOWN, enumeration, multiple
from dutyfree.report import phrases
from dutyfree.report.rankings import reversals
from dutyfree.report.storage import StoragePair, ratio_between, storage_pairs
from dutyfree.report.tables.table import Table, estimate, make_table, middle_cautions, p50, value
from dutyfree.report.walls import wall_prices


class _StorageRow(NamedTuple):
    workload: str
    pair: StoragePair
    disk: Cell
    memory: Cell
    found: Ratio | None

    @property
    def slower(self) -> str:
        if self.found is None:
            return ""
        return "disk" if self.found.substrate == self.pair.disk else "memory"


def storage(summary: Summary) -> Table:
    return make_table(
        "storage",
        "Disk and memory",
        "p50 of the whole rollout, with written files on the disk and in memory. "
        "The ratio is that of the slower to the faster.",
        [
            _StorageRow(name, pair, disk, memory, ratio_between(summary, name, pair.disk, pair.memory))
            for name in summary.workloads
            for pair in storage_pairs(summary)
            if (disk := summary.lone_cell(name, pair.disk))
            and (memory := summary.lone_cell(name, pair.memory))
        ],
        [
            ("workload", lambda row: row.workload),
            ("substrate", lambda row: row.pair.use),
            ("disk", lambda row: p50(row.disk.total)),
            ("memory", lambda row: p50(row.memory.total)),
            (
                "slower",
                lambda row: UNKNOWN if row.found is None else row.slower if row.found.shown else "none shown",
            ),
            ("ratio", lambda row: multiple(row.found.ratio if row.found else None)),
        ],
        [
            "workload",
            "pair.use",
            value("disk_label", lambda row: row.pair.disk),
            value("memory_label", lambda row: row.pair.memory),
            estimate("disk", lambda row: row.disk.total and row.disk.total.p50),
            estimate("memory", lambda row: row.memory.total and row.memory.total.p50),
            "slower",
            estimate("ratio", lambda row: row.found and row.found.ratio),
        ],
        text_columns=2,
        marked=5,
        cautions=lambda row: [
            caution for cell in (row.disk, row.memory) for caution in middle_cautions(summary, cell.key)
        ],
    )


def walls(summary: Summary) -> Table:
    return make_table(
        "walls",
        "The price of each wall",
        "The law with all walls minus the law without this one: what a wall costs once per rollout, "
        "for every action, and as a share of the time of the work. The 95 % intervals are rather too wide. "
        "A wall whose interval includes 0 has no shown price.",
        wall_prices(summary),
        [
            ("wall", lambda price: price.wall),
            ("per creation", lambda price: phrases.seconds(price.creation)),
            ("per action", lambda price: phrases.seconds(price.action)),
            ("of the work", lambda price: phrases.rate(price.work)),
            ("label without it", lambda price: price.substrate),
            ("compared with", lambda price: price.whole),
        ],
        ["wall", "substrate", "whole", estimate("creation"), estimate("action"), estimate("work")],
        text_columns=1,
        marked=1,
    )


def rankings(summary: Summary) -> Table:
    return make_table(
        "rankings",
        "Rankings that reverse",
        "Two substrates of which each is slower than the other in some workload. Only differences "
        "that count as shown are compared.",
        reversals(summary),
        [
            ("one", lambda row: row.one),
            ("other", lambda row: row.other),
            ("the one is slower in", lambda row: enumeration(row.one_slower)),
            ("the other is slower in", lambda row: enumeration(row.other_slower)),
        ],
        [
            "one",
            "other",
            value("one_slower", lambda row: " ".join(row.one_slower)),
            value("other_slower", lambda row: " ".join(row.other_slower)),
        ],
        text_columns=4,
        marked=0,
        absent="None: wherever two substrates differ, the same one is slower.",
    )

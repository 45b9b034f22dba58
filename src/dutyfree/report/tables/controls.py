"""Tables of controlled comparisons: storage, walls, and rankings that reverse."""

from __future__ import annotations

from dutyfree.analysis.model import Cell, Summary
from dutyfree.analysis.units import UNKNOWN, enumeration, multiple
from dutyfree.report import phrases
from dutyfree.report.rankings import reversals
from dutyfree.report.storage import StoragePair, ratio_between, storage_pairs
from dutyfree.report.tables.table import Row, Table, estimate_data, estimate_header, middle_cautions
from dutyfree.report.walls import wall_prices


def storage(summary: Summary) -> Table:
    return Table(
        name="storage",
        title="Disk and memory",
        caption="p50 of the whole rollout, with written files on the disk and in memory. "
        "The ratio is that of the slower to the faster.",
        header=["workload", "substrate", "disk", "memory", "slower", "ratio"],
        text_columns=2,
        marked=5,
        data_header=[
            "workload",
            "use",
            "disk_label",
            "memory_label",
            *estimate_header("disk"),
            *estimate_header("memory"),
            "slower",
            *estimate_header("ratio"),
        ],
        rows=[
            _storage_row(summary, name, pair, disk, memory)
            for name in summary.workloads
            for pair in storage_pairs(summary)
            for disk in [summary.lone_cell(name, pair.disk)]
            for memory in [summary.lone_cell(name, pair.memory)]
            if disk and memory
        ],
    )


def _storage_row(summary: Summary, workload: str, pair: StoragePair, disk: Cell, memory: Cell) -> Row:
    found = ratio_between(summary, workload, pair.disk, pair.memory)
    slower = "" if found is None else "disk" if found.substrate == pair.disk else "memory"
    middles = [cell.total.p50 if cell.total else None for cell in (disk, memory)]
    return Row(
        [
            workload,
            pair.use,
            *(phrases.seconds(middle) for middle in middles),
            UNKNOWN if found is None else slower if found.shown else "none shown",
            multiple(found.ratio if found else None),
        ],
        [
            workload,
            pair.use,
            pair.disk,
            pair.memory,
            *(value for middle in middles for value in estimate_data(middle)),
            slower,
            *estimate_data(found.ratio if found else None),
        ],
        [caution for cell in (disk, memory) for caution in middle_cautions(summary, cell.key)],
    )


def walls(summary: Summary) -> Table:
    return Table(
        name="walls",
        title="The price of each wall",
        caption="The law with all walls minus the law without this one: what a wall costs once per rollout, "
        "for every action, and as a share of the time of the work. The 95 % intervals are rather too wide. "
        "A wall whose interval includes 0 has no shown price.",
        header=["wall", "per creation", "per action", "of the work", "label without it", "compared with"],
        text_columns=1,
        marked=1,
        data_header=[
            "wall",
            "substrate",
            "whole",
            *estimate_header("creation"),
            *estimate_header("action"),
            *estimate_header("work"),
        ],
        rows=[
            Row(
                [
                    price.wall,
                    phrases.seconds(price.creation),
                    phrases.seconds(price.action),
                    phrases.rate(price.work),
                    price.substrate,
                    price.whole,
                ],
                [
                    price.wall,
                    price.substrate,
                    price.whole,
                    *estimate_data(price.creation),
                    *estimate_data(price.action),
                    *estimate_data(price.work),
                ],
            )
            for price in wall_prices(summary)
        ],
    )


def rankings(summary: Summary) -> Table:
    return Table(
        name="rankings",
        title="Rankings that reverse",
        caption="Two substrates of which each is slower than the other in some workload. Only differences "
        "that count as shown are compared.",
        header=["one", "other", "the one is slower in", "the other is slower in"],
        text_columns=4,
        marked=0,
        data_header=["one", "other", "one_slower", "other_slower"],
        rows=[
            Row(
                [row.one, row.other, enumeration(row.one_slower), enumeration(row.other_slower)],
                [row.one, row.other, " ".join(row.one_slower), " ".join(row.other_slower)],
            )
            for row in reversals(summary)
        ],
        absent="None: wherever two substrates differ, the same one is slower.",
    )

"""Tables of controlled comparisons: storage, walls, and rankings that reverse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from dutyfree.analysis.findings import Ratio
from dutyfree.analysis.model import Cell, Summary
from dutyfree.analysis.statistics import Estimate
from dutyfree.analysis.units import UNKNOWN, enumeration, multiple
from dutyfree.report import phrases
from dutyfree.report.paper import PaperRow, PaperSpread, comparisons
from dutyfree.report.rankings import reversals
from dutyfree.report.storage import StoragePair, ratio_between, storage_pairs
from dutyfree.report.tables.table import DataColumns, Table, estimate, make_table, middle_cautions, p50, value
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


def action_path(summary: Summary) -> Table:
    laws = {one.substrate: one for one in summary.laws}
    longest = next((one.workload for one in summary.action_paths if one.workload), None)
    return make_table(
        "action_path",
        "The action path",
        "Each archetype with its own exec (→) and with our init: the isolation, the storage and the limits "
        "are the same. What b loses is the action path; what remains of b is isolation, storage and our own "
        "path. "
        + (
            f"The last column: how much of the tax of {longest} goes away with our init, creation included. "
            if longest
            else ""
        )
        + "Brackets are 95 % intervals.",
        summary.action_paths,
        [
            ("archetype", lambda one: f"{one.own} → {one.init}"),
            ("a, per rollout", lambda one: _both(laws[one.own].a, laws[one.init].a, phrases.seconds)),
            ("b, per action", lambda one: _both(laws[one.own].b, laws[one.init].b, phrases.seconds)),
            ("c, times the work", lambda one: _both(laws[one.own].c, laws[one.init].c, phrases.factor)),
            ("action path, per action", lambda one: phrases.seconds(one.action)),
            ("share of b", lambda one: phrases.share(one.share)),
            ("share of the tax", lambda one: phrases.share(one.path_of_tax)),
        ],
        [
            *("own", "init", "workload"),
            *map(estimate, ("creation", "action", "work", "share", "tax", "path_of_tax")),
        ],
        text_columns=1,
        marked=2,
        cautions=lambda one: [
            caution
            for caution in summary.cautions
            if caution.substrate in (one.own, one.init) and caution.workload is None
        ],
    )


def _both(own: Estimate | None, init: Estimate | None, phrase: Callable[[Estimate | None], str]) -> str:
    return f"{phrase(own)} → {phrase(init)}"


def beside_the_paper(summary: Summary) -> Table:
    return make_table(
        "beside_the_paper",
        "Our spreads beside those of the paper",
        "Slowest ÷ fastest: in the paper, among the archetypes that were measured here as people use them, "
        "and among all labels that isolate. n is the least number of trials of the two.",
        comparisons(summary),
        [
            ("what", lambda row: row.what),
            ("paper", lambda row: row.paper or UNKNOWN),
            ("here, as people use them", lambda row: _spread(row.as_used)),
            ("here, all that isolate", lambda row: _spread(row.isolated)),
        ],
        [
            "what",
            "paper",
            *_spread_columns("as_used"),
            *_spread_columns("isolated"),
        ],
        text_columns=2,
        marked=2,
    )


def _spread_columns(name: str) -> list[DataColumns]:
    def of(field: str) -> Callable[[PaperRow], Any]:
        return lambda row: getattr(getattr(row, name), field, None)

    return [
        value(f"{name}_slowest", of("slowest")),
        value(f"{name}_fastest", of("fastest")),
        estimate(f"{name}_ratio", of("ratio")),
    ]


def _spread(found: PaperSpread | None) -> str:
    if found is None:
        return UNKNOWN
    return (
        f"{multiple(found.ratio)}: {found.slowest} {found.slow}, {found.fastest} {found.fast} (n ≥ {found.n})"
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

"""Titles, captions and alternative texts of the figures."""

from __future__ import annotations

from collections.abc import Iterable

from dutyfree.analysis.model import Caution, CautionKind, Cell, Summary
from dutyfree.analysis.projection import MILLION
from dutyfree.analysis.units import duration, hours
from dutyfree.report.blocks import FigureBlock
from dutyfree.report.figures.rows import MANY
from dutyfree.report.figures.sensitivity import relative_times
from dutyfree.report.figures.tails import tail_workload, tails_of
from dutyfree.report.figures.tax import lone_taxes, shown_workloads
from dutyfree.report.figures.trajectories import projected_workload
from dutyfree.report.phrases import factor, rate, seconds, share
from dutyfree.report.rankings import crossings, lines
from dutyfree.report.storage import compared_workloads, storage_pairs
from dutyfree.report.tables.table import DIVISION, MIDDLE, lone_cells
from dutyfree.report.walls import wall_prices


def tax(summary: Summary) -> FigureBlock | None:
    names = shown_workloads(summary)
    if not names:
        return None
    rates = [
        f"{name} on {row.substrate} {rate(row.rate)}"
        for name in names
        for row in lone_taxes(summary, name)
        if row.rate
    ]
    return FigureBlock(
        "tax",
        f"The tax: extra time over {summary.baseline} by substrate",
        "p50 of the whole rollout compared with the same rollout on bare, in the shortest and the longest "
        "workload. Thick lines are 95\N{NO-BREAK SPACE}% intervals. A hollow mark means that no "
        "difference is shown: the interval includes 0, or the difference may be chance, or it is below the "
        "noise floor.",
        f"The tax rate of each substrate as dots with intervals: {'; '.join(rates)}.",
        _figure_cautions(summary, lone_cells(summary, names), without=MIDDLE),
    )


def figure1(summary: Summary) -> FigureBlock:
    cells = summary.lone("T2")
    return FigureBlock(
        "figure1",
        "Figure 1. Latency decomposition at T2",
        "Mean components over the middle half of the rollouts by total. The tick is the p50 of the total, "
        "with its 95 % interval. Grey is the time inside the actions. It includes any slow-down of the work "
        "in the sandbox; where a substrate does not report it, it is that of bare.",
        _alt("The time of a T2 rollout by component as stacked bars", cells, "total"),
        _figure_cautions(summary, cells, without={CautionKind.UNSURE_TAIL}),
    )


def figure2(summary: Summary) -> FigureBlock:
    cells = lone_cells(summary, summary.tiers)
    return FigureBlock(
        "figure2",
        "Figure 2. Cold start by substrate and tier",
        "p50 on a logarithmic scale: from the request to the result of the first command (filled), and until "
        "the sandbox is removed (hollow). Thick lines are 95 % intervals, if wider than the mark.",
        _alt("The p50 of the whole rollout by tier as dots", cells, "total"),
        _figure_cautions(summary, cells, without=MIDDLE),
    )


def figure3(summary: Summary) -> FigureBlock:
    cells = lone_cells(summary, summary.tiers)
    return FigureBlock(
        "figure3",
        "Figure 3. Distributions of cold starts",
        "A mark for each successful trial, on logarithmic scales: from the request to the first command's "
        "result (left), and until the sandbox is removed (right)."
        if len({cell.substrate for cell in cells}) > MANY
        else "The share of all trials, including failures, that ended within a time. No trial is left out. "
        "The mark is the slowest trial. With failures, the curve ends below 100 %.",
        _alt("Cumulative distributions of cold starts; p95 of the whole rollout", cells, "p95"),
        _figure_cautions(summary, cells, without=DIVISION),
    )


def figure4(summary: Summary) -> FigureBlock:
    cells = lone_cells(summary, summary.trajectories)
    return FigureBlock(
        "figure4",
        "Figure 4. Composition by trajectory length",
        "Each bar is a whole rollout. In short trajectories, creation and readiness cost most; in long "
        "ones, the orchestration of every action.",
        _alt(
            "Components by trajectory length as stacked bars of equal height; the share of orchestration",
            cells,
            "share",
        ),
        _figure_cautions(summary, cells, without={CautionKind.UNSURE_TAIL}),
    )


def figure5(summary: Summary) -> FigureBlock:
    cells = lone_cells(summary, summary.trajectories)
    return FigureBlock(
        "figure5",
        "Figure 5. Completion time and amortised latency by action count",
        "Left: p50 of the completion time, from the request until the sandbox is removed. Right: the same "
        "divided by the number of actions. Both are logarithmic."
        if len({cell.substrate for cell in cells if cell.total}) > MANY
        else "Above: p50 of the completion time, from the request until the sandbox is removed. Below: the "
        "same divided by the number of actions. Thick lines are 95 % intervals, if wider than the mark.",
        _alt("Completion time by number of actions as lines", cells, "total"),
        _figure_cautions(summary, cells, without=MIDDLE),
    )


def figure6(summary: Summary) -> FigureBlock:
    workload = projected_workload(summary)
    cells = summary.lone(workload) if workload else []
    rows = [row for row in summary.projections if row.workload == workload]
    many = len({row.substrate for row in rows}) > MANY
    rollouts = MILLION if many else rows[-1].rollouts if rows else 0
    ends = [row for row in rows if row.rollouts == rollouts]
    values = ", ".join(f"{row.substrate} {hours(row.hours.value)}" for row in ends)
    return FigureBlock(
        "figure6",
        "Figure 6. Worker-hours by number of trajectories",
        f"N·T/3600, where T is the mean of {workload or 'a trajectory'}. "
        + ("Thick lines" if many else "Bands")
        + " are 95 % intervals. The ranking is the same for every N.",
        f"Worker-hours of a million rollouts as dots: {values}."
        if many
        else f"Worker-hours by number of rollouts as lines; at the right end: {values or 'no data'}.",
        _figure_cautions(summary, cells, without=MIDDLE),
    )


def law(summary: Summary) -> FigureBlock | None:
    laws = [one for one in summary.laws if one.substrate not in summary.controls]
    if not any(one.a for one in laws):
        return None
    values = "; ".join(
        f"{one.substrate} a {seconds(one.a)}, b {seconds(one.b)}, c {factor(one.c)}" for one in laws
    )
    return FigureBlock(
        "law",
        "The law by substrate",
        "Short rollouts pay a, rollouts with many actions pay b, and heavy work pays c. Thick lines are 95 % "
        "intervals. The axes of a and b are logarithmic. A hollow mark of c: no slow-down is shown.",
        f"The three numbers of the law as dots with intervals: {values}.",
        [one for one in summary.cautions if one.substrate and one.workload is None],
    )


def action_path(summary: Summary) -> FigureBlock | None:
    if not summary.action_paths:
        return None
    values = "; ".join(
        f"{one.own} to {one.init}: {seconds(one.action)} per action, {share(one.share)} of b"
        for one in summary.action_paths
    )
    return FigureBlock(
        "action_path",
        "The action path",
        "Each archetype with its own exec (filled) and with our init (hollow): a per rollout and b per "
        "action, logarithmic, and the share of b that is the action path. Thick lines are 95 % intervals.",
        f"The law of both ways to run an action as dots with intervals: {values}.",
        [],
    )


def rankings(summary: Summary) -> FigureBlock | None:
    found = lines(summary)
    if not found or len(found) > MANY:
        return None
    ends = "; ".join(f"{label} {points[-1].measured:.2f}" for label, points in found.items())
    crossed = ", ".join(
        f"{one.one} and {one.other} at about {one.length:.0f} actions" for one in crossings(summary)
    )
    return FigureBlock(
        "rankings",
        "Time by length, relative to bare",
        f"Lines are predictions of the law, marks are measured p50s, both divided by {summary.baseline}. "
        + (f"A ring marks where a ranking reverses: {crossed}. " if crossed else "No ranking reverses here. ")
        + "Only differences that count as shown can reverse.",
        f"Relative time by number of actions as lines; in the longest trajectory: {ends}.",
        [],
    )


def sensitivity(summary: Summary) -> FigureBlock | None:
    rows = relative_times(summary)
    if not rows:
        return None
    values = "; ".join(
        f"{name}: {', '.join(f'{label} {value:.2f}' for label, value in found.items())}"
        for name, found in rows.items()
    )
    return FigureBlock(
        "sensitivity",
        "Other mixes of actions and repositories",
        f"p50 of the whole rollout, divided by that of {summary.baseline}, for every trajectory.",
        f"Relative time by trajectory as dots: {values}.",
        [],
    )


def tails(summary: Summary) -> FigureBlock | None:
    workload = tail_workload(summary)
    found = [one for one in tails_of(summary, workload) if one.substrate not in summary.controls]
    if not found:
        return None
    values = "; ".join(f"{one.substrate} p99 {duration(one.p99.value)}" for one in found)
    return FigureBlock(
        "tails",
        "What a synchronous step waits for",
        f"The mean of {workload}, and the expected time of the slowest of 8, 64 and 512 rollouts. "
        + (
            "The table says which are lower bounds."
            if len(found) > MANY
            else "A hollow mark is a lower bound: there are too few trials for so large a group."
        ),
        f"The expected slowest rollout by group size as lines: {values}.",
        [],
    )


def storage(summary: Summary) -> FigureBlock | None:
    pairs = storage_pairs(summary)
    names = compared_workloads(summary)
    if not pairs or not names:
        return None
    cells = [
        cell
        for name in names
        for pair in pairs
        for label in (pair.disk, pair.memory)
        if (cell := summary.lone_cell(name, label))
    ]
    return FigureBlock(
        "storage",
        "The same substrate on the disk and in memory",
        "p50 of the whole rollout with written files on the disk (filled) and in memory (hollow). Thick "
        "lines are 95 % intervals.",
        _alt("The p50 of the whole rollout by storage as dots", cells, "total"),
        _figure_cautions(summary, cells, without=MIDDLE),
    )


def walls(summary: Summary) -> FigureBlock | None:
    prices = wall_prices(summary)
    if not prices:
        return None
    values = "; ".join(
        f"{one.wall} {seconds(one.creation)} per creation, {seconds(one.action)} per action, "
        f"{rate(one.work)} of the work"
        for one in prices
    )
    return FigureBlock(
        "walls",
        "The price of each wall",
        "What is saved if a wall is left out: once per rollout, for every action, and as a share of the "
        "work. Thick lines are 95 % intervals. A hollow mark means that no price is shown.",
        f"The prices as dots with intervals: {values}.",
        [],
    )


def _alt(what: str, cells: Iterable[Cell], metric: str) -> str:
    values = []
    for cell in cells:
        if cell.total is None:
            value = "no data"
        elif metric == "share":
            share = cell.composition.get("orchestration", 0.0) / (cell.typical_total or 1.0)
            value = "undivided" if cell.undivided else f"{share * 100:.0f} %"
        else:
            value = duration((cell.total.p95 if metric == "p95" else cell.total.p50).value)
        values.append(f"{cell.workload} on {cell.substrate} {value}")
    return f"{what}: {'; '.join(values) or 'no data'}."


def _figure_cautions(
    summary: Summary, cells: Iterable[Cell], without: Iterable[CautionKind] = ()
) -> list[Caution]:
    kept: dict[Caution, None] = {}
    for cell in cells:
        for caution in summary.cautions_on(*cell.key):
            if caution.kind not in without and caution.workload is not None:
                kept[caution] = None
    return list(kept)

"""The four questions of the rollout infrastructure tax, answered in sentences from the summary."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from dutyfree.analysis.model import CautionKind, Cell, Spread, Summary
from dutyfree.analysis.units import count, duration, hours, percent, plural, times
from dutyfree.report.palette import COMPONENTS
from dutyfree.report.wording import interval_phrase

QUESTIONS = (
    "How much does the substrate change cold start?",
    "Where does the time go?",
    "How does it grow with the length of a trajectory?",
    "What does it cost at a million trajectories?",
)


class Answer(msgspec.Struct, frozen=True):
    question: str
    figure: str
    """The one number to remember; empty where there is none."""
    text: str
    cautions: list[CautionKind] = []
    """What qualifies the answer; the sections below say of which cells."""


def answers(summary: Summary) -> list[Answer]:
    division = {CautionKind.STAND_IN, CautionKind.UNDIVIDED}
    told: tuple[tuple[tuple[str, str], Sequence[str | None], set[CautionKind]], ...] = (
        (_cold_start(summary), summary.tiers, division),
        (_where(summary), [_taken_apart(summary)], set()),
        (_growth(summary), summary.trajectories, set()),
        (_cost(summary), summary.trajectories[-1:], division),
    )
    return [
        Answer(question, figure, text, _kinds(summary, workloads, without | {CautionKind.UNSURE_TAIL}))
        for question, ((figure, text), workloads, without) in zip(QUESTIONS, told, strict=True)
    ]


def _kinds(summary: Summary, workloads: Sequence[str | None], without: set[CautionKind]) -> list[CautionKind]:
    found = [
        caution.kind
        for name in workloads
        if name is not None
        for cell in summary.lone(name)
        for caution in summary.cautions_on(*cell.key)
    ]
    return [kind for kind in dict.fromkeys(found) if kind not in without]


def _cold_start(summary: Summary) -> tuple[str, str]:
    tiers = [tier for tier in summary.tiers if any(cell.total for cell in summary.lone(tier))]
    if not tiers:
        return "", "No tier was measured successfully, so the records cannot tell."
    first = [_first_commands(tier, summary.lone(tier)) for tier in tiers[:1]]
    spreads = [spread for spread in summary.spreads if spread.workload in tiers]
    if not spreads:
        return "", " ".join([*first, "With one substrate there is nothing to compare it with."])
    widest = max(spreads, key=_factor)
    sentences = [*first, *(_episode(spread) for spread in spreads)]
    return times(_factor(widest)), " ".join(sentences)


def _factor(spread: Spread) -> float:
    return spread.ratio.value if spread.ratio else 1.0


def _first_commands(tier: str, cells: list[Cell]) -> str:
    done = sorted(
        ((cell.first_result.p50.value, cell.substrate) for cell in cells if cell.first_result),
    )
    (fast, fastest), (slow, slowest) = done[0], done[-1]
    if len(done) == 1:
        return (
            f"At {tier} the first command's result is there {duration(fast)} after the request on {fastest}."
        )
    return (
        f"At {tier} the first command's result is there {duration(fast)} after the request on {fastest} and "
        f"{duration(slow)} after it on {slowest}: {times(slow / fast) if fast > 0 else 'far more'}."
    )


def _episode(spread: Spread) -> str:
    return (
        f"The whole fresh {spread.workload} episode: {duration(spread.slowest_seconds.value)} on "
        f"{spread.slowest}, {duration(spread.fastest_seconds.value)} on {spread.fastest}, "
        f"{times(_factor(spread))}{interval_phrase(spread.ratio)}."
    )


def _where(summary: Summary) -> tuple[str, str]:
    name = _taken_apart(summary)
    if name is None:
        return "", "No workload with actions was measured successfully, so the records cannot tell."
    cells = [cell for cell in summary.lone(name) if cell.total]
    told = "; ".join(_shares(cell) for cell in cells[:4])
    more = f" The other {plural(len(cells) - 4, 'substrate')} are in Figure 1." if len(cells) > 4 else ""
    heaviest = max(cells, key=_around)
    return (
        f"{percent(_around(heaviest))} infrastructure on {heaviest.substrate}",
        f"Of a {name} rollout, {told}.{more} The rest is the commands' own time and set-up.",
    )


def _share(cell: Cell, name: str) -> float:
    return max(0.0, cell.composition.get(name, 0.0)) / (cell.typical_total or 1.0)


AROUND = ("creation", "readiness", "orchestration", "cleanup", "unattributed")


def _around(cell: Cell) -> float:
    return sum(_share(cell, name) for name in AROUND)


def _shares(cell: Cell) -> str:
    parts = sorted(AROUND, key=lambda name: -_share(cell, name))
    told = [
        f"{COMPONENTS[name].title} {percent(_share(cell, name))}"
        for name in parts[:3]
        if _share(cell, name) > 0.005
    ]
    least = "at least " if cell.undivided else ""
    detail = f" ({', '.join(told)})" if told else ""
    assert cell.total is not None
    return (
        f"{least}{percent(_around(cell))} of {duration(cell.total.p50.value)} on {cell.substrate} is "
        f"infrastructure{detail}"
    )


def _taken_apart(summary: Summary) -> str | None:
    """The workload whose composition is told: T2, or else the longest."""
    return "T2" if any(cell.total for cell in summary.lone("T2")) else _longest(summary)


def _longest(summary: Summary) -> str | None:
    done = [
        name for name in summary.workloads if any(cell.total and cell.actions for cell in summary.lone(name))
    ]
    return done[-1] if done else None


def _growth(summary: Summary) -> tuple[str, str]:
    lengths = [name for name in summary.trajectories if any(cell.total for cell in summary.lone(name))]
    if not lengths:
        return "", "No trajectory was measured successfully, so the records cannot tell."
    sentences, remembered = [], ""
    if len(lengths) > 1:
        told = [
            text
            for label in _extremes(summary, lengths[-1])
            if (text := _amortisation(summary, label, lengths))
        ]
        sentences += told
    per_action = [
        (cell.orchestration_per_action.p50.value, cell.substrate)
        for cell in summary.lone(lengths[-1])
        if cell.orchestration_per_action
    ]
    if per_action:
        added = ", ".join(f"{duration(value)} on {label}" for value, label in per_action)
        sentences.append(f"Orchestration adds to every action, at p50: {added}.")
        worst, label = max(per_action)
        remembered = f"{duration(worst)} per action on {label}"
    if not sentences:
        sentences.append("One length was measured, and orchestration is unknown: growth is not shown.")
    return remembered, " ".join(sentences)


def _extremes(summary: Summary, workload: str) -> list[str]:
    """The slowest substrate and the fastest."""
    done = sorted((cell.total.p50.value, cell.substrate) for cell in summary.lone(workload) if cell.total)
    return list(dict.fromkeys([done[-1][1], done[0][1]])) if done else []


def _amortisation(summary: Summary, label: str, lengths: list[str]) -> str:
    few, many = summary.lone_cell(lengths[0], label), summary.lone_cell(lengths[-1], label)
    if not few or not many or not few.per_action or not many.per_action or not few.total or not many.total:
        return ""
    start = [percent(_share(cell, "creation") + _share(cell, "readiness")) for cell in (few, many)]
    return (
        f"On {label}, {few.actions} actions take {duration(few.total.p50.value)} and {many.actions} take "
        f"{duration(many.total.p50.value)}: {duration(few.per_action.p50.value)}, then "
        f"{duration(many.per_action.p50.value)} per action. Creation and readiness are {start[0]}, then "
        f"{start[1]} of it."
    )


def _cost(summary: Summary) -> tuple[str, str]:
    spreads = [spread for spread in summary.spreads if spread.workload in summary.trajectories]
    if not spreads:
        return _cost_of_one(summary)
    spread = spreads[-1]
    slow, fast = spread.hours(spread.slowest_seconds), spread.hours(spread.fastest_seconds)
    gap = spread.hours(spread.difference)
    bounds = (
        f" (95\N{NO-BREAK SPACE}% interval {hours(gap.low)} to {hours(gap.high)})"
        if gap.low is not None and gap.high is not None
        else ""
    )
    return (
        hours(gap.value),
        f"{count(spread.rollouts)} trajectories of {spread.actions} actions take {hours(slow.value)} of "
        f"workers on {spread.slowest} and {hours(fast.value)} on {spread.fastest}: {hours(gap.value)} "
        f"more{bounds}, {times(_factor(spread))}. More workers in parallel shorten the wait, not the bill.",
    )


def _cost_of_one(summary: Summary) -> tuple[str, str]:
    rows = [row for row in summary.projections if row.workload in summary.trajectories]
    if not rows:
        return "", "No trajectory was measured successfully, so the records cannot tell."
    row = rows[-1]
    return (
        hours(row.hours.value),
        f"{count(row.rollouts)} trajectories of {row.actions} actions take {hours(row.hours.value)} of "
        f"workers on {row.substrate}, the only substrate measured.",
    )

"""The four questions of the rollout infrastructure tax, answered in sentences from the summary."""

from __future__ import annotations

import msgspec

from dutyfree.analysis.model import Cell, Spread, Summary
from dutyfree.analysis.units import count, duration, hours, percent, times
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


def answers(summary: Summary) -> list[Answer]:
    made = (_cold_start(summary), _where(summary), _growth(summary), _cost(summary))
    return [Answer(question, *made) for question, made in zip(QUESTIONS, made, strict=True)]


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
        f"A whole fresh {spread.workload} episode takes {duration(spread.slowest_seconds.value)} on "
        f"{spread.slowest} against {duration(spread.fastest_seconds.value)} on {spread.fastest}, "
        f"{times(_factor(spread))}{interval_phrase(spread.ratio)}."
    )


def _where(summary: Summary) -> tuple[str, str]:
    name = "T2" if any(cell.total for cell in summary.lone("T2")) else _longest(summary)
    if name is None:
        return "", "No workload with actions was measured successfully, so the records cannot tell."
    cells = [cell for cell in summary.lone(name) if cell.total]
    sentences = [_shares(cell) for cell in cells[:4]]
    if len(cells) > 4:
        sentences.append(f"The other {len(cells) - 4} substrates are in Figure 1.")
    heaviest = max(cells, key=lambda cell: cell.typical_total)
    share = _share(heaviest, "actions") + _share(heaviest, "undivided")
    return (
        percent(1 - share) + f" around the commands on {heaviest.substrate}",
        f"At {name}: " + " ".join(sentences) if sentences else "",
    )


def _share(cell: Cell, name: str) -> float:
    return max(0.0, cell.composition.get(name, 0.0)) / (cell.typical_total or 1.0)


def _shares(cell: Cell) -> str:
    others = sorted(
        (name for name in COMPONENTS if name not in ("actions", "undivided")),
        key=lambda name: -_share(cell, name),
    )
    told = [
        f"{COMPONENTS[name].title} {percent(_share(cell, name))}"
        for name in others[:3]
        if _share(cell, name) > 0.005
    ]
    inside = (
        f"the actions, undivided, take {percent(_share(cell, 'undivided') + _share(cell, 'actions'))}"
        if cell.undivided
        else f"the commands themselves take {percent(_share(cell, 'actions'))}"
    )
    rest = f"; the rest is {', '.join(told)}" if told else ""
    assert cell.total is not None
    return f"on {cell.substrate}, {inside} of {duration(cell.total.p50.value)}{rest}."


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
        sentences += [
            text
            for label in summary.labels
            if (text := _amortisation(summary, label, lengths[0], lengths[-1]))
        ][:4]
    per_action = [
        (cell.orchestration_per_action.p50.value, cell.substrate)
        for cell in summary.lone(lengths[-1])
        if cell.orchestration_per_action
    ]
    if per_action:
        told = ", ".join(f"{duration(value)} on {label}" for value, label in per_action)
        sentences.append(f"Orchestration adds to every action, at p50: {told}.")
        worst, label = max(per_action)
        remembered = f"{duration(worst)} per action on {label}"
    if not sentences:
        sentences.append("One length was measured, and orchestration is unknown: growth is not shown.")
    return remembered, " ".join(sentences)


def _amortisation(summary: Summary, label: str, short: str, long: str) -> str:
    few, many = summary.lone_cell(short, label), summary.lone_cell(long, label)
    if not few or not many or not few.per_action or not many.per_action or not few.total or not many.total:
        return ""
    start = (
        _share(few, "creation") + _share(few, "readiness"),
        _share(many, "creation") + _share(many, "readiness"),
    )
    return (
        f"On {label}, {few.actions} actions take {duration(few.total.p50.value)} and {many.actions} take "
        f"{duration(many.total.p50.value)}: per action {duration(few.per_action.p50.value)}, then "
        f"{duration(many.per_action.p50.value)}, while creation and readiness fall from {percent(start[0])} "
        f"to {percent(start[1])} of the whole."
    )


def _cost(summary: Summary) -> tuple[str, str]:
    spreads = [spread for spread in summary.spreads if spread.workload in summary.trajectories]
    if not spreads:
        return _cost_of_one(summary)
    spread = spreads[-1]
    slow, fast = spread.hours(spread.slowest_seconds), spread.hours(spread.fastest_seconds)
    gap = spread.hours(spread.difference)
    bounds = (
        f" (95 % interval {hours(gap.low)} to {hours(gap.high)})"
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

"""The top of the report: four questions about the rollout infrastructure tax, and their answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from dutyfree.analysis.findings import Ratio, Spread
from dutyfree.analysis.model import CautionKind, Cell, Summary
from dutyfree.analysis.projection import widest
from dutyfree.analysis.statistics import Estimate
from dutyfree.analysis.units import count, duration, hours, percent, plural
from dutyfree.report.palette import COMPONENTS
from dutyfree.report.phrases import compared, seconds
from dutyfree.report.tables.costs import mean_hours

QUESTIONS = (
    "How much does the substrate change cold start?",
    "Where does the time go?",
    "How does the time grow with the length of a trajectory?",
    "What do a million trajectories cost?",
)


NOTHING_SHOWN = "No difference shown"
"""Used unless the analysis counts the difference as shown."""


class HeadlineAnswer(msgspec.Struct, frozen=True):
    question: str
    figure: str
    """The main finding; empty if there is none."""
    text: str
    cautions: list[CautionKind] = []
    """Kinds of the cautions about the answer. The sections below say which cells they concern."""


def answers(summary: Summary) -> list[HeadlineAnswer]:
    division = {CautionKind.STAND_IN, CautionKind.UNDIVIDED}
    answered: tuple[tuple[tuple[str, str], Sequence[str | None], set[CautionKind]], ...] = (
        (_cold_start(summary), summary.tiers, division),
        (_where(summary), [_decomposed_workload(summary)], set()),
        (_growth(summary), summary.trajectories, set()),
        (_cost(summary), summary.trajectories[-1:], division),
    )
    return [
        HeadlineAnswer(
            question, figure, text, _kinds(summary, workloads, without | {CautionKind.UNSURE_TAIL})
        )
        for question, ((figure, text), workloads, without) in zip(QUESTIONS, answered, strict=True)
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


class _Pair(msgspec.Struct, frozen=True):
    """Two substrates in a sentence: ``one`` is compared with ``other``."""

    one: str
    other: str
    ratio: Estimate | None
    shown: bool
    why: str

    @property
    def sentence(self) -> str:
        return compared(self.one, self.other, self.ratio, shown=self.shown, why=self.why)


def _pair(summary: Summary, slower: str, faster: str, found: Ratio | Spread) -> _Pair:
    """Compare the slower with the faster substrate; but compare with bare if one of them is it."""
    bare = _bare(summary)
    if slower in bare and faster not in bare:
        return _Pair(faster, slower, found.ratio.inverse() if found.ratio else None, found.shown, found.why)
    return _Pair(slower, faster, found.ratio, found.shown, found.why)


def _of_spread(summary: Summary, spread: Spread) -> _Pair:
    return _pair(summary, spread.slowest, spread.fastest, spread)


def _bare(summary: Summary) -> set[str]:
    """The labels that have no tax: the others are compared with them."""
    return {one.label for one in summary.substrates if one.use == "bare"} | {summary.baseline or ""}


def _cold_start(summary: Summary) -> tuple[str, str]:
    tiers = [tier for tier in summary.tiers if any(cell.total for cell in summary.lone(tier))]
    if not tiers:
        return "", "No tier was measured successfully."
    first = _first_commands(summary, tiers[0])
    spreads = [spread for spread in summary.spreads if spread.workload in tiers]
    if not spreads:
        return "", f"{first} There is only one substrate, so there is nothing to compare."
    shown = [spread for spread in spreads if spread.shown]
    text = " ".join([first, *(_episode(summary, spread) for spread in spreads)])
    if not shown:
        return NOTHING_SHOWN, text
    widest = max(shown, key=lambda spread: spread.ratio.value if spread.ratio else 1.0)
    return f"At {widest.workload} {_of_spread(summary, widest).sentence}", text


def _first_commands(summary: Summary, tier: str) -> str:
    cells = summary.lone(tier)
    firsts = {cell.substrate: cell.first_result.p50.value for cell in cells if cell.first_result}
    text = f"At {tier}, the first command's result arrives"
    key = (tier, cells[0].parallel, "first_result")
    rows = [row for row in summary.ratios if (row.workload, row.parallel, row.metric) == key]
    if not rows:
        ((label, value),) = firsts.items()
        return f"{text} {duration(value)} after the request on {label}."
    found = widest(rows, {one.label: one.baseline for one in summary.substrates})
    slow, fast = found.substrate, found.base
    return (
        f"{text} {duration(firsts[fast])} after the request on {fast} and {duration(firsts[slow])} after it "
        f"on {slow}: {_pair(summary, slow, fast, found).sentence}."
    )


def _episode(summary: Summary, spread: Spread) -> str:
    return (
        f"The whole {spread.workload} rollout takes {duration(spread.slowest_seconds.value)} on "
        f"{spread.slowest} and {duration(spread.fastest_seconds.value)} on {spread.fastest}: "
        f"{_of_spread(summary, spread).sentence}."
    )


def _where(summary: Summary) -> tuple[str, str]:
    name = _decomposed_workload(summary)
    if name is None:
        return "", "No workload with actions was measured successfully."
    cells = sorted((cell for cell in summary.lone(name) if cell.total), key=_around, reverse=True)
    taxed = [cell for cell in cells if cell.substrate not in _bare(summary)]
    shares = "; ".join(_shares(cell) for cell in (taxed or cells)[:4])
    more = f" The other {plural(len(taxed) - 4, 'substrate')} are in Figure 1." if len(taxed) > 4 else ""
    text = (
        f"Of a {name} rollout, {shares}.{more} The rest is the set-up and the time inside the actions, in "
        "which the work may run slower than on bare."
    )
    if not taxed:
        return "", text
    beside = [
        f" On {cell.substrate}, the baseline, {percent(_around(cell))} of "
        f"{duration(cell.total.p50.value)} is infrastructure."
        for cell in cells
        if cell.substrate == summary.baseline and cell.total
    ]
    figure = f"{percent(_around(taxed[0]))} of a {name} rollout on {taxed[0].substrate} is infrastructure"
    return figure, text + "".join(beside)


def _share(cell: Cell, name: str) -> float:
    return max(0.0, cell.composition.get(name, 0.0)) / (cell.typical_total or 1.0)


AROUND = ("creation", "readiness", "orchestration", "cleanup", "unattributed")


def _around(cell: Cell) -> float:
    return sum(_share(cell, name) for name in AROUND)


def _shares(cell: Cell) -> str:
    largest = sorted(AROUND, key=lambda name: -_share(cell, name))[:3]
    parts = [
        f"{COMPONENTS[name].title} {percent(_share(cell, name))}"
        for name in largest
        if _share(cell, name) > 0.005
    ]
    least = "at least " if cell.undivided else ""
    detail = f" ({', '.join(parts)})" if parts else ""
    assert cell.total is not None
    return (
        f"{least}{percent(_around(cell))} of {duration(cell.total.p50.value)} on {cell.substrate} is "
        f"infrastructure{detail}"
    )


def _decomposed_workload(summary: Summary) -> str | None:
    """The workload whose composition is shown: T2, otherwise the longest."""
    return "T2" if any(cell.total for cell in summary.lone("T2")) else _longest(summary)


def _longest(summary: Summary) -> str | None:
    done = [
        name for name in summary.workloads if any(cell.total and cell.actions for cell in summary.lone(name))
    ]
    return done[-1] if done else None


def _growth(summary: Summary) -> tuple[str, str]:
    lengths = [name for name in summary.trajectories if any(cell.total for cell in summary.lone(name))]
    if not lengths:
        return "", "No trajectory was measured successfully."
    sentences = [
        text for label in _extremes(summary, lengths[-1]) if (text := _amortisation(summary, label, lengths))
    ]
    if len(lengths) == 1:
        sentences = ["Only one length was measured, so growth is unknown."]
    around = {
        cell.substrate: cell.orchestration_per_action.p50
        for cell in summary.lone(lengths[-1])
        if cell.orchestration_per_action
    }
    if around:
        names = {label: f"{label}, the baseline" if label == summary.baseline else label for label in around}
        parts = "; ".join(f"{seconds(estimate)} on {names[label]}" for label, estimate in around.items())
        sentences.append(f"Orchestration adds to every action (p50 and 95 % interval): {parts}.")
    taxed = {label: found for label, found in around.items() if label not in _bare(summary)}
    most = max(taxed, key=lambda label: taxed[label].value, default=None)
    if most is None or not taxed[most].leaves_out(0):
        return "", " ".join(sentences)
    beside = [
        f"; on {label} itself it is {duration(found.value)}"
        for label, found in around.items()
        if label == summary.baseline
    ]
    figure = f"{most} adds {_with_interval(taxed[most], duration, 'to every action')}{''.join(beside)}"
    return figure, " ".join(sentences)


def _with_interval(estimate: Estimate, unit: Callable[[float], str], word: str = "") -> str:
    """``2,707 h more (95 % interval 2,650 h to 2,770 h)``."""
    value = f"{unit(estimate.value)} {word}".strip()
    if estimate.low is None or estimate.high is None:
        return value
    return f"{value} (95\N{NO-BREAK SPACE}% interval {unit(estimate.low)} to {unit(estimate.high)})"


def _extremes(summary: Summary, workload: str) -> list[str]:
    """The slowest substrate and the fastest."""
    done = sorted((cell.total.p50.value, cell.substrate) for cell in summary.lone(workload) if cell.total)
    return list(dict.fromkeys([done[-1][1], done[0][1]])) if done else []


def _amortisation(summary: Summary, label: str, lengths: list[str]) -> str:
    few, many = summary.lone_cell(lengths[0], label), summary.lone_cell(lengths[-1], label)
    if not few or not many or not few.per_action or not many.per_action or not few.total or not many.total:
        return ""
    start = [percent(_share(cell, "creation") + _share(cell, "readiness")) for cell in (few, many)]
    short, long = duration(few.total.p50.value), duration(many.total.p50.value)
    return (
        f"On {label}, a trajectory of {plural(few.actions, 'action')} takes {short} and one of "
        f"{many.actions} takes {long}: {duration(few.per_action.p50.value)}, then "
        f"{duration(many.per_action.p50.value)} per action. Creation and readiness are {start[0]}, then "
        f"{start[1]} of it."
    )


def _cost(summary: Summary) -> tuple[str, str]:
    spreads = [spread for spread in summary.spreads if spread.workload in summary.trajectories]
    if not spreads:
        return _cost_of_one(summary)
    spread = spreads[-1]
    slow, fast, gap = mean_hours(spread)
    pair = _of_spread(summary, spread)
    text = (
        f"{count(spread.rollouts)} trajectories of {plural(spread.actions, 'action')} take "
        f"{hours(slow.value)} of worker time on {spread.slowest} and {hours(fast.value)} on "
        f"{spread.fastest}: {pair.sentence}"
    )
    if not pair.shown or not gap.leaves_out(0):
        return NOTHING_SHOWN, f"{text}."
    word = "less" if pair.one == spread.fastest else "more"
    return (
        f"{pair.one} takes {_with_interval(gap, hours, f'{word} than {pair.other}')}",
        f"{text}, {hours(gap.value)} {word}. More parallel workers shorten the wall time, not the "
        "worker-hours.",
    )


def _cost_of_one(summary: Summary) -> tuple[str, str]:
    rows = [row for row in summary.projections if row.workload in summary.trajectories]
    if not rows:
        return "", "No trajectory was measured successfully."
    row = rows[-1]
    return (
        f"{hours(row.hours.value)} on {row.substrate}",
        f"{count(row.rollouts)} trajectories of {plural(row.actions, 'action')} take "
        f"{hours(row.hours.value)} of worker time on {row.substrate}, the only substrate measured.",
    )

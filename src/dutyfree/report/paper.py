"""The numbers of the reference study, and the same numbers from this study.

The paper compares archetypes as people use them. So a label is comparable if it isolates, is not our own
engine, and runs actions in its own way, without sandboxes that were made ahead.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import msgspec

from dutyfree.analysis.findings import Metric
from dutyfree.analysis.model import Summary
from dutyfree.analysis.projection import MILLION, REFERENCE_ACTIONS
from dutyfree.analysis.statistics import Estimate
from dutyfree.analysis.units import count, duration, enumeration, hours

NO_ISOLATION = ("bare", "scripted")
OURS = ("native", "hosted")
"""Names of substrates that begin so are ours; the paper has nothing like them."""

COLD_START = 110.0
T2 = 1.9
WORKER_HOURS = 1.8
SLOWEST_HOURS, FASTEST_HOURS = 11_811.0, 6_495.0
SLOWEST_SECONDS, FASTEST_SECONDS = 42.5, 23.4
"""Of arXiv 2607.01415: the spreads, and for a million trajectories of 150 actions the worker-hours and the
seconds of one."""


class PaperSpread(msgspec.Struct, frozen=True):
    """The slowest and the fastest of some labels."""

    slowest: str
    fastest: str
    slow: str
    """As text, with its unit."""
    fast: str
    ratio: Estimate
    n: int


class PaperRow(msgspec.Struct, frozen=True):
    what: str
    paper: str
    as_used: PaperSpread | None
    isolated: PaperSpread | None


def comparable(summary: Summary) -> list[str]:
    """The labels that are what the paper measured."""
    return [label for label in isolating(summary) if why_not(summary, label) is None]


def isolating(summary: Summary) -> list[str]:
    """All measured labels but bare and controls."""
    measured = {cell.substrate for cell in summary.cells if cell.total}
    return [
        one.label
        for one in summary.substrates
        if one.use not in NO_ISOLATION and one.control_of is None and one.label in measured
    ]


def why_not(summary: Summary, label: str) -> str | None:
    """Why a label is not what the paper measured; None if it is."""
    one = next(found for found in summary.substrates if found.label == label)
    options = _options(summary, label)
    if one.use.startswith(OURS):
        return "our own engine"
    if (options.get("actions") or one.facts.get("actions")) == "init":
        return "actions through our init"
    if one.facts.get("accelerator") == "tcg":
        return "its processor is emulated, because KVM does not work on this machine"
    if options.get("ready") or options.get("restore") or options.get("baked"):
        return "made ahead"
    return None


def comparisons(summary: Summary) -> list[PaperRow]:
    """Empty with fewer than two comparable labels."""
    used, every = comparable(summary), isolating(summary)
    if len(used) < 2:
        return []

    def row(what: str, paper: str, workload: str, metric: Metric) -> PaperRow:
        spreads = [_spread(summary, workload, metric, labels) for labels in (used, every)]
        return PaperRow(what, paper, *spreads)

    rows = [
        row("cold start, T0: time to first command", f"{COLD_START:g}×", "T0", "first_result"),  # noqa: RUF001
        row("cold start, T0: whole rollout", "", "T0", "total"),
        row("T2: whole rollout", f"{T2:g}×", "T2", "total"),  # noqa: RUF001
        *(row(f"{name}: whole rollout", "", name, "total") for name in summary.trajectories),
        _hours(summary, used, every),
    ]
    return [one for one in rows if one.as_used or one.isolated]


def _spread(summary: Summary, workload: str, metric: Metric, labels: Collection[str]) -> PaperSpread | None:
    cells = {cell.substrate: cell for cell in summary.lone(workload) if cell.substrate in labels}
    rows = [
        one
        for one in summary.ratios
        if (one.workload, one.metric) == (workload, metric)
        and one.ratio is not None
        and {one.substrate, one.base} <= set(cells)
        and one.parallel == cells[one.substrate].parallel
    ]
    if not rows:
        return None
    widest = max(rows, key=lambda one: one.ratio.value if one.ratio else 0.0)
    assert widest.ratio is not None
    slow, fast = cells[widest.substrate], cells[widest.base]
    return PaperSpread(
        slowest=widest.substrate,
        fastest=widest.base,
        slow=duration(getattr(slow, metric).p50.value),
        fast=duration(getattr(fast, metric).p50.value),
        ratio=widest.ratio,
        n=min(slow.succeeded, fast.succeeded),
    )


def _hours(summary: Summary, used: Collection[str], every: Collection[str]) -> PaperRow:
    workload = f"trajectory-{REFERENCE_ACTIONS}"

    def spread(labels: Collection[str]) -> PaperSpread | None:
        found = {
            one.substrate: one.hours
            for one in summary.projections
            if (one.workload, one.rollouts) == (workload, MILLION) and one.substrate in labels
        }
        if len(found) < 2:
            return None
        slow, fast = (chosen(found, key=lambda label: found[label].value) for chosen in (max, min))
        ratio = Estimate(found[slow].value / found[fast].value)
        cells = [summary.lone_cell(workload, label) for label in (slow, fast)]
        n = min(cell.succeeded for cell in cells if cell)
        return PaperSpread(slow, fast, hours(found[slow].value), hours(found[fast].value), ratio, n)

    return PaperRow(
        f"worker-hours of {count(MILLION)} trajectories of {REFERENCE_ACTIONS} actions",
        f"{WORKER_HOURS:g}×: {SLOWEST_HOURS:,.0f} h ({SLOWEST_SECONDS:g} s each) and "  # noqa: RUF001
        f"{FASTEST_HOURS:,.0f} h ({FASTEST_SECONDS:g} s)",
        spread(used),
        spread(every),
    )


def sentences(summary: Summary) -> list[str]:
    """What is compared, and whether the gap narrows with the length, as in the paper."""
    used = comparable(summary)
    others: dict[str, list[str]] = {}
    for label in isolating(summary):
        if (why := why_not(summary, label)) is not None:
            others.setdefault(why, []).append(label)
    left = "; ".join(f"{enumeration(labels)} ({why})" for why, labels in others.items())
    offline = summary.plan.get("offline")
    source = "cloned from a copy in the sandbox" if offline else "from a git server on the loopback"
    text = f"Comparable with the paper, because measured as people use them: {enumeration(used)}."
    return [
        text + (f" Not comparable: {left}." if left else ""),
        _narrowing(summary, used),
        "The paper's hosts, networks and images are not ours. Here all runs on one machine, with the same "
        f"software and one repository, {source}, so no time is spent on a network. "
        "Compare the spreads and the order, not the times.",
    ]


def _narrowing(summary: Summary, labels: Collection[str]) -> str:
    """In words, from the p50s of the whole rollouts."""
    lengths = ["T0", "T2", *summary.trajectories]
    found = [(name, spread) for name in lengths if (spread := _spread(summary, name, "total", labels))]
    if len(found) < 2:
        return "Whether the gap narrows with the length is not known: only one workload was measured."
    each = ", ".join(f"{spread.ratio.value:.3g}× in {name}" for name, spread in found)  # noqa: RUF001
    tier = f"The spread of the whole rollout is {each}."
    longer = [spread.ratio.value for name, spread in found if name.startswith("trajectory-")]
    if len(longer) < 2:
        return tier
    change = longer[-1] / longer[0]
    verdict = "narrows" if change < 0.95 else "widens" if change > 1.05 else "stays about the same"
    return (
        f"{tier} From the shortest trajectory to the longest it {verdict}. In the paper it narrows: from "
        f"{COLD_START:g} times in the cold start at T0 to {WORKER_HOURS:g} times at {REFERENCE_ACTIONS} "
        "actions. An archetype whose actions are slow keeps its distance, however long the trajectory is."
    )


def _options(summary: Summary, label: str) -> dict[str, Any]:
    found = summary.plan.get("options")
    own = found.get(label) if isinstance(found, dict) else None
    return own if isinstance(own, dict) else {}

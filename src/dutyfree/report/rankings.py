"""Whether the rankings of substrates hold across lengths, mixes and repositories, and where they cross."""

from __future__ import annotations

from itertools import combinations, pairwise

import msgspec

from dutyfree.analysis.findings import Law
from dutyfree.analysis.model import Summary


class Point(msgspec.Struct, frozen=True):
    """One trajectory on one substrate, relative to the baseline."""

    length: int
    measured: float
    predicted: float
    """By the law."""


class Reversal(msgspec.Struct, frozen=True):
    """Two substrates of which each is slower than the other in some workload, both differences shown."""

    one: str
    other: str
    one_slower: list[str]
    other_slower: list[str]


class Crossing(msgspec.Struct, frozen=True):
    """The length at which the law predicts the same time for two substrates of a reversal."""

    one: str
    other: str
    length: float
    relative: float
    """The time there, relative to the baseline."""


def lines(summary: Summary) -> dict[str, list[Point]]:
    """Substrate → its trajectories by length. Empty without a baseline, two substrates and two lengths."""
    base = _by_workload(summary.law(summary.baseline) if summary.baseline else None)
    lengths = {
        name: cell.actions
        for name in summary.trajectories
        for cell in [summary.lone_cell(name, summary.baseline or "")]
        if cell and name in base and min(base[name]) > 0
    }
    found: dict[str, list[Point]] = {}
    for law in summary.laws:
        own = _by_workload(law)
        names = sorted((name for name in lengths if name in own), key=lengths.__getitem__)
        if law.substrate in summary.controls or len(names) < 2:
            continue
        points = [
            Point(lengths[name], own[name][0] / base[name][0], own[name][1] / base[name][1]) for name in names
        ]
        if all(min(point.measured, point.predicted) > 0 for point in points):
            found[law.substrate] = points
    return found if len(found) > 1 else {}


def _by_workload(law: Law | None) -> dict[str, tuple[float, float]]:
    """Workload → measured and predicted seconds."""
    points = [*law.fitted, *law.predictions] if law else []
    return {point.workload: (point.measured.value, point.predicted.value) for point in points}


def reversals(summary: Summary) -> list[Reversal]:
    slower: dict[tuple[str, str], list[str]] = {}
    for row in summary.ratios:
        if row.metric == "total" and row.shown and row.parallel == 1:
            slower.setdefault((row.substrate, row.base), []).append(row.workload)
    return [
        Reversal(one, other, slower[one, other], slower[other, one])
        for one, other in combinations(summary.labels, 2)
        if (one, other) in slower and (other, one) in slower
    ]


def crossings(summary: Summary) -> list[Crossing]:
    drawn = lines(summary)
    found = []
    for reversal in reversals(summary):
        if reversal.one not in drawn or reversal.other not in drawn:
            continue
        one = {point.length: point.predicted for point in drawn[reversal.one]}
        other = {point.length: point.predicted for point in drawn[reversal.other]}
        both = sorted(one.keys() & other.keys())
        for left, right in pairwise(both):
            before, after = one[left] - other[left], one[right] - other[right]
            if before * after < 0:
                share = before / (before - after)
                found.append(
                    Crossing(
                        reversal.one,
                        reversal.other,
                        left + share * (right - left),
                        one[left] + share * (one[right] - one[left]),
                    )
                )
    return found

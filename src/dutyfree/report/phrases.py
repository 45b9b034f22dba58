"""Text for estimates and cautions."""

from __future__ import annotations

from collections.abc import Iterable

from dutyfree.analysis.model import Caution, CautionKind
from dutyfree.analysis.statistics import Estimate
from dutyfree.analysis.units import UNKNOWN, duration, enumeration, hours, percent, significant


def seconds(estimate: Estimate | None) -> str:
    """253 ms [249, 260]; the interval is in the unit of the value."""
    if estimate is None:
        return UNKNOWN
    value = duration(estimate.value)
    if estimate.low is None or estimate.high is None:
        return value
    unit = value.split()[-1]
    size = {"µs": 1e-6, "ms": 1e-3, "s": 1.0, "h": 3600.0}[unit]
    if "min" in value:
        return f"{value} [{duration(estimate.low)}, {duration(estimate.high)}]"
    return f"{value} [{significant(estimate.low / size)}, {significant(estimate.high / size)}]"


def rate(estimate: Estimate | None) -> str:
    """+12 % [10, 14]."""
    if estimate is None:
        return UNKNOWN
    value = signed(percent(estimate.value))
    if estimate.low is None or estimate.high is None:
        return value
    low, high = (signed(percent(bound))[:-2] for bound in (estimate.low, estimate.high))
    return f"{value} [{low}, {high}]"


def share(estimate: Estimate | None) -> str:
    """97 % [96, 98]."""
    if estimate is None:
        return UNKNOWN
    value = percent(estimate.value)
    if estimate.low is None or estimate.high is None:
        return value
    low, high = (percent(bound)[:-2] for bound in (estimate.low, estimate.high))
    return f"{value} [{low}, {high}]"


def minus_one(ratio: Estimate) -> Estimate:
    """A ratio as a rate: 1.05 is +5 %."""
    low = None if ratio.low is None else ratio.low - 1
    return Estimate(ratio.value - 1, low, None if ratio.high is None else ratio.high - 1)


def factor(estimate: Estimate | None) -> str:
    """1.040 [1.021, 1.058]."""
    if estimate is None:
        return UNKNOWN
    text = f"{estimate.value:.3f}"
    if estimate.low is not None and estimate.high is not None:
        text += f" [{estimate.low:.3f}, {estimate.high:.3f}]"
    return text.replace("-", "\N{MINUS SIGN}")


def worker_hours(estimate: Estimate | None) -> str:
    if estimate is None:
        return UNKNOWN
    if estimate.low is None or estimate.high is None:
        return hours(estimate.value)
    return f"{hours(estimate.value)} [{hours(estimate.low)[:-2]}, {hours(estimate.high)[:-2]}]"


def signed(text: str) -> str:
    return (
        text if text.startswith("\N{MINUS SIGN}") or not text.strip("0.%\N{NO-BREAK SPACE}") else f"+{text}"
    )


def interval_phrase(estimate: Estimate | None, of: str = "") -> str:
    """The interval of a ratio for a sentence, or that there is none."""
    if estimate is None or estimate.low is None or estimate.high is None:
        return " (too few trials for an interval)"
    bounds = f"{significant(estimate.low)} to {significant(estimate.high)}"
    return f" (95\N{NO-BREAK SPACE}% interval{of} {bounds})"


def verdict(shown: bool, why: str) -> str:
    """Whether a difference is shown, and why not if its interval alone would show it."""
    return "shown" if shown else why or "none shown"


def compared(one: str, other: str, ratio: Estimate | None, *, shown: bool, why: str = "") -> str:
    """``docker takes 2.08 times as long as bare (95 % interval 2.01 to 2.15)``, or that none is shown."""
    if shown and ratio is not None:
        return f"{one} takes {significant(ratio.value)} times as long as {other}{interval_phrase(ratio)}"
    if ratio is None or not ratio.leaves_out(1):
        return f"no difference shown between {one} and {other}{interval_phrase(ratio, ' of the ratio')}"
    return (
        f"{one} and {other} may differ, but this is not certain: {why or 'too few trials for a test'}"
        f"{interval_phrase(ratio, ' of the ratio')}"
    )


class CautionNote:
    """One text, and all cells that have it as a caution."""

    def __init__(self, kind: CautionKind, text: str) -> None:
        self.kind = kind
        self.text = text
        self.cells: list[Caution] = []


class CautionGroup:
    """All cautions of one kind: what a report says once, and then refers to by its number."""

    def __init__(self, cautions: list[Caution], all_cells: bool) -> None:
        self.kind = cautions[0].kind
        self.notes = _notes(cautions)
        self._cells = [one for one in cautions if one.workload is not None or one.substrate is not None]
        self._all_cells = all_cells

    @property
    def heading(self) -> str:
        """How often and where: ``12 times: T1 and T2 on docker``; empty if it concerns the whole study."""
        if not self._cells:
            return ""
        often = f"{len(self._cells)} times: " if len(self._cells) > 1 else ""
        return f"{often}{'all cells' if self._all_cells else where(self._cells)}"

    @property
    def line(self) -> str:
        """One line for a terminal."""
        about = f" ({self.heading})" if self.heading else ""
        more = len(self.notes) - 1
        others = f"; {more} more of this kind in the report" if more else ""
        return f"{self.kind.value}{about}: {self.notes[0].text}{others}"


def where(cautions: Iterable[Caution]) -> str:
    """The cells of cautions, by name: "T1 and T2 on docker"."""
    by_substrate: dict[str | None, list[str]] = {}
    for caution in cautions:
        place = caution.workload or ""
        if caution.parallel is not None and caution.parallel > 1:
            place += f" ({caution.parallel} at once)"
        by_substrate.setdefault(caution.substrate, []).append(place)
    by_places: dict[tuple[str, ...], list[str]] = {}
    for substrate, places in by_substrate.items():
        named = tuple(place for place in dict.fromkeys(places) if place)
        by_places.setdefault(named, []).extend([substrate] if substrate else [])
    return "; ".join(
        " on ".join(enumeration(names) for names in (places, substrates) if names)
        for places, substrates in by_places.items()
    )


def groups(cautions: Iterable[Caution], cells: int) -> list[CautionGroup]:
    """Group cautions by kind, in the order of their first appearance. The study has ``cells`` cells."""
    kinds: dict[CautionKind, list[Caution]] = {}
    for caution in cautions:
        kinds.setdefault(caution.kind, []).append(caution)
    places = {
        kind: {(one.workload, one.substrate, one.parallel) for one in alike} for kind, alike in kinds.items()
    }
    return [CautionGroup(alike, all_cells=len(places[kind]) == cells > 1) for kind, alike in kinds.items()]


def _notes(cautions: Iterable[Caution]) -> list[CautionNote]:
    """One note for each different text, in the order of their first appearance."""
    found: dict[tuple[CautionKind, str], CautionNote] = {}
    for caution in cautions:
        note = found.setdefault((caution.kind, caution.text), CautionNote(caution.kind, caution.text))
        if caution.workload is not None or caution.substrate is not None:
            note.cells.append(caution)
    return list(found.values())

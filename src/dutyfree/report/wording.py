"""Estimates as text, and cautions as sentences."""

from __future__ import annotations

from collections.abc import Iterable

from dutyfree.analysis.model import Caution, CautionKind
from dutyfree.analysis.statistics import Estimate
from dutyfree.analysis.units import UNKNOWN, duration, enumeration, hours, percent, significant


def seconds(estimate: Estimate | None) -> str:
    """253 ms [249, 260], all in the unit of the value."""
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
    value = _signed(percent(estimate.value))
    if estimate.low is None or estimate.high is None:
        return value
    low, high = (_signed(percent(bound))[:-2] for bound in (estimate.low, estimate.high))
    return f"{value} [{low}, {high}]"


def worker_hours(estimate: Estimate | None) -> str:
    if estimate is None:
        return UNKNOWN
    if estimate.low is None or estimate.high is None:
        return hours(estimate.value)
    return f"{hours(estimate.value)} [{hours(estimate.low)[:-2]}, {hours(estimate.high)[:-2]}]"


def _signed(text: str) -> str:
    return (
        text if text.startswith("\N{MINUS SIGN}") or not text.strip("0.%\N{NO-BREAK SPACE}") else f"+{text}"
    )


def interval_phrase(estimate: Estimate | None) -> str:
    """For a sentence: the bounds of a ratio, or nothing."""
    if estimate is None or estimate.low is None or estimate.high is None:
        return ""
    return f" (95\N{NO-BREAK SPACE}% interval {significant(estimate.low)} to {significant(estimate.high)})"


class Note:
    """Cautions that say the same of several cells, as one."""

    def __init__(self, kind: CautionKind, text: str) -> None:
        self.kind = kind
        self.text = text
        self.cells: list[Caution] = []

    @property
    def about(self) -> str:
        """Which cells, by name: "T1 and T2 on docker"."""
        by_substrate: dict[str | None, list[str]] = {}
        for caution in self.cells:
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


def notes(cautions: Iterable[Caution]) -> list[Note]:
    """One note for each different sentence, in the order of first mention."""
    found: dict[tuple[CautionKind, str], Note] = {}
    for caution in cautions:
        note = found.setdefault((caution.kind, caution.text), Note(caution.kind, caution.text))
        if caution.workload is not None or caution.substrate is not None:
            note.cells.append(caution)
    return list(found.values())

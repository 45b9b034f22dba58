"""Spans inside a creation or an action: how much time they explain, and how much they do not."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from dutyfree.analysis.model import Period, SpanBreakdown
from dutyfree.analysis.statistics import Quantity, point, quantity
from dutyfree.contract import Span
from dutyfree.study.records import Trial

Timing = tuple[float, Sequence[Span]]
"""The wall time of a creation or an action, and the spans inside it."""


def breakdowns(trials: Iterable[Trial]) -> dict[Period, SpanBreakdown]:
    """Break down the creation, the first command and the actions, if the trials have them."""
    trials = list(trials)
    once: dict[Period, list[Timing]] = {
        "creation": [(trial.creation, trial.creation_spans) for trial in trials],
        "first": [(trial.first.seconds, trial.first.spans) for trial in trials if trial.first],
    }
    found = {period: _breakdown(timings, quantity) for period, timings in once.items() if timings}
    actions = [(action.seconds, action.spans) for trial in trials for action in trial.actions]
    if actions:
        # Actions of one trial are not independent, so an interval from them would be too narrow.
        found["action"] = _breakdown(actions, point)
    return found


def _breakdown(timings: Sequence[Timing], measure: Callable[[list[float]], Quantity | None]) -> SpanBreakdown:
    opened = [(seconds, by_name(spans), unexplained(seconds, spans)) for seconds, spans in timings if spans]
    names = dict.fromkeys(name for _, sums, _ in opened for name in sums)
    parts = {name: measure([sums.get(name, 0.0) for _, sums, _ in opened]) for name in names}
    silent = [seconds for seconds, spans in timings if not spans]
    return SpanBreakdown(
        told=len(opened),
        silent=len(silent),
        seconds=measure([seconds for seconds, _, _ in opened]),
        spans={name: part for name, part in parts.items() if part is not None},
        unattributed=measure([rest for _, _, rest in opened]),
        silent_seconds=measure(silent),
    )


def by_name(spans: Iterable[Span]) -> dict[str, float]:
    """Seconds by name of span; spans with the same name are added up."""
    sums: dict[str, float] = {}
    for span in spans:
        sums[span.name] = sums.get(span.name, 0.0) + span.seconds
    return sums


def unexplained(seconds: float, spans: Iterable[Span]) -> float:
    """Seconds outside of all spans. Time in overlapping spans counts once."""
    covered, reached = 0.0, 0.0
    for span in sorted(spans, key=lambda span: span.start):
        end = min(span.start + span.seconds, seconds)
        covered += max(0.0, end - max(span.start, reached))
        reached = max(reached, end)
    return seconds - covered

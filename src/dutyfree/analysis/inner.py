"""Inside a stretch of time: what the spans that a substrate tells explain of it, and what they do not."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from dutyfree.analysis.model import Inner, Stretch
from dutyfree.analysis.statistics import Quantity, point, quantity
from dutyfree.contract import Span
from dutyfree.study.records import Trial

Told = tuple[float, Sequence[Span]]
"""The wall time of a stretch, and the spans within it."""


def inner(trials: Iterable[Trial]) -> dict[Stretch, Inner]:
    """Of the creation, the first command and the actions, so far as the trials have them."""
    trials = list(trials)
    once: dict[Stretch, list[Told]] = {
        "creation": [(trial.creation, trial.creation_spans) for trial in trials],
        "first": [(trial.first.seconds, trial.first.spans) for trial in trials if trial.first],
    }
    found = {stretch: _taken_apart(told, quantity) for stretch, told in once.items() if told}
    actions = [(action.seconds, action.spans) for trial in trials for action in trial.actions]
    if actions:
        # Actions of one trial are not independent: an interval from them would be too narrow.
        found["action"] = _taken_apart(actions, point)
    return found


def _taken_apart(stretches: Sequence[Told], measure: Callable[[list[float]], Quantity | None]) -> Inner:
    opened = [(seconds, by_name(spans), unexplained(seconds, spans)) for seconds, spans in stretches if spans]
    names = dict.fromkeys(name for _, sums, _ in opened for name in sums)
    parts = {name: measure([sums.get(name, 0.0) for _, sums, _ in opened]) for name in names}
    silent = [seconds for seconds, spans in stretches if not spans]
    return Inner(
        told=len(opened),
        silent=len(silent),
        seconds=measure([seconds for seconds, _, _ in opened]),
        spans={name: part for name, part in parts.items() if part is not None},
        unattributed=measure([rest for _, _, rest in opened]),
        silent_seconds=measure(silent),
    )


def by_name(spans: Iterable[Span]) -> dict[str, float]:
    """Seconds; spans of one name are added up."""
    sums: dict[str, float] = {}
    for span in spans:
        sums[span.name] = sums.get(span.name, 0.0) + span.seconds
    return sums


def unexplained(seconds: float, spans: Iterable[Span]) -> float:
    """What lies outside of all spans; where they overlap, time counts once."""
    covered, reached = 0.0, 0.0
    for span in sorted(spans, key=lambda span: span.start):
        end = min(span.start + span.seconds, seconds)
        covered += max(0.0, end - max(span.start, reached))
        reached = max(reached, end)
    return seconds - covered

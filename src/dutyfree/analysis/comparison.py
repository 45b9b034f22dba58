"""Compare earlier runs with later runs: ``dutyfree compare``.

Two runs of the same plan differ by more than their trials vary: caches, neighbours and the clock speed
change from minute to minute, and all trials of a run share them. So the unit is the run. Each run gives one
number, its p50, and the variation between the runs of a side shows how much runs differ without any change.
With one run on a side this is unknown, and the verdict is "cannot tell".
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any

import msgspec
import numpy as np

from dutyfree.analysis import plan_differences
from dutyfree.analysis.cautions import cautions
from dutyfree.analysis.cells import METRICS, Key, Sample, describe, samples
from dutyfree.analysis.decomposition import Decomposer
from dutyfree.analysis.findings import Metric
from dutyfree.analysis.model import Caution, CautionKind
from dutyfree.analysis.statistics import RUN_LEVEL, as_sample, judge_runs
from dutyfree.analysis.units import UNKNOWN, duration, enumeration, markdown, multiple, percent, plural
from dutyfree.analysis.verdicts import (
    REASONS,
    UNCOMPARED,
    Comparison,
    MetricChange,
    Run,
    TestedMetric,
    Unit,
    changes,
    failures,
)
from dutyfree.contract.errors import RecordsError
from dutyfree.study.records import Records

IRRELEVANT = {
    CautionKind.CACHE,
    CautionKind.NO_BASELINE,
    CautionKind.NO_CONTROL,
    CautionKind.UNSURE_TAIL,
    CautionKind.UNDIVIDED,
}
"""Cautions of a run about numbers that a comparison does not show."""


class _RunCells(msgspec.Struct, frozen=True):
    """One run and its cells."""

    name: str
    records: Records
    by_key: dict[Key, Sample]
    cautions: list[Caution]


def compare(before: Sequence[Records], after: Sequence[Records], *, across_hosts: bool = False) -> Comparison:
    """Compare B with A, cell by cell.

    Raises RecordsError if a run is named twice, if the hosts differ (unless ``across_hosts``), and if the
    plans leave no cell comparable.
    """
    _check_different([*before, *after])
    unlike = _unlike_hosts(before[0].study.host, [one.study.host for one in (*before[1:], *after)])
    if unlike and not across_hosts:
        raise RecordsError(
            f"the records come from different hosts ({unlike}), so their times cannot be compared",
            remedy="measure both on one machine, or force the comparison with --across-hosts",
        )
    a, b = _run_cells("A", before), _run_cells("B", after)
    ours, theirs = _keys(a), _keys(b)
    common = [key for key in ours if key in theirs]
    refused = _refused([*a, *b], common)
    if refused and len(refused) == len(common):
        raise RecordsError(
            f"the plans differ in {_reasons(refused)}: no cell can be compared",
            remedy="measure one of the two again with the plan of the other",
        )
    found = [*_order_cautions(a, b), *_run_cautions([*a, *b])]
    return Comparison(
        unit="run",
        title_a=_title(a),
        title_b=_title(b),
        runs_a=_runs(a),
        runs_b=_runs(b),
        changes=changes([row for key in common for row in _judged(key, a, b, key in refused, found)], "run"),
        failures=[
            change
            for key in common
            if (change := failures(_samples(a, key), _samples(b, key), key)).failed_a + change.failed_b
        ],
        only_a=[key for key in ours if key not in theirs],
        only_b=[key for key in theirs if key not in ours],
        cautions=[
            *_host_cautions(unlike),
            *_refusal_cautions(refused),
            *_differences([*a, *b]),
            *found,
        ],
    )


def _check_different(runs: Sequence[Records]) -> None:
    if any(one.study == other.study and one.trials == other.trials for one, other in combinations(runs, 2)):
        raise RecordsError(
            "the same run is named twice, but a run counts once", remedy="name different runs, or repeat them"
        )


def _run_cells(side: str, runs: Sequence[Records]) -> list[_RunCells]:
    found = []
    for number, records in enumerate(runs, 1):
        decomposer = Decomposer(records)
        by_key = samples(records, decomposer)
        name = f"{side}{number}" if len(runs) > 1 else side
        found.append(_RunCells(name, records, by_key, own_cautions(records, by_key, decomposer)))
    return found


def _keys(runs: Iterable[_RunCells]) -> list[Key]:
    return list(dict.fromkeys(key for run in runs for key in run.by_key))


def _samples(runs: Iterable[_RunCells], key: Key) -> list[Sample]:
    return [run.by_key[key] for run in runs if key in run.by_key]


def _title(runs: Sequence[_RunCells]) -> str:
    started = [run.records.study.started for run in runs]
    return f"run of {started[0]}" if len(runs) == 1 else f"{len(runs)} runs, {min(started)} to {max(started)}"


def _runs(runs: Iterable[_RunCells]) -> list[Run]:
    return [Run(run.name, run.records.study.started, run.records.study.version) for run in runs]


def _judged(
    key: Key, a: Iterable[_RunCells], b: Iterable[_RunCells], refused: bool, found: Iterable[Caution]
) -> Iterator[TestedMetric]:
    for metric, values in METRICS.items():
        before, after = ([values(sample) for sample in _samples(runs, key)] for runs in (a, b))
        x, y = (as_sample([float(np.median(run)) for run in side if run.size]) for side in (before, after))
        if not x.size and not y.size:
            continue
        n_a, n_b = (sum(run.size for run in side) for side in (before, after))
        judgement = UNCOMPARED if refused else judge_runs(y, x)
        yield TestedMetric(key, metric, x, y, n_a, n_b, judgement, concerning([key], metric, found))


def own_cautions(records: Records, by_key: Mapping[Key, Sample], decomposer: Decomposer) -> list[Caution]:
    """Cautions of one run that matter for a comparison."""
    cells = [describe(sample, records.study.plan, decomposer) for sample in by_key.values()]
    found = cautions(records, cells, by_key, decomposer)
    return [caution for caution in found if caution.kind not in IRRELEVANT]


def concerning(keys: Iterable[Key], metric: Metric, cautions: Iterable[Caution]) -> list[CautionKind]:
    """The kinds of cautions that apply to a metric of any of these cells."""
    cells = list(keys)
    kinds = (caution.kind for caution in cautions if any(_about(caution, key) for key in cells))
    return [
        kind
        for kind in dict.fromkeys(kinds)
        if kind != CautionKind.STAND_IN or metric == "orchestration_per_action"
    ]


def _about(caution: Caution, key: Key) -> bool:
    about = (caution.workload, caution.substrate, caution.parallel)
    return all(one in (None, own) for one, own in zip(about, key, strict=True))


def _run_cautions(runs: Iterable[_RunCells]) -> list[Caution]:
    """The cautions of the runs, each with the names of its runs."""
    having: dict[Caution, list[str]] = {}
    for run in runs:
        for caution in run.cautions:
            having.setdefault(caution, []).append(run.name)
    return [
        msgspec.structs.replace(caution, text=f"{caution.text} (in {enumeration(names)})")
        for caution, names in having.items()
    ]


def _order_cautions(a: Sequence[_RunCells], b: Sequence[_RunCells]) -> Iterator[Caution]:
    if min(len(a), len(b)) < 2:
        yield Caution(
            CautionKind.FEW_RUNS,
            "one run on a side does not show how much runs differ without a change: repeat both, three times "
            "or more, in turn; or measure both in one study with 'dutyfree ab'",
        )
        return
    ours, theirs = ([run.records.study.started for run in runs] for runs in (a, b))
    if max(ours) < min(theirs) or max(theirs) < min(ours):
        yield Caution(
            CautionKind.RUN_ORDER,
            "all runs of one side came before those of the other: anything else that changed on the machine "
            "in between counts as a difference; alternate the runs (A, B, A, B, ...)",
        )


def _refused(runs: Sequence[_RunCells], common: Iterable[Key]) -> dict[Key, list[str]]:
    """The cells that cannot be compared because the plans differ, with the reasons."""
    first, rest = runs[0], runs[1:]
    found = {
        key: [
            reason
            for run in rest
            for reason in plan_differences.refusals(
                first.records.study.plan, run.records.study.plan, key[0], (first.name, run.name)
            )
        ]
        for key in common
    }
    return {key: reasons for key, reasons in found.items() if reasons}


def _reasons(refused: Mapping[Key, list[str]]) -> str:
    return enumeration(list(dict.fromkeys(reason for reasons in refused.values() for reason in reasons)))


def _unlike_hosts(first: dict[str, Any], others: Iterable[dict[str, Any]]) -> str:
    """How a host differs from the first; empty if all are alike."""
    return next((unlike for host in others if (unlike := _unlike(first, host))), "")


def _unlike(a: dict[str, Any], b: dict[str, Any]) -> str:
    if "host_key" in a and a.get("host_key") == b.get("host_key"):
        return ""
    if "host_key" not in a and "host_key" not in b and a == b:
        return ""
    ignored = ("host_key", "load")  # the first is a hash of the others, the second changes all the time
    names = [name for name in dict.fromkeys([*a, *b]) if name not in ignored and a.get(name) != b.get(name)]
    differences = [f"{name}: {a.get(name, 'unknown')} and {b.get(name, 'unknown')}" for name in names[:4]]
    return "; ".join(differences) or "their host keys differ"


def _host_cautions(unlike: str) -> Iterator[Caution]:
    if unlike:
        yield Caution(
            CautionKind.UNLIKE_HOSTS,
            f"the hosts differ: {unlike}; ratios include their difference",
        )


def _refusal_cautions(refused: Mapping[Key, list[str]]) -> Iterator[Caution]:
    for workload, reasons in {key[0]: reasons for key, reasons in refused.items()}.items():
        yield Caution(
            CautionKind.UNLIKE_PLANS,
            f"not compared: the plans differ in {enumeration(reasons)}",
            workload,
        )


def _differences(runs: Sequence[_RunCells]) -> Iterator[Caution]:
    """Plans and software that differ from the first run."""
    first, rest = runs[0], runs[1:]
    for run in rest:
        yield from plan_differences.cautions(
            first.records.study.plan, run.records.study.plan, (first.name, run.name)
        )
        yield from _software_cautions(first, run)


def _software_cautions(a: _RunCells, b: _RunCells) -> Iterator[Caution]:
    for label, before in a.records.substrates.items():
        after = b.records.substrates.get(label)
        if after is None or before.unavailable is not None or after.unavailable is not None:
            continue
        for name in dict.fromkeys([*before.facts, *after.facts]):
            old, new = before.facts.get(name, "unknown"), after.facts.get(name, "unknown")
            if old != new:
                yield Caution(
                    CautionKind.UNLIKE_SOFTWARE,
                    f"{name} is {old} in {a.name} and {new} in {b.name}",
                    substrate=label,
                )


TITLES: dict[Metric, str] = {
    "first_result": "time to first command",
    "total": "whole rollout",
    "orchestration_per_action": "orchestration per action",
}


def as_markdown(comparison: Comparison) -> str:
    """The comparison as Markdown."""
    lines = [
        "# B compared with A",
        "",
        f"A: {markdown(comparison.title_a)}. B: {markdown(comparison.title_b)}.",
        "",
        *_conclusion(comparison),
        "",
    ]
    if comparison.changes:
        lines += [*_table(comparison), ""]
    reasons = dict.fromkeys(change.why for change in comparison.changes if change.why)
    lines += [f"- {why}: {REASONS[why]}" for why in reasons]
    for change in comparison.failures:
        lines.append(
            f"- {markdown(change.workload)} on {markdown(change.substrate)}: {change.failed_a} of "
            f"{change.trials_a} trials failed in A, {change.failed_b} of {change.trials_b} in B"
        )
    for name, keys in (("A", comparison.only_a), ("B", comparison.only_b)):
        if keys:
            cells = ", ".join(f"{markdown(key[0])} on {markdown(key[1])} ({key[2]} at once)" for key in keys)
            lines.append(f"- only in {name}: {cells}")
    lines += _caution_lines(comparison.cautions)
    return "\n".join(lines).rstrip() + "\n"


def _conclusion(comparison: Comparison) -> list[str]:
    if not comparison.changes:
        return ["There is nothing to compare: no cell has a successful trial in both A and B."]
    if comparison.unit == "round":
        return [f"- {sentence(change)}" for change in comparison.changes if change.metric == "total"]
    counts = {
        verdict: sum(change.verdict == verdict for change in comparison.changes)
        for verdict in ("slower", "faster", "no difference shown", "cannot tell")
    }
    text = ", ".join(f"{verdict}: {count}" for verdict, count in counts.items())
    return [f"Of {len(comparison.changes)} comparisons, with {percent(RUN_LEVEL)} intervals: {text}."]


def sentence(change: MetricChange) -> str:
    """One verdict as a sentence."""
    at_once = f" ({change.parallel} at once)" if change.parallel > 1 else ""
    measured = f"{multiple(change.ratio)} over {plural(change.units_b, 'round')}"
    about = f"{markdown(change.workload)}{at_once}"
    if change.verdict in ("slower", "faster"):
        return f"{about}: B is **{change.verdict}** than A: B ÷ A is {measured}"
    if change.verdict == "cannot tell":
        return f"{about}: cannot tell, {change.why}: B ÷ A is {measured}"
    assert change.ratio is not None
    assert change.ratio.low is not None
    assert change.ratio.high is not None
    bounds = f"at most {percent(change.ratio.high - 1)} slower or {percent(1 - change.ratio.low)} faster"
    return f"{about}: no difference shown: B is {bounds}; B ÷ A is {measured}"


def _table(comparison: Comparison) -> list[str]:
    rows = [_row(change, comparison.unit) for change in comparison.changes]
    if all(change.parallel == 1 for change in comparison.changes):
        for row in rows:
            del row["at once"]
    rule = ["--:" if name in NUMBERS else "---" for name in rows[0]]
    lines = [list(rows[0]), rule, *([*row.values()] for row in rows)]
    return [f"| {' | '.join(fields)} |" for fields in lines]


NUMBERS = {"at once", "A p50", "B p50", "rounds", "B ÷ A", "runs, trials of A", "runs, trials of B"}


def _row(change: MetricChange, unit: Unit) -> dict[str, str]:
    verdict = f"{change.verdict}: {change.why}" if change.why else change.verdict
    counts = (
        {"rounds": str(change.units_b)}
        if unit == "round"
        else {
            "runs, trials of A": f"{change.units_a}, {change.n_a}",
            "runs, trials of B": f"{change.units_b}, {change.n_b}",
        }
    )
    return {
        "workload": markdown(change.workload),
        **({} if unit == "round" else {"substrate": markdown(change.substrate)}),
        "at once": str(change.parallel),
        "metric": TITLES[change.metric],
        "A p50": UNKNOWN if change.a is None else duration(change.a),
        "B p50": UNKNOWN if change.b is None else duration(change.b),
        **counts,
        "B ÷ A": multiple(change.ratio),
        "verdict": f"**{verdict}**" if change.verdict in ("slower", "faster") else verdict,
        "cautions": ", ".join(change.cautions),
    }


def _caution_lines(cautions: Collection[Caution]) -> list[str]:
    """One line for each different text, with the cells that it is about."""
    places: dict[tuple[CautionKind, str], list[str]] = {}
    for caution in cautions:
        about = " on ".join(markdown(name) for name in (caution.workload, caution.substrate) if name)
        if about and caution.parallel is not None and caution.parallel > 1:
            about += f" ({caution.parallel} at once)"
        places.setdefault((caution.kind, caution.text), []).extend([about] if about else [])
    return [
        f"- caution ({kind.value}): {f'{enumeration(about)}: ' if about else ''}{markdown(text)}"
        for (kind, text), about in places.items()
    ]

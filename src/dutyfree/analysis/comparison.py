"""Two sets of records against each other: what became slower, honestly judged.

A verdict needs both: an interval of the ratio that leaves out 1, and a Mann-Whitney test that stays
significant after Holm's correction over all that was compared. Where the trials are too few for any
outcome to be significant the verdict is "cannot tell", never "no difference"; so it is where the two plans
had a cell do different things.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from typing import Any, Literal

import msgspec

from dutyfree.analysis import plans
from dutyfree.analysis.cells import Key, Sample, samples
from dutyfree.analysis.decomposition import Decomposer
from dutyfree.analysis.model import Caution, CautionKind, Metric
from dutyfree.analysis.statistics import ALPHA, Estimate, Floats, Judgement, holm, judge, p50
from dutyfree.analysis.units import UNKNOWN, duration, enumeration, markdown, multiple
from dutyfree.errors import RecordsError
from dutyfree.study.records import Records

Verdict = Literal["slower", "faster", "no difference shown", "cannot tell"]

METRICS: dict[Metric, Callable[[Sample], Floats]] = {
    "first_result": Sample.first_results,
    "total": Sample.totals,
    "orchestration_per_action": Sample.orchestration_per_action,
}


UNCOMPARED = Judgement(ratio=None, p=None, least_p=1.0)


class Change(msgspec.Struct, frozen=True):
    """One metric of one cell, in A and in B."""

    workload: str
    substrate: str
    parallel: int
    metric: Metric
    n_a: int
    n_b: int
    a: Estimate | None
    """p50"""
    b: Estimate | None
    ratio: Estimate | None
    """B over A."""
    p: float | None
    """Holm-corrected; None where no test was possible."""
    verdict: Verdict


class FailureChange(msgspec.Struct, frozen=True):
    workload: str
    substrate: str
    parallel: int
    failed_a: int
    trials_a: int
    failed_b: int
    trials_b: int


class Comparison(msgspec.Struct, frozen=True):
    started_a: str
    started_b: str
    version_a: str
    version_b: str
    changes: list[Change]
    failures: list[FailureChange]
    """Cells in which any trial failed, in either."""
    only_a: list[Key]
    only_b: list[Key]
    cautions: list[Caution]

    @property
    def slower(self) -> list[Change]:
        return [change for change in self.changes if change.verdict == "slower"]


def compare(a: Records, b: Records, *, across_hosts: bool = False) -> Comparison:
    """B against A, cell by cell.

    Raises RecordsError for records of unlike hosts, unless ``across_hosts``, and where the plans leave
    no cell comparable.
    """
    unlike = _unlike_hosts(a.study.host, b.study.host)
    if unlike and not across_hosts:
        raise RecordsError(
            f"the records come from unlike hosts ({unlike}): their times do not compare",
            remedy="measure both on one machine, or insist with --across-hosts",
        )
    ours, theirs = samples(a, Decomposer(a)), samples(b, Decomposer(b))
    common = [key for key in ours if key in theirs]
    refused = _refused(a, b, common)
    if refused and len(refused) == len(common):
        raise RecordsError(
            f"the plans differ in {_reasons(refused)}: no cell of theirs is comparable",
            remedy="measure one of the two again with the plan of the other",
        )
    return Comparison(
        started_a=a.study.started,
        started_b=b.study.started,
        version_a=a.study.version,
        version_b=b.study.version,
        changes=_changes([(ours[key], theirs[key]) for key in common], refused),
        failures=[
            change
            for key in common
            if (change := _failures(ours[key], theirs[key])).failed_a + change.failed_b
        ],
        only_a=[key for key in ours if key not in theirs],
        only_b=[key for key in theirs if key not in ours],
        cautions=[
            *_host_cautions(unlike),
            *_refusal_cautions(refused),
            *plans.cautions(a.study.plan, b.study.plan),
            *_software_cautions(a, b),
        ],
    )


def _refused(a: Records, b: Records, common: list[Key]) -> dict[Key, list[str]]:
    """The cells that did different things in A and in B, with the reasons."""
    found = {key: plans.refusals(a.study.plan, b.study.plan, key[0]) for key in common}
    return {key: reasons for key, reasons in found.items() if reasons}


def _reasons(refused: dict[Key, list[str]]) -> str:
    return enumeration(list(dict.fromkeys(reason for reasons in refused.values() for reason in reasons)))


def _changes(pairs: list[tuple[Sample, Sample]], refused: Container[Key]) -> list[Change]:
    judged: list[tuple[Sample, Metric, Floats, Floats, Judgement]] = []
    for before, after in pairs:
        for metric, values in METRICS.items():
            x, y = values(before), values(after)
            if x.size or y.size:
                comparable = before.key not in refused
                judged.append((before, metric, x, y, judge(y, x) if comparable else UNCOMPARED))
    corrected = holm([judgement.p for *_, judgement in judged])
    tests = sum(p is not None for p in corrected)
    return [
        Change(
            *sample.key,
            metric=metric,
            n_a=x.size,
            n_b=y.size,
            a=p50(x),
            b=p50(y),
            ratio=judgement.ratio,
            p=p,
            verdict=_verdict(judgement, p, tests),
        )
        for (sample, metric, x, y, judgement), p in zip(judged, corrected, strict=True)
    ]


def _verdict(judgement: Judgement, p: float | None, tests: int) -> Verdict:
    ratio = judgement.ratio
    if p is None or ratio is None or ratio.low is None or ratio.high is None:
        return "cannot tell"
    if p <= ALPHA and ratio.low > 1:
        return "slower"
    if p <= ALPHA and ratio.high < 1:
        return "faster"
    # Complete separation would not have survived the correction: silence is no evidence.
    return "cannot tell" if judgement.least_p * tests > ALPHA else "no difference shown"


def _failures(before: Sample, after: Sample) -> FailureChange:
    return FailureChange(
        *before.key,
        failed_a=len(before.trials) - len(before.succeeded),
        trials_a=len(before.trials),
        failed_b=len(after.trials) - len(after.succeeded),
        trials_b=len(after.trials),
    )


def _unlike_hosts(a: dict[str, Any], b: dict[str, Any]) -> str:
    """What tells the hosts apart; empty if they are alike."""
    if "host_key" in a and a.get("host_key") == b.get("host_key"):
        return ""
    if "host_key" not in a and "host_key" not in b and a == b:
        return ""
    names = [name for name in dict.fromkeys([*a, *b]) if name != "host_key" and a.get(name) != b.get(name)]
    told = [f"{name}: {a.get(name, 'unknown')} and {b.get(name, 'unknown')}" for name in names[:4]]
    return "; ".join(told) or "their host keys differ"


def _host_cautions(unlike: str) -> Iterator[Caution]:
    if unlike:
        yield Caution(
            CautionKind.UNLIKE_HOSTS, f"unlike hosts: {unlike}; ratios mix the machines with the change"
        )


def _refusal_cautions(refused: dict[Key, list[str]]) -> Iterator[Caution]:
    for workload, reasons in {key[0]: reasons for key, reasons in refused.items()}.items():
        yield Caution(
            CautionKind.UNLIKE_PLANS,
            f"not compared: the plans differ in {enumeration(reasons)}",
            workload,
        )


def _software_cautions(a: Records, b: Records) -> Iterator[Caution]:
    for label, before in a.substrates.items():
        after = b.substrates.get(label)
        if after is None or before.unavailable is not None or after.unavailable is not None:
            continue
        for name in dict.fromkeys([*before.facts, *after.facts]):
            old, new = before.facts.get(name, "unknown"), after.facts.get(name, "unknown")
            if old != new:
                yield Caution(
                    CautionKind.UNLIKE_SOFTWARE, f"{name} changed from {old} to {new}", substrate=label
                )


TITLES: dict[Metric, str] = {
    "first_result": "time to first command",
    "total": "whole fresh episode",
    "orchestration_per_action": "orchestration per action",
}


def as_markdown(comparison: Comparison) -> str:
    """The comparison as GitHub shows it."""
    lines = [
        f"# B ({comparison.started_b}) against A ({comparison.started_a})",
        "",
        _conclusion(comparison),
        "",
    ]
    if comparison.changes:
        lines += [
            "| workload | substrate | at once | metric | A p50 (n) | B p50 (n) | B ÷ A | p | verdict |",
            "|---|---|--:|---|--:|--:|--:|--:|---|",
            *(_row(change) for change in comparison.changes),
            "",
        ]
    for change in comparison.failures:
        lines.append(
            f"- {markdown(change.workload)} on {markdown(change.substrate)}: {change.failed_a} of "
            f"{change.trials_a} trials failed in A, {change.failed_b} of {change.trials_b} in B"
        )
    for name, keys in (("A", comparison.only_a), ("B", comparison.only_b)):
        if keys:
            cells = ", ".join(f"{markdown(key[0])} on {markdown(key[1])} ({key[2]} at once)" for key in keys)
            lines.append(f"- only in {name}: {cells}")
    for caution in comparison.cautions:
        place = caution.substrate or caution.workload
        about = f"{markdown(place)}: " if place else ""
        lines.append(f"- caution ({caution.kind.value}): {about}{markdown(caution.text)}")
    return "\n".join(lines).rstrip() + "\n"


def _conclusion(comparison: Comparison) -> str:
    if not comparison.changes:
        return "The two have no cell in common with a successful trial: there is nothing to compare."
    counts = {
        verdict: sum(change.verdict == verdict for change in comparison.changes)
        for verdict in ("slower", "faster", "no difference shown", "cannot tell")
    }
    told = ", ".join(f"{verdict}: {count}" for verdict, count in counts.items())
    return f"Of {len(comparison.changes)} comparisons: {told}."


def _row(change: Change) -> str:
    a = UNKNOWN if change.a is None else f"{duration(change.a.value)} ({change.n_a})"
    b = UNKNOWN if change.b is None else f"{duration(change.b.value)} ({change.n_b})"
    p = UNKNOWN if change.p is None else f"{change.p:.2g}"
    fields = [
        markdown(change.workload),
        markdown(change.substrate),
        str(change.parallel),
        TITLES[change.metric],
        a,
        b,
        multiple(change.ratio),
        p,
        f"**{change.verdict}**" if change.verdict in ("slower", "faster") else change.verdict,
    ]
    return f"| {' | '.join(fields)} |"

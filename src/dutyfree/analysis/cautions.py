"""Cautions: typed warnings about the study, a substrate or a cell."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from dutyfree.analysis.baselines import storage_kind, twins
from dutyfree.analysis.cells import Key, Sample
from dutyfree.analysis.decomposition import Decomposer
from dutyfree.analysis.model import Caution, CautionKind, Cell
from dutyfree.analysis.statistics import Floats, as_sample, dispersion, drift
from dutyfree.analysis.units import duration, enumeration, percent, plural
from dutyfree.study.records import Records, Session, SubstrateFacts

FEW = 10
FEW_FOR_TAIL = 20
"""With fewer trials, p95 is between the two slowest."""
WIDE = 0.2
DISPERSED = 0.5
DRIFTING = 0.5
DRIFT_P = 0.01
DRIFT_LEAST = 6
"""With fewer values even a perfect order has p > DRIFT_P: 2 of 5! orders."""
BUSY = 0.5
"""Load average per core when a session starts."""
COPYING = "vfs"
"""Docker's storage driver that copies the whole image for every container."""
CONTROLLERS = {"cpus": "cpu", "memory": "memory", "pids": "pids"}
"""Limit → its name in the fact ``enforces`` of a substrate."""
SOFTWARE = ("python", "git", "pytest", "bash", "grep", "libc", "glibc", "coreutils")


def cautions(
    records: Records, cells: Iterable[Cell], by_key: Mapping[Key, Sample], decomposer: Decomposer
) -> list[Caution]:
    found = [*_of_study(records, decomposer.baseline), *_of_substrates(records, decomposer.baselines)]
    cells = list(cells)
    for cell in cells:
        expected = None if cell.planned is None else _expected(records.study.plan, cell.planned)
        found += _of_cell(cell, by_key[cell.key], decomposer.baselines.get(cell.substrate), expected)
    found += _never_ran(records, cells)
    found += _out_of_time(records, found)
    return found


def incomplete(found: Iterable[Caution]) -> set[Key]:
    """The cells with fewer trials than planned."""
    return {
        (one.workload, one.substrate, one.parallel or 1)
        for one in found
        if one.kind == CautionKind.INCOMPLETE and one.workload is not None and one.substrate is not None
    }


def _out_of_time(records: Records, found: Iterable[Caution]) -> Iterator[Caution]:
    budget = records.sessions[-1].budget if records.sessions else None
    if budget is not None and any(one.kind == CautionKind.INCOMPLETE for one in found):
        yield Caution(
            CautionKind.INCOMPLETE,
            f"the study stopped when its budget of {duration(budget)} was used up: to run the rest, continue "
            "it with --resume",
        )


def _of_study(records: Records, baseline: str | None) -> Iterator[Caution]:
    if baseline is None and records.trials:
        yield Caution(
            CautionKind.NO_BASELINE,
            "bare was not measured: there is no tax, and orchestration is known only for substrates that "
            "report it",
        )
    if len(records.sessions) > 1:
        yield Caution(
            CautionKind.RESUMED,
            f"the study was interrupted and resumed: it has {len(records.sessions)} sessions, and the "
            "machine may have changed between them",
        )
    cores = records.study.host.get("cores")
    if isinstance(cores, int) and cores > 0:
        yield from (_busy(session, cores) for session in records.sessions if session.load > BUSY * cores)
    if len({trial.substrate for trial in records.trials}) > 1 and not twins(records):
        yield Caution(
            CautionKind.NO_CONTROL,
            "the plan has no A/A control (one substrate under two labels): the noise floor is unknown, and a "
            "small difference may be noise",
        )
    if records.study.plan.get("adaptive"):
        yield Caution(
            CautionKind.EXPLORATORY,
            "cells stopped when their interval was narrow enough: such intervals are somewhat too narrow, so "
            "treat small differences as exploratory, and repeat with a fixed number of trials",
        )
    yield _cache_state(records.study.plan)


def _busy(session: Session, cores: int) -> Caution:
    return Caution(
        CautionKind.HIGH_LOAD,
        f"the machine was busy when the session of {session.started} started: load {session.load:.2f} on "
        f"{plural(cores, 'core')}",
    )


def _cache_state(plan: Mapping[str, Any]) -> Caution:
    if plan.get("drop_caches"):
        return Caution(CautionKind.CACHE, "page caches were dropped before each trial: the disk was cold too")
    return Caution(
        CautionKind.CACHE, "page caches were warm: a cold start is a fresh sandbox, not a cold disk"
    )


def _of_substrates(records: Records, baselines: Mapping[str, str]) -> Iterator[Caution]:
    measured = {trial.substrate for trial in records.trials}
    for label, facts in records.substrates.items():
        if facts.unavailable is not None:
            text = (
                f"not available when the study was resumed ({facts.unavailable}): its trials are older"
                if label in measured
                else f"left out: {facts.unavailable}"
            )
            yield Caution(CautionKind.LEFT_OUT, text, substrate=label)
    present = [
        facts for label, facts in records.substrates.items() if facts.unavailable is None or label in measured
    ]
    yield from _unlike_software(present)
    yield from _unlike_storage(present, baselines)
    yield from _unlike_limits(present, records.study.plan.get("limits") or {})
    yield from _not_isolated(present)


def _unlike_software(present: Iterable[SubstrateFacts]) -> Iterator[Caution]:
    for name in SOFTWARE:
        versions: dict[str, list[str]] = {}
        for facts in present:
            fact = facts.facts.get(name, facts.facts.get(f"{name}3"))
            if fact is not None:
                versions.setdefault(_version(fact), []).append(facts.label)
        if len(versions) > 1:
            each = [f"{version} on {enumeration(labels)}" for version, labels in versions.items()]
            yield Caution(
                CautionKind.UNLIKE_SOFTWARE,
                f"the version of {name} differs between substrates ({'; '.join(each)}): this may explain "
                "part of a difference",
            )


def _unlike_storage(present: Iterable[SubstrateFacts], baselines: Mapping[str, str]) -> Iterator[Caution]:
    """A substrate on other storage than its baseline, and a storage driver that copies."""
    by_label = {facts.label: facts for facts in present}
    kinds = {label: kind for label, facts in by_label.items() if (kind := storage_kind(facts.facts))}
    for label, kind in kinds.items():
        base = baselines.get(label)
        if base is not None and base in kinds and kinds[base] != kind:
            yield Caution(
                CautionKind.UNLIKE_STORAGE,
                f"files were {_PLACES[kind]}, and {_PLACES[kinds[base]]} on its baseline {base}: this may "
                "explain part of a difference",
                substrate=label,
            )
    if len(set(kinds.values())) > 1:
        each = [
            f"{_PLACES[kind]} on {enumeration([label for label in kinds if kinds[label] == kind])}"
            for kind in dict.fromkeys(kinds.values())
        ]
        yield Caution(
            CautionKind.UNLIKE_STORAGE,
            f"files were {' and '.join(each)}: a ratio between them includes the difference of the storage",
        )
    for label, facts in by_label.items():
        if facts.facts.get("storage driver") == COPYING:
            yield Caution(
                CautionKind.UNLIKE_STORAGE,
                f"the storage driver {COPYING} copies the whole image for every sandbox, and other drivers "
                "do not: creation and cleanup are slower because of it",
                substrate=label,
            )


_PLACES = {"memory": "in memory", "disk": "on disk"}


def _not_isolated(present: Iterable[SubstrateFacts]) -> Iterator[Caution]:
    """A native with walls switched off. ``bare`` isolates nothing either, but its name says so."""
    for facts in present:
        isolation = facts.facts.get("isolation", "")
        if facts.use.startswith("native") and (isolation == "none" or isolation.startswith("without ")):
            yield Caution(
                CautionKind.NOT_ISOLATED,
                f"isolation: {isolation}. This is for measuring and for trusted code only",
                substrate=facts.label,
            )


def _unlike_limits(present: Iterable[SubstrateFacts], limits: Mapping[str, Any]) -> Iterator[Caution]:
    """A substrate without the fact ``enforces`` refuses what it cannot enforce, so it enforces all."""
    given = [name for name in CONTROLLERS if limits.get(name) is not None]
    for facts in present:
        enforced = facts.facts.get("enforces")
        missing = [name for name in given if enforced is not None and CONTROLLERS[name] not in enforced]
        if missing:
            yield Caution(
                CautionKind.UNLIKE_LIMITS,
                f"ran without the plan's {enumeration(missing)} limit, which it cannot enforce: this may "
                "explain part of a difference",
                substrate=facts.label,
            )


def _version(fact: str) -> str:
    """The version number alone: one substrate reports "2.39.5" and another "git version 2.39.5"."""
    found = re.search(r"\d+(\.\d+)+\S*", fact)
    return found[0] if found else fact


def _of_cell(cell: Cell, sample: Sample, baseline: str | None, expected: int | None) -> Iterator[Caution]:
    for kind, text in _about(cell, sample, baseline, expected):
        yield Caution(kind, text, cell.workload, cell.substrate, cell.parallel)


def _about(
    cell: Cell, sample: Sample, baseline: str | None, expected: int | None
) -> Iterator[tuple[CautionKind, str]]:
    if cell.failed:
        rest = (
            f"the numbers are from the other {cell.succeeded}" if cell.succeeded else "there are no numbers"
        )
        yield CautionKind.FAILURES, f"{cell.failed} of {plural(cell.trials, 'trial')} failed; {rest}"
    if expected is not None and cell.trials < expected:
        yield CautionKind.INCOMPLETE, f"only {cell.trials} of {cell.planned} planned trials ran"
    if 0 < cell.succeeded < FEW:
        yield (
            CautionKind.TOO_FEW,
            f"fewer than {FEW} successful trials: intervals are rough, and p95 is close to the slowest trial",
        )
    elif 0 < cell.succeeded < FEW_FOR_TAIL:
        yield (
            CautionKind.UNSURE_TAIL,
            f"fewer than {FEW_FOR_TAIL} successful trials: p95 is close to the slowest trial",
        )
    if cell.succeeded >= FEW:
        yield from _about_stability(cell, sample)
    if cell.stood_in and baseline:
        yield CautionKind.STAND_IN, _stand_in(cell, baseline)
    if cell.undivided:
        yield (
            CautionKind.UNDIVIDED,
            f"the substrate does not report the time inside {_actions(cell.undivided, cell)}, and there "
            "is no bare run of them to use instead",
        )


def _about_stability(cell: Cell, sample: Sample) -> Iterator[tuple[CautionKind, str]]:
    assert cell.total is not None
    middle, totals = cell.total.p50, sample.totals()
    # The same words for many cells, so that they become one note. The numbers are in the tables.
    if middle.low is not None and middle.high is not None and middle.high - middle.low > WIDE * middle.value:
        yield (
            CautionKind.UNSTABLE,
            f"the interval of the p50 of the whole rollout is wider than {percent(WIDE)} of the p50",
        )
    if dispersion(totals) > DISPERSED:
        yield (
            CautionKind.UNSTABLE,
            f"the trials vary: the middle half spans more than {percent(DISPERSED)} of the p50",
        )
    in_order = _in_order(sample)
    correlation, p = drift(in_order)
    if in_order.size >= DRIFT_LEAST and abs(correlation) > DRIFTING and p < DRIFT_P:
        grew = "rose" if correlation > 0 else "fell"
        yield CautionKind.DRIFT, f"times {grew} during the study"


def _in_order(sample: Sample) -> Floats:
    """Totals in the order of the trials. Parallel rollouts count once, with their p50.

    They end in the order of their length, which would look like drift.
    """
    batches: dict[int, list[float]] = {}
    for trial in sample.succeeded:
        batches.setdefault(trial.index // trial.parallel, []).append(trial.total)
    return as_sample([float(np.median(totals)) for totals in batches.values()])


def _stand_in(cell: Cell, baseline: str) -> str:
    level = cell.stand_in_parallel
    at = f", measured with {level} rollouts at once," if level is not None and level != cell.parallel else ""
    return (
        f"the substrate does not report the time inside {_actions(cell.stood_in, cell)}: the time of the "
        f"same action on {baseline}{at} is used instead, so a command that runs slower in the sandbox counts "
        "as orchestration"
    )


def _actions(number: int, cell: Cell) -> str:
    """The same words for many cells, so that they become one note."""
    return "all actions" if number == cell.actions else "some actions"


def _expected(plan: Mapping[str, Any], planned: int) -> int:
    """Trials that a cell must have. With adaptive stopping, it may end after the minimum."""
    adaptive = plan.get("adaptive")
    minimum = adaptive.get("minimum") if isinstance(adaptive, dict) else None
    return min(planned, minimum) if isinstance(minimum, int) else planned


def _never_ran(records: Records, cells: Iterable[Cell]) -> Iterator[Caution]:
    workloads, parallel = (records.study.plan.get(name) for name in ("workloads", "parallel"))
    if not isinstance(workloads, dict):
        return
    ran = {cell.key for cell in cells}
    labels = {key[1] for key in ran}
    for label, facts in records.substrates.items():
        if facts.unavailable is not None and label not in labels:
            continue
        for name in workloads:
            levels = parallel.get(name, []) if isinstance(parallel, dict) else []
            for level in (1, *levels):
                if (name, label, level) not in ran:
                    yield Caution(CautionKind.INCOMPLETE, "no trial ran", name, label, level)

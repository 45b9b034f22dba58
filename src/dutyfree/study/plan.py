"""Plans: what to measure, read from TOML, and the order in which to measure it.

The order is a pure function of the plan: rounds, each of which holds every open cell once, shuffled, so
that drift of the machine hits all substrates alike.
"""

from __future__ import annotations

import math
import os
import random
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from dutyfree import substrates, validation
from dutyfree.contract.errors import OptionError, PlanError, UsageError
from dutyfree.study.records import Trial
from dutyfree.workloads import check_name


class Adaptive(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Stop a cell early once the 95 % interval of its p50 is narrow enough."""

    width: float
    """Of the interval, as a share of the p50: 0.05 is ±2.5 %."""
    minimum: int = 20
    """Trials before the first look."""


class Plan(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What to measure."""

    name: str
    substrates: Annotated[list[str], Meta(examples=['["bare", "native"]'])]
    """Labels; each is a substrate's name, or has a table in ``options`` whose ``use`` is one."""
    optional: Annotated[list[str], Meta(examples=['["docker"]'])] = []
    """Labels that are left out, with the reason in the report, where they are not available."""
    options: dict[str, Annotated[dict[str, Any], Meta(examples=['{use = "docker", init = false}'])]] = {}
    """Label → options of the substrate."""
    workloads: Annotated[
        dict[str, Annotated[int, Meta(description="a number of trials")]], Meta(examples=["{T0 = 10}"])
    ]
    """T0, T1, T2, trajectory-N → trials on every substrate."""
    parallel: Annotated[
        dict[str, Annotated[list[int], Meta(examples=["[8, 32]"])]], Meta(examples=["{T0 = [8, 32]}"])
    ] = {}
    """Workload → further cells with that many rollouts at once, in whole batches."""
    seed: int = 1
    warmups: int = 1
    """Unmeasured trials of every workload on every substrate before the first round."""
    timeout: Annotated[float, Meta(description="a number of seconds")] = 300.0
    """Seconds that one trial may take."""
    drop_caches: bool = False
    """Drop the page cache before every trial (needs root)."""
    full_tests: bool = False
    """T2 runs the whole test suite of attrs."""
    remote: str | None = None
    """Clone from this URL instead of the loopback server; it must hold the fixture's commits."""
    adaptive: Adaptive | None = None

    def use(self, label: str) -> tuple[str, dict[str, Any]]:
        """The substrate's name and its options."""
        options = dict(self.options.get(label, {}))
        return options.pop("use", label), options


class Batch(msgspec.Struct, frozen=True):
    """Trials that start together: one, or as many as the cell has in parallel."""

    workload: str
    substrate: str
    parallel: int
    indices: tuple[int, ...]
    warmup: bool = False
    session: int = 0
    """Of a warm-up: every session of a study warms up anew."""

    def trial_id(self, index: int) -> str:
        number = f"warmup-{self.session}-{index}" if self.warmup else f"trial-{index}"
        return f"{self.workload}/{self.substrate}/x{self.parallel}/{number}"

    @property
    def cell(self) -> tuple[str, str, int]:
        return (self.workload, self.substrate, self.parallel)


def shipped() -> dict[str, Path]:
    """The plans that come with dutyfree, by name."""
    package = Path(__file__).parents[1]
    # In a wheel they lie within the package, in a checkout at its root.
    folder = package / "plans" if (package / "plans").is_dir() else package.parents[1] / "plans"
    return {path.stem: path for path in sorted(folder.glob("*.toml"))}


def load(name: str) -> Plan:
    """Read and check a plan, by the name of a shipped one or by path. Raises PlanError."""
    known = shipped()
    path = known.get(name, Path(name))
    if not path.exists():
        raise PlanError(f"there is no plan {name!r}", remedy=f"name a file, or one of: {', '.join(known)}")
    try:
        data = path.read_bytes()
    except OSError as error:
        raise PlanError(f"cannot read the plan {path}: {error.strerror}") from error
    try:
        table = msgspec.toml.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise PlanError(f"{path} is not TOML: {error}", remedy=_DOCS) from error
    return check(_converted(table, str(path)), str(path))


_DOCS = "docs/study.md describes plans"


def _converted(table: object, where: str) -> Plan:
    try:
        return msgspec.convert(table, Plan)
    except msgspec.ValidationError as error:
        mistake = validation.explain(error, table, Plan)
        raise PlanError(f"{where}: {mistake.message}", remedy=mistake.remedy or _DOCS) from error


def check(plan: Plan, where: str = "the plan") -> Plan:
    """The plan itself, if it can be run. Raises PlanError."""
    if not plan.substrates:
        raise PlanError(f"{where} names no substrate", remedy='add substrates = ["bare"]')
    if len(set(plan.substrates)) != len(plan.substrates):
        raise PlanError(f"{where} names a substrate twice", remedy="give the second a label in options")
    for label in plan.substrates:
        _check_substrate(plan, label, where)
    for key, labels in (("optional", plan.optional), ("options", plan.options)):
        for label in labels:
            if label not in plan.substrates:
                raise PlanError(
                    f"{where}: {key} names {label!r}, which is not among the substrates",
                    remedy=validation.suggestion(label, plan.substrates) or f"add {label!r} to substrates",
                )
    _check_workloads(plan, where)
    if plan.timeout <= 0:
        raise PlanError(f"{where}: timeout must be a number of seconds > 0, not {plan.timeout:g}")
    if plan.warmups < 0:
        raise PlanError(f"{where}: warmups must be a number of trials ≥ 0, not {plan.warmups}")
    if plan.adaptive and not (0 < plan.adaptive.width < 1 and plan.adaptive.minimum >= 6):
        raise PlanError(f"{where}: adaptive needs 0 < width < 1 and minimum ≥ 6")
    if plan.drop_caches and not os.access("/proc/sys/vm/drop_caches", os.W_OK):
        raise PlanError(f"{where} drops the page cache, which only root may", remedy="run it as root")
    return plan


def _check_substrate(plan: Plan, label: str, where: str) -> None:
    use, options = plan.use(label)
    if not isinstance(use, str):
        raise PlanError(f"{where}: [options.{label}] use must be the name of a substrate, not {use!r}")
    table = f" [options.{label}]" if label in plan.options else ""
    try:
        substrates.configure(use, options)
    except OptionError as error:
        raise PlanError(f"{where}:{table} {error.message}", remedy=error.remedy) from error


def _check_workloads(plan: Plan, where: str) -> None:
    if not plan.workloads:
        raise PlanError(f"{where} names no workload", remedy="add a table such as [workloads] T0 = 10")
    for workload, trials in plan.workloads.items():
        _check_workload(workload, where)
        if trials < 1:
            raise PlanError(f"{where}: [workloads] {workload} needs at least one trial, not {trials}")
    for workload, levels in plan.parallel.items():
        if workload not in plan.workloads:
            raise PlanError(
                f"{where}: [parallel] names {workload!r}, which is not among the workloads",
                remedy=validation.suggestion(workload, plan.workloads) or f"add {workload} to [workloads]",
            )
        if any(level < 2 for level in levels) or len(set(levels)) != len(levels):
            raise PlanError(f"{where}: [parallel] {workload} must hold different numbers above 1")


def _check_workload(workload: str, where: str) -> None:
    try:
        check_name(workload)
    except UsageError as error:
        # In TOML a key below [workloads] is one of that table.
        misplaced = workload in Plan.__struct_fields__
        remedy = f"write {workload} above the first [table]" if misplaced else error.remedy
        raise PlanError(f"{where}: [workloads] {error.message}", remedy=remedy) from error


def cells(plan: Plan, labels: Sequence[str]) -> list[tuple[str, str, int]]:
    """Every (workload, substrate, parallel) that is measured."""
    return [
        (workload, label, parallel)
        for workload in plan.workloads
        for parallel in (1, *plan.parallel.get(workload, ()))
        for label in labels
    ]


def trials(plan: Plan, workload: str, parallel: int) -> int:
    """How many a cell has: as the plan says, rounded up to whole batches of ``parallel``."""
    return math.ceil(plan.workloads[workload] / parallel) * parallel


def warmups(plan: Plan, session: int, open_cells: Iterable[tuple[str, str, int]]) -> list[Batch]:
    """One batch for every workload on every substrate that has trials to run, as often as the plan says."""
    pairs = dict.fromkeys((workload, label) for workload, label, _ in open_cells)
    return [
        Batch(workload, label, 1, (index,), warmup=True, session=session)
        for index in range(plan.warmups)
        for workload, label in pairs
    ]


def rounds(plan: Plan, labels: Sequence[str]) -> Iterator[list[Batch]]:
    """The measured batches. A cell of p parallel rollouts takes part in every p-th round."""
    for number in range(max(plan.workloads.values())):
        batches = [
            Batch(workload, label, parallel, tuple(range(number, number + parallel)))
            for workload, label, parallel in cells(plan, labels)
            if number < plan.workloads[workload] and number % parallel == 0
        ]
        random.Random(f"{plan.seed}/{number}").shuffle(batches)  # noqa: S311 (an order, not a secret)
        yield batches


def remaining(batches: Iterable[Batch], done: set[str]) -> Iterator[Batch]:
    """What is still to do, given the ids of the trials on record."""
    for batch in batches:
        indices = tuple(index for index in batch.indices if batch.trial_id(index) not in done)
        if indices:
            yield msgspec.structs.replace(batch, indices=indices)


def settled(adaptive: Adaptive | None, trials: Sequence[Trial]) -> bool:
    """Whether the cell's p50 is known narrowly enough; failures count as trials, not as values."""
    if adaptive is None or len(trials) < adaptive.minimum:
        return False
    values = sorted(trial.total for trial in trials if trial.ok)
    count = len(values)
    # The order statistics that bracket the median with 95 %, whatever the distribution.
    reach = 0.98 * math.sqrt(count)
    low, high = math.floor(count / 2 - reach), math.ceil(count / 2 + reach)
    if low < 0 or high >= count:
        return False
    return values[high] - values[low] <= adaptive.width * values[count // 2]

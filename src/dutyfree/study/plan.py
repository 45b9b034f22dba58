"""Plans: what to measure, read from TOML, and in which order.

The order depends on the plan only. It consists of rounds. Each round has every unfinished cell once, in
random order, so that a slow minute of the machine affects all substrates.
"""

from __future__ import annotations

import math
import os
import random
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from dutyfree import substrates, validation
from dutyfree.contract import Limits, sized
from dutyfree.contract.errors import LimitError, OptionError, PlanError, UsageError
from dutyfree.contract.limits import size
from dutyfree.study.counts import Cell, Fewer, bounded, runs_in
from dutyfree.study.records import Trial
from dutyfree.workloads import check_name, is_name, project_of


class Adaptive(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Stop a cell early when the 95 % interval of its p50 is narrow enough."""

    width: float
    """Width of the interval as a share of the p50: 0.05 is ±2.5 %."""
    minimum: int = 20
    """Number of trials before the first check."""


class Plan(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What to measure."""

    name: str
    substrates: Annotated[list[str], Meta(examples=['["bare", "native"]'])]
    """Labels. Each is the name of a substrate, or has a table in ``options`` that names one with ``use``."""
    optional: Annotated[list[str], Meta(examples=['["docker"]'])] = []
    """Labels that may be missing, or whose substrate is not installed: they are left out, and the report says
    why."""
    options: dict[str, Annotated[dict[str, Any], Meta(examples=['{use = "docker", init = false}'])]] = {}
    """Label → options of its substrate, ``use``, and ``padding``: the size of files to add to its image."""
    workloads: Annotated[
        dict[str, Annotated[int, Meta(description="a number of trials")]], Meta(examples=["{T0 = 10}"])
    ]
    """Name of a workload, as in ``workloads.NAMES`` or ``recorded`` → number of trials on every substrate."""
    most: dict[str, Annotated[int, Meta(description="a number of trials")]] = {}
    """Label → the most trials of each workload on it: for a substrate that is much slower than the others."""
    fewer: Annotated[list[Fewer], Meta(examples=["[{seconds = 5, trials = 10}]"])] = []
    """Fewer trials for slow cells: the first measured trial of a cell decides. Then the trials of every cell
    are spread evenly over the rounds, so that a study that stops early has a part of each."""
    parallel: Annotated[
        dict[str, Annotated[list[int], Meta(examples=["[8, 32]"])]], Meta(examples=["{T0 = [8, 32]}"])
    ] = {}
    """Workload → numbers of parallel rollouts. Each number adds a cell, with whole batches."""
    held_out: Annotated[tuple[str, ...], Meta(examples=['["trajectory-100"]'])] = ()
    """Workloads that are measured, but left out of the fit of the law, which must predict them."""
    recorded: dict[str, str] = {}
    """Name of a workload → file with a recorded trajectory, relative to the plan."""
    offline: bool = False
    """Clone from a copy of the repository in the sandbox, so that no workload needs the network."""
    limits: Annotated[Limits, Meta(examples=['{memory = "2G", pids = 512}'])] | None = None
    """Limits of every sandbox on every substrate. A substrate runs without those that it cannot enforce; its
    fact ``enforces`` says so. ``limits`` in a label's options come before these."""
    seed: int = 1
    warmups: int = 1
    """Warm-up trials of every workload on every substrate before the first round."""
    warm_up: Annotated[list[str], Meta(examples=['["T0", "T2"]'])] = []
    """The workloads that have warm-up trials; all if empty. Long ones that only repeat what a shorter one
    warms up can be left out."""
    renew: Annotated[int, Meta(ge=0)] = 0
    """After so many rounds, all substrates start anew in fresh processes; 0 for never. Two processes of the
    same program differ a little as long as they live. Renewed, that is noise between blocks of rounds."""
    settle: Annotated[float, Meta(description="a number of seconds")] = 0.0
    """Seconds of pause before every batch, in which all substrates finish what they do in the background."""
    timeout: Annotated[float, Meta(description="a number of seconds")] = 300.0
    """Maximum seconds of one trial."""
    drop_caches: bool = False
    """Drop the page cache before every trial (needs root)."""
    full_tests: bool = False
    """Run the whole test suite of attrs in T2."""
    remote: str | None = None
    """Clone from this URL instead of the loopback server. It must have the commits of the fixture."""
    adaptive: Adaptive | None = None

    def use(self, label: str) -> tuple[str, dict[str, Any]]:
        """The substrate's name and its options."""
        options = dict(self.options.get(label, {}))
        options.pop("padding", None)
        return options.pop("use", label), options

    def opening(self, label: str) -> tuple[str, dict[str, Any]]:
        """The substrate's name, and the options to open it with.

        A substrate with a warm pool makes its idle sandboxes in advance, so it gets the plan's limits.
        """
        use, options = self.use(label)
        limits = self.limits_of(label)
        provider = substrates.provider(use)
        if (
            limits is not None
            and hasattr(provider, "warmth")
            and "limits" in provider.Config.__struct_fields__
        ):
            options["limits"] = {
                name: value for name, value in msgspec.to_builtins(limits).items() if value is not None
            }
        return use, options

    def padding(self, label: str) -> int:
        """The number of bytes to add to the image of the label's sandboxes. Raises LimitError."""
        given = self.options.get(label, {}).get("padding", "0")
        return size(str(given), "padding")

    def limits_of(self, label: str) -> Limits | None:
        """The plan's limits, overridden by those in the label's options. None if there are none."""
        use, options = self.use(label)
        own = options.get("limits")
        if not isinstance(own, dict):
            return self.limits
        _, config = substrates.configure(use, options)
        given = {name: getattr(config.limits, name) for name in own}  # type: ignore[attr-defined]
        return msgspec.structs.replace(self.limits or Limits(), **given)


class Batch(msgspec.Struct, frozen=True):
    """Trials that start together: as many as the cell has parallel rollouts."""

    workload: str
    substrate: str
    parallel: int
    indices: tuple[int, ...]
    warmup: bool = False
    session: int = 0
    """For warm-ups, because every session of a study has its own."""

    def trial_id(self, index: int) -> str:
        number = f"warmup-{self.session}-{index}" if self.warmup else f"trial-{index}"
        return f"{self.workload}/{self.substrate}/x{self.parallel}/{number}"

    @property
    def cell(self) -> Cell:
        return (self.workload, self.substrate, self.parallel)


def shipped() -> dict[str, Path]:
    """The plans that come with dutyfree, by name."""
    package = Path(__file__).parents[1]
    # In a wheel they are inside the package, in a checkout at its root.
    folder = package / "plans" if (package / "plans").is_dir() else package.parents[1] / "plans"
    return {path.stem: path for path in sorted(folder.glob("*.toml"))}


def load(name: str) -> Plan:
    """Read and check a plan: the name of one that comes with dutyfree, or a path. Raises PlanError."""
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
    return check(_beside(_converted(table, str(path)), path), str(path))


_DOCS = "docs/study.md describes plans"


def _beside(plan: Plan, path: Path) -> Plan:
    """The plan with absolute paths: a resumed study may run in another directory."""
    found = {name: str(path.parent.resolve() / file) for name, file in plan.recorded.items()}
    return msgspec.structs.replace(plan, recorded=found)


def _converted(table: dict[str, Any], where: str) -> Plan:
    if isinstance(table.get("limits"), dict):
        table["limits"] = sized(table["limits"])
    try:
        return msgspec.convert(table, Plan)
    except msgspec.ValidationError as error:
        mistake = validation.explain(error, table, Plan)
        raise PlanError(f"{where}: {mistake.message}", remedy=mistake.remedy or _DOCS) from error


def check(plan: Plan, where: str = "the plan") -> Plan:
    """Return the plan if it can run. Raises PlanError."""
    if not plan.substrates:
        raise PlanError(f"{where} names no substrate", remedy='add substrates = ["bare"]')
    if len(set(plan.substrates)) != len(plan.substrates):
        raise PlanError(
            f"{where} names a substrate twice",
            remedy="give the second one another label, with use in options",
        )
    for label in plan.substrates:
        _check_substrate(plan, label, where)
    for key, labels in (("optional", plan.optional), ("options", plan.options), ("[most]", plan.most)):
        _check_named(f"{where}: {key}", labels, plan.substrates, "substrates")
    _check_named(f"{where}: warm_up", plan.warm_up, plan.workloads, "workloads")
    for label, trials in plan.most.items():
        if trials < 1:
            raise PlanError(f"{where}: [most] {label} needs at least one trial, not {trials}")
    _check_workloads(plan, where)
    _check_fewer(plan, where)
    if plan.remote is not None and any(project_of(name) == "networkx" for name in plan.workloads):
        raise PlanError(
            f"{where}: remote is the URL of the attrs repository, and a workload needs networkx",
            remedy="leave remote out, or the workloads networkx-N",
        )
    if plan.timeout <= 0:
        raise PlanError(f"{where}: timeout must be a number of seconds > 0, not {plan.timeout:g}")
    if not 0 <= plan.settle < math.inf:
        raise PlanError(f"{where}: settle must be a number of seconds ≥ 0, not {plan.settle:g}")
    if plan.limits is not None and plan.limits.disk is not None:
        raise PlanError(
            f"{where}: [limits] disk cannot be the same on every substrate",
            remedy="set it in the options of a substrate",
        )
    if plan.warmups < 0:
        raise PlanError(f"{where}: warmups must be a number of trials ≥ 0, not {plan.warmups}")
    if plan.adaptive and not (0 < plan.adaptive.width < 1 and plan.adaptive.minimum >= 6):
        raise PlanError(f"{where}: adaptive needs 0 < width < 1 and minimum ≥ 6")
    if plan.drop_caches and not os.access("/proc/sys/vm/drop_caches", os.W_OK):
        raise PlanError(f"{where} drops the page cache, which needs root", remedy="run it as root")
    return plan


def _check_substrate(plan: Plan, label: str, where: str) -> None:
    use, options = plan.use(label)
    if not isinstance(use, str):
        raise PlanError(f"{where}: [options.{label}] use must be the name of a substrate, not {use!r}")
    table = f" [options.{label}]" if label in plan.options else ""
    if label in plan.optional and not _is_installed(use):
        return  # left out when the study starts, with the reason
    try:
        substrates.configure(use, options)
        plan.padding(label)
    except (OptionError, LimitError) as error:
        raise PlanError(f"{where}:{table} {error.message}", remedy=error.remedy) from error


def _is_installed(use: str) -> bool:
    try:
        substrates.provider(use)
    except OptionError:
        return False
    return True


def _check_fewer(plan: Plan, where: str) -> None:
    for rule in plan.fewer:
        if rule.seconds <= 0 or rule.trials < 1:
            raise PlanError(
                f"{where}: fewer needs seconds > 0 and trials ≥ 1, not {rule.trials} from {rule.seconds:g} s"
            )
    if plan.fewer and any(plan.parallel.values()):
        raise PlanError(
            f"{where}: fewer cannot be combined with [parallel]",
            remedy="leave one of them out, or bound slow labels with [most]",
        )


def _check_workloads(plan: Plan, where: str) -> None:
    if not plan.workloads:
        raise PlanError(f"{where} names no workload", remedy="add a table such as [workloads] T0 = 10")
    for workload, trials in plan.workloads.items():
        if workload not in plan.recorded:
            _check_workload(workload, where)
        if trials < 1:
            raise PlanError(f"{where}: [workloads] {workload} needs at least one trial, not {trials}")
    keys = {"recorded": plan.recorded, "held_out": plan.held_out, "[parallel]": plan.parallel}
    for key, listed in keys.items():
        _check_named(f"{where}: {key}", listed, plan.workloads, "workloads")
    for workload, file in plan.recorded.items():
        if is_name(workload):
            raise PlanError(
                f"{where}: [recorded] {workload!r} is the name of another workload",
                remedy="choose another name",
            )
        if not os.access(file, os.R_OK):
            raise PlanError(
                f"{where}: [recorded] {workload}: cannot read {file}",
                remedy="name a file relative to the plan",
            )
    for workload, levels in plan.parallel.items():
        if any(level < 2 for level in levels) or len(set(levels)) != len(levels):
            raise PlanError(f"{where}: [parallel] {workload} must have different numbers > 1")


def _check_named(place: str, names: Iterable[str], known: Collection[str], what: str) -> None:
    for name in names:
        if name not in known:
            added = f"add {name!r} to substrates" if what == "substrates" else f"add {name} to [{what}]"
            raise PlanError(
                f"{place} names {name!r}, which is not among the {what}",
                remedy=validation.suggestion(name, known) or added,
            )


def _check_workload(workload: str, where: str) -> None:
    try:
        check_name(workload)
    except UsageError as error:
        # In TOML, a key below [workloads] belongs to that table.
        misplaced = workload in Plan.__struct_fields__
        remedy = f"write {workload} above the first [table]" if misplaced else error.remedy
        raise PlanError(f"{where}: [workloads] {error.message}", remedy=remedy) from error


def cells(plan: Plan, labels: Sequence[str]) -> list[Cell]:
    """Every cell that is measured."""
    return [
        (workload, label, parallel)
        for workload in plan.workloads
        for parallel in (1, *plan.parallel.get(workload, ()))
        for label in labels
    ]


def trials(plan: Plan, cell: Cell, first: float | None = None) -> int:
    """The number of trials of a cell, in whole batches; ``first``: seconds of its first one, if it ran."""
    workload, label, parallel = cell
    return math.ceil(_wanted(plan, workload, label, first) / parallel) * parallel


def _wanted(plan: Plan, workload: str, label: str, first: float | None) -> int:
    wanted = plan.workloads[workload]
    return bounded(min(wanted, plan.most.get(label, wanted)), plan.fewer, first)


def warmups(plan: Plan, session: int, open_cells: Iterable[Cell]) -> list[Batch]:
    """The warm-up batches: for every workload on every substrate that has trials to run."""
    pairs = dict.fromkeys((workload, label) for workload, label, _ in open_cells)
    return [
        Batch(workload, label, 1, (index,), warmup=True, session=session)
        for index in range(plan.warmups)
        for workload, label in pairs
        if not plan.warm_up or workload in plan.warm_up
    ]


def rounds(
    plan: Plan, labels: Sequence[str], firsts: Mapping[Cell, float] | None = None
) -> Iterator[list[Batch]]:
    """The measured batches of each round. A cell with p parallel rollouts runs in every p-th round.

    ``firsts``: the seconds of the first trials, which may be added while the rounds run.
    """
    firsts = firsts if firsts is not None else {}
    last = max(plan.workloads.values())
    for number in range(last):
        batches = [
            Batch(workload, label, parallel, tuple(range(number, number + parallel)))
            for workload, label, parallel in cells(plan, labels)
            if _runs(plan, (workload, label, parallel), firsts, number, last)
        ]
        random.Random(f"{plan.seed}/{number}").shuffle(batches)  # noqa: S311 (an order, not a secret)
        yield batches


def _runs(plan: Plan, cell: Cell, firsts: Mapping[Cell, float], number: int, last: int) -> bool:
    workload, label, parallel = cell
    wanted = _wanted(plan, workload, label, firsts.get(cell))
    if plan.fewer:
        return runs_in(number, wanted, last)
    return number < wanted and number % parallel == 0


def remaining(batches: Iterable[Batch], done: set[str]) -> Iterator[Batch]:
    """The batches without the trials that are recorded already."""
    for batch in batches:
        indices = tuple(index for index in batch.indices if batch.trial_id(index) not in done)
        if indices:
            yield msgspec.structs.replace(batch, indices=indices)


def settled(adaptive: Adaptive | None, trials: Sequence[Trial]) -> bool:
    """Whether the interval of the cell's p50 is narrow enough. Failed trials only count as trials."""
    if adaptive is None or len(trials) < adaptive.minimum:
        return False
    from dutyfree.analysis.statistics import p50  # imports numpy, which is slow

    middle = p50([trial.total for trial in trials if trial.ok])
    if middle is None or middle.low is None or middle.high is None:
        return False
    return middle.high - middle.low <= adaptive.width * middle.value

"""Runs a study: prepare the substrates, run the rounds of trials, write the records.

Each substrate is in a process of its own, a worker. The fixture, the git server and the recipes are prepared
before any time is measured. A study that was stopped or killed continues from its records.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections import defaultdict
from collections.abc import Mapping
from contextlib import AsyncExitStack
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from time import monotonic, perf_counter
from typing import Any, Protocol

import anyio
import anyio.to_thread
import msgspec

import dutyfree
from dutyfree import paths, substrates, validation, workloads
from dutyfree.contract.errors import (
    DutyfreeError,
    OptionError,
    PlanError,
    RecordsError,
    Unavailable,
    UsageError,
)
from dutyfree.study import machine, records, trial
from dutyfree.study import plan as plans
from dutyfree.study.counts import Cell, first_seconds
from dutyfree.study.messages import Ended, Prepare, Prepared, RunBatch
from dutyfree.study.plan import Batch, Plan
from dutyfree.study.records import Line, Records, RecordsWriter, Session, Study, SubstrateFacts, Trial
from dutyfree.study.workers import WorkerDied, Workers
from dutyfree.workloads import trajectory_file
from dutyfree.workloads.fixture import Fixture
from dutyfree.workloads.fixture import build as build_fixture
from dutyfree.workloads.gitserver import GitServer, listen_address, serve
from dutyfree.workloads.project import PROJECTS
from dutyfree.workloads.workload import Workload

GIVE_UP_AFTER = 3
"""After this many infrastructure failures in a row, check whether the substrate is still available."""

_OPTION = re.compile(r"\boption (\w+)=")
"""An option in a remedy, as a program gives it."""


class Progress(Protocol):
    """Receives the progress of a study."""

    def note(self, text: str) -> None:
        """Report what is being prepared, or was left out."""

    def begin(self, done: int, total: int, warmups: int) -> None:
        """Report that the warm-ups start, and then the trials; ``done`` of these are recorded already."""

    def ended(self, ended: Trial, done: int, total: int, seconds_left: float | None) -> None:
        """Report that a trial ended. ``total`` falls when a slow cell gets fewer trials.

        Warm-ups count apart: after one, ``done`` and ``total`` are numbers of warm-ups.
        """


async def run(
    plan: Plan, out: Path, *, resume: bool, progress: Progress, budget: float | None = None
) -> Records:
    """Run the plan, or the rest of it, and return all records.

    ``budget``: seconds. No trial starts that would probably end later. A resumed study runs the rest.

    Raises RecordsError, PlanError, Unavailable, and errors of the preparation. If no trial has been recorded
    then, a new file of records and its new directory are removed.
    """
    deadline = None if budget is None else monotonic() + budget
    loop = type(asyncio.get_running_loop()).__module__.partition(".")[0]
    writer = await anyio.to_thread.run_sync(RecordsWriter, out)
    try:
        session, done = await anyio.to_thread.run_sync(_begin, plan, out, resume, writer, loop, budget)
        async with AsyncExitStack() as stack:
            workers = await stack.enter_async_context(Workers())
            study = _StudyRun(plan, workers, writer, progress, session, done, deadline)
            await study.open()
            await study.prepare(stack)
            await study.measure()
    except BaseException:
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(writer.discard_if_no_trial)
        raise
    finally:
        writer.close()
    return await anyio.to_thread.run_sync(records.read, out)


def recorded_plan(out: Path) -> Plan | None:
    """The plan of the study in ``out``; None if there is no study. Raises RecordsError."""
    if not records.exists(out):
        return None
    return _plan_of(records.read(out), out)


def _plan_of(found: Records, out: Path) -> Plan:
    recorded = found.study.plan
    try:
        return msgspec.convert(recorded, Plan)
    except msgspec.ValidationError as error:
        mistake = validation.explain(error, recorded, Plan)
        raise RecordsError(
            f"the study in {out} cannot be resumed: its plan is not valid here: {mistake.message}",
            remedy="use the version of dutyfree that started it",
        ) from error


def _begin(
    plan: Plan, out: Path, resume: bool, writer: RecordsWriter, loop: str, budget: float | None
) -> tuple[int, tuple[Trial, ...]]:
    """Write the first lines. Return the number of the session, and the trials that are recorded already."""
    host = {**machine.facts(), "event_loop": loop}
    session = 0
    done: tuple[Trial, ...] = ()
    if writer.empty:
        study = Study(records.SCHEMA, dutyfree.__version__, _now(), msgspec.to_builtins(plan), host)
        writer.write(study)
    else:
        found = records.read(out)
        _check_continuation(plan, out, resume, found, host)
        session, done = len(found.sessions), found.trials
    writer.write(Session(started=_now(), load=os.getloadavg()[0], budget=budget))
    return session, done


def _check_continuation(plan: Plan, out: Path, resume: bool, found: Records, host: Mapping[str, Any]) -> None:
    if not resume:
        raise RecordsError(
            f"{out} already has the records of a study",
            remedy="continue it with --resume, or choose another --out",
        )
    if _plan_of(found, out) != plan:
        raise PlanError(
            f"the study in {out} was started with another plan ({found.study.plan['name']!r})",
            remedy="leave out --plan and --substrates to continue with its own plan, or choose another --out",
        )
    unlike = [name for name in machine.LIKE if found.study.host.get(name) != host[name]]
    if unlike:
        was, now = found.study.host.get(unlike[0]), host[unlike[0]]
        raise RecordsError(
            f"the study in {out} was started on another machine ({unlike[0]}: {was!r} there, {now!r} here)",
            remedy="one study cannot mix machines: choose another --out",
        )


class _StudyRun:
    """A running study."""

    def __init__(
        self,
        plan: Plan,
        workers: Workers,
        writer: RecordsWriter,
        progress: Progress,
        session: int,
        done: tuple[Trial, ...],
        deadline: float | None,
    ) -> None:
        self._plan = plan
        self._workers = workers
        self._writer = writer
        self._progress = progress
        self._session = session
        self._host_addresses: dict[str, str | None] = {}
        self._built: dict[tuple[str, str, int], Workload] = {}
        self._wanted: dict[str, Prepare] = {}
        self._fixtures: dict[str, Fixture] = {}
        self._servers: dict[tuple[str, str], GitServer] = {}
        self._trials: dict[Cell, list[Trial]] = defaultdict(list)
        self._done: set[str] = set()
        self._warm: dict[Cell, float] = {}
        """The seconds of warm-up trials, to estimate the time of cells without a measured one."""
        self._firsts: dict[Cell, float] = {}
        self._deadline = deadline
        self._failures_in_a_row: dict[str, int] = defaultdict(int)
        for ended in done:
            self._keep(ended)

    def _keep(self, ended: Trial) -> None:
        self._done.add(ended.id)
        if ended.warmup:
            self._warm[ended.cell] = ended.total
        else:
            self._trials[ended.cell].append(ended)
            self._firsts |= first_seconds([ended])

    async def _write(self, *lines: Line) -> None:
        await anyio.to_thread.run_sync(self._writer.write, *lines)

    async def open(self) -> None:
        """Open every substrate of the plan. Leave out optional ones that are not available."""
        await self._workers.start(self._plan.substrates)
        for label in self._plan.substrates:
            try:
                use, options = self._plan.opening(label)
            except OptionError as error:
                await self._leave_out(label, error)
                continue
            try:
                self._host_addresses[label] = await self._workers[label].open(use, options)
            except Unavailable as error:
                await self._leave_out(label, error)
            except UsageError as error:  # options that only the substrate itself can check
                table = f"[options.{label}]" if label in self._plan.options else label
                raise PlanError(f"{table} {error.message}", remedy=error.remedy) from error

    async def prepare(self, stack: AsyncExitStack) -> None:
        """Prepare everything. Leave out an optional substrate that cannot be prepared."""
        for name in sorted(filter(None, {workloads.project_of(name) for name in self._plan.workloads})):
            if self._workers.labels:
                self._progress.note(f"preparing the {name} fixture")
                self._fixtures[name] = await anyio.to_thread.run_sync(
                    build_fixture, paths.cache(), self._progress.note, PROJECTS[name]
                )
        for label in self._workers.labels:
            self._progress.note(f"preparing {label}")
            start = perf_counter()
            try:
                facts = await self._prepare(label, stack)
            except DutyfreeError as error:
                await self._leave_out(label, error)
            else:
                use, _ = self._plan.use(label)
                await self._write(SubstrateFacts(label, use, facts, perf_counter() - start))
        if not self._workers.labels:
            raise Unavailable(
                "none of the plan's substrates is available", remedy="see 'dutyfree substrates'"
            )

    async def _leave_out(self, label: str, error: DutyfreeError) -> None:
        if label not in self._plan.optional:
            if option := _OPTION.search(error.remedy):
                error.remedy += f'; in a plan: {option[1]} = "…" in the table [options.{label}]'
            raise error
        await self._workers.remove(label)
        self._progress.note(f"{label} is left out: {error}")
        use, _ = self._plan.use(label)
        await self._write(SubstrateFacts(label, use, {}, unavailable=str(error)))

    async def _prepare(self, label: str, stack: AsyncExitStack) -> dict[str, str]:
        built = [await self._workload(name, label, stack) for name in self._plan.workloads]
        self._wanted[label] = Prepare(built, self._plan.limits_of(label))
        return (await self._workers[label].request(self._wanted[label], Prepared)).facts

    async def _workload(self, name: str, label: str, stack: AsyncExitStack) -> Workload:
        fixture = self._fixtures.get(workloads.project_of(name) or "")
        url = "" if fixture is None else await self._url(label, fixture, stack)
        padding = self._plan.padding(label)
        key = name, url, padding
        if key not in self._built:
            self._built[key] = await anyio.to_thread.run_sync(self._build, name, fixture, url, padding)
        return self._built[key]

    def _build(self, name: str, fixture: Fixture | None, url: str, padding: int) -> Workload:
        if name in self._plan.recorded:
            assert fixture is not None
            workload = trajectory_file.load(Path(self._plan.recorded[name]), fixture, url)
            workload = msgspec.structs.replace(workload, name=name)
        else:
            workload = workloads.build(name, fixture, url, self._plan.full_tests)
        if self._plan.offline and workload.setup and fixture is not None:
            workload = workload.offline(fixture.repository)
        return workload.padded(padding) if padding else workload

    async def _url(self, label: str, fixture: Fixture, stack: AsyncExitStack) -> str:
        """The URL of a repository for the sandboxes of a substrate."""
        if self._plan.offline:
            return fixture.repository.name
        if self._plan.remote is not None:
            return self._plan.remote
        address = self._host_addresses[label]
        if address is None:
            raise PlanError(
                f"sandboxes of {label} cannot reach a git server on this host",
                remedy="set remote in the plan to a server that they can reach",
            )
        key = address, fixture.project.name
        if key not in self._servers:
            server = serve(fixture, [listen_address(address)])
            self._servers[key] = await stack.enter_async_context(server)
        return self._servers[key].url(address)

    async def measure(self) -> None:
        """Run the warm-ups, then all rounds that are not recorded yet, until the budget is used up."""
        labels = self._workers.labels
        known = plans.rounds(self._plan, labels, self._firsts)
        left = [batch for batches in known for batch in plans.remaining(batches, self._done)]
        warmups = plans.warmups(self._plan, self._session, (batch.cell for batch in left))
        done = self._planned(labels) - sum(len(batch.indices) for batch in left)
        warmed = 0
        self._progress.begin(done, self._planned(labels), len(warmups))
        # The rounds are made one by one: the first trial of a cell decides in which of the others it runs.
        for number, batches in enumerate(
            chain([warmups], plans.rounds(self._plan, labels, self._firsts)), -1
        ):
            left = list(plans.remaining(batches, self._done))
            if left and number > 0 and self._plan.renew and number % self._plan.renew == 0:
                await self._renew(left)
            for batch in left:
                if not batch.warmup and plans.settled(self._plan.adaptive, self._trials[batch.cell]):
                    continue
                if self._deadline is not None and monotonic() + self._expected(batch.cell) > self._deadline:
                    self._progress.note("the budget is used up: the rest of the plan is left")
                    return
                for ended in await self._batch(batch):
                    warmed += ended.warmup
                    done += not ended.warmup
                    self._keep(ended)
                    broken = ended.failure is not None and ended.failure.kind == "infrastructure"
                    self._failures_in_a_row[batch.substrate] = (
                        self._failures_in_a_row[batch.substrate] + 1 if broken else 0
                    )
                    count = (warmed, len(warmups)) if ended.warmup else (done, self._planned(labels))
                    self._progress.ended(ended, *count, self._seconds_left(labels))
                await self._check_substrate(batch.substrate)

    def _planned(self, labels: list[str]) -> int:
        """The number of measured trials, as far as it is known now."""
        cells = plans.cells(self._plan, labels)
        return sum(plans.trials(self._plan, cell, self._firsts.get(cell)) for cell in cells)

    async def _renew(self, batches: list[Batch]) -> None:
        """Start the substrates of the next rounds in fresh processes, and warm them up, unrecorded."""
        for label in dict.fromkeys(batch.substrate for batch in batches):
            await self._workers.renew(label)
            use, options = self._plan.opening(label)
            await self._workers[label].open(use, options)
            await self._workers[label].request(self._wanted[label], Prepared)
        for workload, label in dict.fromkeys((batch.workload, batch.substrate) for batch in batches):
            if self._plan.warm_up and workload not in self._plan.warm_up:
                continue
            warmup = Batch(workload, label, 1, (0,), warmup=True, session=self._session)
            await self._workers[label].request(RunBatch(warmup, self._plan.timeout), Ended)

    async def _batch(self, batch: Batch) -> list[Trial]:
        """Run the trials of a batch in parallel, and record all of them or none."""
        await anyio.sleep(self._plan.settle)
        if self._plan.drop_caches:
            await anyio.to_thread.run_sync(_drop_caches)
        started, start = datetime.now(UTC), perf_counter()
        try:
            wanted = RunBatch(batch, self._plan.timeout)
            ended = (await self._workers[batch.substrate].request(wanted, Ended)).trials
        except WorkerDied as error:
            seconds = perf_counter() - start
            await self._write(*(trial.lost(batch, index, started, seconds, error) for index in batch.indices))
            raise
        await self._write(*ended)
        return ended

    async def _check_substrate(self, label: str) -> None:
        """Stop the study if the substrate is gone, instead of recording failure after failure."""
        if self._failures_in_a_row[label] < GIVE_UP_AFTER:
            return
        use, options = self._plan.use(label)
        found = await substrates.probe(use, **options)
        if not found.available:
            raise Unavailable(
                f"{label} is no longer available: {found.detail}",
                remedy=f"{found.remedy}; then continue with --resume: earlier trials are kept",
            )

    def _seconds_left(self, labels: list[str]) -> float | None:
        """Estimate from the mean time of each cell, or of others with the same workload."""
        left = 0.0
        for cell in plans.cells(self._plan, labels):
            ran = self._trials[cell]
            one = self._expected(cell)
            missing = plans.trials(self._plan, cell, self._firsts.get(cell, one)) - len(ran)
            if missing <= 0 or plans.settled(self._plan.adaptive, ran):
                continue
            if not one:
                return None
            left += missing / cell[2] * (one + self._plan.settle)
        if self._deadline is not None:
            left = min(left, max(0.0, self._deadline - monotonic()))
        return left

    def _expected(self, cell: Cell) -> float:
        """The estimated seconds of a trial; 0 if nothing is known."""
        workload, label, _ = cell
        if ran := self._trials[cell]:
            return sum(one.total for one in ran) / len(ran)
        if warm := self._warm.get((workload, label, 1)):
            return warm
        others = [one.total for name, found in self._trials.items() if name[0] == workload for one in found]
        return sum(others) / len(others) if others else 0.0


def _drop_caches() -> None:
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text("3")


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")

"""One trial: runs a workload in a sandbox and measures it. The path is the same on every substrate."""

from __future__ import annotations

import os
from datetime import UTC, datetime
from time import perf_counter

import anyio

from dutyfree.contract import Observation, Result, Sandbox, Span, Stage, Substrate, Usage
from dutyfree.contract.errors import ActionError, Phase, SubstrateError
from dutyfree.contract.perform import perform
from dutyfree.study.plan import Batch
from dutyfree.study.records import ActionKind, ActionRecord, Trial, TrialFailure
from dutyfree.workloads.workload import Expect, Step, Workload

STAGE = "stage "
"""Prefix of the spans of a creation that belong to a stage."""


class UnexpectedResult(Exception):  # noqa: N818 (not an error of ours)
    """The sandbox works, but a result is not as expected."""


class StepTimeout(Exception):  # noqa: N818 (not an error of ours)
    """An action was killed by its own timeout."""


async def run(substrate: Substrate, workload: Workload, batch: Batch, index: int, timeout: float) -> Trial:
    """Run one rollout and return its record, whatever happens. Only cancellation leaves no record."""
    meter = _Meter()
    failure = None
    started, load = datetime.now(UTC).isoformat(timespec="milliseconds"), os.getloadavg()[0]
    start = perf_counter()
    try:
        with anyio.move_on_after(timeout) as scope:
            await _rollout(substrate, workload, meter, start)
        if scope.cancelled_caught:
            cause = f"the trial took more than {timeout:g} s; it was at {meter.at}"
            failure = TrialFailure("timeout", meter.phase, cause)
    except SubstrateError as error:
        # If the first command failed, the sandbox did not become ready, whatever the reason.
        phase = "ready" if meter.phase == "ready" else error.phase
        failure = TrialFailure("infrastructure", phase, str(error))
    except StepTimeout as error:
        failure = TrialFailure("timeout", meter.phase, f"{meter.at}: {error}")
    except (UnexpectedResult, ActionError) as error:
        failure = TrialFailure("task", meter.phase, f"{meter.at}: {error}")
    except Exception as error:  # noqa: BLE001 (a third-party substrate may raise anything)
        failure = TrialFailure("infrastructure", meter.phase, f"{meter.at}: {type(error).__name__}: {error}")
    ended = perf_counter()
    return Trial(
        id=batch.trial_id(index),
        workload=workload.name,
        substrate=batch.substrate,
        index=index,
        parallel=batch.parallel,
        warmup=batch.warmup,
        started=started,
        load=load,
        creation=meter.creation,
        creation_spans=meter.creation_spans,
        readiness=meter.readiness,
        first=meter.first,
        setup=tuple(meter.setup),
        actions=tuple(meter.actions),
        cleanup=ended - meter.left if meter.left is not None else 0.0,
        total=ended - start,
        failure=failure,
    )


def lost(batch: Batch, index: int, started: datetime, seconds: float, error: Exception) -> Trial:
    """The record of a trial whose process died: nothing of it is known but how long it took."""
    return Trial(
        id=batch.trial_id(index),
        workload=batch.workload,
        substrate=batch.substrate,
        index=index,
        parallel=batch.parallel,
        warmup=batch.warmup,
        started=started.isoformat(timespec="milliseconds"),
        load=os.getloadavg()[0],
        total=seconds,
        failure=TrialFailure("infrastructure", "exec", str(error)),
    )


class _Meter:
    """What has been measured so far, and what the rollout is doing."""

    def __init__(self) -> None:
        self.phase: Phase = "create"
        self.at = "creation"
        self.creation = 0.0
        self.creation_spans: tuple[Span, ...] = ()
        self.readiness = 0.0
        self.first: ActionRecord | None = None
        self.setup: list[ActionRecord] = []
        self.actions: list[ActionRecord] = []
        self.left: float | None = None

    def move_stages_to_setup(self) -> None:
        """Count stages that ran during the creation as set-up."""
        stages = [span for span in self.creation_spans if span.name.startswith(STAGE)]
        self.setup = [
            _record(f"{span.name.removeprefix(STAGE)}-{number}", "setup", span.seconds, None)
            for number, span in enumerate(stages, 1)
        ]
        self.creation -= sum(span.seconds for span in stages)
        self.creation_spans = tuple(span for span in self.creation_spans if span not in stages)


async def _rollout(substrate: Substrate, workload: Workload, meter: _Meter, start: float) -> None:
    async with substrate.sandbox(workload.recipe, limits=workload.limits) as sandbox:
        handed = perf_counter()
        meter.creation, meter.creation_spans = handed - start, sandbox.spans
        meter.move_stages_to_setup()
        try:
            meter.phase = "ready"
            meter.first = await _step(sandbox, workload.first, "ready", meter)
            meter.readiness = perf_counter() - handed
            meter.phase = "exec"
            for stage in workload.setup:
                await _stage(sandbox, stage, meter)
            for step in workload.actions:
                meter.actions.append(await _step(sandbox, step, step.kind, meter))
            meter.phase, meter.at = "cleanup", "cleanup"
        finally:
            meter.left = perf_counter()


async def _step(sandbox: Sandbox, step: Step, kind: ActionKind, meter: _Meter) -> ActionRecord:
    meter.at = step.label
    start = perf_counter()
    result = await perform(sandbox, step.action)
    seconds = perf_counter() - start
    _check(step.expect, result)
    return _record(step.label, kind, seconds, result)


async def _stage(sandbox: Sandbox, stage: Stage, meter: _Meter) -> None:
    for number, (path, source) in enumerate(stage.files.items(), 1):
        meter.at = f"{stage.kind}-upload-{number}"
        start = perf_counter()
        await sandbox.upload(source, path)
        meter.setup.append(_record(meter.at, "setup", perf_counter() - start, None))
    for number, command in enumerate(stage.commands, 1):
        meter.at = f"{stage.kind}-{number}"
        start = perf_counter()
        result = await sandbox.exec(command)
        seconds = perf_counter() - start
        _check(Expect(), result)
        meter.setup.append(_record(meter.at, "setup", seconds, result))


def _check(expect: Expect, result: Result) -> None:
    problem = expect.problem(result)
    if isinstance(result, Observation) and result.timed_out:
        raise StepTimeout("the action was killed by its timeout")
    if problem is not None:
        raise UnexpectedResult(problem)


def _record(label: str, kind: ActionKind, seconds: float, result: Result) -> ActionRecord:
    inside: float | None = None
    spans: tuple[Span, ...] = ()
    usage: Usage | None = None
    if isinstance(result, Observation):
        inside, spans, usage = result.command_seconds, result.spans, result.usage
    return ActionRecord(label=label, kind=kind, seconds=seconds, inside=inside, spans=spans, usage=usage)

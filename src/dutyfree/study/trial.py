"""One trial: the one measured path of every workload on every substrate."""

from __future__ import annotations

import os
from datetime import UTC, datetime
from time import perf_counter

import anyio

from dutyfree.contract import Observation, Result, Sandbox, Span, Stage, Substrate, Usage
from dutyfree.contract.errors import ActionError, Phase, SubstrateError
from dutyfree.contract.perform import perform
from dutyfree.study.plan import Batch
from dutyfree.study.records import ActionKind, ActionRecord, Failure, Trial
from dutyfree.workloads.workload import Expect, Step, Workload

STAGE = "stage "
"""How the spans of a creation begin that are those of a stage."""


class WrongAnswer(Exception):  # noqa: N818 (a verdict on the task)
    """The sandbox worked, its answer is not the expected one."""


class Overran(Exception):  # noqa: N818 (a verdict on the task)
    """An action was cut off by its own timeout."""


async def run(substrate: Substrate, workload: Workload, batch: Batch, index: int, timeout: float) -> Trial:
    """Run one rollout and record it, however it ends; only cancellation leaves no record."""
    meter = _Meter()
    failure = None
    started, load = datetime.now(UTC).isoformat(timespec="milliseconds"), os.getloadavg()[0]
    asked = perf_counter()
    try:
        with anyio.move_on_after(timeout) as scope:
            await _rollout(substrate, workload, meter, asked)
        if scope.cancelled_caught:
            cause = f"the trial took more than {timeout:g} s, at {meter.at}"
            failure = Failure("timeout", meter.phase, cause)
    except SubstrateError as error:
        # Whatever broke under the first command, the sandbox never became ready.
        phase = "ready" if meter.phase == "ready" else error.phase
        failure = Failure("infrastructure", phase, str(error))
    except Overran as error:
        failure = Failure("timeout", meter.phase, f"{meter.at}: {error}")
    except (WrongAnswer, ActionError) as error:
        failure = Failure("task", meter.phase, f"{meter.at}: {error}")
    except Exception as error:  # noqa: BLE001 (a third party's substrate may raise anything; all is recorded)
        failure = Failure("infrastructure", meter.phase, f"{meter.at}: {type(error).__name__}: {error}")
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
        total=ended - asked,
        failure=failure,
    )


class _Meter:
    """What has been measured so far, and where the rollout is."""

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

    def set_up(self) -> None:
        """Stages that were run in the creation count as what they are: set-up."""
        stages = [span for span in self.creation_spans if span.name.startswith(STAGE)]
        self.setup = [
            _record(f"{span.name.removeprefix(STAGE)}-{number}", "setup", span.seconds, None)
            for number, span in enumerate(stages, 1)
        ]
        self.creation -= sum(span.seconds for span in stages)
        self.creation_spans = tuple(span for span in self.creation_spans if span not in stages)


async def _rollout(substrate: Substrate, workload: Workload, meter: _Meter, asked: float) -> None:
    async with substrate.sandbox(workload.recipe, limits=workload.limits) as sandbox:
        handed = perf_counter()
        meter.creation, meter.creation_spans = handed - asked, sandbox.spans
        meter.set_up()
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
    asked = perf_counter()
    result = await perform(sandbox, step.action)
    seconds = perf_counter() - asked
    _judge(step.expect, result)
    return _record(step.label, kind, seconds, result)


async def _stage(sandbox: Sandbox, stage: Stage, meter: _Meter) -> None:
    for number, (path, source) in enumerate(stage.files.items(), 1):
        meter.at = f"{stage.kind}-upload-{number}"
        asked = perf_counter()
        await sandbox.upload(source, path)
        meter.setup.append(_record(meter.at, "setup", perf_counter() - asked, None))
    for number, command in enumerate(stage.commands, 1):
        meter.at = f"{stage.kind}-{number}"
        asked = perf_counter()
        result = await sandbox.exec(command)
        seconds = perf_counter() - asked
        _judge(Expect(), result)
        meter.setup.append(_record(meter.at, "setup", seconds, result))


def _judge(expect: Expect, result: Result) -> None:
    complaint = expect.complaint(result)
    if isinstance(result, Observation) and result.timed_out:
        raise Overran("the action was cut off by its timeout")
    if complaint is not None:
        raise WrongAnswer(complaint)


def _record(label: str, kind: ActionKind, seconds: float, result: Result) -> ActionRecord:
    inside: float | None = None
    spans: tuple[Span, ...] = ()
    usage: Usage | None = None
    if isinstance(result, Observation):
        inside, spans, usage = result.command_seconds, result.spans, result.usage
    return ActionRecord(label=label, kind=kind, seconds=seconds, inside=inside, spans=spans, usage=usage)

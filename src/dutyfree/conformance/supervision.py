"""Run checks in a worker process, so that a check that hangs, or ends its process, fails alone.

The worker opens the substrate and judges the checks in order. A timer beside its event loop watches each: a
check that is neither done nor cancelled some seconds after its deadline is reported with the place where it
hangs, and the worker ends, for its event loop may be blocked. Another worker then goes on with the rest.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from time import perf_counter
from typing import Any, TypeAlias

import anyio
import msgspec

import dutyfree
from dutyfree.conformance import suite
from dutyfree.conformance.suite import Check, CheckResult, complaint, judge, where
from dutyfree.contract.errors import DutyfreeError

GRACE = 5.0
"""Seconds to cancel and clean up a check that missed its deadline."""

OPENING, CLOSING = 600.0, 60.0
"""Seconds to open and prepare a substrate, which may build an image; and to close it."""

OPEN, CLOSE = "opening", "closing"


class NotOpened(DutyfreeError):  # noqa: N818 (what happened, as its kin are called)
    """The substrate could not be opened, or opened again after a check ended its process."""


class _Begun(msgspec.Struct, frozen=True):
    """The worker starts a check, or opens or closes the substrate."""

    what: str
    deadline: float


class _Closed(msgspec.Struct, frozen=True):
    """The worker has finished."""


_Report: TypeAlias = _Begun | CheckResult | _Closed


def supervised(
    substrate: str, options: dict[str, Any], checks: Sequence[Check], patience: float = 1
) -> Iterator[CheckResult]:
    """Yield results as they arrive, and one for the closing if that fails. Raises NotOpened."""
    left = [msgspec.structs.replace(check, deadline=check.deadline * patience) for check in checks]
    while left:
        for result in _work(substrate, options, left, patience):
            left = [check for check in left if check.name != result.check]
            yield result


def _work(
    substrate: str, options: dict[str, Any], checks: Sequence[Check], patience: float
) -> Iterator[CheckResult]:
    """The results of one worker, whose last check may have ended it."""
    context = multiprocessing.get_context("fork")  # it has the checks and all modules already
    receiver, sender = context.Pipe(duplex=False)
    worker = context.Process(target=_main, args=(sender, substrate, options, checks, patience))
    worker.start()
    sender.close()
    try:
        for result in _results(receiver, worker):
            if result.check == OPEN:
                raise NotOpened(result.reason)
            yield result
    finally:
        receiver.close()
        worker.join(GRACE)  # after a Ctrl-C, it closes the substrate
        worker.kill()
        worker.join()


def _results(receiver: Connection, worker: BaseProcess) -> Iterator[CheckResult]:
    begun, since, done = _Begun(OPEN, OPENING), perf_counter(), False
    while True:
        # The worker's own watchdog acts first, if the worker still runs.
        if not receiver.poll(begun.deadline + 4 * GRACE):
            worker.kill()
            reason = f"did not end within {begun.deadline:g} s, nor let another thread of its process run"
            yield CheckResult(begun.what, "failed", perf_counter() - since, reason)
            return
        try:
            report: _Report = receiver.recv()
        except EOFError:
            if done:
                return
            worker.join()
            reason = f"its process ended, with status {worker.exitcode}"
            yield CheckResult(begun.what, "failed", perf_counter() - since, reason)
            return
        if isinstance(report, _Closed):
            return
        done = isinstance(report, CheckResult)
        if isinstance(report, CheckResult):
            yield report
        else:
            begun, since = report, perf_counter()


def _main(
    sender: Connection, substrate: str, options: dict[str, Any], checks: Sequence[Check], patience: float
) -> None:
    watch = _Watch(sender)
    try:
        anyio.run(_judge_all, watch, substrate, options, checks, patience)
        watch.report(_Closed())
    except BrokenPipeError:  # the supervisor is gone
        os._exit(1)
    except KeyboardInterrupt:
        os._exit(130)
    except (Exception, SystemExit) as error:  # noqa: BLE001 (what a substrate raises is a result)
        reason = str(error) if isinstance(error, DutyfreeError) else complaint(error)
        watch.fail(reason)


async def _judge_all(
    watch: _Watch, substrate: str, options: dict[str, Any], checks: Sequence[Check], patience: float
) -> None:
    watch.task = asyncio.current_task()
    watch.begin(OPEN, OPENING * patience)
    async with dutyfree.open(substrate, **options) as opened:
        await opened.prepare()  # an image may have to be made, which is no part of any check
        for check in checks:
            watch.begin(check.name, check.deadline)
            watch.report(await judge(opened, check))
        watch.begin(CLOSE, CLOSING * patience)


class _Watch:
    """Reports to the supervisor, and ends this process if a check takes too long."""

    task: asyncio.Task[Any] | None = None

    def __init__(self, sender: Connection) -> None:
        self._sender = sender
        self._lock = threading.Lock()
        self._timer = threading.Timer(0, lambda: None)
        self._begun = _Begun(OPEN, OPENING)
        self._since = perf_counter()

    def begin(self, what: str, deadline: float) -> None:
        self._timer.cancel()
        self._begun, self._since = _Begun(what, deadline), perf_counter()
        self.report(self._begun)
        self._timer = threading.Timer(deadline + GRACE, self._give_up)
        self._timer.daemon = True
        self._timer.start()

    def report(self, report: _Report) -> None:
        if not isinstance(report, _Begun):
            self._timer.cancel()
        with self._lock:
            self._sender.send(report)

    def fail(self, reason: str) -> None:
        """Report the current check as failed, and end this process, which cannot go on."""
        self.report(CheckResult(self._begun.what, "failed", perf_counter() - self._since, reason))
        os._exit(1)

    def _give_up(self) -> None:
        place = where(self._frames())
        self.fail(f"did not end within {self._begun.deadline:g} s, nor could it be cancelled ({place})")

    def _frames(self) -> list[traceback.FrameSummary]:
        """Where the event loop's thread is; if it waits for events, where the check waits."""
        thread = threading.main_thread().ident
        assert thread is not None
        running = list(traceback.extract_stack(sys._current_frames()[thread]))
        if any(frame.filename == suite.__file__ for frame in running):
            return running
        return list(_awaited(self.task.get_coro() if self.task else None))


def _awaited(coroutine: Any) -> Iterator[traceback.FrameSummary]:
    """The chain of awaits in a coroutine, as far as it is visible."""
    while coroutine is not None:
        kind = {"cr": "cr_await", "gi": "gi_yieldfrom", "ag": "ag_await"}
        prefix = next((one for one in kind if hasattr(coroutine, f"{one}_frame")), None)
        if prefix is None:
            return
        frame = getattr(coroutine, f"{prefix}_frame")
        if frame is not None:
            yield traceback.FrameSummary(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)
        coroutine = getattr(coroutine, kind[prefix])

"""Calls that are one frame to init and one back, without a task: commands without input, and small files.

A task for each call takes longer than to read a file: two turns of the event loop, and the coroutines of
everything that looks at a call. So what a call needs before the sandbox can work is done first, and what is
recorded of it while the sandbox works, and after the answer is sent.

``begin`` leaves to the other way, ``channel.RunningCall``, whatever is wrong with a call or unusual about it.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Coroutine
from time import perf_counter
from types import CoroutineType
from typing import TYPE_CHECKING, Any

from dutyfree.contract import Exec, Observation, Read, Write
from dutyfree.contract.arguments import Unrunnable
from dutyfree.contract.errors import DispatchError, DutyfreeError, verdict
from dutyfree.engine.sandbox.request import Request
from dutyfree.engine.sandbox.sandbox import NativeSandbox
from dutyfree.server.bodies import LARGE, LARGEST_REQUEST
from dutyfree.server.call_events import label_of, outcome_of
from dutyfree.server.observed import Origin
from dutyfree.server.sandboxes import Held
from dutyfree.wire import codec
from dutyfree.wire.calls import CALLS
from dutyfree.wire.errors import describe
from dutyfree.wire.frames import Call, Kind

if TYPE_CHECKING:
    from dutyfree.server.channel import Channel

SPIN = 100e-6
"""Seconds in which the answer to a call that is alone is looked for, before the server sleeps."""

_log = logging.getLogger(__name__)


def _exec(sandbox: NativeSandbox, wanted: Exec) -> Request[Observation] | None:
    return sandbox.begin_exec(wanted)


def _read(sandbox: NativeSandbox, wanted: Read) -> Request[bytes]:
    return sandbox.begin_read(wanted.path, LARGEST_REQUEST)


def _write(sandbox: NativeSandbox, wanted: Write) -> Request[None] | None:
    return sandbox.begin_write(wanted.path, wanted.data, wanted.mode)


_CPUS = len(os.sched_getaffinity(0))

_BEGIN: dict[str, Callable[[NativeSandbox, Any], Request[Any] | None]] = {
    "exec": _exec,
    "read": _read,
    "write": _write,
}


def begin(channel: Channel, number: int, call: Call, size: int, since: float) -> QuickCall | None:
    """Begin a call that came at ``since``; None if it must go the other way, and nothing has happened."""
    service, tenant = channel.service, channel.tenant
    start = _BEGIN.get(call.method)
    if start is None or size > LARGE or service.draining or not service.calls.idle:
        return None
    if not service.quotas.has_room(tenant):
        return None
    try:
        arguments = codec.decode(call.arguments, CALLS[call.method].arguments)
        held = service.sandboxes.get(tenant, call.sandbox)
        request = start(held.sandbox, arguments)
    except (DutyfreeError, Unrunnable, ValueError, TypeError):
        return None  # the other way says what is wrong
    return None if request is None else QuickCall(channel, number, call, arguments, held, request, since)


class QuickCall:
    """One call that was sent to its sandbox."""

    def __init__(
        self,
        channel: Channel,
        number: int,
        call: Call,
        arguments: Any,
        held: Held,
        request: Request[Any],
        since: float,
    ) -> None:
        service, self._tenant = channel.service, channel.tenant
        self._service = service
        self._channel = channel
        self._number = number
        self._call = call
        self._arguments = arguments
        self._request = request
        self._ended = False
        self._cancelled = self._gone = False
        self._task: asyncio.Task[None] | None = None
        request.on_answer(self._answered)
        service.quotas.calls[self._tenant] += 1
        self._start = service.metrics.begun()
        self._waited = self._start - since
        self._running = service.events.begin(
            call.method, label_of(call.method, arguments), self._tenant, held
        )

    # --- For the channel --------------------------------------------------------------------------------

    def watch(self) -> None:
        """Look for the answer for a moment, if nothing else is to be done: to be woken takes longer."""
        if self._call.method == "exec" or self._service.quotas.calls.total() > 1 or _CPUS == 1:
            return
        until = perf_counter() + SPIN
        while not self._ended and self._task is None and perf_counter() < until:
            self._request.look()
            os.sched_yield()  # init may wait for this CPU

    def add_item(self, _data: bytes) -> None:
        """Raises ProtocolError."""
        self._channel.refuse_items(self._call.method)

    def end_input(self) -> None:
        """There is none."""

    def add_credit(self, _size: int) -> None:
        """It sends no items."""

    def cancel(self) -> None:
        """Stop it in the sandbox, and answer when it has stopped."""
        self._cancelled = True
        if self._task is None and not self._ended and not self._request.cancel():
            self._give_up()

    def abandon(self) -> asyncio.Task[None] | None:
        """The client is gone. Returns what to wait for."""
        self._cancelled = self._gone = True
        if self._task is None and not self._ended:
            self._request.cancel()
            self._give_up()
        return self._task

    def _give_up(self) -> None:
        """Answer without waiting for the sandbox."""
        self._request.drop()
        self._end(None, asyncio.CancelledError())

    # --- The answer -------------------------------------------------------------------------------------

    def _answered(self) -> None:
        try:
            self._answer()
        except Exception as error:  # noqa: BLE001 (a defect, which must not stop the sandbox's other answers)
            _log.exception("the call %s failed", self._call.method)
            self._channel.forget(self._number)
            self._channel.send_later(Kind.ERROR, self._number, codec.encode(describe(error)))

    def _answer(self) -> None:
        if self._ended or self._task is not None:
            return
        if self._cancelled:
            self._give_up()
            return
        try:
            found = self._request.result()
        except Exception as error:  # noqa: BLE001 (the client gets it)
            self._end(None, error)
            return
        if isinstance(found, CoroutineType):
            self._task = asyncio.create_task(self._complete(found))
        else:
            self._end(found, None)

    async def _complete(self, rest: Coroutine[Any, Any, Any]) -> None:
        """Wait for the rest of an answer: a large file."""
        try:
            found = await rest
        except Exception as error:  # noqa: BLE001 (the client gets it)
            self._end(None, error)
        else:
            self._end(found, asyncio.CancelledError() if self._cancelled else None)

    def _end(self, found: object, error: BaseException | None) -> None:
        """Answer, and then record that it has ended."""
        self._ended = True
        self._request.forget_callback()  # a cycle per call makes the garbage collector stop the server often
        channel, number = self._channel, self._number
        if error is None:
            kind, payload = Kind.RESULT, codec.encode(found)
        else:
            kind, payload = Kind.ERROR, self._described(error)
        channel.forget(number)
        if self._gone:
            pass
        elif len(payload) > LARGE or not channel.send_now(kind, number, payload):
            channel.send_later(kind, number, payload)
        self._record(found, error)

    def _described(self, error: BaseException) -> bytes:
        if not isinstance(error, Exception):
            return codec.encode(describe(DispatchError("the call was cancelled")))
        if not isinstance(error, DutyfreeError):
            _log.error("the call %s failed", self._call.method, exc_info=error)
        return codec.encode(describe(error))

    def _record(self, found: object, error: BaseException | None) -> None:
        service, method = self._service, self._call.method
        service.quotas.calls[self._tenant] -= 1
        outcome = "ok"
        if error is None:
            service.events.end(self._running, found, outcome_of(found))
        else:
            service.events.fail(self._running, error)
            outcome = verdict(error) if isinstance(error, Exception) else "cancelled"
        service.metrics.ended(method, self._tenant, self._start, outcome, found, self._waited)
        if isinstance(error, Exception):
            service.calls.note_failure(method, self._origin, error, perf_counter() - self._start)

    def _origin(self) -> Origin:
        return self._channel.origin(self._number, self._call, self._arguments)

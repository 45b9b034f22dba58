"""The channel of one client: a WebSocket on which many calls run at once (``wire.frames``)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections import deque
from collections.abc import Awaitable
from typing import Any, NoReturn, Protocol

import msgspec

from dutyfree.contract.errors import DispatchError, DutyfreeError, Exhausted, UsageError
from dutyfree.server import quick_calls
from dutyfree.server.bodies import LARGE, answer_lost
from dutyfree.server.handlers import HANDLERS
from dutyfree.server.observed import Origin, command_of
from dutyfree.server.quick_calls import QuickCall
from dutyfree.server.sandboxes import Held
from dutyfree.server.service import Service
from dutyfree.wire import codec, frames
from dutyfree.wire.arguments import decode_arguments
from dutyfree.wire.calls import CALLS, CallType
from dutyfree.wire.errors import describe
from dutyfree.wire.frames import Call, Kind

_STEP = 1 << 20
"""Unfinished messages count in steps of so many bytes."""

_ITEM_COST = 64
"""Bytes that each item counts besides its own."""

MOST_WAITING = 1024
"""Answers that may wait until the client reads. If there are more, no further calls are read."""

_WAITING_COST = 2048
"""Bytes that an answer counts besides its own while it waits."""

_log = logging.getLogger(__name__)


class ProtocolError(Exception):
    """The client sent what is no frame, or what its call does not take. The channel ends."""


class ClientSocket(Protocol):
    """The connection of a client: a ``channel_socket.ChannelSocket``."""

    async def write(self, frame: bytes) -> None:
        """Send a frame, when the client has taken those before. Raises ConnectionError if it is gone."""

    def write_now(self, frame: bytes) -> bool:
        """Send a frame if the client has taken those before; says whether it did."""

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


class Channel:
    """One connected client. ``receive`` takes its frames; calls run in tasks of their own."""

    def __init__(self, service: Service, tenant: str, socket: ClientSocket, largest: int) -> None:
        self.service = service
        self.tenant = tenant
        self._socket = socket
        self._send = socket.write
        self._send_now = socket.write_now
        self._waiting = 0
        self._holds_back = False
        self._refusal: bytes | None = None
        self._assembler = frames.Assembler(largest)
        self._calls: dict[int, RunningCall | QuickCall] = {}
        self._sending: set[asyncio.Task[None]] = set()
        self._reserved = 0
        self.name = secrets.token_hex(4)
        """For the log: the id of a call is this and its number."""

    def receive(self, frame: bytes, since: float) -> None:
        """Handle a frame that came then. Raises ProtocolError."""
        try:
            message = self._assembler.add(frame)
        except ValueError as error:
            raise ProtocolError(str(error)) from error
        if message is None or self._reserved:
            self._reserve(-(-self._assembler.held // _STEP) * _STEP)
        if message is None:
            return
        kind, number, payload = message
        if kind == Kind.CALL:
            self._start(number, payload, since)
            return
        call = self._calls.get(number)
        if call is None:
            return  # it has ended, and the client does not know yet
        if kind == Kind.CANCEL:
            call.cancel()
        elif kind == Kind.ITEM:
            call.add_item(payload)
        elif kind == Kind.END:
            call.end_input()
        elif kind == Kind.CREDIT and len(payload) == frames.NUMBER.size:
            call.add_credit(*frames.NUMBER.unpack(payload))
        else:
            raise ProtocolError(f"a client does not send frames of kind {kind}")

    def _start(self, number: int, payload: bytes, since: float) -> None:
        if number in self._calls:
            raise ProtocolError(f"the number {number} is in use")
        try:
            call = codec.decode(payload, Call, plain=False)
        except msgspec.DecodeError as error:
            raise ProtocolError(str(error)) from error
        if not self.service.overload.admits(
            self.tenant, call.method, since
        ):  # before anything is spent on it
            self._refuse(number)
            return
        quick = quick_calls.begin(self, number, call, len(payload), since)
        if quick is None:
            self._calls[number] = RunningCall(self, number, call, len(payload))
        else:
            self._calls[number] = quick
            quick.watch()

    def _reserve(self, size: int) -> None:
        """Count the memory of unfinished messages. Raises ProtocolError if the tenant uses too much."""
        held, more = self.service.quotas.bytes, size - self._reserved
        try:
            if more > 0:
                held.take(self.tenant, more)
        except Exhausted as error:
            raise ProtocolError(error.message) from error
        if more < 0:
            held.give_back(self.tenant, -more)
        self._reserved = size

    def _refuse(self, number: int) -> None:
        """Answer a call that may not begin now."""
        if self._refusal is None:
            self._refusal = codec.encode(describe(self.service.overload.error()))
        if not self.send_now(Kind.ERROR, number, self._refusal):
            self.send_later(Kind.ERROR, number, self._refusal)

    def send_now(self, kind: Kind, number: int, payload: bytes) -> bool:
        """Send a message of one frame if the client reads; says whether it did."""
        return len(payload) <= frames.PART and self._send_now(frames.HEAD.pack(kind, number) + payload)

    def send_later(self, kind: Kind, number: int, payload: bytes) -> None:
        """Send what ends a call, when the client reads."""
        task = asyncio.create_task(self.answer(kind, number, payload))
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)

    async def answer(self, kind: Kind, number: int, payload: bytes) -> None:
        """Send what ends a call, when the client reads. Until then it counts as memory of the tenant.

        If the tenant may have no more, a large answer is lost. After a small one no further calls are read.
        """
        if self.send_now(kind, number, payload):
            return
        held, waiting, budget = len(payload) + _WAITING_COST, 1, self.service.quotas.bytes
        try:
            budget.take(self.tenant, held)
        except Exhausted:
            held, waiting = 0, MOST_WAITING
            if len(payload) > LARGE:
                kind, payload = Kind.ERROR, codec.encode(describe(answer_lost()))
        self._count_waiting(waiting)
        try:
            with contextlib.suppress(OSError, RuntimeError):  # the client has gone in the meantime
                await self.send(kind, number, payload)
        finally:
            self._count_waiting(-waiting)
            budget.give_back(self.tenant, held)

    def _count_waiting(self, more: int) -> None:
        """Read no further calls while too many answers wait: they would be as many as the client likes."""
        self._waiting += more
        if self._waiting >= MOST_WAITING and not self._holds_back:
            self._holds_back = True
            self._socket.pause_reading()
        elif self._waiting <= MOST_WAITING // 2 and self._holds_back:
            self._holds_back = False
            self._socket.resume_reading()

    async def send(self, kind: Kind, number: int, payload: bytes = b"") -> None:
        for frame in frames.pack(kind, number, payload):
            await self._send(frame)

    def refuse_items(self, method: str) -> NoReturn:
        """Raises ProtocolError."""
        raise ProtocolError(f"too many items for {method[:40]!r}")

    def origin(self, number: int, call: Call, arguments: object) -> Origin:
        """Where a call comes from, for the log and for traces."""
        return Origin(self.tenant, call.sandbox, f"{self.name}-{number}", call.trace, command_of(arguments))

    def forget(self, number: int) -> None:
        self._calls.pop(number, None)

    async def close(self) -> None:
        """Cancel all calls: the client is gone. Its sandboxes stay until their leases end."""
        self._reserve(0)
        tasks = [task for call in list(self._calls.values()) if (task := call.abandon()) is not None]
        tasks += self._sending
        for task in self._sending:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)


def _stopped() -> DispatchError:
    return DispatchError("the call was cancelled")


class RunningCall:
    """One call: the ``handlers.Context`` of its handler."""

    def __init__(self, channel: Channel, number: int, call: Call, size: int) -> None:
        """``size``: the bytes of the call on the wire."""
        self.service = channel.service
        self.tenant = channel.tenant
        self._channel = channel
        self._number = number
        self._call = call
        self._type: CallType = CALLS.get(call.method, CallType(None))
        self._items: deque[bytes | None] = deque()
        self._ended = False
        self._pending = 0
        self._credit = frames.WINDOW
        self._changed: asyncio.Event | None = None
        self._begun = False
        self._cancelled = False
        self._size = size
        self.task = asyncio.create_task(self._run())

    # --- For the handler --------------------------------------------------------------------------------

    @property
    def held(self) -> Held:
        return self.service.sandboxes.get(self.tenant, self.sandbox_id)

    @property
    def sandbox_id(self) -> str:
        return self._call.sandbox

    async def send(self, item: object) -> None:
        data = item if isinstance(item, bytes) else codec.encode(item)
        while self._credit <= 0:
            await self._change()
        self._credit -= len(data) + _ITEM_COST
        await self._channel.send(Kind.ITEM, self._number, data)

    async def receive(self) -> Any:
        while not self._items:
            await self._change()
        data = self._items[0]
        if data is None:
            return None  # it stays, for those who ask again
        self._items.popleft()
        cost = len(data) + _ITEM_COST
        self._pending -= cost
        await self._channel.send(Kind.CREDIT, self._number, frames.NUMBER.pack(cost))
        if self._type.received is bytes:
            return data
        try:
            return codec.decode(data, self._type.received)
        except msgspec.DecodeError as error:
            raise UsageError(f"{self._call.method}: {error}") from error

    async def _change(self) -> None:
        """Wait for an item or for credit. Most calls never do, and need no event for it."""
        if self._changed is None:
            self._changed = asyncio.Event()
        self._changed.clear()
        await self._changed.wait()  # all who wait look again

    # --- For the channel --------------------------------------------------------------------------------

    def add_item(self, data: bytes) -> None:
        """Raises ProtocolError if the call takes no items, or the client sends more than it may."""
        self._pending += len(data) + _ITEM_COST
        if self._type.received is None or self._pending > frames.WINDOW + frames.PART + _ITEM_COST:
            self._channel.refuse_items(self._call.method)
        self._items.append(data)
        self._wake()

    def end_input(self) -> None:
        if not self._ended:
            self._ended = True
            self._items.append(None)
            self._wake()

    def _wake(self) -> None:
        if self._changed is not None:
            self._changed.set()

    def add_credit(self, size: int) -> None:
        self._credit = min(self._credit + size, frames.WINDOW)
        self._wake()

    def cancel(self) -> None:
        self._cancelled = True
        self.task.cancel()
        if not self._begun:  # a task that never ran answers nothing
            self._channel.forget(self._number)
            self._channel.send_later(Kind.ERROR, self._number, codec.encode(describe(_stopped())))

    def abandon(self) -> asyncio.Task[None]:
        """The client is gone. Returns what to wait for."""
        self.task.cancel()
        return self.task

    async def _run(self) -> None:
        self._begun = True
        quotas, tenant = self.service.quotas, self.tenant
        kind, payload, held = Kind.RESULT, b"", 0
        quotas.calls[tenant] += 1
        try:
            if self._size > LARGE:
                quotas.bytes.take(tenant, self._size)
                held = self._size
            payload = codec.encode(await self._perform())
        except asyncio.CancelledError:
            if not self._cancelled:
                if held:
                    quotas.bytes.give_back(tenant, held)
                raise  # the client is gone
            kind, payload = Kind.ERROR, codec.encode(describe(_stopped()))
        except DutyfreeError as error:
            kind, payload = Kind.ERROR, codec.encode(describe(error))
        except Exception as error:  # noqa: BLE001 (a defect, which is logged)
            _log.exception("the call %s failed", self._call.method)
            kind, payload = Kind.ERROR, codec.encode(describe(error))
        finally:
            quotas.calls[tenant] -= 1
            self._channel.forget(self._number)
        try:
            await self._channel.answer(kind, self._number, payload)
        finally:
            if held:
                quotas.bytes.give_back(tenant, held)

    def _perform(self) -> Awaitable[object]:
        """The work of the call. Raises UsageError, Restarting, Exhausted."""
        method = self._call.method
        handler = HANDLERS.get(method)
        if handler is None:
            raise UsageError(f"there is no call {method[:80]!r}")
        self.service.check_draining()
        self.service.quotas.check_call(self.tenant)
        try:
            arguments = decode_arguments(self._call.arguments, self._type.arguments)
        except msgspec.DecodeError as error:
            raise UsageError(f"{method}: {error}") from error
        work = handler(self, arguments)
        return self.service.calls.call(method, self.tenant, lambda: self._origin(arguments), work)

    def _origin(self, arguments: object) -> Origin:
        return self._channel.origin(self._number, self._call, arguments)

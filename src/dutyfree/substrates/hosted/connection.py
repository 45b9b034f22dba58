"""The connection to a server: one WebSocket for all calls (``wire.frames``), made again when it was lost."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import ssl
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import anyio
import msgspec
from websockets.asyncio.client import ClientConnection, connect, unix_connect
from websockets.exceptions import InvalidMessage, InvalidStatus, WebSocketException
from websockets.protocol import State

from dutyfree.contract.errors import (
    DispatchError,
    ExecError,
    Restarting,
    SubstrateError,
    Unavailable,
    UsageError,
)
from dutyfree.substrates.hosted.trace_context import traceparent
from dutyfree.wire import codec, frames
from dutyfree.wire.calls import CALLS, REPEATABLE, Nothing
from dutyfree.wire.errors import WireError, restore
from dutyfree.wire.frames import Call, Kind
from dutyfree.wire.websocket import MessageFinder, pack_masked

LARGEST = 5 << 30
"""Bytes of the largest answer."""
RESEND_SECONDS = 10.0
"""A call is sent again only if this much time has passed since the last time: it may be what ends servers."""
CANCEL_SECONDS = 30.0
"""How long a cancelled call waits for the server to have stopped it."""
_ITEM_COST = 64  # as the server counts


class ServerAddress:
    """``http://HOST:PORT``, ``https://HOST:PORT`` or ``unix:PATH``. Raises UsageError."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.path = url.removeprefix("unix:") if url.startswith("unix:") else None
        parts = urlsplit(url)
        if self.path is None and (parts.scheme not in ("http", "https") or not parts.hostname):
            raise UsageError(
                f"{url!r} is not the address of a server",
                remedy="write http://HOST:PORT, https://HOST:PORT or unix:PATH",
            )
        self.tls = parts.scheme == "https"
        self.host = parts.hostname or "localhost"
        self.netloc = parts.netloc.rpartition("@")[2] or "localhost"

    @property
    def is_local(self) -> bool:
        """Whether the server is surely on this machine."""
        return self.path is not None or self.host in ("localhost", "::1") or self.host.startswith("127.")


class FrameSocket(ClientConnection):
    """A WebSocket that hands over each frame as it arrives: a task that waits for it would cost a turn."""

    on_lost: Callable[[str], None] | None = None

    _finder: MessageFinder | None = None

    def hand_over(self, on_frame: Callable[[bytes], None], on_lost: Callable[[str], None]) -> None:
        """From now on pass frames to this function."""
        self.on_lost = on_lost
        self._finder = MessageFinder(frames.FRAME_MAX, on_frame, super().data_received, masked=False)

    def data_received(self, data: bytes) -> None:
        if self._finder is not None:
            self._finder.feed(data)
        else:
            super().data_received(data)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self.on_lost is not None:
            self.on_lost(str(exc or self.protocol.close_exc))

    def write(self, frame: bytes) -> bool:
        """Send a frame; False if the caller should ``drain``. Raises DispatchError."""
        if self.protocol.state is not State.OPEN:
            raise DispatchError("the connection to the server was lost")
        self.transport.write(pack_masked(frame))
        return not self.paused

    async def drain(self) -> None:
        """Wait for room. If the connection is lost meanwhile, the next ``write`` says so."""
        with contextlib.suppress(OSError):
            await super().drain()


class Connection:
    """Calls to one server. It belongs to the event loop in which it is used."""

    def __init__(
        self,
        address: ServerAddress,
        token: str | None,
        certificates: Path | None,
        timeout: float,
        reconnect: float = 0.0,
    ) -> None:
        """``reconnect``: for how many seconds to look for a server again, after a connection was lost."""
        self._address = address
        self._reconnect = reconnect
        self._lost_at: float | None = None
        self._failure: Unavailable | None = None
        """Why the latest attempt to connect failed."""
        self._postponed: dict[int, PendingCall] = {}
        self._resuming: set[asyncio.Task[None]] = set()
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._certificates = certificates
        self._timeout = timeout
        self._socket: FrameSocket | None = None
        self._numbers = itertools.count(1)
        self._calls: dict[int, PendingCall] = {}
        self._opening = asyncio.Lock()
        self.loop = asyncio.get_running_loop()
        self._closed = False

    async def open(self) -> None:
        """Connect, if there is no connection. All who wait for one attempt share its failure: Unavailable."""
        earlier = self._failure
        async with self._opening:
            if self._socket is not None or self._closed:
                return
            failure = self._failure
            if failure is not None and failure is not earlier:
                raise Unavailable(failure.message, remedy=failure.remedy)
            try:
                socket = await (self._connect() if self._lost_at is None else self._connect_again())
            except Unavailable as error:
                self._failure = Unavailable(error.message, remedy=error.remedy)
                raise
            assert isinstance(socket, FrameSocket)
            self._assembler = frames.Assembler(LARGEST)
            socket.hand_over(self._receive, self._lost)
            self._socket = socket

    async def _connect_again(self) -> ClientConnection:
        """Connect to a server that may be about to start. Raises Unavailable."""
        loop, wait = asyncio.get_running_loop(), 0.02
        assert self._lost_at is not None
        until = self._lost_at + self._reconnect
        while True:
            try:
                return await self._connect()
            except Unavailable:
                if self._closed or loop.time() + wait > until:
                    raise
            await asyncio.sleep(wait)
            wait = min(1.0, 2 * wait)

    async def _connect(self) -> ClientConnection:
        address = self._address
        options: dict[str, Any] = {
            "additional_headers": self._headers,
            "subprotocols": [frames.PROTOCOL],
            "compression": None,
            "max_size": frames.FRAME_MAX,
            "open_timeout": self._timeout,
            "user_agent_header": None,
            "create_connection": FrameSocket,
        }
        try:
            if address.path is not None:
                return await unix_connect(address.path, f"ws://localhost{frames.PATH}", **options)
            if address.is_local:
                options["proxy"] = None
            scheme = "wss" if address.tls else "ws"
            context = await anyio.to_thread.run_sync(self._tls) if address.tls else None
            return await connect(f"{scheme}://{address.netloc}{frames.PATH}", ssl=context, **options)
        except InvalidStatus as error:
            raise self._refused(error.response.status_code) from error
        except ssl.SSLCertVerificationError as error:
            raise Unavailable(
                f"the certificate of {address.url} is not trusted: {error.verify_message}",
                remedy="give the file of its authority: certificates=…",
            ) from error
        except InvalidMessage as error:
            remedy = "check its port"
            if address.path is None and not address.tls:
                remedy = f"if the server has a certificate, use https://{address.netloc}; else check the port"
            raise Unavailable(
                f"the program at {address.url} does not answer in HTTP", remedy=remedy
            ) from error
        except (OSError, WebSocketException, TimeoutError) as error:
            if isinstance(error, ssl.SSLError) and error.reason == "WRONG_VERSION_NUMBER":
                raise Unavailable(
                    f"the program at {address.url} does not answer in TLS",
                    remedy=f"if the server has no certificate, use http://{address.netloc}",
                ) from error
            raise Unavailable(
                f"no server answers at {address.url}: {error or 'it took too long'}",
                remedy="start one with: dutyfree serve",
            ) from error

    def _refused(self, status: int) -> Unavailable:
        what = f"{self._address.url} refused the connection: status {status}"
        if status == 401 and self._headers:
            return Unavailable(
                f"{what}: it does not know the token that was given, or the token was revoked",
                remedy="check token= or DUTYFREE_TOKEN; to create one there: dutyfree token create TENANT",
            )
        remedy = "give a token: token=…, or the variable DUTYFREE_TOKEN" if status in (401, 403) else ""
        return Unavailable(what, remedy=remedy)

    def _tls(self) -> ssl.SSLContext:
        return ssl.create_default_context(
            cafile=None if self._certificates is None else str(self._certificates)
        )

    # --- Calls ------------------------------------------------------------------------------------------

    async def call(self, method: str, sandbox: str = "", arguments: object = Nothing()) -> Any:
        """Make a call without items, and return its result. Raises the errors of the call."""
        pending = await self.begin(method, sandbox, arguments)
        return await pending.finish()

    async def begin(self, method: str, sandbox: str = "", arguments: object = Nothing()) -> PendingCall:
        """Send a call. Raises Unavailable, DispatchError."""
        if self._closed:
            raise DispatchError("the substrate is closed")
        if self._socket is None:
            await self.open()
        number = next(self._numbers) & 0xFFFFFFFF
        payload = codec.encode(Call(method, sandbox, msgspec.Raw(codec.encode(arguments)), traceparent()))
        messages = iter(frames.pack(Kind.CALL, number, payload))
        socket = self._open_socket()
        has_room = socket.write(next(messages))
        # Recorded after the send, while the server works: no answer can arrive before this task awaits.
        pending = self._calls[number] = PendingCall(self, number, method, payload)
        try:
            if not has_room:
                await socket.drain()
            await _send_all(socket, messages)
        except DispatchError:
            if self._calls.pop(number, None) is not None:
                raise
            # Otherwise ``_lost`` has it already: it fails, or is sent again.
        except BaseException:
            self._calls.pop(number, None)
            pending.cancelled = True  # ``_lost`` may have it
            raise
        return pending

    async def _resume(self, calls: dict[int, PendingCall], reason: str) -> None:
        """Send calls again to the next server, and take those from ``calls``."""
        try:
            await self.open()
            for number, pending in list(calls.items()):
                socket = self._open_socket()
                if not pending.done.done() and not pending.cancelled:
                    self._calls[number] = calls.pop(number)
                    await _send_all(socket, frames.pack(Kind.CALL, number, pending.resent()))
        except (SubstrateError, Unavailable) as error:
            self._lose(calls, f"{reason}; {error.message}")

    def _lose(self, calls: dict[int, PendingCall], reason: str) -> None:
        for pending in calls.values():
            pending.lose(f"{self._address.url}: {reason}")

    async def send(self, kind: Kind, number: int, payload: bytes = b"") -> None:
        """Raises DispatchError."""
        await _send_all(self._open_socket(), frames.pack(kind, number, payload))

    def _open_socket(self) -> FrameSocket:
        """Raises DispatchError."""
        if self._socket is None:
            raise DispatchError(f"the connection to {self._address.url} was lost")
        return self._socket

    def forget(self, number: int) -> None:
        self._calls.pop(number, None)

    def is_running(self, number: int) -> bool:
        """Whether the server has not answered a call yet."""
        return number in self._calls

    def withdraw(self, number: int) -> bool:
        """Do not send a call that waits for the next server; False if it does not wait."""
        return self._postponed.pop(number, None) is not None

    # --- Answers ----------------------------------------------------------------------------------------

    def _receive(self, frame: bytes) -> None:
        try:
            message = self._assembler.add(frame)
        except ValueError:
            assert self._socket is not None
            self._socket.transport.abort()  # this is no server of ours
            return
        if message is not None:
            self._handle(*message)

    def _lost(self, reason: str) -> None:
        self._socket = None
        self._lost_at = self.loop.time()
        lost, self._calls = self._calls, {}
        again, self._postponed = self._postponed, {}
        for number, pending in lost.items():
            if self._closed or not pending.may_repeat:
                pending.lose(f"{self._address.url}: {reason}")
            else:
                again[number] = pending
        if again:
            task = asyncio.ensure_future(self._resume(again, reason))
            self._resuming.add(task)
            task.add_done_callback(self._resuming.discard)
            task.add_done_callback(lambda _: self._lose(again, reason))  # also if it is cancelled

    def _handle(self, kind: Kind, number: int, payload: bytes) -> None:
        pending = self._calls.get(number)
        if pending is None:
            return
        if kind == Kind.RESULT:
            del self._calls[number]
            pending.resolve(payload)
        elif kind == Kind.ERROR:
            del self._calls[number]
            error = restore(codec.decode(payload, WireError))
            if isinstance(error, Restarting) and pending.is_plain and not pending.cancelled:
                self._postponed[number] = pending  # it did not begin; the connection ends soon
            else:
                pending.fail(error)
        elif kind == Kind.ITEM:
            pending.add_item(payload)
        elif kind == Kind.CREDIT:
            pending.add_credit(*frames.NUMBER.unpack(payload))

    async def close(self) -> None:
        self._closed = True
        for task in self._resuming:
            task.cancel()
        if self._socket is not None:
            with contextlib.suppress(WebSocketException, OSError):
                await self._socket.close()


async def _send_all(socket: FrameSocket, messages: Iterable[bytes]) -> None:
    for frame in messages:
        if not socket.write(frame):
            await socket.drain()


class PendingCall:
    """A call that the server carries out: its result, and the items in both directions."""

    def __init__(self, connection: Connection, number: int, method: str, payload: bytes) -> None:
        self._connection = connection
        self._payload = payload
        self._sent_at = 0.0
        self._number = number
        self._type = CALLS[method]
        self._method = method
        self._items: deque[bytes] = deque()
        self._credit = frames.WINDOW
        self._changed: asyncio.Event | None = None
        """Set when there are items, credit or the end, if someone waits for that."""
        self.cancelled = False
        """Whether its caller does not want it any more: then no other server may get it."""
        self.done: asyncio.Future[bytes] = connection.loop.create_future()

    def _wake(self) -> None:
        if self._changed is not None:
            self._changed.set()

    async def _change(self) -> None:
        """Wait until there is something new. The caller has looked that there is not."""
        if self._changed is None:
            self._changed = asyncio.Event()
        self._changed.clear()
        await self._changed.wait()

    # --- For the connection -----------------------------------------------------------------------------

    @property
    def is_plain(self) -> bool:
        """Whether it has no items, so that it can begin anew."""
        return self._type.received is None and self._type.sent is None

    @property
    def may_repeat(self) -> bool:
        """Whether it can be sent to the next server, though this one may have carried it out."""
        now = asyncio.get_running_loop().time()
        is_due = now - self._sent_at > RESEND_SECONDS
        return self._method in REPEATABLE and is_due and not self.cancelled

    def resent(self) -> bytes:
        """What to send once more."""
        self._sent_at = asyncio.get_running_loop().time()
        return self._payload

    def resolve(self, payload: bytes) -> None:
        if not self.done.done():
            self.done.set_result(payload)
            self._wake()

    def fail(self, error: Exception) -> None:
        if not self.done.done():
            self.done.set_exception(error)
            self.done.exception()  # a call whose owner is gone must not warn
            self._wake()

    def lose(self, reason: str) -> None:
        remedy = "it may have taken effect: repeat the rollout, or check before you call again"
        self.fail(ExecError(f"the connection was lost while {self._method} ran: {reason}", remedy=remedy))

    def add_item(self, payload: bytes) -> None:
        self._items.append(payload)
        self._wake()

    def add_credit(self, size: int) -> None:
        self._credit += size
        self._wake()

    # --- For the caller ---------------------------------------------------------------------------------

    async def finish(self) -> Any:
        """Wait for the result. If the caller is cancelled, stop the call first. Raises the call's error."""
        try:
            payload = await self.done  # not shielded, which would cost a turn of the event loop
        except asyncio.CancelledError:
            if self.done.cancelled():
                self.done = self._connection.loop.create_future()
            await self.cancel()
            raise
        return None if self._type.result is None else codec.decode(payload, self._type.result)

    async def item(self) -> Any:
        """The next item; None if the call has ended and there are no more. Does not raise its error."""
        while not self._items:
            if self.done.done():
                return None
            await self._change()
        data = self._items.popleft()
        if not self.done.done():
            with contextlib.suppress(SubstrateError):
                cost = frames.NUMBER.pack(len(data) + _ITEM_COST)
                await self._connection.send(Kind.CREDIT, self._number, cost)
        return data if self._type.sent is bytes else codec.decode(data, self._type.sent)

    async def send(self, item: object) -> bool:
        """Send an item when the server has room. False if the call has ended. Raises DispatchError."""
        data = item if isinstance(item, bytes) else codec.encode(item)
        for at in range(0, len(data) or 1, frames.PART) if self._type.received is bytes else (None,):
            part = data if at is None else data[at : at + frames.PART]
            while self._credit <= 0 and not self.done.done():
                await self._change()
            if self.done.done():
                return False
            self._credit -= len(part) + _ITEM_COST
            await self._connection.send(Kind.ITEM, self._number, part)
        return True

    async def end_input(self) -> None:
        if not self.done.done():
            with contextlib.suppress(SubstrateError):
                await self._connection.send(Kind.END, self._number)

    async def cancel(self) -> None:
        """Stop the call, and wait until the server has stopped it."""
        if self.done.done():
            return
        self.cancelled = True
        if self._connection.withdraw(self._number):
            self.fail(DispatchError("the call was cancelled before it began"))
            return
        if not self._connection.is_running(self._number):
            return  # its answer came in the same turn of the event loop
        with anyio.CancelScope(shield=True), contextlib.suppress(SubstrateError):
            await self._connection.send(Kind.CANCEL, self._number)
            await asyncio.wait([self.done], timeout=CANCEL_SECONDS)
        self._connection.forget(self._number)

"""The channel to one sandbox: a socket on which we send frames to its init, and read its answers.

A reader callback reads the answers and resolves futures: a sandbox needs no task and no thread.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import errno
import itertools
import os
import secrets
import socket
import struct
from collections import deque
from collections.abc import Awaitable, Callable, Sequence

import anyio

from dutyfree.contract.errors import (
    CollectError,
    CreateError,
    DispatchError,
    ExecError,
    SandboxClosed,
    SandboxGone,
)
from dutyfree.engine.host import fork_guard
from dutyfree.engine.launcher import protocol
from dutyfree.engine.launcher.protocol import FRAME, Frame
from dutyfree.engine.launcher.timeouts import DEFAULT_TIMEOUTS
from dutyfree.engine.sandbox import frame_writer
from dutyfree.engine.sandbox.frame_writer import FrameWriter
from dutyfree.engine.sandbox.pending import (
    P,
    Pending,
    PendingCommand,
    PendingOperation,
    PendingRequests,
    ReadBudget,
    rejection,
)

_CHUNK = 1 << 16  # from the heap; larger buffers would be mapped and unmapped each time
_OUTPUT, _EXIT = int(Frame.OUTPUT), int(Frame.EXIT)

_FOREIGN_ROOM = 256 << 20
"""Bytes of frames that may come in all for commands of a former owner: they are killed soon."""
_REASON_MAX = 200  # bytes of a reason from init
_ANCILLARY = socket.CMSG_SPACE(4 * 4)


class SetupError(CreateError):
    """Init could not set up the sandbox on the files that it starts from; ``number`` is an errno."""

    def __init__(self, message: str, number: int) -> None:
        super().__init__(message)
        self.number = number


class ForeignCommands:
    """Commands that a former owner started. ``claim`` takes one over; all others are killed."""

    def __init__(self) -> None:
        self.claimed: set[int] = set()
        self.unclaimed: set[int] | None = None
        """Those that still run; None until init has told."""
        self._room = _FOREIGN_ROOM

    def expects(self, kind: int, identity: int, size: int) -> bool:
        """Whether a frame of ``size`` bytes may come for a command that we did not start."""
        self._room -= size + protocol.FRAME_COST
        if self._room < 0:
            return False
        if self.unclaimed is None:
            return True  # it ended before init told us what runs
        known = identity in self.unclaimed
        if kind in (_EXIT, Frame.DONE):
            self.unclaimed.discard(identity)
        return known


class Channel(PendingRequests):
    """Requests to one init, and its answers. It belongs to the event loop in which it was created."""

    def __init__(
        self,
        connected: socket.socket,
        name: str,
        destroy: Callable[[], None],
        responds: Callable[[], Awaitable[bool]] | None = None,
        answer_timeout: float = DEFAULT_TIMEOUTS.answer,
        foreign: ForeignCommands | None = None,
    ) -> None:
        """``responds`` says whether the launcher answers, so that this machine works.

        ``foreign``: the sandbox had another owner before, whose commands may still run.
        """
        super().__init__(answer_timeout)
        connected.setblocking(False)
        self._socket = connected
        self._name = name
        self._destroy = destroy
        self._responds = responds
        self._diagnosis: asyncio.Task[None] | None = None
        self._identities = itertools.count(1 if foreign is None else secrets.randbits(31))
        self._foreign = foreign
        self._received = bytearray()
        self._arrived: deque[int] = deque()
        self._closed: Exception | None = None
        self.on_death: Callable[[], None] | None = None
        """Called once if the sandbox ends by itself."""
        self.ready: asyncio.Future[tuple[int, ...]] = self._loop.create_future()
        # The number, because the event loop would format a description of a socket each time.
        self._descriptor = connected.fileno()
        self._loop.add_reader(self._descriptor, self._receive)
        self._writer = FrameWriter(connected, self._drained, self._refused)
        self._send = self._writer.send
        fork_guard.bind(self)

    @property
    def closed(self) -> bool:
        return self._closed is not None

    def check(self) -> None:
        """Raises SandboxClosed, SandboxGone or CreateError if the channel is closed."""
        if isinstance(self._closed, CreateError | SandboxGone):
            raise self._closed
        if self._closed is not None:
            raise SandboxClosed(str(self._closed))

    # --- Requests ----------------------------------------------------------------------------------

    _reply_limit = staticmethod(protocol.reply_limit)

    def exec(
        self,
        payload: bytes,
        stdin: int | None = None,
        timeout: float | None = None,
        kind: Frame = Frame.EXEC,
    ) -> tuple[int, PendingCommand]:
        """Start a command. Closes our copy of the descriptor ``stdin``. Raises DispatchError."""
        identity, running = self._post(
            kind, payload, stdin, PendingCommand(self._loop, protocol.reply_limit(kind, payload))
        )
        if timeout is not None:
            self.expect(running, timeout)
        return identity, running

    def kill(self, identity: int) -> bool:
        """Kill a command with all its children, or stop a file operation.

        If the answer does not come soon, the sandbox is given up. False if the answer is here already, or the
        channel is closed.
        """
        waiting = self._waiting.get(identity)
        if self._closed is not None or waiting is None:
            return False
        self.tell(Frame.KILL, identity)
        self.expect(waiting, 0.0)
        return True

    async def kill_and_wait(self, identity: int, running: PendingCommand) -> None:
        """Kill a command whose caller was cancelled, and wait until it is dead."""
        if running.ended.done() and not running.ended.cancelled():
            return
        if self.frozen:  # the sandbox is frozen: init kills the command when it is thawed
            self.kill(identity)
            return
        running.ended = self._loop.create_future()
        if not self.kill(identity):  # it ended between the cancellation and now
            return
        with anyio.CancelScope(shield=True):
            await asyncio.wait([running.ended])
            running.ended.exception()

    async def queue_if_idle(self) -> bool:
        """If nothing runs in the sandbox, queue all requests until ``send_queued``, and return True."""
        if self._waiting or not self._writer.ready or self._closed is not None:
            return False
        nothing = protocol.NUMBER.pack(0)
        _, answer = self._post(
            Frame.SIGNAL_ALL, nothing, None, PendingOperation(self._loop, protocol.INLINE_MAX)
        )
        self.expect(answer, 0.0)
        self._writer.pause()
        try:
            quiet = await answer.done == errno.ESRCH
        except BaseException:
            self.send_queued()
            raise
        if not quiet:
            self.send_queued()
        return quiet

    def send_queued(self, successor: Channel | None = None) -> None:
        """Send the queued requests: to this sandbox, or to that of ``successor``, whose socket it takes."""
        if self._closed is not None:
            if successor is not None:
                successor.abandon()
            return
        if successor is not None:
            self._loop.remove_reader(self._descriptor)
            self._loop.remove_reader(successor._descriptor)
            self._socket.close()
            self._socket, self._descriptor = successor._socket, successor._descriptor
            self._destroy = successor._destroy
            self._writer.use(self._socket)
            successor._writer.close()
            successor._closed = SandboxClosed(f"sandbox {self._name} continues on another channel")
            self._loop.add_reader(self._descriptor, self._receive)
        self._writer.resume()

    def tell(self, kind: Frame, identity: int, payload: bytes = b"", flags: int = 0) -> None:
        """Send a frame that has no answer. Does nothing once the channel is closed."""
        if self._closed is None:
            self._send(protocol.frame(kind, identity, payload, flags), None)

    def credit(self, identity: int, size: int) -> None:
        """Let init send ``size`` more bytes of output: what was taken, plus FRAME_COST for each frame."""
        waiting = self._waiting.get(identity)
        if waiting is None:
            return
        waiting.owed += size
        # No credit while init does not read: else these frames would pile up here.
        if self._writer.ready:
            self._send_credit(identity, waiting)

    def _send_credit(self, identity: int, waiting: Pending) -> None:
        size, waiting.owed = waiting.owed, 0
        waiting.room += size
        self.tell(Frame.CREDIT, identity, protocol.NUMBER.pack(size))

    def _drained(self) -> None:
        """Init reads again: send the credit that waited for that."""
        for identity, waiting in self._waiting.items():
            if waiting.owed:
                self._send_credit(identity, waiting)

    def _operation(self, kind: Frame, payload: bytes, budget: ReadBudget | None = None) -> PendingOperation:
        room = self._reply_limit(kind, payload)
        return PendingOperation(self._loop, room, kind == Frame.READ, budget)

    async def ask(
        self,
        kind: Frame,
        payload: bytes,
        descriptor: int | None = None,
        timeout: float | None = None,
        budget: ReadBudget | None = None,
    ) -> PendingOperation:
        """Send a request and wait for the answer; ``done`` has the errno. Raises DispatchError, ExecError.

        An answer with more data than ``budget`` allows becomes EFBIG.
        """
        identity, answer = self._post(kind, payload, descriptor, self._operation(kind, payload, budget))
        if timeout is not None:
            self.expect(answer, timeout)
        try:
            await answer.done
        except asyncio.CancelledError:
            self.kill(identity)
            if answer.descriptor is not None:  # the answer came at the same moment
                os.close(answer.descriptor)
            raise
        return answer

    def request(
        self, kind: Frame, payload: bytes, budget: ReadBudget | None = None
    ) -> tuple[int, PendingOperation]:
        """Send a request as ``ask`` does, for one who does not wait in a task. Raises DispatchError."""
        return self._post(kind, payload, None, self._operation(kind, payload, budget))

    def begin(
        self, kind: Frame, payload: bytes, on_output: Callable[[bytes], None]
    ) -> tuple[int, PendingOperation]:
        """Start an operation that sends data before it is done. Raises DispatchError."""
        answer = PendingOperation(self._loop, protocol.reply_limit(kind, payload))
        answer.on_output = on_output
        return self._post(kind, payload, None, answer)

    def post_all(self, frames: Sequence[tuple[Frame, bytes, int | None, int]]) -> list[tuple[int, Pending]]:
        """Send several requests at once (kind, payload, descriptor, flags). Raises DispatchError.

        All files that they read have READ_MAX bytes at most, as for one.
        """
        largest = max((len(payload) for _, payload, _, _ in frames), default=0)
        if self._closed is not None or largest > protocol.FRAME_MAX:
            for _, _, descriptor, _ in frames:
                if descriptor is not None:
                    os.close(descriptor)
            self.check()
            raise _too_large(largest)
        posted: list[tuple[int, Pending]] = []
        parts: list[bytes] = []
        attached: int | None = None
        budget = ReadBudget(protocol.READ_MAX)
        for kind, payload, descriptor, flags in frames:
            identity = next(self._identities) & 0xFFFFFFFF
            waiting = (
                PendingCommand(self._loop, self._reply_limit(kind, payload))
                if kind == Frame.EXEC
                else self._operation(kind, payload, budget if kind == Frame.READ else None)
            )
            self._waiting[identity] = waiting
            posted.append((identity, waiting))
            if descriptor is not None:
                # A descriptor arrives with the first byte of a write, so this frame begins a new write.
                if parts:
                    self._send(b"".join(parts), attached)
                parts, attached, flags = [], descriptor, flags | protocol.WITH_FD
            parts.append(protocol.frame(kind, identity, payload, flags))
        self._send(b"".join(parts), attached)
        return posted

    def _send_with(self, descriptor: int, kind: Frame, identity: int, payload: bytes) -> None:
        """Send a request with a descriptor, which is closed here."""
        self._send(protocol.frame(kind, identity, payload, protocol.WITH_FD), descriptor)

    def _post(self, kind: Frame, payload: bytes, descriptor: int | None, waiting: P) -> tuple[int, P]:
        if self._closed is not None or len(payload) > protocol.FRAME_MAX:
            if descriptor is not None:
                os.close(descriptor)
            self.check()
            raise _too_large(len(payload))
        identity = next(self._identities) & 0xFFFFFFFF
        self._waiting[identity] = waiting
        if descriptor is None:
            self._send(FRAME.pack(len(payload), kind, 0, identity) + payload, None)
        else:
            self._send_with(descriptor, kind, identity, payload)
        return identity, waiting

    def _refused(self) -> None:
        """Destroy the sandbox, because the kernel refuses to send a descriptor to it."""
        if self._closed is None:
            reason = f"sandbox {self._name} was destroyed: {frame_writer.FULL}"
            self._fail(DispatchError(reason, remedy=frame_writer.REMEDY))
            self._destroy()

    # --- Answers -----------------------------------------------------------------------------------

    def look(self) -> None:
        """Take what has come, if there is anything."""
        if self._closed is None:
            self._receive()

    def _receive(self) -> None:
        try:
            data = self._read()
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""
        if not data:
            self._stream_ended()
            return
        self._take(data)

    def _read(self) -> bytes:
        """The next bytes of the stream, empty at its end. Raises OSError."""
        data, ancillary, _, _ = self._socket.recvmsg(_CHUNK, _ANCILLARY, socket.MSG_CMSG_CLOEXEC)
        for level, kind, value in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                self._arrived.extend(array.array("i", value[: len(value) // 4 * 4]))
        return data

    def _stream_ended(self) -> None:
        self._fail(ExecError(f"sandbox {self._name} died"))

    def _take(self, data: bytes) -> None:
        """Handle the frames that are complete now."""
        self._last_heard = self._loop.time()
        buffer: bytes | bytearray = data
        if self._received:
            self._received += data
            buffer = self._received
        at, end = 0, len(buffer)
        while end - at >= FRAME.size:
            size, what, flags, identity = FRAME.unpack_from(buffer, at)
            begin = at + FRAME.size
            if size > protocol.FRAME_MAX:
                self._protocol_error(f"a frame of {size} bytes")
                return
            if end - begin < size:
                break
            at = begin + size
            self._handle(what, flags, identity, bytes(buffer[begin:at]))
        if buffer is self._received:
            del self._received[:at]
        elif at < end:
            self._received += memoryview(buffer)[at:]
        # One may belong to a frame that is incomplete; more would fill our descriptor table.
        if len(self._arrived) > 1:
            self._protocol_error("descriptors that it was not asked for")

    def _handle(self, kind: int, flags: int, identity: int, payload: bytes) -> None:
        waiting = self._waiting.get(identity)
        if waiting is not None:
            waiting.room -= len(payload) + protocol.FRAME_COST
            if waiting.room < 0:
                self._protocol_error("more than it was allowed to")
                return
        if kind == _OUTPUT and isinstance(waiting, PendingCommand):
            if flags not in (1, 2):
                self._protocol_error(f"output of stream {flags}")
            elif waiting.on_output is not None:
                waiting.on_output(flags, payload)
            else:
                (waiting.stdout if flags == 1 else waiting.stderr).append(payload)
        elif kind == _EXIT and isinstance(waiting, PendingCommand) and len(payload) == protocol.EXIT.size:
            self._forget(identity)
            if not waiting.ended.done():
                waiting.ended.set_result(protocol.EXIT.unpack(payload))
                if waiting.on_answer is not None:
                    waiting.on_answer()
        elif kind == Frame.DONE and waiting is not None and len(payload) >= protocol.ERROR.size:
            self._done(waiting, flags, identity, payload)
        elif kind == _OUTPUT and isinstance(waiting, PendingOperation):
            self._add_data(waiting, identity, payload)
        elif kind == Frame.STARTED and isinstance(waiting, PendingCommand):
            self._started(waiting, flags, identity)
        elif kind == Frame.READY and len(payload) == protocol.READY.size and not self.ready.done():
            self.ready.set_result(protocol.READY.unpack(payload))
        elif kind == Frame.FATAL and len(payload) >= protocol.ERROR.size:
            (error,) = protocol.ERROR.unpack_from(payload)
            step = payload[protocol.ERROR.size :][:_REASON_MAX].decode(errors="replace")
            self._fail(SetupError(f"the sandbox could not be set up: {step}: {os.strerror(error)}", error))
        elif kind == Frame.ADOPTED and self._foreign is not None and len(payload) % 4 == 0:
            self._adopted(self._foreign, struct.unpack(f"={len(payload) // 4}I", payload))
        elif (
            waiting is None
            and self._foreign is not None
            and self._foreign.expects(kind, identity, len(payload))
        ):
            pass
        else:
            self._protocol_error("a frame that it was not asked for")

    def claim(self, identity: int, payload: bytes) -> PendingCommand:
        """Take over a command that a former owner started with this payload."""
        assert self._foreign is not None
        running = PendingCommand(self._loop, protocol.reply_limit(Frame.EXEC, payload))
        self._waiting[identity] = running
        self._foreign.claimed.add(identity)
        return running

    def _adopted(self, foreign: ForeignCommands, running: tuple[int, ...]) -> None:
        """Init tells which commands of the former owner run. What we claimed and does not run has ended."""
        if foreign.unclaimed is not None:
            self._protocol_error("twice what it runs")
            return
        for identity in foreign.claimed.difference(running).intersection(self._waiting):
            ended = self._waiting[identity].future
            ended.set_exception(ExecError(f"sandbox {self._name}: it ended while there was no owner to tell"))
            ended.exception()  # marks it as retrieved: no one may wait for it
            self._forget(identity)
        foreign.unclaimed = {identity for identity in running if identity not in self._waiting}
        for identity in foreign.unclaimed:
            self.tell(Frame.KILL, identity)

    def _protocol_error(self, what: str) -> None:
        """Destroy the sandbox: init broke the protocol, so a process in the sandbox has taken it over."""
        if self._closed is None:
            self._fail(self._taken_over(f"sandbox {self._name} sent {what}, and was destroyed"))
            self._destroy()

    def _taken_over(self, message: str) -> Exception:
        """No command should be able to do that, so it is not counted against the task."""
        return CollectError(message)

    def _started(self, waiting: PendingCommand, flags: int, identity: int) -> None:
        if not (flags & protocol.WITH_FD and self._arrived):
            self.kill(identity)  # its terminal did not arrive
        elif waiting.on_started is not None:
            waiting.on_started(self._arrived.popleft())
        else:
            os.close(self._arrived.popleft())

    def _add_data(self, waiting: PendingOperation, identity: int, payload: bytes) -> None:
        if waiting.on_output is not None:
            waiting.on_output(payload)
            return
        was_too_large = waiting.too_large
        waiting.add(payload)
        if not waiting.too_large:
            self.tell(Frame.CREDIT, identity, protocol.NUMBER.pack(len(payload) + protocol.FRAME_COST))
        elif not was_too_large:
            self.kill(identity)

    def _done(self, waiting: Pending, flags: int, identity: int, payload: bytes) -> None:
        descriptor = self._arrived.popleft() if flags & protocol.WITH_FD and self._arrived else None
        (error,) = protocol.ERROR.unpack_from(payload)
        if descriptor is not None and not (isinstance(waiting, PendingOperation) and waiting.with_file):
            os.close(descriptor)
            self._protocol_error("a file that it was not asked for")
            return
        self._forget(identity)
        if isinstance(waiting, PendingOperation) and not waiting.done.cancelled():
            waiting.descriptor = descriptor
            waiting.add(payload[protocol.ERROR.size :])
            waiting.done.set_result(errno.EFBIG if waiting.too_large else error)
            if waiting.on_answer is not None:
                waiting.on_answer()
            return
        if descriptor is not None:
            os.close(descriptor)
        if isinstance(waiting, PendingCommand) and not waiting.ended.done():
            waiting.ended.set_exception(rejection(error))

    # --- End ---------------------------------------------------------------------------------------

    def _give_up(self) -> None:
        if self._closed is None and self._diagnosis is None:
            self._diagnosis = self._loop.create_task(self._diagnose())

    async def _diagnose(self) -> None:
        """Decide why init does not answer: if the launcher does, because of processes in the sandbox."""
        what = f"sandbox {self._name} stopped answering"
        if self._responds is not None and await self._responds():
            self._fail(SandboxGone(f"{what} because of what runs in it, and was destroyed"))
        else:
            self._fail(ExecError(f"{what}, and was destroyed"))
        self._destroy()

    def orphan(self) -> None:
        """Close it in a forked child of this process (see ``fork_guard``)."""
        self._closed = SandboxClosed(f"sandbox {self._name}: {fork_guard.FORKED}", remedy=fork_guard.REMEDY)
        with contextlib.suppress(OSError):
            self._socket.close()
        for waiting in self._waiting.values():
            if not waiting.future.done():
                waiting.future.set_exception(self._closed)
                waiting.future.exception()
        self._waiting.clear()

    def abandon(self) -> None:
        """Close, and destroy the sandbox without waiting for its end."""
        self.close()
        self._destroy()

    def close(self) -> None:
        self._fail(SandboxClosed(f"sandbox {self._name} is closed"))

    def _fail(self, error: Exception) -> None:
        """Close the socket, and let all pending requests fail with ``error``."""
        if self._closed is not None:
            return
        self._closed = error
        self._writer.close()
        self._loop.remove_reader(self._descriptor)
        self._socket.close()
        for future in (self.ready, *(waiting.future for waiting in self._waiting.values())):
            if not future.done():
                future.set_exception(error)
                future.exception()  # marks it as retrieved: its caller may be gone
        for waiting in self._waiting.values():
            if waiting.overdue is not None:
                waiting.overdue.cancel()
        self._waiting.clear()
        for descriptor in self._arrived:
            os.close(descriptor)
        self._arrived.clear()
        if self.on_death is not None and not isinstance(error, SandboxClosed):
            self.on_death()


def _too_large(size: int) -> DispatchError:
    return DispatchError(
        f"the request has {size} bytes, and at most {protocol.FRAME_MAX} can be sent at once"
    )

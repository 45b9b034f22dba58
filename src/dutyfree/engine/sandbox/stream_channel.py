"""The channel to an init behind a byte stream: in a container, a pod or a virtual machine of another runtime.

No descriptors travel on it. Input, large files and trees go as frames (``in_band``); terminals do not exist.
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Awaitable, Callable, Sequence

import anyio

from dutyfree.contract.errors import CreateError, ExecError, SandboxGone
from dutyfree.engine.launcher import protocol
from dutyfree.engine.launcher.protocol import Frame
from dutyfree.engine.launcher.timeouts import DEFAULT_TIMEOUTS
from dutyfree.engine.sandbox.channel import Channel
from dutyfree.engine.sandbox.in_band import InputPump, OutputSink
from dutyfree.engine.sandbox.pending import Pending, PendingOperation

EXPLAIN_SECONDS = 10.0
"""How long to look for the reason after the stream has ended."""

_CHUNK = 1 << 16
_TAKEN = int(Frame.TAKEN)


class StreamChannel(Channel):
    """Requests to one init over a connected socket that only carries bytes.

    ``decode`` turns received bytes into init's own: a transport may put frames of its own around them.
    ``explain`` says why the stream ended: that error is the answer to all requests that wait.
    ``is_protected``: whether init is protected from the commands. Else what it sends may be theirs.
    """

    def __init__(
        self,
        connected: socket.socket,
        name: str,
        destroy: Callable[[], None],
        *,
        decode: Callable[[bytes], bytes],
        explain: Callable[[], Awaitable[Exception]],
        responds: Callable[[], Awaitable[bool]] | None = None,
        is_protected: bool = True,
        answer_timeout: float = DEFAULT_TIMEOUTS.answer,
    ) -> None:
        self._decode = decode
        self._explain = explain
        self._is_protected = is_protected
        self._pumps: dict[int, InputPump] = {}
        self._sinks: dict[int, OutputSink] = {}
        super().__init__(connected, name, destroy, responds, answer_timeout)

    async def wait_ready(self) -> None:
        """Wait until init serves frames. Raises CreateError if it is another version of the program."""
        version, *_ = await self.ready
        if version != protocol.VERSION:
            raise CreateError(
                f"init in sandbox {self._name} speaks version {version} of the protocol, "
                f"not {protocol.VERSION}"
            )

    # --- Requests ----------------------------------------------------------------------------------

    @staticmethod
    def _reply_limit(kind: Frame, payload: bytes) -> int:
        if kind == Frame.READ:  # a large file comes as output
            return protocol.READ_MAX + protocol.READ_MAX // 16
        return protocol.reply_limit(kind, payload)

    def post_all(self, frames: Sequence[tuple[Frame, bytes, int | None, int]]) -> list[tuple[int, Pending]]:
        """Send several requests at once (kind, payload, descriptor, flags). Raises DispatchError."""
        marked = [
            (kind, payload, None, flags if descriptor is None else flags | protocol.WITH_INPUT)
            for kind, payload, descriptor, flags in frames
        ]
        try:
            posted = super().post_all(marked)
        except BaseException:
            for _, _, descriptor, _ in frames:
                if descriptor is not None:
                    os.close(descriptor)
            raise
        for (_, _, descriptor, _), (identity, _) in zip(frames, posted, strict=True):
            if descriptor is not None:
                self._send(self._pump(identity, descriptor), None)
        return posted

    def _send_with(self, descriptor: int, kind: Frame, identity: int, payload: bytes) -> None:
        waiting = self._waiting[identity]
        if kind == Frame.PACK and isinstance(waiting, PendingOperation):
            sink = OutputSink(
                descriptor, lambda size: self.credit(identity, size), lambda: self.kill(identity)
            )
            waiting.on_output = sink.add
            self._sinks[identity] = sink
            self._send(protocol.frame(kind, identity, payload), None)
        else:
            head = protocol.frame(kind, identity, payload, protocol.WITH_INPUT)
            self._send(head + self._pump(identity, descriptor), None)

    def _pump(self, identity: int, descriptor: int) -> bytes:
        """Begin to send what the descriptor has. Returns the first frames."""
        pump = self._pumps[identity] = InputPump(
            identity, descriptor, lambda data: self._send(data, None), lambda: self._writer.ready
        )
        return pump.read()

    def _drained(self) -> None:
        super()._drained()
        for identity in list(self._pumps):
            if not self._writer.ready:
                break
            # It goes to the end, so that the next turn begins with another one.
            pump = self._pumps[identity] = self._pumps.pop(identity)
            pump.go_on()

    # --- Answers -----------------------------------------------------------------------------------

    def _read(self) -> bytes:
        while received := self._socket.recv(_CHUNK):
            if data := self._decode(received):
                return data
        return b""

    def _handle(self, kind: int, flags: int, identity: int, payload: bytes) -> None:
        if kind != _TAKEN:
            super()._handle(kind, flags, identity, payload)
            return
        pump = self._pumps.get(identity)
        if pump is None or len(payload) != protocol.NUMBER.size:
            self._protocol_error("a frame that it was not asked for")
        elif not pump.taken(*protocol.NUMBER.unpack(payload)):
            self._protocol_error("that it took more than it was sent")

    def _done(self, waiting: Pending, flags: int, identity: int, payload: bytes) -> None:
        sink = self._sinks.pop(identity, None)
        if sink is not None:
            if sink.broken:  # we ended it, because nobody takes the rest
                payload = protocol.ERROR.pack(errno.EPIPE)
            sink.end()
        super()._done(waiting, flags, identity, payload)

    def _forget(self, identity: int) -> None:
        super()._forget(identity)
        pump = self._pumps.pop(identity, None)
        if pump is not None:
            pump.close()

    def _taken_over(self, message: str) -> Exception:
        return super()._taken_over(message) if self._is_protected else SandboxGone(message)

    # --- End ---------------------------------------------------------------------------------------

    def _stream_ended(self) -> None:
        self._loop.remove_reader(self._descriptor)
        if self._closed is None and self._diagnosis is None:
            self._diagnosis = self._loop.create_task(self._find_reason())

    async def _find_reason(self) -> None:
        error: Exception = ExecError(f"the stream to sandbox {self._name} ended")
        with anyio.move_on_after(EXPLAIN_SECONDS):
            error = await self._explain()
        self._fail(error)

    def _fail(self, error: Exception) -> None:
        super()._fail(error)
        self._close_streams()

    def orphan(self) -> None:
        super().orphan()
        self._close_streams()

    def _close_streams(self) -> None:
        streams: list[InputPump | OutputSink] = [*self._pumps.values(), *self._sinks.values()]
        for stream in streams:
            stream.close()
        self._pumps.clear()
        self._sinks.clear()

"""The launcher's owner: one process per open substrate, started once, asked over a socket.

The socket is what ties the two: when the owner's end closes, whatever became of the owner, the launcher
kills every sandbox, removes what it made, and exits.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import socket
import struct
import subprocess
from collections import deque
from pathlib import Path
from typing import NamedTuple

from dutyfree.contract.errors import SubstrateError, Unavailable
from dutyfree.engine.host import fork_guard
from dutyfree.engine.launcher import protocol
from dutyfree.engine.launcher.protocol import Request

BINARY = Path(__file__).parents[1] / "bin" / "dutyfree-init"

_REPLY_MAX = 4096
_PATIENCE = 30.0
_UNDO = {
    Request.CREATE: Request.DESTROY,
    Request.LAYER: Request.REMOVE_LAYER,
    Request.SCRATCH: Request.REMOVE_LAYER,
}


class LauncherError(SubstrateError):
    """The launcher refused, or is gone. Mapped to the phase by whoever asked."""

    phase = "create"

    def __init__(self, message: str, number: int = 0) -> None:
        super().__init__(message)
        self.number = number


class Reply(NamedTuple):
    value: int
    text: bytes
    descriptors: tuple[int, ...]


_KEEPING = (Request.SNAPSHOT_MOVE, Request.SNAPSHOT_COPY, Request.MERGE)


def layers_of(reply: Reply) -> tuple[int, ...]:
    """The layers that a request kept."""
    return struct.unpack_from(f"={reply.value}I", reply.text, protocol.SNAPSHOT_USAGE.size)


class Launcher:
    """Requests and their replies. Belongs to the event loop that it was made in."""

    def __init__(self, process: subprocess.Popen[bytes], ours: socket.socket) -> None:
        self._process = process
        self._socket = ours
        self._loop = asyncio.get_running_loop()
        self._serials = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Reply]] = {}
        self._unsent: deque[tuple[bytes, int | None]] = deque()
        self._gone = ""
        # By its number: of a socket, the loop would make a description each time.
        self._descriptor = ours.fileno()
        self._writing = False
        self._loop.add_reader(self._descriptor, self._receive)
        fork_guard.bind(self)

    @property
    def pid(self) -> int:
        return self._process.pid

    @staticmethod
    def spawn(program: Path) -> tuple[subprocess.Popen[bytes], socket.socket]:
        """Start the process; blocks for a moment. Raises Unavailable."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        with theirs:
            try:
                process = subprocess.Popen(
                    [str(program), "launcher", str(theirs.fileno())],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    cwd="/",
                    env={},
                )
            except OSError as error:
                ours.close()
                raise Unavailable(f"native: cannot run {program}: {error.strerror}") from error
        return process, ours

    @staticmethod
    def trial(program: Path) -> str:
        """Start one, greet it, let it go; blocks. What it says is wrong, or "". Raises Unavailable."""
        process, ours = Launcher.spawn(program)
        try:
            ours.settimeout(_PATIENCE)
            with contextlib.suppress(BrokenPipeError):
                ours.send(protocol.REQUEST.pack(Request.HELLO, 1, 0, 0))
            try:
                message = ours.recv(_REPLY_MAX)
            except ConnectionResetError:  # it went without hearing us, after its last word
                message = ours.recv(_REPLY_MAX)
        except OSError as error:
            return f"no answer: {error}"
        finally:
            ours.close()
            process.wait()
        if not message:
            return "no answer"
        _, number, _, _ = protocol.REPLY.unpack_from(message)
        step = message[protocol.REPLY.size :].decode(errors="replace")
        return f"{step}: {os.strerror(number)}" if number else ""

    async def ask(
        self, kind: Request, number: int = 0, body: bytes = b"", descriptor: int | None = None
    ) -> Reply:
        """One request, one reply; a descriptor that goes with it stays open. Raises LauncherError."""
        serial, answer = self._post(kind, number, body, descriptor)
        try:
            return await answer
        except asyncio.CancelledError:
            # The answer still comes, and what it brings must not be lost.
            if answer.cancelled():
                self._waiting[serial] = orphan = self._loop.create_future()
                orphan.add_done_callback(lambda done: self._abandon(kind, done))
            elif not answer.exception():
                self._abandon(kind, answer)
            raise

    def tell(self, kind: Request, number: int) -> None:
        """A request whose reply nobody waits for. Ignored once the launcher is gone."""
        with contextlib.suppress(LauncherError):
            _, done = self._post(kind, number, b"")
            done.add_done_callback(lambda ended: ended.cancelled() or ended.exception())

    def _post(
        self, kind: Request, number: int, body: bytes, descriptor: int | None = None
    ) -> tuple[int, asyncio.Future[Reply]]:
        if self._gone:
            raise LauncherError(self._gone)
        serial = next(self._serials) & 0xFFFFFFFF
        self._waiting[serial] = answer = self._loop.create_future()
        self._unsent.append((protocol.REQUEST.pack(kind, serial, number, len(body)) + body, descriptor))
        if len(self._unsent) == 1:
            self._send()
        return serial, answer

    def _send(self) -> None:
        while self._unsent:
            try:
                message, descriptor = self._unsent[0]
                if descriptor is None:
                    self._socket.send(message)
                else:
                    socket.send_fds(self._socket, [message], [descriptor])
            except BlockingIOError:
                self._loop.add_writer(self._descriptor, self._send)
                self._writing = True
                return
            except OSError:
                return  # the reader learns of the end
            self._unsent.popleft()
        if self._writing:
            self._loop.remove_writer(self._descriptor)
            self._writing = False

    def _receive(self) -> None:
        try:
            message, descriptors, _, _ = socket.recv_fds(self._socket, _REPLY_MAX, 4)
        except (BlockingIOError, InterruptedError):
            return
        except ConnectionResetError:
            return  # it went without hearing us; its last word, or its end, comes now
        except OSError:
            message, descriptors = b"", []
        if not message:
            self._lost("the launcher is gone")
            return
        serial, error, value, _ = protocol.REPLY.unpack_from(message)
        text = message[protocol.REPLY.size :]
        if serial == 0:
            step = text.decode(errors="replace")
            self._lost(f"{step}: {os.strerror(error)}")
            return
        waiting = self._waiting.pop(serial, None)
        if waiting is None or waiting.done():
            for descriptor in descriptors:
                os.close(descriptor)
        elif error:
            step = text.decode(errors="replace")
            waiting.set_exception(LauncherError(f"{step}: {os.strerror(error)}", error))
        else:
            waiting.set_result(Reply(value, text, tuple(descriptors)))

    def _abandon(self, kind: Request, answer: asyncio.Future[Reply]) -> None:
        """Give back what a cancelled request brought."""
        if answer.cancelled() or answer.exception():
            return
        reply = answer.result()
        for descriptor in reply.descriptors:
            os.close(descriptor)
        if kind in _UNDO:
            self.tell(_UNDO[kind], reply.value)
        for layer in layers_of(reply) if kind in _KEEPING else ():
            self.tell(Request.REMOVE_LAYER, layer)

    def _lost(self, reason: str) -> None:
        if self._gone:
            return
        self._gone = reason
        self._loop.remove_reader(self._descriptor)
        self._loop.remove_writer(self._descriptor)
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(LauncherError(reason))
                waiting.exception()  # an orphan's is nobody's
        self._waiting.clear()

    def orphan(self) -> None:
        # The launcher goes with the owner, whatever copies there are of it.
        self._gone = fork_guard.FORKED
        self._waiting.clear()
        with contextlib.suppress(OSError):
            self._socket.close()

    def disconnect(self) -> subprocess.Popen[bytes]:
        """The end: the launcher cleans up and exits, which the process returned can be waited for."""
        self._lost("the substrate is closed")
        self._socket.close()
        return self._process

"""Start the launcher, one process per open substrate, and send requests to it over a socket.

However the owner ends, its end of the socket closes. Then the launcher kills every sandbox, removes what it
made, and exits. A launcher that keeps sandboxes (``keep``) waits for a new owner while they have leases.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import secrets
import select
import socket
import struct
import subprocess
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from dutyfree.contract.errors import SubstrateError, Unavailable
from dutyfree.engine.host import fork_guard
from dutyfree.engine.launcher import protocol
from dutyfree.engine.launcher.protocol import Request, WallFlag

BINARY = Path(__file__).parents[1] / "bin" / "dutyfree-init"

_REPLY_MAX = 4096
_TRIAL_SECONDS = 30.0
_UNDO = {
    Request.CREATE: Request.DESTROY,
    Request.LAYER: Request.REMOVE_LAYER,
    Request.SCRATCH: Request.REMOVE_LAYER,
}


class LauncherError(SubstrateError):
    """The launcher refused a request, or is gone. Callers map it to the error of their phase.

    ``number`` is an errno, or 0.
    """

    phase = "create"

    def __init__(self, message: str, number: int = 0) -> None:
        super().__init__(message)
        self.number = number


class Reply(NamedTuple):
    """The launcher's reply to one request."""

    value: int
    text: bytes
    descriptors: tuple[int, ...]


_RETURNS_LAYERS = (Request.SNAPSHOT_MOVE, Request.SNAPSHOT_COPY, Request.MERGE)


def layers_of(reply: Reply) -> tuple[int, ...]:
    """The layers in the reply to a snapshot or a merge."""
    return struct.unpack_from(f"={reply.value}I", reply.text, protocol.SNAPSHOT_USAGE.size)


@contextlib.contextmanager
def _short(path: Path) -> Iterator[str]:
    """A name of the path for a socket, which may have 107 bytes only."""
    directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{directory}/{path.name}"
    finally:
        os.close(directory)


class Launcher:
    """The connection to one launcher. It belongs to the event loop in which it was created."""

    def __init__(self, process: subprocess.Popen[bytes] | None, ours: socket.socket) -> None:
        """``process`` is None for a launcher of a former owner."""
        self._process = process
        self.pid = 0 if process is None else process.pid
        self.keeps = process is None
        """Whether sandboxes with a lease outlive the owner."""
        self._socket = ours
        self._loop = asyncio.get_running_loop()
        # Not from 1: replies to requests of a former owner may still come.
        self._serials = itertools.count(1 if process is not None else secrets.randbits(31))
        self._waiting: dict[int, asyncio.Future[Reply]] = {}
        self._unsent: deque[tuple[bytes, int | None]] = deque()
        self._gone = ""
        self.left = False
        """Whether ``leave`` was called."""
        # The number, not the socket: with a socket the loop builds an error text on each call.
        self._descriptor = ours.fileno()
        self._writing = False
        self._loop.add_reader(self._descriptor, self._receive)
        fork_guard.bind(self)

    @property
    def is_former(self) -> bool:
        """Whether another owner started it."""
        return self._process is None

    @staticmethod
    def connect(path: Path) -> socket.socket | None:
        """Connect to the launcher that a former owner left at this path; None if there is none."""
        ours = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with _short(path) as name:
                ours.connect(name)
        except OSError:
            ours.close()
            return None
        ours.setblocking(False)
        return ours

    @staticmethod
    def listen(path: Path) -> socket.socket:
        """A socket at which a new owner finds the launcher; only this user can connect. Blocks.

        Raises Unavailable.
        """
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            path.unlink(missing_ok=True)
            with _short(path) as name:
                listener.bind(name)
            path.chmod(0o600)
            listener.listen(1)
        except OSError as error:
            listener.close()
            raise Unavailable(f"native: cannot listen at {path}: {error.strerror or error}") from error
        return listener

    async def keep(self, listener: socket.socket) -> None:
        """Let sandboxes with a lease outlive this process. ``listen`` gives the socket.

        Raises LauncherError.
        """
        with listener:
            await self.ask(Request.KEEP, 0, b"", listener.fileno())
        self.keeps = True

    @staticmethod
    def spawn(
        program: Path, without: WallFlag | None = None
    ) -> tuple[subprocess.Popen[bytes], socket.socket]:
        """Start the process. Blocks for a moment. Raises Unavailable."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        with theirs:
            try:
                number = f"{theirs.fileno()}:{without.value}" if without else str(theirs.fileno())
                process = subprocess.Popen(
                    [str(program), "launcher", number],
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
        """Start a launcher, greet it and end it. Returns its error or "". Blocks. Raises Unavailable."""
        process, ours = Launcher.spawn(program)
        try:
            ours.settimeout(_TRIAL_SECONDS)
            with contextlib.suppress(BrokenPipeError):
                ours.send(protocol.REQUEST.pack(Request.HELLO, 1, 0, 0))
            try:
                message = ours.recv(_REPLY_MAX)
            except ConnectionResetError:  # it exited before it read the request; its reply is still there
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
        """Send a request, with a descriptor that stays open, and wait for the reply. Raises LauncherError."""
        serial, answer = self._post(kind, number, body, descriptor)
        try:
            return await answer
        except asyncio.CancelledError:
            # The reply still arrives, and we must release what it creates.
            if answer.cancelled():
                self._waiting[serial] = orphan = self._loop.create_future()
                orphan.add_done_callback(lambda done: self._abandon(kind, done))
            elif not answer.exception():
                self._abandon(kind, answer)
            raise

    def tell(self, kind: Request, number: int, body: bytes = b"") -> None:
        """Send a request without waiting for the reply. Does nothing if the launcher is gone."""
        with contextlib.suppress(LauncherError):
            _, done = self._post(kind, number, body)
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
                return  # ``_receive`` handles the end
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
            return  # it exited before it read all; its last message, or the end, comes next
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
        """Release what a cancelled request created."""
        if answer.cancelled() or answer.exception():
            return
        reply = answer.result()
        for descriptor in reply.descriptors:
            os.close(descriptor)
        if kind in _UNDO:
            self.tell(_UNDO[kind], reply.value)
        for layer in layers_of(reply) if kind in _RETURNS_LAYERS else ():
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
                waiting.exception()  # its waiter may be gone; this avoids a warning
        self._waiting.clear()

    def orphan(self) -> None:
        # The launcher serves the original owner, not a forked copy.
        self._gone = fork_guard.FORKED
        self._waiting.clear()
        with contextlib.suppress(OSError):
            self._socket.close()

    def leave(self) -> None:
        """Close the connection. Sandboxes with a lease stay, and the launcher with them."""
        self.left = True
        self._lost("the connection is closed")
        self._socket.close()

    def disconnect(self) -> Callable[[], object]:
        """Close the connection: the launcher cleans up and exits. Returns what waits for its end, and blocks.

        Also a launcher that keeps sandboxes ends then, unless ``leave`` was called before.
        """
        if self.left:
            return int
        if self.keeps:
            self.tell(Request.KEEP, 0)
        self.leave()
        return self._process.wait if self._process is not None else self._wait

    def _wait(self) -> None:
        """Wait for the end of a process that is not our child."""
        try:
            ended = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return
        try:
            select.select([ended], [], [])
        finally:
            os.close(ended)

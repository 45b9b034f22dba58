"""A compromised PID 1: whatever it sends to its owner harms only its own sandbox."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from collections.abc import Callable, Iterator

import anyio
import anyio.to_thread
import pytest

from dutyfree.contract.errors import CollectError, SandboxClosed
from dutyfree.contract.services import Service
from dutyfree.engine.launcher import protocol
from dutyfree.engine.launcher.protocol import FRAME_COST, Frame
from dutyfree.engine.sandbox.channel import Channel
from dutyfree.engine.sandbox.pending import CommandNotStarted
from dutyfree.engine.sandbox.services import ServiceProcess

OUTPUT = 1 << 20
EXEC = protocol.EXEC.pack(0, OUTPUT, 0, 0, 1, 0) + b"\0\0x\0"
MUCH = 256 << 20
"""More bytes than any answer here may have."""


class Hostile:
    """Init's end of the socket, and what happened to the sandbox."""

    def __init__(self) -> None:
        ours, self.socket = socket.socketpair()
        self.destroyed = 0
        self.owner = Channel(ours, "hostile", self._destroy)

    def _destroy(self) -> None:
        self.destroyed += 1

    async def say(self, frame: bytes, most: int = MUCH, *, listen: bool = False) -> int:
        """Send until the socket is closed. Returns how many bytes the owner took."""
        part = frame * max(1, (1 << 16) // len(frame))
        return await anyio.to_thread.run_sync(self._say, part, most, listen)

    def _say(self, part: bytes, most: int, listen: bool) -> int:
        sent = 0
        with contextlib.suppress(OSError):
            while sent < most:
                self.socket.sendall(part)
                sent += len(part)
                with contextlib.suppress(BlockingIOError):
                    while listen and self.socket.recv(1 << 16, socket.MSG_DONTWAIT):
                        pass
        return sent


@contextlib.contextmanager
def hostile() -> Iterator[Hostile]:
    made = Hostile()
    try:
        yield made
    finally:
        made.owner.close()
        made.socket.close()


@pytest.mark.parametrize("size", [0, 1, 1 << 16])
async def test_output_without_end(size: int) -> None:
    """For a command with a limit of 1 MiB, neither large nor small frames fill the owner's memory."""
    with hostile() as init:
        identity, running = init.owner.exec(EXEC)
        frame = protocol.frame(Frame.OUTPUT, identity, bytes(size), 1)
        taken = await init.say(frame)
        assert taken < MUCH
        with pytest.raises(CollectError, match="more than it was allowed to"):
            await running.ended
        assert len(running.stdout) * (size + FRAME_COST) < 8 * OUTPUT
        assert init.destroyed == 1
        with pytest.raises(SandboxClosed):
            init.owner.exec(EXEC)


@pytest.mark.parametrize("kind", [Frame.READ, Frame.LIST, Frame.SEARCH, Frame.VERIFY, Frame.REMOVE])
async def test_an_answer_without_end(kind: Frame) -> None:
    with hostile() as init:
        identity, answer = init.owner.begin(kind, b"/\0", lambda _: None)
        answer.on_output = None  # as for an answer that is collected whole
        taken = await init.say(protocol.frame(Frame.OUTPUT, identity, bytes(1 << 16), 1))
        assert taken < MUCH
        with pytest.raises(CollectError, match="more than it was allowed to"):
            await answer.done
        assert sum(map(len, answer.data)) < 2 * protocol.LISTING_MAX
        assert init.destroyed == 1


async def test_a_stream_that_nobody_takes() -> None:
    """Output above the credit is not buffered for a slow reader."""
    with hostile() as init:
        identity, running = init.owner.exec(EXEC)
        kept: list[bytes] = []
        running.on_output = lambda _, data: kept.append(data)
        await init.say(protocol.frame(Frame.OUTPUT, identity, bytes(1 << 16), 1))
        with pytest.raises(CollectError, match="more than it was allowed to"):
            await running.ended
        assert sum(map(len, kept)) < 8 * OUTPUT


async def test_a_stream_that_is_taken_goes_on() -> None:
    with hostile() as init:
        identity, running = init.owner.exec(EXEC)
        running.on_output = lambda _, data: init.owner.credit(identity, len(data) + FRAME_COST)
        frame = protocol.frame(Frame.OUTPUT, identity, bytes(1 << 16), 1)
        assert await init.say(frame, 64 * OUTPUT, listen=True) >= 64 * OUTPUT
        init.socket.sendall(protocol.frame(Frame.EXIT, identity, bytes(protocol.EXIT.size)))
        await running.ended
        assert not init.destroyed


def _exit(identity: int) -> bytes:
    return protocol.frame(Frame.EXIT, identity, bytes(protocol.EXIT.size))


def _done(identity: int) -> bytes:
    return protocol.frame(Frame.DONE, identity, protocol.ERROR.pack(0))


VIOLATIONS: dict[str, Callable[[int], bytes]] = {
    "about a command that never was": lambda one: protocol.frame(Frame.OUTPUT, one + 1, b"x", 1),
    "output of no stream": lambda one: protocol.frame(Frame.OUTPUT, one, b"x", 3),
    "output of stdin": lambda one: protocol.frame(Frame.OUTPUT, one, b"x", 0),
    "an end that never began": lambda one: _exit(one + 1),
    "an answer to no question": lambda one: _done(one + 1),
    "a terminal of nobody's": lambda one: protocol.frame(Frame.STARTED, one + 1, b"", protocol.WITH_FD),
    "two ends": lambda one: _exit(one) * 2,
    "an end after an answer": lambda one: _done(one) + _exit(one),
    "an end that is too short": lambda one: protocol.frame(Frame.EXIT, one, b"x"),
    "an answer that is too short": lambda one: protocol.frame(Frame.DONE, one, b"x"),
    "a readiness that is too short": lambda one: protocol.frame(Frame.READY, 0, b"x"),
    "an order to the owner": lambda one: protocol.frame(Frame.EXEC, one, EXEC),
    "a kind that is none": lambda one: protocol.frame(0xFFFF, one, b""),
    "a frame that is too long": lambda one: protocol.FRAME.pack(0xFFFFFFFF, Frame.OUTPUT, 1, one),
}


@pytest.mark.parametrize("violation", list(VIOLATIONS))
async def test_what_nobody_asked_for_ends_the_sandbox(violation: str) -> None:
    with hostile() as init:
        _, other = init.owner.exec(EXEC)
        identity, _ = init.owner.exec(EXEC)
        init.socket.sendall(VIOLATIONS[violation](identity))
        with anyio.fail_after(60), pytest.raises(CollectError, match=r"sent (a frame|output of stream)"):
            await other.ended
        assert init.destroyed == 1
        assert init.owner.closed


async def test_reasons_are_short() -> None:
    """It fills no process log and no terminal either."""
    with hostile() as init:
        await init.say(protocol.frame(Frame.FATAL, 0, protocol.ERROR.pack(5) + b"x" * (1 << 20)), 1)
        with anyio.fail_after(60), pytest.raises(Exception, match="could not be set up") as failed:
            await init.owner.ready
        assert len(str(failed.value)) < 1000


@pytest.mark.parametrize("kind", [Frame.LIST, Frame.REMOVE, Frame.WRITE, Frame.SEARCH, Frame.PING])
async def test_files_that_nobody_asked_for(kind: Frame) -> None:
    """Each descriptor would stay open in the owner."""
    with hostile() as init:
        before = len(os.listdir("/proc/self/fd"))
        identity, answer = init.owner.begin(kind, b"/\0", lambda _: None)
        frame = protocol.frame(Frame.DONE, identity, protocol.ERROR.pack(0), protocol.WITH_FD)
        socket.send_fds(init.socket, [frame], [0])
        with anyio.fail_after(60), pytest.raises(CollectError, match="a file that it was not asked for"):
            await answer.done
        assert init.destroyed == 1
        assert len(os.listdir("/proc/self/fd")) < before


async def test_an_init_that_speaks_and_does_not_listen() -> None:
    """Credit for its frames does not pile up: it gets none, and may send no more."""
    with hostile() as init:
        identity, running = init.owner.exec(EXEC)
        running.on_output = lambda _, data: init.owner.credit(identity, len(data) + FRAME_COST)
        frame = protocol.frame(Frame.OUTPUT, identity, b"x", 1)
        taken = await init.say(frame)
        assert taken < MUCH
        with pytest.raises(CollectError, match="more than it was allowed to"):
            await running.ended
        assert init.owner._writer.queued < 10


async def test_a_service_that_cannot_be_started() -> None:
    """Its state is reported in words."""
    with hostile() as init:
        service = ServiceProcess(Service("server", "true"))
        service.started(init.owner, *init.owner.exec(EXEC))
        init.socket.send(protocol.frame(Frame.DONE, service.identity, protocol.ERROR.pack(errno.EAGAIN)))
        with anyio.fail_after(60), pytest.raises(CommandNotStarted):
            await service.wait()
        assert service.state().exit_code == 126
        assert "no processes left" in service.output()


@pytest.mark.parametrize("status", [0x7F, 0x137F, 0xFFFF])
async def test_an_end_that_no_command_has(status: int) -> None:
    """Also for a shell or a service, it is the sandbox's failure."""
    with hostile() as init:
        service = ServiceProcess(Service("server", "true"))
        service.started(init.owner, *init.owner.exec(EXEC))
        said = protocol.EXIT.pack(status, *[0] * 12)
        init.socket.send(protocol.frame(Frame.EXIT, service.identity, said))
        with anyio.fail_after(60):
            await service.wait()
        with pytest.raises(CollectError, match="as the exit status of a command"):
            service.state()

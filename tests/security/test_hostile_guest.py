"""A compromised init behind a byte stream: whatever it sends harms only its own sandbox."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from collections.abc import AsyncIterator

import anyio
import anyio.to_thread
import pytest

from dutyfree.contract.errors import CollectError, CreateError, SandboxGone
from dutyfree.engine.launcher import protocol
from dutyfree.engine.launcher.protocol import FRAME, INPUT_WINDOW, Frame
from dutyfree.engine.sandbox.pending import PendingOperation, ReadBudget
from dutyfree.engine.sandbox.stream_channel import StreamChannel

pytestmark = pytest.mark.anyio

EXEC = protocol.EXEC.pack(0, 1 << 20, 0, 0, 1, 0) + b"\0\0x\0"


class Guest:
    """Init's end of the stream, and what happened to the sandbox."""

    def __init__(self) -> None:
        ours, self.socket = socket.socketpair()
        self.socket.setblocking(False)
        self.destroyed = 0
        self.owner = StreamChannel(
            ours, "guest", self._destroy, decode=lambda data: data, explain=self._explain
        )

    def _destroy(self) -> None:
        self.destroyed += 1

    async def _explain(self) -> Exception:
        return SandboxGone("the container was killed by its memory limit")

    async def received(self) -> list[tuple[int, int, bytes]]:
        """The frames that the owner has sent so far: kind, flags, payload."""
        await anyio.wait_all_tasks_blocked()
        data, found = b"", []
        while True:
            try:
                data += self.socket.recv(1 << 20)
            except BlockingIOError:
                break
        while data:
            size, kind, flags, _ = FRAME.unpack_from(data)
            found.append((kind, flags, data[FRAME.size : FRAME.size + size]))
            data = data[FRAME.size + size :]
        return found

    def taken(self, identity: int, size: int) -> None:
        self.socket.sendall(protocol.frame(Frame.TAKEN, identity, protocol.NUMBER.pack(size)))


@pytest.fixture
async def guest() -> AsyncIterator[Guest]:
    made = Guest()
    try:
        yield made
    finally:
        made.owner.close()
        made.socket.close()


def start(guest: Guest) -> tuple[int, int, PendingOperation]:
    """A request with a pipe as its input: its number, and our end of the pipe."""
    theirs, ours = os.pipe()
    os.set_blocking(ours, False)
    answer = PendingOperation(guest.owner._loop, 1 << 20)
    identity, _ = guest.owner._post(Frame.UNPACK, b"/x\0", theirs, answer)
    return identity, ours, answer


def fill(ours: int, size: int) -> int:
    written = 0
    while written < size:
        try:
            written += os.write(ours, bytes(min(1 << 14, size - written)))
        except BlockingIOError:
            break
    return written


async def test_input_waits_until_init_takes_it(guest: Guest) -> None:
    identity, ours, answer = start(guest)

    async def sent(least: int) -> int:
        """Wait for so many bytes of input, and a while longer for more."""
        found, rounds = 0, 0
        with anyio.fail_after(60):
            while found < least or rounds < 10:
                fill(ours, 1 << 16)
                await anyio.sleep(0.001)
                found += sum(len(data) for kind, _, data in await guest.received() if kind == Frame.INPUT)
                rounds += found >= least
        return found

    assert await sent(INPUT_WINDOW) == INPUT_WINDOW
    guest.taken(identity, 1000)  # for so little, no frame is sent
    guest.taken(identity, (1 << 16) - 1000)
    assert await sent(1 << 16) == 1 << 16
    guest.taken(identity, 0)
    with anyio.fail_after(30):
        while not guest.owner._pumps[identity]._descriptor < 0:  # noqa: ASYNC110 (a callback of the loop)
            await anyio.sleep(0.01)
    with pytest.raises(BrokenPipeError):
        os.write(ours, b"x")
    os.close(ours)
    guest.socket.sendall(protocol.frame(Frame.DONE, identity, protocol.ERROR.pack(0)))
    assert await answer.done == 0


@pytest.mark.parametrize("size", [1, INPUT_WINDOW, 0xFFFFFFFF])
async def test_taking_more_than_was_sent(guest: Guest, size: int) -> None:
    identity, ours, answer = start(guest)
    guest.taken(identity, size)
    with pytest.raises(CollectError, match="took more than it was sent"):
        await answer.done
    assert guest.destroyed == 1
    with pytest.raises(BrokenPipeError):
        os.write(ours, b"x")
    os.close(ours)


async def test_nothing_is_said_after_nobody_reads(guest: Guest) -> None:
    identity, ours, answer = start(guest)
    guest.taken(identity, 0)
    guest.taken(identity, 0)
    with pytest.raises(CollectError, match="took more than it was sent"):
        await answer.done
    assert guest.destroyed == 1
    os.close(ours)


async def test_more_reports_than_input(guest: Guest) -> None:
    """Each costs the owner time, so a byte is not acknowledged alone."""
    identity, ours, answer = start(guest)
    fill(ours, 1000)
    with anyio.fail_after(60):
        while guest.owner._pumps[identity]._room == INPUT_WINDOW:  # noqa: ASYNC110 (a callback of the loop)
            await anyio.sleep(0.001)
    for _ in range(4):
        guest.taken(identity, 1)
    with pytest.raises(CollectError, match="took more than it was sent"):
        await answer.done
    assert guest.destroyed == 1
    os.close(ours)


async def test_taking_what_was_never_read(guest: Guest) -> None:
    """The owner sends no faster than the stream takes it, and then goes on."""
    identity, ours, _ = start(guest)
    pump = guest.owner._pumps[identity]
    fed = 0
    for _ in range(300):
        fed += fill(ours, 1 << 16)
        if outstanding := INPUT_WINDOW - pump._room:
            assert pump.taken(outstanding)
        await anyio.sleep(0.001)
    assert sum(len(data) for data, _ in guest.owner._writer._queue) <= 2 * INPUT_WINDOW
    arrived = 0
    with anyio.fail_after(60):
        while arrived < fed:
            await anyio.sleep(0.001)
            with contextlib.suppress(BlockingIOError):
                arrived += len(guest.socket.recv(1 << 20))
    os.close(ours)


async def test_taking_what_was_not_offered(guest: Guest) -> None:
    identity, running = guest.owner.exec(EXEC)
    guest.taken(identity, 1)
    with pytest.raises(CollectError, match="not asked for"):
        await running.ended
    assert guest.destroyed == 1


async def test_a_tree_that_nobody_takes(guest: Guest) -> None:
    """What does not fit into the pipe is bounded, since it gets no credit."""
    ours, theirs = os.pipe()
    answer = PendingOperation(guest.owner._loop, protocol.INLINE_MAX)
    identity, _ = guest.owner._post(Frame.PACK, b"/x\0", theirs, answer)
    part = protocol.frame(Frame.OUTPUT, identity, bytes(1 << 16), 1)
    guest.socket.setblocking(True)

    def say() -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            for _ in range(1000):
                guest.socket.sendall(part)

    await anyio.to_thread.run_sync(say)
    with pytest.raises(CollectError, match="more than it was allowed to"):
        await answer.done
    assert guest.destroyed == 1
    os.close(ours)


def send_file(guest: Guest, identity: int, size: int) -> None:
    """Send a file of zeros, as init does. Blocks."""
    guest.socket.setblocking(True)
    part = protocol.frame(Frame.OUTPUT, identity, bytes(1 << 16), 1)
    for _ in range(size >> 16):
        guest.socket.sendall(part)
    guest.socket.sendall(protocol.frame(Frame.DONE, identity, protocol.ERROR.pack(0)))
    guest.socket.setblocking(False)


async def test_a_large_file_in_a_batch(guest: Guest) -> None:
    ((identity, answer),) = guest.owner.post_all([(Frame.READ, b"/x\0", None, 0)])
    assert isinstance(answer, PendingOperation)
    await anyio.to_thread.run_sync(send_file, guest, identity, 5 << 20)
    assert await answer.done == 0
    assert sum(map(len, answer.data)) == 5 << 20


async def test_a_file_larger_than_the_owner_takes(guest: Guest) -> None:
    """Init is told once to stop, and nothing of the file is kept."""
    budget = ReadBudget(1 << 20)
    identity, answer = guest.owner.request(Frame.READ, b"/x\0", budget)
    await anyio.to_thread.run_sync(send_file, guest, identity, 2 << 20)
    assert await answer.done == errno.EFBIG
    assert answer.data == []
    assert budget.left == 1 << 20
    assert [kind for kind, _, _ in await guest.received()].count(Frame.KILL) == 1
    identity, answer = guest.owner.request(Frame.READ, b"/x\0", ReadBudget(99))
    guest.socket.sendall(protocol.frame(Frame.DONE, identity, protocol.ERROR.pack(0) + bytes(100)))
    assert await answer.done == errno.EFBIG
    assert guest.destroyed == 0


async def test_reads_of_a_batch_share_a_budget(guest: Guest) -> None:
    budget = ReadBudget(10)
    one, other = (PendingOperation(guest.owner._loop, 0, budget=budget) for _ in range(2))
    one.add(b"123456")
    other.add(b"1234")
    other.add(b"5")
    other.add(b"6")
    assert (one.data, one.too_large) == ([b"123456"], False)
    assert (other.data, other.too_large) == ([], True)
    assert budget.left == 4


async def test_descriptors_are_not_taken(guest: Guest) -> None:
    """They do not travel here: a flag alone opens nothing, and a descriptor that comes is dropped."""
    answer = PendingOperation(guest.owner._loop, 1 << 20, with_file=True)
    identity, _ = guest.owner._post(Frame.READ, b"/x\0", None, answer)
    frame = protocol.frame(Frame.DONE, identity, protocol.ERROR.pack(0), protocol.WITH_FD)
    socket.send_fds(guest.socket, [frame], [guest.socket.fileno()])
    assert await answer.done == 0
    assert answer.descriptor is None


async def test_the_end_of_the_stream_is_explained(guest: Guest) -> None:
    _, running = guest.owner.exec(EXEC)
    guest.socket.close()
    with pytest.raises(SandboxGone, match="memory limit"):
        await running.ended
    with pytest.raises(SandboxGone):
        guest.owner.exec(EXEC)


async def test_another_version(guest: Guest) -> None:
    ready = protocol.READY.pack(protocol.VERSION + 1, 0, 0, 0)
    guest.socket.sendall(protocol.frame(Frame.READY, 0, ready))
    with pytest.raises(CreateError, match="speaks version"):
        await guest.owner.wait_ready()

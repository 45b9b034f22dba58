"""Messages that do not fit into a turn of the event loop wait for the next, in their order."""

from __future__ import annotations

import asyncio
import gc
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from websockets.asyncio.client import connect
from websockets.typing import Subprotocol

from dutyfree.server import garbage
from dutyfree.server.overload import TICK, Overload
from dutyfree.server.turns import BUDGET, MOST, Inbox, Turns
from dutyfree.wire import codec, frames
from dutyfree.wire.frames import Call, Kind
from tests.awaiting import until
from tests.server.in_process import served


async def turn() -> None:
    """Wait for the next turn of the event loop."""
    await asyncio.sleep(0)


def work(seconds: float) -> None:
    """Keep the event loop busy."""
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        pass


class Client:
    """Sends messages, and remembers which were handled."""

    def __init__(self, turns: Turns, seconds: float = 0.0) -> None:
        self.reads = True
        self.handled: list[bytes] = []
        self._seconds = seconds
        self._inbox = Inbox(turns, self, self._handle)

    def send(self, *messages: bytes) -> None:
        for message in messages:
            self._inbox.add(message)

    def pause_reading(self) -> None:
        assert self.reads
        self.reads = False

    def resume_reading(self) -> None:
        assert not self.reads
        self.reads = True

    def _handle(self, message: bytes, _since: float) -> None:
        self.handled.append(message)
        work(self._seconds)
        if message == b"wrong":
            raise RuntimeError(message)


MESSAGES = [bytes([number]) for number in range(20)]
LONG = BUDGET / 3


class Late(Overload):
    """The event loop is late whenever the test says so."""

    loop_is_late = False


@pytest.fixture
def overload() -> Late:
    return Late()


async def test_messages_that_fit_are_handled_at_once(overload: Late) -> None:
    client = Client(Turns(overload))
    client.send(*MESSAGES)
    assert client.handled == MESSAGES
    assert client.reads


async def test_the_others_wait_in_their_order_and_no_more_are_read(overload: Late) -> None:
    client = Client(Turns(overload), seconds=LONG)
    client.send(*MESSAGES[:2])
    overload.loop_is_late = True
    client.send(*MESSAGES[2:5])
    overload.loop_is_late = False
    client.send(*MESSAGES[5:])
    assert client.handled == MESSAGES[:2]
    assert not client.reads
    await turn()
    assert 2 < len(client.handled) < len(MESSAGES)
    for _ in MESSAGES:
        await turn()
    assert client.handled == MESSAGES
    assert client.reads


async def test_a_client_that_sends_many_small_messages_fills_no_memory(overload: Late) -> None:
    client = Client(Turns(overload))
    sent = [number.to_bytes(4) for number in range(3 * MOST)]
    overload.loop_is_late = True
    client.send(*sent)
    assert client.handled == sent[: 2 * MOST]
    for _ in range(MOST):
        await turn()
    assert client.handled == sent
    assert client.reads


async def test_no_client_waits_for_all_messages_of_another(overload: Late) -> None:
    turns = Turns(overload)
    first, second = Client(turns, seconds=LONG), Client(turns)
    overload.loop_is_late = True
    first.send(*MESSAGES)
    second.send(*MESSAGES[:2])
    for _ in range(4):
        await turn()
    assert second.handled == MESSAGES[:2]
    assert second.reads
    assert not first.reads


async def test_a_message_that_fails_does_not_stop_the_others(overload: Late) -> None:
    failures: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: failures.append(context))
    client = Client(Turns(overload))
    overload.loop_is_late = True
    client.send(b"wrong", *MESSAGES)
    assert not client.handled
    for _ in range(2 + len(MESSAGES)):
        await turn()
    assert client.handled == [b"wrong", *MESSAGES]
    assert len(failures) == 1


def connected(address: str) -> connect:
    protocols = [Subprotocol(frames.PROTOCOL)]
    return connect(f"ws://{address}{frames.PATH}", subprotocols=protocols, compression=None, proxy=None)


def call(number: int) -> bytes:
    return frames.HEAD.pack(Kind.CALL, number) + codec.encode(Call("none", "", msgspec.Raw(codec.encode({}))))


@pytest.mark.native
async def test_whole_and_fragmented_messages_of_a_channel_keep_their_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Overload, "loop_is_late", True)
    async with served(tmp_path) as (_, address), connected(address) as client:
        for number in range(50):
            message = call(number)
            await client.send(message if number % 3 else [message[:7], message[7:]])
        async with asyncio.timeout(60):
            answers = [await client.recv(decode=False) for _ in range(50)]
        assert [frames.HEAD.unpack_from(answer)[1] for answer in answers] == list(range(50))


@pytest.mark.native
async def test_messages_of_a_client_that_is_gone_do_not_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Overload, "loop_is_late", True)
    async with served(tmp_path) as (service, address):
        async with connected(address) as client:
            for number in range(3000):
                await client.send(call(number))
            client.transport.abort()
        async with connected(address) as other, asyncio.timeout(60):
            await other.send(call(1))
            await other.recv()
        await until(lambda: not service.overload._control.waiting and not service.quotas.calls.total())


async def test_a_loop_that_works_for_long_is_late() -> None:
    overload, seen = Overload(), list[bool]()
    seen.append(overload.loop_is_late)
    async with overload.watching():
        await turn()
        work(2 * TICK)
        seen.append(overload.loop_is_late)
    seen.append(overload.loop_is_late)
    assert seen == [False, True, False]


async def test_complete_garbage_collections_are_rare(monkeypatch: pytest.MonkeyPatch) -> None:
    complete = asyncio.Event()

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "stop" and info["generation"] == 2:
            complete.set()

    before = gc.get_threshold()
    monkeypatch.setattr(garbage, "PERIOD", 0.05)
    async with garbage.rare_collections():
        assert gc.get_threshold()[:2] == before[:2]
        assert gc.get_threshold() != before
        gc.callbacks.append(note)
        try:
            async with asyncio.timeout(60):
                await complete.wait()
        finally:
            gc.callbacks.remove(note)
    assert gc.get_threshold() == before
    assert gc.get_freeze_count() == 0

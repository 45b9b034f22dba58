"""Messages that do not fit into a turn of the event loop wait for the next, in their order."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from dutyfree.server.garbage import rare_collections
from dutyfree.server.overload import TICK, Overload
from dutyfree.server.turns import BUDGET, MOST, Inbox, Turns


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


@pytest.fixture
async def turns() -> AsyncIterator[Turns]:
    overload = Overload()
    async with overload.watching():
        await turn()
        yield Turns(overload)


async def test_messages_that_fit_are_handled_at_once(turns: Turns) -> None:
    client = Client(turns)
    client.send(*MESSAGES)
    assert client.handled == MESSAGES
    assert client.reads


async def test_the_others_wait_in_their_order_and_no_more_are_read(turns: Turns) -> None:
    client = Client(turns, seconds=LONG)
    client.send(*MESSAGES)
    begun = len(client.handled)
    assert 0 < begun < 10
    assert not client.reads
    await turn()
    assert begun < len(client.handled) < len(MESSAGES)
    for _ in MESSAGES:
        await turn()
    assert client.handled == MESSAGES
    assert client.reads


async def test_a_client_that_sends_many_small_messages_fills_no_memory(turns: Turns) -> None:
    client = Client(turns)
    work(2 * TICK)
    sent = [number.to_bytes(4) for number in range(3 * MOST)]
    client.send(*sent)
    assert client.handled == sent[: 2 * MOST]
    await turn()
    assert client.handled == sent
    assert client.reads


async def test_no_client_waits_for_all_messages_of_another(turns: Turns) -> None:
    first, second = Client(turns, seconds=LONG), Client(turns)
    first.send(*MESSAGES)
    second.send(*MESSAGES[:2])
    for _ in range(3):
        await turn()
    assert second.handled == MESSAGES[:2]
    assert second.reads
    assert not first.reads


async def test_a_message_that_fails_does_not_stop_the_others(turns: Turns) -> None:
    failures: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: failures.append(context))
    client = Client(turns)
    work(2 * TICK)
    client.send(b"wrong", *MESSAGES)
    assert not client.handled
    for _ in range(3):
        await turn()
    assert client.handled == [b"wrong", *MESSAGES]
    assert len(failures) == 1


async def test_a_server_collects_garbage_rarely() -> None:
    before = gc.get_threshold()
    async with rare_collections():
        assert gc.get_threshold()[2] > 1_000_000
    assert gc.get_threshold() == before
    assert gc.get_freeze_count() == 0

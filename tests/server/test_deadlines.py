"""Deadlines of clients reach through the queue, and clients that are gone leave it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import anyio
import pytest

import dutyfree
from dutyfree.contract.errors import Exhausted
from dutyfree.server.admission import TenantLimits
from dutyfree.server.service import Service
from dutyfree.server.tokens import Tokens
from dutyfree.substrates.hosted import Hosted
from dutyfree.wire import calls
from tests.awaiting import until
from tests.server.in_process import served

pytestmark = pytest.mark.native


class Full:
    """A server on which a tenant has the one sandbox that it may have."""

    def __init__(self, service: Service, address: str, token: str) -> None:
        self.service = service
        self.address = address
        self.token = token

    @property
    def waiting(self) -> int:
        return self.service.admission._queue.waiting("trainer")

    async def create(self, body: dict[str, Any], *headers: str) -> asyncio.StreamReader:
        """Ask for a sandbox; the connection ends with ``close``."""
        host, _, port = self.address.partition(":")
        reader, self.writer = await asyncio.open_connection(host, int(port))
        data = json.dumps(body).encode()
        lines = [
            "POST /v1/sandboxes HTTP/1.1",
            f"Host: {self.address}",
            f"Authorization: Bearer {self.token}",
            f"Content-Length: {len(data)}",
            "Connection: close",
            *headers,
        ]
        self.writer.write("".join(f"{line}\r\n" for line in lines).encode() + b"\r\n" + data)
        return reader

    def close(self) -> None:
        self.writer.close()


@pytest.fixture(scope="module")
async def full(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Full]:
    state = tmp_path_factory.mktemp("state")
    with Tokens(state / "server.sqlite") as tokens:
        tokens.set_limits("trainer", TenantLimits(sandboxes=1))
        secret = tokens.create("trainer")
    async with served(state) as (service, address):
        found = Full(service, address, secret)
        reader = await found.create({"lease": 1000})
        assert b" 201 " in await reader.readline()
        found.close()
        yield found


@pytest.mark.parametrize("how", ["body", "header"])
async def test_an_answer_comes_before_the_clients_deadline(full: Full, how: str) -> None:
    reader = await full.create(
        {"patience": 1} if how == "body" else {}, *(["Prefer: wait=1"] if how == "header" else [])
    )
    with anyio.fail_after(30):  # half of what the server waits
        answer = await reader.read()
    assert b" 429 " in answer.partition(b"\r\n")[0]
    assert b"\r\nretry-after: " in answer
    assert b"trainer has 1 sandbox (its limit is 1)" in answer
    assert full.waiting == 0
    full.close()


async def test_a_client_that_is_gone_leaves_the_queue(full: Full) -> None:
    await full.create({})
    await until(lambda: full.waiting == 1)
    full.close()
    await until(lambda: full.waiting == 0)
    assert len(full.service.sandboxes.of("trainer")) == 1


async def test_a_call_that_is_cancelled_leaves_the_queue(full: Full) -> None:
    async with dutyfree.open("hosted", url=f"http://{full.address}", token=full.token) as hosted:
        assert isinstance(hosted, Hosted)
        with pytest.raises(TimeoutError), anyio.fail_after(1):
            async with hosted.sandbox():
                pass
        await until(lambda: full.waiting == 0)
        with pytest.raises(Exhausted) as refused:
            await hosted._connection.call("create", "", calls.Create("a key", patience=0.5))
        assert float(str(refused.value.numbers["retry_after"])) > 0
        lost = asyncio.create_task(hosted._connection.call("create", "", calls.Create("another")))
        await until(lambda: full.waiting == 1)
        assert hosted._connection._socket is not None
        hosted._connection._closed = True  # otherwise it connects again, and asks again
        hosted._connection._socket.transport.abort()
        await until(lambda: full.waiting == 0)
        await asyncio.wait([lost])
        assert lost.exception() is not None


async def test_patience_is_no_part_of_the_request(full: Full) -> None:
    """The same key with another patience is the same request."""
    (held,) = full.service.sandboxes.of("trainer")
    await full.service.sandboxes.release(held)
    ids = []
    for patience in (5, 6):
        reader = await full.create({"patience": patience}, "Idempotency-Key: one")
        answer = await reader.read()
        full.close()
        ids.append(json.loads(answer.partition(b"\r\n\r\n")[2])["id"])
    assert ids[0] == ids[1]

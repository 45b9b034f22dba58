"""The connection of ``hosted``: what happens to its calls when it is lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import pytest
from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.typing import Subprotocol

from dutyfree.contract.errors import ExecError, Restarting, Unavailable
from dutyfree.substrates.hosted.connection import CANCEL_SECONDS, Connection, ServerAddress
from dutyfree.wire import codec, frames
from dutyfree.wire.errors import describe
from dutyfree.wire.frames import Call, Kind
from tests.awaiting import until


class ScriptedServer:
    """A server that can be stopped and started at the same port.

    It answers ``sandboxes``, takes no ``exec`` because it ends soon, and does not answer other calls.
    """

    def __init__(self) -> None:
        self.seen: list[str] = []
        """The calls that came."""
        self.port = 0
        self._server: Server | None = None

    async def start(self) -> None:
        protocols = [Subprotocol(frames.PROTOCOL)]
        self._server = await serve(self._converse, "127.0.0.1", self.port, subprotocols=protocols)
        self.port = next(iter(self._server.sockets)).getsockname()[1]

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()
        await self._server.wait_closed()

    async def _converse(self, socket: ServerConnection) -> None:
        async for frame in socket:
            assert isinstance(frame, bytes)
            kind, number = frames.HEAD.unpack_from(frame)
            if kind == Kind.CALL:
                method = codec.decode(frame[frames.HEAD.size :], Call).method
                self.seen.append(method)
                if method == "sandboxes":
                    await socket.send(frames.HEAD.pack(Kind.RESULT, number) + codec.encode(()))
                elif method == "exec":
                    error = codec.encode(describe(Restarting("another server comes")))
                    await socket.send(frames.HEAD.pack(Kind.ERROR, number) + error)

    def connection(self, reconnect: float) -> Connection:
        return Connection(ServerAddress(f"http://127.0.0.1:{self.port}"), None, None, 10.0, reconnect)


@pytest.fixture
async def server() -> AsyncIterator[ScriptedServer]:
    found = ScriptedServer()
    await found.start()
    yield found
    await found.stop()


@asynccontextmanager
async def lost(server: ScriptedServer, reconnect: float) -> AsyncIterator[Connection]:
    """A connection that has lost its server."""
    connection = server.connection(reconnect)
    assert await connection.call("sandboxes") == ()
    await server.stop()
    await until(lambda: connection._socket is None)
    yield connection
    await connection.close()


@asynccontextmanager
async def refusing(port: int) -> AsyncIterator[list[int]]:
    """What listens at a port and ends every connection. The list has the port of each."""
    seen: list[int] = []

    def end(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.append(writer.get_extra_info("peername")[1])
        writer.close()

    async with await asyncio.start_server(end, "127.0.0.1", port):
        yield seen


async def test_calls_that_wait_for_one_attempt_fail_together(server: ScriptedServer) -> None:
    async with lost(server, reconnect=0) as connection, refusing(server.port) as attempts:
        calls = [connection.call("sandboxes") for _ in range(5)]
        found = await asyncio.gather(*calls, return_exceptions=True)
        assert [type(one) for one in found] == [Unavailable] * 5
        assert len(attempts) == 1


async def test_the_time_for_a_new_server_begins_with_the_loss(server: ScriptedServer) -> None:
    """A call that begins after it makes one attempt."""
    async with lost(server, reconnect=0.2) as connection, refusing(server.port) as attempts:
        with pytest.raises(Unavailable):
            await connection.call("sandboxes")
        over = connection.loop.time() + 0.2
        await until(lambda: connection.loop.time() > over)
        before = len(attempts)
        with pytest.raises(Unavailable):
            await connection.call("sandboxes")
        assert len(attempts) == before + 1


async def test_a_call_that_waits_for_a_new_server_ends_with_its_connection(server: ScriptedServer) -> None:
    connection = server.connection(reconnect=60)
    reading = asyncio.create_task(connection.call("read"))
    await until(lambda: server.seen)
    await server.stop()
    await until(lambda: connection._resuming)
    await connection.close()
    with pytest.raises(ExecError, match="connection was lost"), anyio.fail_after(60):
        await reading


async def cancelled(call: asyncio.Task[object]) -> None:
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call


async def test_a_cancelled_call_that_did_not_begin_is_not_sent_again(server: ScriptedServer) -> None:
    connection = server.connection(reconnect=60)
    running = asyncio.create_task(connection.call("exec"))
    await until(lambda: connection._postponed)
    await cancelled(running)
    await server.stop()
    await server.start()
    await until(lambda: connection._socket is None)
    assert await connection.call("sandboxes") == ()
    assert server.seen == ["exec", "sandboxes"]
    await connection.close()


async def test_a_call_that_is_cancelled_without_a_server_is_not_sent_again(server: ScriptedServer) -> None:
    connection = server.connection(reconnect=60)
    reading = asyncio.create_task(connection.call("read"))
    await until(lambda: server.seen)
    await server.stop()
    await until(lambda: connection._resuming)
    await cancelled(reading)
    await server.start()
    await until(lambda: not connection._resuming)
    assert await connection.call("sandboxes") == ()
    assert server.seen == ["read", "sandboxes"]
    await connection.close()


async def test_an_answer_in_the_same_turn_as_the_cancellation(server: ScriptedServer) -> None:
    """Nobody waits for another one."""
    connection = server.connection(reconnect=0)
    reading = asyncio.create_task(connection.call("read"))
    await until(lambda: server.seen)
    (number,) = connection._calls
    reading.cancel()
    connection._receive(frames.HEAD.pack(Kind.RESULT, number) + codec.encode(b""))
    done, _ = await asyncio.wait([reading], timeout=CANCEL_SECONDS / 2)
    assert reading in done
    assert reading.cancelled()
    await connection.close()

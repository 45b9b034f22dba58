"""The sockets on which a server listens."""

from __future__ import annotations

import asyncio
import socket

import pytest

from dutyfree.server.listen import Address


@pytest.mark.parametrize("address", ["127.0.0.1:0", "[::1]:0"])
async def test_no_answer_waits_for_an_acknowledgement_and_lost_clients_are_found(address: str) -> None:
    accepted: asyncio.Future[asyncio.StreamWriter] = asyncio.get_running_loop().create_future()

    def serve(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        accepted.set_result(writer)

    listener = Address(address).bind()
    host, port = listener.getsockname()[:2]
    async with await asyncio.start_server(serve, sock=listener):
        _, writer = await asyncio.open_connection(host, port)
        theirs = (await accepted).get_extra_info("socket")
        assert theirs.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        assert theirs.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert theirs.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 120_000
        for one in (writer, accepted.result()):
            one.close()
            await one.wait_closed()

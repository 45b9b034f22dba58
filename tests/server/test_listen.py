"""The sockets on which a server listens."""

from __future__ import annotations

import asyncio
import os
import socket
from pathlib import Path

import pytest

from dutyfree.contract.errors import Unavailable
from dutyfree.server.listen import Address


def test_the_socket_of_a_program_that_listens_is_not_replaced(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(tmp_path / "s"))
        other.listen()
        address = Address(f"unix:{tmp_path}/s")
        with pytest.raises(Unavailable, match="a server listens there already"):
            address.bind()
        for leaving in (None, os.getppid()):
            with pytest.raises(Unavailable, match="a server listens there already"):
                address.check_free(leaving)
        address.check_free(os.getpid())
        assert (tmp_path / "s").is_socket()
    address.check_free(None)  # nobody listens any more
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
def test_a_port_is_free_once_the_process_that_listens_has_ended(host: str) -> None:
    with Address(f"{host}:0").bind() as other:
        address = Address(f"{host}:{other.getsockname()[1]}")
        for leaving in (None, os.getppid()):
            with pytest.raises(Unavailable, match="Address already in use"):
                address.check_free(leaving)
        address.check_free(os.getpid())
    address.check_free(None)


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

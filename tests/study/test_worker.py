"""The process of one substrate in a study."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from pathlib import Path

import anyio.to_thread
import pytest

from dutyfree.study.messages import Connection, Open, Opened, Reply

pytestmark = pytest.mark.anyio

HANGING = """
import time
from dutyfree.substrates.scripted import Scripted

class Hanging(Scripted):
    async def __aexit__(self, *details):
        time.sleep(1000)
"""


async def test_an_orphan_that_hangs_ends(tmp_path: Path) -> None:
    (tmp_path / "hanging.py").write_text(HANGING)
    ours, theirs = socket.socketpair()
    with theirs:
        descriptor = theirs.fileno()
        program = f"from dutyfree.study import worker; worker.main({descriptor}, 'asyncio', orphan_seconds=1)"
        process = await anyio.to_thread.run_sync(
            lambda: subprocess.Popen([sys.executable, "-c", program], pass_fds=[descriptor])
        )
    try:
        connection: Connection[Reply] = await Connection.on(ours, Reply)
        await connection.send(Open("hanging:Hanging", {}, [str(tmp_path), *sys.path]))
        assert isinstance(await connection.receive(), Opened)
        connection.abort()  # as if the study was killed
        assert await anyio.to_thread.run_sync(process.wait, 60) == -signal.SIGALRM
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("sent", [b"\xff" * 8, (5).to_bytes(8) + b"xxxxx", (9).to_bytes(8) + b"x"])
async def test_what_is_no_message_ends_the_connection(sent: bytes) -> None:
    ours, theirs = socket.socketpair()
    connection: Connection[Reply] = await Connection.on(ours, Reply)
    with theirs:
        theirs.sendall(sent)
        theirs.shutdown(socket.SHUT_WR)
        assert await connection.receive() is None
    connection.abort()

"""Services that lie to PID 1 about their forks. PID 1 is built with sanitizers, which abort on an error."""

from __future__ import annotations

import os
import textwrap
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import anyio
import pytest

import dutyfree
from dutyfree import Ready, Recipe, Service
from dutyfree.contract.errors import ActionError
from tests.engine import counts

pytestmark = pytest.mark.native

FORK = """
import array, os, resource, socket, struct, sys, time
def rights(*fds):
    return [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))]
def order():
    data, fds, _, _ = socket.recv_fds(control, 8, 1)
    return struct.unpack("=Q", data)[0], socket.socket(fileno=fds[0])
def take(mark):
    resource.setrlimit(resource.RLIMIT_RTTIME, (mark, mark))
def orphan():
    if os.fork():
        return False
    if os.fork():
        os._exit(0)
    while os.getppid() != 1:
        time.sleep(0.001)
    return True
control = socket.socket(fileno=3)
print("ready", flush=True)
while True:
    mark, connected = order()
"""

LIES = {
    "it is the service itself": "take(mark); connected.send(b'x'); time.sleep(1000)",
    "it is a child of the service": "os.fork() or (take(mark), connected.send(b'x'), time.sleep(1000))",
    "it has no mark": "orphan() and (connected.send(b'x'), time.sleep(1000))",
    "it has another mark": "orphan() and (take(mark - 1), connected.send(b'x'), time.sleep(1000))",
    "it says so again and again": (
        "orphan() and (take(mark), [connected.send(b'x') for _ in range(9)], time.sleep(1000))"
    ),
    "it says nothing": "orphan() and time.sleep(1000)",
    "it ends": "orphan() and (take(mark), connected.send(b'x'), os._exit(0))",
    "it sends descriptors": (
        "orphan() and (take(mark), connected.sendmsg([b'x'], rights(*[2] * 200)), time.sleep(1000))"
    ),
    "it talks to PID 1": "[control.send(b'x', socket.MSG_DONTWAIT) for _ in range(9)]; connected.close()",
    "the service hangs up": "control.close(); connected.close(); time.sleep(1000)",
    "the service ends": "time.sleep(0.2); sys.exit('no more')",
    "the service does not listen": "time.sleep(1000)",
}


@pytest.mark.parametrize("lie", list(LIES))
async def test_lies_hold_up_nobody_and_are_told(program: Path, lie: str) -> None:
    body = textwrap.indent(LIES[lie], "    ")
    service = Service("liar", ("python3", "-c", FORK + body), Ready(line="ready"), forks=True)
    before = set(counts.children(os.getpid()))
    async with AsyncExitStack() as stack:
        native = await stack.enter_async_context(dutyfree.open("native", program=str(program)))
        sandbox: Any = await stack.enter_async_context(native.sandbox(Recipe(services=(service,))))
        family = counts.Family(os.getpid(), before)
        await anyio.sleep(0.3)
        for _ in range(3):
            try:
                seen = await sandbox.call("liar", ["x"], timeout=0.5)
                assert not seen.ok or lie == "it ends"
            except ActionError as error:
                assert "liar" in str(error)  # noqa: PT017
        assert (await sandbox.exec("echo fine", timeout=60)).stdout == b"fine\n"
        assert (await sandbox.exec("sleep 60", timeout=0.2)).timed_out
        assert max(len(os.listdir(f"/proc/{init}/fd")) for init in counts.sandboxes(os.getpid())) < 40
    assert not family.remains()

"""Whether a connection is stuck: a part of pods that needs no cluster."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest

PROGRAM = """
import socket, subprocess, time
from dutyfree.substrates.kubernetes.stream import STUCK_MILLISECONDS, is_unacknowledged

def link(state):
    subprocess.run(["ip", "link", "set", "lo", state], check=True)

def connected(server):
    return socket.create_connection(server.getsockname()), server.accept()[0]

link("up")
with socket.create_server(("127.0.0.1", 0)) as server:
    full, unread = connected(server)
    quiet, unused = connected(server)
full.setblocking(False)
try:
    while True:
        full.send(bytes(1 << 16))
except BlockingIOError:
    pass
time.sleep(2 * STUCK_MILLISECONDS / 1000)
print(is_unacknowledged(full), is_unacknowledged(quiet))
link("down")
quiet.send(b"lost")
deadline = time.monotonic() + 60
while not is_unacknowledged(quiet) and time.monotonic() < deadline:
    time.sleep(0.05)
print(is_unacknowledged(quiet))
quiet.close()
print(is_unacknowledged(quiet))
"""


@pytest.mark.root("it makes a network namespace")
def test_a_connection_whose_other_end_does_not_acknowledge() -> None:
    """One that only does not read does acknowledge."""
    if not shutil.which("ip") or not shutil.which("unshare"):
        pytest.skip("no ip or unshare; to enable it: apt-get install iproute2 util-linux")
    command = ["unshare", "--net", sys.executable, "-c", PROGRAM]
    seen = subprocess.run(command, capture_output=True, text=True, check=True)
    assert seen.stdout.split() == ["False", "False", "True", "False"]

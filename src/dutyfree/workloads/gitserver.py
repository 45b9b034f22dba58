"""A git server on this host, for the sandboxes to clone the fixture from: git's own daemon."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import anyio

from dutyfree.contract.errors import DutyfreeError
from dutyfree.workloads.fixture import GIT_ENVIRONMENT, TRUSTING, Fixture

LOOPBACK = "127.0.0.1"
LISTENER = Path(__file__).with_name("inetd.py")


class GitServerError(DutyfreeError):
    """No git server could be had."""


class GitServer:
    """A running server. ``url(address)`` is what a sandbox clones from."""

    def __init__(self, port: int, process: subprocess.Popen[bytes]) -> None:
        self.port = port
        self._process = process

    def url(self, address: str = LOOPBACK) -> str:
        host = f"[{address}]" if ":" in address else address
        return f"git://{host}:{self.port}/attrs.git"

    def stop(self) -> None:
        """End the listener and every clone under way. Blocks."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()


@asynccontextmanager
async def serve(fixture: Fixture, addresses: Sequence[str] = (LOOPBACK,)) -> AsyncIterator[GitServer]:
    """Serve the fixture's repository, read-only, on each of ``addresses``.

    The server is gone when the context is left, and dies with this process whatever kills it.
    Raises GitServerError.
    """
    with anyio.CancelScope(shield=True):  # some 50 ms; a server that was started must be known here
        server = await anyio.to_thread.run_sync(start, fixture, addresses)
    try:
        yield server
    finally:
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(server.stop)


def start(fixture: Fixture, addresses: Sequence[str]) -> GitServer:
    """What ``serve`` does on entering; blocks until the server listens. Raises GitServerError."""
    command = [
        _daemon(),
        "--inetd",
        f"--base-path={fixture.served}",
        "--export-all",
        "--informative-errors",
        str(fixture.served),
    ]
    orders = json.dumps({"addresses": list(addresses), "command": command})
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", str(LISTENER), orders],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={"PATH": os.environ.get("PATH", os.defpath), **GIT_ENVIRONMENT, **TRUSTING},
        start_new_session=True,  # a Ctrl-C ends the rollouts first, then the server
    )
    assert process.stdout is not None
    answer = json.loads(process.stdout.readline() or b'{"error": "its listener could not start"}')
    server = GitServer(answer.get("port", 0), process)
    if "error" in answer:
        server.stop()
        raise GitServerError(
            f"a git server cannot listen on this host: {answer['error']}",
            remedy="check that the host has these addresses, or name a remote in the plan",
        )
    return server


def listening(address: str) -> str:
    """Where a service listens that sandboxes reach at a substrate's ``host_address``.

    There; or, if it is none of this host's addresses, on the loopback that it stands for.
    """
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as attempt:
        try:
            attempt.bind((address, 0))
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL:
                return LOOPBACK
    return address


def _daemon() -> str:
    """The daemon itself, without git's front end before it."""
    try:
        found = subprocess.run(["git", "--exec-path"], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise GitServerError("git was not found", remedy="install git") from None
    program = Path(found.stdout.strip(), "git-daemon")
    if found.returncode or not os.access(program, os.X_OK):
        raise GitServerError(
            "this git has no daemon", remedy="install git-daemon, or name a remote in the plan"
        )
    return str(program)

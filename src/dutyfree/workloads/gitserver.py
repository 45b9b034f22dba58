"""A git server on this host, from which sandboxes clone the fixture. It runs git's own daemon."""

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
from dutyfree.workloads.fixture import GIT_ENVIRONMENT, GIT_TRUST_ALL, Fixture

LOOPBACK = "127.0.0.1"
LISTENER = Path(__file__).with_name("inetd.py")


class GitServerError(DutyfreeError):
    """The git server could not be started."""


class GitServer:
    """A running server. A sandbox clones from ``url(address)``."""

    def __init__(self, port: int, repository: str, process: subprocess.Popen[bytes]) -> None:
        self.port = port
        self._repository = repository
        self._process = process

    def url(self, address: str = LOOPBACK) -> str:
        host = f"[{address}]" if ":" in address else address
        return f"git://{host}:{self.port}/{self._repository}"

    def stop(self) -> None:
        """Kill the listener and all running clones. Blocks."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()


@asynccontextmanager
async def serve(fixture: Fixture, addresses: Sequence[str] = (LOOPBACK,)) -> AsyncIterator[GitServer]:
    """Serve the fixture's repository, read-only, on each of ``addresses``.

    The server ends with the context, and with this process, even if that is killed.
    Raises GitServerError.
    """
    with anyio.CancelScope(shield=True):  # about 50 ms; otherwise a started server could get lost
        server = await anyio.to_thread.run_sync(start, fixture, addresses)
    try:
        yield server
    finally:
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(server.stop)


def start(fixture: Fixture, addresses: Sequence[str]) -> GitServer:
    """Start a server and wait until it listens. Blocks. Raises GitServerError."""
    command = [
        _daemon(),
        "--inetd",
        f"--base-path={fixture.served}",
        "--export-all",
        "--informative-errors",
        str(fixture.served),
    ]
    arguments = json.dumps({"addresses": list(addresses), "command": command})
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", str(LISTENER), arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={"PATH": os.environ.get("PATH", os.defpath), **GIT_ENVIRONMENT, **GIT_TRUST_ALL},
        start_new_session=True,  # Ctrl-C must end the rollouts first, then the server
    )
    assert process.stdout is not None
    answer = json.loads(process.stdout.readline() or b'{"error": "the listener did not start"}')
    server = GitServer(answer.get("port", 0), fixture.repository.name, process)
    if "error" in answer:
        server.stop()
        raise GitServerError(
            f"the git server cannot listen on this host: {answer['error']}",
            remedy="check that the host has these addresses, or set remote in the plan",
        )
    return server


def listen_address(address: str) -> str:
    """The address to listen at for sandboxes that connect to ``host_address`` of their substrate.

    It is the same address, or the loopback if this host does not have that address.
    """
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as attempt:
        try:
            attempt.bind((address, 0))
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL:
                return LOOPBACK
    return address


def _daemon() -> str:
    """The path of git-daemon, to start it without the git command in front."""
    try:
        found = subprocess.run(["git", "--exec-path"], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise GitServerError("git was not found", remedy="install git") from None
    program = Path(found.stdout.strip(), "git-daemon")
    if found.returncode or not os.access(program, os.X_OK):
        raise GitServerError("this git has no daemon", remedy="install git-daemon, or set remote in the plan")
    return str(program)

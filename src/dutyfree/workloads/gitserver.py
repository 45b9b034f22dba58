"""A git server on this host, for the sandboxes to clone the fixture from: git's own daemon."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import IO
from uuid import uuid4

import anyio

from dutyfree.errors import DutyfreeError
from dutyfree.substrates.reaper import Reaper, kill_marked
from dutyfree.workloads.fixture import GIT_ENVIRONMENT, Fixture

LOOPBACK = "127.0.0.1"


class GitServerError(DutyfreeError):
    """No git server could be had."""


class GitServer:
    """A running server. ``url(address)`` is what a sandbox clones from."""

    def __init__(self, port: int, addresses: Sequence[str]) -> None:
        self.port = port
        self.addresses = tuple(addresses)

    def url(self, address: str = LOOPBACK) -> str:
        host = f"[{address}]" if ":" in address else address
        return f"git://{host}:{self.port}/attrs.git"


@asynccontextmanager
async def serve(
    fixture: Fixture, addresses: Sequence[str] = (LOOPBACK,), *, deadline: float = 10
) -> AsyncIterator[GitServer]:
    """Serve the fixture's repository, read-only, on each of ``addresses``.

    The server is gone when the context is left, and dies with this process whatever kills it.
    Raises GitServerError.
    """
    program = await anyio.to_thread.run_sync(_program)
    marker = f"DUTYFREE_GITSERVER={uuid4().hex}"
    reaper = await anyio.to_thread.run_sync(lambda: Reaper(marker=marker))
    try:
        with tempfile.TemporaryFile() as log:
            port = _free_port(addresses)
            process = await anyio.to_thread.run_sync(_start, program, fixture, addresses, port, marker, log)
            try:
                with anyio.move_on_after(deadline) as waiting:
                    for address in addresses:
                        await _reachable(process, address, port)
                if waiting.cancelled_caught or process.poll() is not None:
                    raise GitServerError(
                        f"git daemon does not answer on {', '.join(addresses)}: {_said(log)}",
                        remedy="check that this host has these addresses, or name a remote in the plan",
                    )
                yield GitServer(port, addresses)
            finally:
                with anyio.CancelScope(shield=True):
                    await anyio.to_thread.run_sync(_stop, process, marker)
    finally:
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(reaper.dismiss)


def _program() -> str:
    """The daemon itself, not git's front end, which would stay as its parent."""
    try:
        found = subprocess.run(["git", "--exec-path"], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise GitServerError("git was not found", remedy="install git") from None
    program = os.path.join(found.stdout.strip(), "git-daemon")
    if found.returncode or not os.access(program, os.X_OK):
        raise GitServerError(
            "this git has no daemon", remedy="install git-daemon, or name a remote in the plan"
        )
    return program


def _free_port(addresses: Sequence[str]) -> int:
    """A port that is free on every address; git daemon takes one for all."""
    for _ in range(100):
        with contextlib.ExitStack() as stack:
            port = 0
            try:
                for address in addresses:
                    family = socket.AF_INET6 if ":" in address else socket.AF_INET
                    probe = stack.enter_context(socket.socket(family, socket.SOCK_STREAM))
                    probe.bind((address, port))
                    port = probe.getsockname()[1]
            except OSError as error:
                if not port:
                    raise GitServerError(
                        f"this host cannot listen on {address}: {error.strerror}",
                        remedy="name a remote in the plan",
                    ) from error
                continue
            return port
    raise GitServerError(f"no port is free on all of {', '.join(addresses)}", remedy="close some servers")


def _start(
    program: str, fixture: Fixture, addresses: Sequence[str], port: int, marker: str, log: IO[bytes]
) -> subprocess.Popen[bytes]:
    name, _, value = marker.partition("=")
    return subprocess.Popen(
        [
            program,
            f"--base-path={fixture.served}",
            "--export-all",
            "--reuseaddr",
            "--informative-errors",
            "--max-connections=0",  # many rollouts may clone at once
            *(f"--listen={address}" for address in addresses),
            f"--port={port}",
            str(fixture.served),
        ],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=log,
        env={
            "PATH": os.environ.get("PATH", os.defpath),
            **GIT_ENVIRONMENT,
            "GIT_CONFIG_COUNT": "1",
            "GIT_CONFIG_KEY_0": "safe.directory",
            "GIT_CONFIG_VALUE_0": "*",
            name: value,
        },
        start_new_session=True,  # a Ctrl-C ends the rollouts first, then the server
    )


async def _reachable(process: subprocess.Popen[bytes], address: str, port: int) -> None:
    """Return when the server answers at ``address``, or has ended."""
    while process.poll() is None:
        try:
            stream = await anyio.connect_tcp(address, port)
        except OSError:
            await anyio.sleep(0.005)  # git daemon says nothing when it is ready
        else:
            await stream.aclose()
            return


def _said(log: IO[bytes]) -> str:
    log.seek(0)
    return log.read()[-300:].decode(errors="replace").strip() or "it says nothing"


def _stop(process: subprocess.Popen[bytes], marker: str) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    kill_marked(marker)

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import anyio
import pytest

from dutyfree.workloads.fixture import GIT_ENVIRONMENT, Fixture
from dutyfree.workloads.gitserver import LISTENER, GitServerError, listen_address, serve, start
from dutyfree.workloads.project import ATTRS
from tests.awaiting import enter
from tests.processes import eventually, speaking, speaking_python

OWNER = """
import pathlib, signal, sys
from dutyfree import paths
from dutyfree.workloads.fixture import build
from dutyfree.workloads.gitserver import start
server = start(build(paths.cache()), ["127.0.0.1"])
print(server.port, server._process.pid, flush=True)
signal.pause()
"""


async def git(*arguments: str) -> subprocess.CompletedProcess[bytes]:
    return await anyio.run_process(["git", *arguments], env={**os.environ, **GIT_ENVIRONMENT}, check=False)


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


async def test_clones_and_is_gone_afterwards(fixture: Fixture, tmp_path: Path) -> None:
    async with serve(fixture, ["127.0.0.1", "127.0.0.2"]) as server:
        for address in ("127.0.0.1", "127.0.0.2"):
            target = str(tmp_path / address)
            assert (await git("clone", "--quiet", server.url(address), target)).returncode == 0
            assert (await git("-C", target, "rev-parse", "HEAD")).stdout.decode().strip() == ATTRS.commit
        pushed = await git("-C", target, "push", "origin", "HEAD:refs/heads/other")
        assert pushed.returncode != 0
        missing = await git("ls-remote", server.url().replace("attrs.git", "other.git"))
        assert missing.returncode != 0
    assert not listens(server.port)


async def test_many_clones_at_once(fixture: Fixture) -> None:
    async with serve(fixture) as server, anyio.create_task_group() as group:

        async def look() -> None:
            assert ATTRS.commit.encode() in (await git("ls-remote", server.url())).stdout

        for _ in range(32):
            group.start_soon(look)


def test_the_backlog_holds_a_crowd(fixture: Fixture) -> None:
    server = start(fixture, ["127.0.0.1"])
    try:
        os.kill(server._process.pid, signal.SIGSTOP)
        with ExitStack() as stack:
            for _ in range(64):  # nobody takes one off: those beyond the backlog would wait for ever
                stack.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=60))
    finally:
        server.stop()


@contextmanager
def listener(command: list[str]) -> Iterator[tuple[subprocess.Popen[str], int]]:
    orders = json.dumps({"addresses": ["127.0.0.1"], "command": command})
    options = {"stdin": subprocess.PIPE, "stderr": subprocess.DEVNULL, "start_new_session": True}
    with speaking(sys.executable, "-I", "-S", str(LISTENER), orders, **options) as (process, said):
        yield process, json.loads(said)["port"]
        process.kill()


def answer(port: int) -> bytes:
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        return connection.recv(100)


def test_a_program_that_cannot_be_started_does_not_end_it() -> None:
    with listener(["/no/such/program"]) as (process, port):
        assert [answer(port) for _ in range(3)] == [b"", b"", b""]
        assert process.poll() is None


def test_it_goes_on_once_there_are_descriptors_again() -> None:
    with listener(["/bin/echo", "served"]) as (process, port):
        assert answer(port) == b"served\n"
        before = resource.prlimit(process.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (4, before[1]))
        with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
            time.sleep(0.2)
            assert process.poll() is None
            resource.prlimit(process.pid, resource.RLIMIT_NOFILE, before)
            assert connection.recv(100) == b"served\n"


def test_dies_with_its_owner(fixture: Fixture) -> None:
    with speaking_python(OWNER) as (owner, said):
        port, pid = map(int, said.split())
        assert listens(port)
        owner.kill()
    assert eventually(lambda: not Path(f"/proc/{pid}").exists())
    assert not listens(port)


def test_where_a_service_listens_for_sandboxes() -> None:
    assert listen_address("127.0.0.2") == "127.0.0.2"
    assert listen_address("::1") == "::1"
    assert listen_address("192.0.2.1") == "127.0.0.1"  # it stands for the loopback


async def test_an_address_of_another_host_is_refused(fixture: Fixture) -> None:
    with pytest.raises(GitServerError, match=r"192\.0\.2\.1: Cannot assign") as raised:
        await enter(serve(fixture, ["127.0.0.1", "192.0.2.1"]))
    assert "remote" in raised.value.remedy


async def test_without_git(fixture: Fixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(GitServerError, match="git was not found"):
        await enter(serve(fixture))
    (tmp_path / "git").write_text("#!/bin/sh\necho /nowhere\n")
    (tmp_path / "git").chmod(0o755)
    with pytest.raises(GitServerError, match="this git has no daemon"):
        await enter(serve(fixture))

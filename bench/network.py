"""Network from a sandbox, compared with the loopback of the host and with Docker's bridge."""

from __future__ import annotations

import asyncio
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from time import perf_counter

from rounds import Measured, Row, Side, figure, interleaved, ratio

import dutyfree
from dutyfree import Limits, paths
from dutyfree.contract import Sandbox
from dutyfree.workloads.fixture import build
from dutyfree.workloads.gitserver import serve

CONNECTIONS = 20
BYTES = 1 << 30
ALL = "0.0.0.0"  # noqa: S104 (Docker reaches the host by another address)

SERVER = """
import socket, threading
server = socket.create_server(("0.0.0.0", 0), backlog=1024)
print(server.getsockname()[1], flush=True)
chunk = bytes(1 << 20)
def serve(connected):
    with connected:
        left = int(connected.recv(20))
        while left > 0:
            connected.sendall(chunk[:left])
            left -= len(chunk)
while True:
    threading.Thread(target=serve, args=(server.accept()[0],), daemon=True).start()
"""

CONNECT = """
import socket, statistics, sys, time
seconds = []
for _ in range(int(sys.argv[3])):
    start = time.perf_counter()
    with socket.create_connection((sys.argv[1], int(sys.argv[2]))) as connected:
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connected.sendall(b"1")
        connected.recv(1)
    seconds.append(time.perf_counter() - start)
print(statistics.median(seconds))
"""

FETCH = """
import socket, sys, time
buffer = bytearray(1 << 20)
start = time.perf_counter()
with socket.create_connection((sys.argv[1], int(sys.argv[2]))) as connected:
    connected.sendall(sys.argv[3].encode())
    while connected.recv_into(buffer):
        pass
print(time.perf_counter() - start)
"""


@contextmanager
def server() -> Iterator[int]:
    process = subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield int(process.stdout.readline())
    finally:
        process.kill()
        process.communicate()


def on_host(program: str, port: int, count: int) -> Side:
    command = ["/usr/bin/python3", "-c", program, "127.0.0.1", str(port), str(count)]

    async def side() -> float:
        return float(subprocess.run(command, capture_output=True, check=True).stdout)

    return side


def in_sandbox(sandbox: Sandbox, address: str, program: str, port: int, count: int) -> Side:
    async def side() -> float:
        seen = await sandbox.exec(["python3", "-c", program, address, str(port), str(count)])
        return float(seen.stdout)

    return side


async def network(rounds: int) -> list[Row]:
    """N1 to N4: connections, throughput, git clone, and the cost of a network at creation."""
    rows = []
    limits = Limits(network="on")
    async with AsyncExitStack() as stack:
        sandboxes: dict[str, tuple[Sandbox, str]] = {}
        for name in ("native", "docker"):
            if not (await dutyfree.substrates.probe(name)).available:
                continue
            substrate = await stack.enter_async_context(dutyfree.open(name))
            if substrate.host_address is not None:
                sandbox = await stack.enter_async_context(substrate.sandbox(limits=limits))
                sandboxes[name] = sandbox, substrate.host_address
        with server() as port:
            for program, count, repeated, identity, what in (
                (CONNECT, CONNECTIONS, rounds, "N1", "connect and receive one byte"),
                (FETCH, BYTES, max(3, rounds // 10), "N2", "receive 1 GiB"),
            ):
                sides = {"host": on_host(program, port, count)}
                for name, (sandbox, address) in sandboxes.items():
                    sides[name] = in_sandbox(sandbox, address, program, port, count)
                rows += _beside_host(identity, what, await interleaved(repeated, sides))
        rows += _beside_host("N3", "git clone of the study's repository", await _clones(rounds, sandboxes))
    return [*rows, await _creation(4 * rounds)]


def _beside_host(identity: str, what: str, found: Measured) -> list[Row]:
    rows = [figure(identity, f"{what}, host, ms", statistics.median(found["host"]) * 1e3, found["host"])]
    return rows + [
        ratio(f"{identity} {name}", f"{what}, {name} ÷ host", found[name], found["host"])
        for name in found
        if name != "host"
    ]


async def _clones(rounds: int, sandboxes: dict[str, tuple[Sandbox, str]]) -> Measured:
    fixture = await asyncio.to_thread(build, paths.cache())
    async with serve(fixture, [ALL]) as git:

        def cloning(sandbox: Sandbox, url: str) -> Side:
            async def clone() -> float:
                start = perf_counter()
                seen = await sandbox.exec(["git", "clone", "-q", url, "copy"])
                seconds = perf_counter() - start
                assert seen.ok, seen.stderr
                await sandbox.exec(["rm", "-rf", "copy"])
                return seconds

            return clone

        async def host() -> float:
            with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
                start = perf_counter()
                subprocess.run(["git", "clone", "-q", git.url(), Path(directory, "copy")], check=True)
                return perf_counter() - start

        sides: dict[str, Side] = {"host": host}
        for name, (sandbox, address) in sandboxes.items():
            sides[name] = cloning(sandbox, git.url(address))
        return await interleaved(rounds, sides)


async def _creation(rounds: int) -> Row:
    async with dutyfree.open("native") as substrate:

        def creating(limits: Limits) -> Side:
            async def create() -> None:
                async with substrate.sandbox(limits=limits) as sandbox:
                    await sandbox.exec(["/bin/true"])

            return create

        found = await interleaved(
            rounds,
            {"on": creating(Limits(network="on")), "off": creating(Limits())},
        )
    return ratio("N4", "create, exec, remove: network on ÷ off", found["on"], found["off"])

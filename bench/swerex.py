"""SWE-ReX's own server beside ours, with the same requests: a command, a file, and a new environment.

    make test-integrations ARGS=--co        # installs SWE-ReX into .venv-integrations
    scripts/with-docker .venv/bin/python bench/swerex.py [--rounds 200]

Three servers answer the wire of SWE-ReX's remote runtime in turn: SWE-ReX's on the host, SWE-ReX's in a
Docker container of the study's image (if there is an engine that has it), and ours, where every command runs
in an isolated sandbox. The client is the same plain HTTP client with kept connections, except that SWE-ReX's
own client makes a new connection for each request, which is measured apart. A new environment is a new
server process for SWE-ReX, since one server is one environment; for ours it is a new sandbox.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import re
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from time import perf_counter

ROOT = Path(__file__).resolve().parents[1]
PYTHON = ROOT / ".venv-integrations" / "bin" / "python"
IMAGE = "dutyfree/study:latest"
TOKEN = "bench"  # noqa: S105 (it protects nothing)
CONTENT = "x" * 4096
CREATIONS = 10


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Client:
    """Requests of SWE-ReX's wire over plain HTTP."""

    def __init__(self, port: int, prefix: str = "", *, kept: bool = True) -> None:
        self._port = port
        self._prefix = prefix
        self._kept = kept
        self._connection: http.client.HTTPConnection | None = None

    def post(self, path: str, body: object, method: str = "POST") -> object:
        connection = self._connection
        if connection is None:
            connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=60)
            connection.connect()
            connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        headers = {"X-API-Key": TOKEN, "Content-Type": "application/json"}
        connection.request(method, self._prefix + path, json.dumps(body), headers)
        answer = connection.getresponse()
        data = answer.read()
        assert answer.status == 200, (answer.status, data[:300])
        if self._kept:
            self._connection = connection
        else:
            connection.close()
        return json.loads(data)

    def exec(self) -> None:
        found = self.post("/execute", {"command": ["/bin/true"], "shell": False, "timeout": 60})
        assert isinstance(found, dict)
        assert found["exit_code"] == 0, found

    def write(self, path: str) -> None:
        self.post("/write_file", {"path": path, "content": CONTENT})

    def read(self, path: str) -> None:
        found = self.post("/read_file", {"path": path})
        assert isinstance(found, dict)
        assert found["content"] == CONTENT

    def until_alive(self) -> None:
        while True:
            try:
                self.post("/is_alive", None, "GET")
            except (OSError, http.client.HTTPException):
                self._connection = None
                time.sleep(0.005)
            else:
                return


@contextmanager
def swerex_on_host() -> Iterator[int]:
    port = free_port()
    command = [str(PYTHON), "-m", "swerex.server", "--host", "127.0.0.1", "--port", str(port)]
    with subprocess.Popen(
        [*command, "--auth-token", TOKEN], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        try:
            Client(port).until_alive()
            yield port
        finally:
            process.kill()


@contextmanager
def swerex_in_docker() -> Iterator[int]:
    port = free_port()
    (packages,) = (ROOT / ".venv-integrations" / "lib").glob("python3*/site-packages")
    arguments = ["--rm", "--network", "host", "-v", f"{packages}:/swerex:ro", "-e", "PYTHONPATH=/swerex"]
    inside = ["python3", "-m", "swerex.server", "--host", "127.0.0.1", "--port", str(port)]
    name = f"dutyfree-bench-{os.getpid()}-{port}"
    command = ["docker", "run", "--name", name, *arguments, IMAGE, *inside, "--auth-token", TOKEN]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            Client(port).until_alive()
            yield port
        finally:
            subprocess.run(["docker", "rm", "-f", name], capture_output=True, check=False)
            process.wait()


@contextmanager
def ours() -> Iterator[int]:
    with tempfile.TemporaryDirectory() as state:
        command = ["serve", "--listen", "127.0.0.1:0", "--state", state, "--until-eof"]
        with subprocess.Popen(
            [sys.executable, "-m", "dutyfree", *command, "--log-level", "warning"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as process:
            assert process.stdout is not None
            assert process.stdin is not None
            found = re.search(r"serving sandboxes at http://127.0.0.1:(\d+);", process.stdout.readline())
            assert found is not None
            yield int(found[1])
            process.stdin.close()


def new_sandbox(port: int) -> None:
    """A new environment of ours, with the result of its first command."""
    connection = http.client.HTTPConnection("127.0.0.1", port)
    connection.connect()
    connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.request("POST", "/v1/sandboxes", "{}")
    made = json.loads(connection.getresponse().read())["id"]
    connection.request("POST", f"/v1/sandboxes/{made}/exec", json.dumps({"command": ["/bin/true"]}))
    assert json.loads(connection.getresponse().read())["exit_code"] == 0
    connection.request("DELETE", f"/v1/sandboxes/{made}")
    connection.getresponse().read()


def new_server(start: Callable[[], object]) -> None:
    """A new environment of SWE-ReX, with the result of its first command."""
    with start() as port:  # type: ignore[attr-defined]
        Client(port).exec()


def timed(rounds: int, sides: dict[str, Callable[[], None]]) -> dict[str, list[float]]:
    """Seconds of each side, once per round, in random order; the first tenth is left out."""
    found: dict[str, list[float]] = {name: [] for name in sides}
    order, chance = list(sides), random.Random(1)  # noqa: S311 (an order, not a secret)
    for number in range(rounds + rounds // 10):
        chance.shuffle(order)
        for name in order:
            start = perf_counter()
            sides[name]()
            if number >= rounds // 10:
                found[name].append(perf_counter() - start)
    return found


def report(what: str, found: dict[str, list[float]]) -> None:
    base = statistics.median(found["dutyfree"])
    for name, seconds in found.items():
        p50, p95 = statistics.median(seconds), sorted(seconds)[int(0.95 * (len(seconds) - 1))]
        print(f"{what:16} {name:28} {p50 * 1e3:10.3f} {p95 * 1e3:10.3f} {p50 / base:8.2f} {len(seconds):6}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=200)
    rounds = parser.parse_args().rounds
    if not PYTHON.exists():
        sys.exit("SWE-ReX is not installed: run make test-integrations ARGS=--co")
    has_docker = shutil.which("docker") is not None and (
        subprocess.run(["docker", "image", "inspect", IMAGE], capture_output=True, check=False).returncode
        == 0
    )
    print(f"{time.strftime('%Y-%m-%d')}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    print(f"{'':16} {'':28} {'p50 ms':>10} {'p95 ms':>10} {'÷ ours':>8} {'n':>6}")
    with ExitStack() as stack:
        servers = {"dutyfree": stack.enter_context(ours()), "SWE-ReX": stack.enter_context(swerex_on_host())}
        if has_docker:
            servers["SWE-ReX in Docker"] = stack.enter_context(swerex_in_docker())
        prefixes = {"dutyfree": "/swerex/bench"}
        clients = {name: Client(port, prefixes.get(name, "")) for name, port in servers.items()}
        for client in clients.values():
            client.write("/tmp/bench-file")
        report("exec", timed(rounds, {name: client.exec for name, client in clients.items()}))
        reads = {name: partial(client.read, "/tmp/bench-file") for name, client in clients.items()}
        report("read 4 KiB", timed(rounds, reads))
        anew = {name: Client(port, prefixes.get(name, ""), kept=False) for name, port in servers.items()}
        report("exec, connect", timed(rounds, {name: client.exec for name, client in anew.items()}))
        creations = {
            "dutyfree": lambda: new_sandbox(servers["dutyfree"]),
            "SWE-ReX": lambda: new_server(swerex_on_host),
        }
        if has_docker:
            creations["SWE-ReX in Docker"] = lambda: new_server(swerex_in_docker)
        report("new, first exec", timed(CREATIONS, creations))


if __name__ == "__main__":
    main()

"""Two nodes on one machine: two caches, servers for them, and proxies that disturb what the servers send."""

from __future__ import annotations

import contextlib
import os
import re
import select
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

from dutyfree import layers
from dutyfree.contract import Recipe, Stage
from dutyfree.server.tokens import Tokens

CLONE = Stage("repository", commands=("sleep 0.3; date +%N > stamp; head -c 3000000 /dev/urandom > one",))
INSTALL = Stage("dependencies", commands=("sleep 0.3; cat stamp > copy; head -c 5000000 /dev/urandom > two",))
RECIPE = Recipe(stages=(CLONE, INSTALL))


class Nodes:
    """Two nodes: two caches, one of which is in use."""

    def __init__(
        self, root: Path, session: Path, use: Callable[[Path], None], stack: contextlib.ExitStack
    ) -> None:
        self.root = root
        self.session = session
        """A directory that all tests share."""
        self.here, self.there = root / "here", root / "there"
        self.use = use
        self._stack = stack
        with Tokens(root / "tokens.sqlite") as tokens:
            self.token = tokens.create("operator")
        """It is valid for all servers."""

    def carried(self, way: str, what: layers.What) -> str:
        """The source for the layers at ``here``, over one of several transports."""
        if way == "cache":
            return str(self.here)
        if way == "server":
            return self.served()
        self.use(self.here)
        target = self.root / ("exported.tar" if way == "archive" else "exported/")
        layers.export([what], f"{target}/" if way == "directory" else target)
        return str(target)

    def served(self, node: Path | None = None) -> str:
        """The URL of a server of a node's layers, which runs until the end of the test."""
        return self._stack.enter_context(self.listening(node or self.here)).source

    def through(self, change: Change, node: Path | None = None) -> str:
        """The URL of a proxy in front of such a server, until the end of the test."""
        return self._stack.enter_context(proxied(self.served(node), change))

    def kept(self, node: Path) -> list[str]:
        return sorted(str(path.relative_to(node)) for path in node.glob("layers/kept/*/*"))

    @contextlib.contextmanager
    def listening(self, node: Path, *arguments: str, port: int = 0) -> Iterator[Server]:
        """Run a server of a node's layers. It is killed at the end, and leaves nothing."""
        state = Path(tempfile.mkdtemp(dir=self.root))
        with Tokens(state / "server.sqlite") as tokens:
            tokens.create("operator", self.token)
        command = ["serve", "--listen", f"127.0.0.1:{port}", "--state", str(state), *arguments]
        process = subprocess.Popen(
            [sys.executable, "-m", "dutyfree", *command, "--until-eof"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "DUTYFREE_CACHE": str(node)},
            text=True,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            found = re.search(r"serving sandboxes at (\S+);", process.stdout.readline())
            assert found
            yield Server(process, found[1])
        finally:
            process.kill()
            process.wait()
            process.stdin.close()
            process.stdout.close()


class Server:
    def __init__(self, process: subprocess.Popen[str], source: str) -> None:
        self.process = process
        self.source = source


@contextlib.contextmanager
def reserved() -> Iterator[int]:
    """Reserve a loopback port for servers that are started and stopped."""
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # so that a server can bind it too
        taken.bind(("127.0.0.1", 0))
        yield taken.getsockname()[1]


# --- Proxies -------------------------------------------------------------------------------------------

Change = Callable[[bytes, int, socket.socket], bytes]
"""What a proxy sends instead of some bytes of the server, given how many it has passed on in all, and the
connection to the client. Nothing: it hangs up."""


@contextlib.contextmanager
def listener(answer: Callable[[socket.socket], None]) -> Iterator[str]:
    """The URL of a server that answers each connection with a function, in a thread of its own."""
    with socket.create_server(("127.0.0.1", 0)) as server, contextlib.ExitStack() as open_ones:

        def talk(connection: socket.socket) -> None:
            with contextlib.suppress(OSError):
                answer(connection)

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = server.accept()
                    open_ones.callback(connection.close)
                    threading.Thread(target=talk, args=(connection,), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        yield "http://{}:{}".format(*server.getsockname())
        server.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def proxied(source: str, change: Change) -> Iterator[str]:
    """A proxy in front of a server."""
    parts = urlsplit(source)
    passed = 0

    def answer(client: socket.socket) -> None:
        nonlocal passed
        with socket.create_connection((parts.hostname or "", parts.port or 0)) as server:
            threading.Thread(target=forward, args=(client, server), daemon=True).start()
            try:
                while (data := server.recv(65536)) and (data := change(data, passed, client)):
                    client.sendall(data)
                    passed += len(data)
            finally:
                client.shutdown(socket.SHUT_RDWR)

    with listener(answer) as found:
        yield found


def forward(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            target.sendall(data)
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_RDWR)


def unchanged(data: bytes, _passed: int, _client: socket.socket) -> bytes:
    return data


def slowly(data: bytes, _passed: int, _client: socket.socket) -> bytes:
    time.sleep(0.02)
    return data


def cut(count: int) -> Change:
    """Pass some bytes in all, then hang up at once, also on new connections."""
    return lambda data, passed, _: data[: max(0, count - passed)]


def held(count: int) -> Change:
    """Pass some bytes in all, then hang until the client is gone."""

    def change(data: bytes, passed: int, client: socket.socket) -> bytes:
        if passed < count:
            return data[: count - passed]
        gone = select.poll()
        gone.register(client, select.POLLRDHUP | select.POLLHUP)
        gone.poll()
        return b""

    return change


def flipped(at: int) -> Change:
    """Change one byte."""

    def change(data: bytes, passed: int, _client: socket.socket) -> bytes:
        if passed <= at < passed + len(data):
            there = at - passed
            return data[:there] + bytes([data[there] ^ 1]) + data[there + 1 :]
        return data

    return change

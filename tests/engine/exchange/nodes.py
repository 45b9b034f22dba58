"""Two nodes on one machine: two caches, and servers for them."""

from __future__ import annotations

import contextlib
import os
import shlex
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from dutyfree import layers
from dutyfree.contract import Recipe, Stage
from tests.processes import eventually

CLONE = Stage("repository", commands=("sleep 0.3; date +%N > stamp; head -c 3000000 /dev/urandom > one",))
INSTALL = Stage("dependencies", commands=("sleep 0.3; cat stamp > copy; head -c 5000000 /dev/urandom > two",))
RECIPE = Recipe(stages=(CLONE, INSTALL))
TOKEN = "a-token-of-many-characters"


class Nodes:
    """Two nodes: two caches, one of which is in use."""

    def __init__(self, root: Path, session: Path, use: Callable[[Path], None]) -> None:
        self.root = root
        self.session = session
        """A directory that all tests share."""
        self.here, self.there = root / "here", root / "there"
        self.use = use

    def carried(self, way: str, what: layers.What) -> str:
        """The source for the layers at ``here``, over one of several transports."""
        if way == "cache":
            return str(self.here)
        if way == "command":
            return f"exec:env DUTYFREE_CACHE={self.here} {sys.executable} -m dutyfree layer serve"
        self.use(self.here)
        target = self.root / ("exported.tar" if way == "archive" else "exported/")
        layers.export([what], f"{target}/" if way == "directory" else target)
        return str(target)

    def kept(self, node: Path) -> list[str]:
        return sorted(str(path.relative_to(node)) for path in node.glob("layers/kept/*/*"))

    @contextlib.contextmanager
    def listening(self, node: Path, *, token: str = "", port: int = 0) -> Iterator[Server]:
        """Run a server of a node's layers."""
        environment = {**os.environ, "DUTYFREE_CACHE": str(node), "DUTYFREE_PEER_TOKEN": token}
        process = subprocess.Popen(
            [sys.executable, "-m", "dutyfree", "layer", "serve", "--bind", f"127.0.0.1:{port}"],
            stderr=subprocess.PIPE,
            env=environment,
            text=True,
        )
        assert process.stderr is not None
        try:
            said = process.stderr.readline()
            assert "tcp://" in said, said
            yield Server(process, said.split()[-1])
        finally:
            process.kill()
            process.wait()
            process.stderr.close()


class Server:
    def __init__(self, process: subprocess.Popen[str], source: str) -> None:
        self.process = process
        self.source = source

    @property
    def address(self) -> tuple[str, int]:
        host, _, port = self.source.removeprefix("tcp://").rpartition(":")
        return host, int(port)


@contextlib.contextmanager
def reserved() -> Iterator[int]:
    """Reserve a loopback port for servers that are started and stopped."""
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # so that a server can bind it too
        taken.bind(("127.0.0.1", 0))
        yield taken.getsockname()[1]


def over(*search: str) -> bool:
    """Wait until ``pgrep`` finds no process. False if it still does."""
    return bool(eventually(lambda: subprocess.run(["pgrep", *search], capture_output=True).returncode))


def pipe(node: Path, through: str) -> str:
    """A peer whose answers pass through a Python program."""
    serve = f"DUTYFREE_CACHE={node} {sys.executable} -m dutyfree layer serve"
    return f"exec:sh -c {shlex.quote(f'{serve} | exec {sys.executable} -c {shlex.quote(through)}')}"


THROUGH = "import os, time\nwhile data := os.read(0, 99999): os.write(1, data)"
SLOWLY = f"{THROUGH}; time.sleep(0.02)"


def held(count: int) -> str:
    """A program that passes some bytes, then hangs until its reader is gone."""
    return (
        f"import os, select\nleft = {count}\nwhile left: left -= os.write(1, os.read(0, min(left, 99999)))\n"
        "gone = select.poll(); gone.register(1, 0); gone.poll()"
    )


def cut(count: int) -> str:
    """A program that passes some bytes, then exits."""
    return f"import os\nleft = {count}\nwhile left: left -= os.write(1, os.read(0, min(left, 99999)))"

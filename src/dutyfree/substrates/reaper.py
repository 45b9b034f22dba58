"""The last one out: removes what a substrate made when its owner dies without doing so.

The owner starts it as a process of its own and holds the write end of its standard input. Whatever
happens to the owner, SIGKILL included, that pipe closes, and the reaper does what it was told at its
start; when the owner ends well it says so first, and the reaper has nothing to do. It ignores
SIGINT and SIGTERM and lives in a session of its own, so that a Ctrl-C or a kill of the owner's process
group does not reach it.

Only the standard library: the module runs with ``python -I -S`` in about 15 ms.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from http.client import HTTPConnection, HTTPException
from pathlib import Path

DONE = b"done\n"


class Reaper:
    """The owner's handle on its reaper.

    ``directory`` is removed, processes whose environment holds ``marker`` (``NAME=value``) are killed,
    and containers and images with ``label`` on the Docker engine at ``docker`` are removed.
    """

    def __init__(self, *, directory: str = "", marker: str = "", docker: str = "", label: str = "") -> None:
        orders = {"directory": directory, "marker": marker, "docker": docker, "label": label}
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, json.dumps(orders)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def dismiss(self) -> None:
        """The owner has cleaned up itself."""
        with contextlib.suppress(BrokenPipeError):
            self._process.communicate(DONE)

    def engage(self) -> None:
        """The owner could not clean up: the reaper shall try, while the owner goes on."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.returncode = 0  # nobody waits for it


def last_pid() -> int:
    """The pid that the kernel gave out last in this pid namespace."""
    with open("/proc/loadavg", "rb") as file:
        return int(file.read().split()[-1])


def kill_all(find: Callable[[], set[int]]) -> int:
    """Kill what ``find`` finds, again until it finds nothing. Returns how many were killed.

    All stand still before the first dies: else a shell whose child died would go on to its next line.
    """
    killed: set[int] = set()
    for _ in range(100):
        stopped: set[int] = set()
        while new := find() - stopped:
            _signal(new, signal.SIGSTOP)
            stopped |= new
        _signal(stopped, signal.SIGKILL)
        killed |= stopped
        if not stopped:
            break
    return len(killed)


def _signal(processes: set[int], number: signal.Signals) -> None:
    for process in sorted(processes):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(process, number)


def kill_marked(marker: str, since: int = 0, strays: str = "") -> int:
    """Kill every process whose environment holds ``marker``. Returns how many.

    The mark is inherited across fork, exec and setsid, so it finds what left the process group. A
    process may still have emptied its environment: in the directory ``strays``, all that bear no mark
    and have no terminal are killed too. ``since`` is a ``last_pid()`` before the first of them: older
    processes need not be looked at.
    """

    def find() -> set[int]:
        wrapped = last_pid() < since
        return set(_marked(marker.encode(), 0 if wrapped else since, strays))

    return kill_all(find)


def _marked(marker: bytes, since: int, strays: str) -> Iterator[int]:
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) <= since or int(name) == os.getpid():
            continue
        try:
            with open(f"/proc/{name}/environ", "rb") as file:
                environment = file.read()
            with open(f"/proc/{name}/stat", "rb") as file:
                state, _, _, _, terminal, *_ = file.read().rpartition(b")")[2].split()
            stray = strays and b"DUTYFREE_" not in environment and terminal == b"0" and _within(name, strays)
            if state not in b"ZX" and (stray or marker in environment.split(b"\0")):
                yield int(name)
        except OSError:
            continue  # it ended, or is not ours to see


def _within(pid: str, directory: str) -> bool:
    return f"{os.readlink(f'/proc/{pid}/cwd')}/".startswith(f"{directory}/")


class _UnixConnection(HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=60)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def remove_containers(path: str, label: str) -> int:
    """Remove containers and images with ``label`` (``name=value``), running ones too. Returns how many."""
    from urllib.parse import quote

    connection = _UnixConnection(path)
    filters = quote(json.dumps({"label": [label]}))
    removed = 0
    # Containers first: an image cannot go while something is made from it, and is tried again later.
    for kind, query in (("containers", "force=1&v=1"), ("images", "")):
        connection.request("GET", f"/{kind}/json?all={int(kind == 'containers')}&filters={filters}")
        for found in json.loads(connection.getresponse().read()):
            connection.request("DELETE", f"/{kind}/{found['Id']}?{query}")
            response = connection.getresponse()
            response.read()
            removed += response.status < 300
    return removed


def _clean(orders: dict[str, str]) -> None:
    if orders["marker"]:
        kill_marked(orders["marker"], strays=orders["directory"])
    if orders["directory"]:
        shutil.rmtree(orders["directory"], ignore_errors=True)
    if orders["docker"]:
        # A create may still be under way in the engine: look until none has shown up for a while.
        quiet_since = time.monotonic()
        while time.monotonic() - quiet_since < 3:
            with contextlib.suppress(OSError, HTTPException, ValueError):
                if remove_containers(orders["docker"], orders["label"]):
                    quiet_since = time.monotonic()
            time.sleep(0.2)


def _main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    orders = json.loads(sys.argv[1])
    if sys.stdin.buffer.read() != DONE:
        _clean(orders)


if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[2])]
    _main()

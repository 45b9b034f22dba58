"""The last one out: removes what a substrate made when its owner dies without doing so.

The owner starts it as a process of its own and holds the write end of its standard input. Whatever
happens to the owner, SIGKILL included, that pipe closes, and the reaper does what it was told at its
start; when the owner ends well it says so first, and the reaper has nothing to do. It ignores
SIGINT and SIGTERM and lives in a session of its own, so that a Ctrl-C or a kill of the owner's process
group does not reach it.

Only the standard library and ``engine.host.proc``: the module runs with ``python -I -S`` in about 15 ms.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import NamedTuple

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[3])]

from dutyfree.engine.host import proc

DONE = b"done\n"
OWNER = ".owner"
"""Ends the name of the link beside a directory that tells whose it is."""
ROUND_SECONDS = 5
"""No machine gives out all its pids, 32,768 or more, in less."""


class Reaper:
    """The owner's handle on its reaper.

    ``directory`` is removed with the link that tells its owner, processes whose environment holds
    ``marker`` (``NAME=value``) are killed, and containers and images with ``label`` on the Docker engine
    at ``docker`` are removed.
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
    return int(proc.read("loadavg").split()[-1])


class Moment(NamedTuple):
    """A point in time, by which processes are told to be older or newer."""

    ticks: int
    """Since the boot, as the kernel counts the starts of processes."""
    pid: int
    """The one given out last."""

    @classmethod
    def now(cls) -> Moment:
        return cls(int(time.clock_gettime(time.CLOCK_BOOTTIME) * os.sysconf("SC_CLK_TCK")), last_pid())

    def told_by_pids(self) -> bool:
        """Whether newer processes surely have greater pids: the kernel cannot have come round yet."""
        now = Moment.now()
        return now.pid >= self.pid and now.ticks - self.ticks < ROUND_SECONDS * os.sysconf("SC_CLK_TCK")


BEGINNING, END = Moment(0, 0), Moment(sys.maxsize, 0)


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


def kill_marked(marker: str, since: Moment = BEGINNING, strays: str = "") -> int:
    """Kill every process whose environment holds ``marker``. Returns how many; blocking.

    The mark is inherited across fork, exec and setsid, so it finds what left the process group. A
    process may still have emptied its environment: in the directory ``strays``, all that bear no mark
    and have no terminal are killed too. Processes older than ``since`` need not be looked at.
    """
    return kill_all(
        lambda: {found.pid for found in CENSUS.take(since) if found.bears(marker) or found.strays(strays)}
    )


class LiveProcess(NamedTuple):
    """A living process."""

    pid: int
    environment: bytes
    place: str
    """Where it works, if it bears no mark of ours and has no terminal."""

    def bears(self, marker: str) -> bool:
        """Without a marker, none does: an empty one would be found in every environment."""
        return bool(marker) and b"\0%b\0" % marker.encode() in b"\0%b\0" % self.environment

    def strays(self, directory: str) -> bool:
        return bool(directory) and f"{self.place}/".startswith(f"{directory}/")


class Census:
    """Looks at all processes. One look serves all who were waiting for it when it began."""

    def __init__(self) -> None:
        self.looks = 0
        self._next = _Look()
        self._guard = threading.Lock()
        self._turn = threading.Lock()

    def take(self, since: Moment) -> Sequence[LiveProcess]:
        """The processes that are newer, and maybe others; blocking. Raises OSError."""
        with self._guard:
            look = self._next
            look.since = min(look.since, since)
        with self._turn:
            if look.found is None:
                # Who comes from now on may mean a process that this look has passed already.
                with self._guard:
                    self._next = _Look()
                self.looks += 1
                look.found = list(_newer(look.since))
        return look.found


class _Look:
    def __init__(self) -> None:
        self.since = END
        self.found: Sequence[LiveProcess] | None = None


CENSUS = Census()


def _newer(since: Moment) -> Iterator[LiveProcess]:
    # Reading the start of every process costs ten times as much as comparing pids.
    by_pid = since.told_by_pids()
    for pid in proc.pids():
        if pid == os.getpid() or (by_pid and pid <= since.pid):
            continue
        with contextlib.suppress(OSError):  # it ended, or is not ours to see
            if not by_pid and proc.stat(pid).started < since.ticks:
                continue
            environment = proc.environment(pid)
            marked = b"DUTYFREE_" in environment
            yield LiveProcess(pid, environment, "" if marked else _place(pid))


def _place(pid: int) -> str:
    seen = proc.stat(pid)
    return os.readlink(f"/proc/{pid}/cwd") if not seen.terminal and seen.state not in "ZX" else ""


def is_alive(pid: int) -> bool:
    """Whether the process is there and has not begun to end; blocking."""
    try:
        return not proc.stat(pid).is_exiting
    except OSError:
        return False


def remove_tree(path: str) -> None:
    """Remove a tree, if it is there; others may do so at the same time. Raises OSError.

    Also directories that were made read-only, as Go's module cache.
    """
    for attempt in range(1000):
        try:
            shutil.rmtree(path)
        except FileNotFoundError:
            if not os.path.lexists(path):
                return
        except PermissionError:
            if attempt > 10:
                raise
            _make_writable(path)
        except OSError as error:
            if error.errno != errno.ENOTEMPTY or attempt > 10:
                raise  # but what is dying may have written its last
        else:
            return
    shutil.rmtree(path)


def remove_owned(directory: str) -> None:
    """Remove it, and then the link that tells its owner. Raises OSError."""
    remove_tree(directory)
    Path(directory).with_suffix(OWNER).unlink(missing_ok=True)


def _make_writable(path: str) -> None:
    with contextlib.suppress(OSError):
        Path(path).chmod(0o700)
    for parent, names, _ in os.walk(path):
        for directory in (Path(parent, name) for name in names):
            if not directory.is_symlink():
                with contextlib.suppress(OSError):
                    directory.chmod(0o700)


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
    if orders["directory"]:
        _clear(orders["directory"], orders["marker"])
    if orders["docker"]:
        # A create may still be under way in the engine: look until none has shown up for a while, the
        # longer the slower it is.
        quiet_since, patience = time.monotonic(), 3.0
        while time.monotonic() - quiet_since < patience:
            asked = time.monotonic()
            with contextlib.suppress(OSError, HTTPException, ValueError):
                if remove_containers(orders["docker"], orders["label"]):
                    quiet_since = time.monotonic()
                patience = max(patience, min(50 * (time.monotonic() - asked), 60))
            time.sleep(0.2)


def _clear(directory: str, marker: str) -> None:
    """Again until it is gone: who was just being started when the owner died bears no mark yet."""
    for _ in range(20):
        kill_marked(marker, strays=directory)
        with contextlib.suppress(OSError):
            remove_owned(directory)
            return
        time.sleep(0.1)


def _main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    orders = json.loads(sys.argv[1])
    if sys.stdin.buffer.read() != DONE:
        _clean(orders)


if __name__ == "__main__":
    _main()

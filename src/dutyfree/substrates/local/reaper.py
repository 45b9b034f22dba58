"""The reaper: a process that removes what a substrate made if its owner dies without cleaning up.

The owner starts the reaper and holds the write end of its standard input. However the owner dies, also by
SIGKILL, that pipe closes, and the reaper cleans up. An owner that has cleaned up itself says so first. The
reaper ignores SIGINT and SIGTERM and has its own session, so Ctrl-C or a kill of the owner's process group
does not reach it.

It imports only the standard library and ``engine.host.proc``: it starts with ``python -I -S`` in about 15 ms.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import json
import os
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
GROUPS = Path("/sys/fs/cgroup")
OWNER = ".owner"
"""The suffix of the link beside a directory that names its owner."""


class Reaper:
    """The owner's handle of its reaper.

    The reaper kills all processes in the control groups with the name ``groups`` and removes these groups,
    kills processes with ``marker`` (``NAME=value``) in their environment, removes ``directory`` and the link
    that names its owner, and removes containers and images with ``label`` from the Docker engine at
    ``docker``.
    """

    def __init__(
        self, *, directory: str = "", marker: str = "", docker: str = "", label: str = "", groups: str = ""
    ) -> None:
        orders = {
            "directory": directory,
            "marker": marker,
            "docker": docker,
            "label": label,
            "groups": groups,
        }
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, json.dumps(orders)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def dismiss(self) -> None:
        """Tell the reaper that the owner has cleaned up."""
        with contextlib.suppress(BrokenPipeError):
            self._process.communicate(DONE)

    def engage(self) -> None:
        """Let the reaper clean up now, because the owner could not."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.returncode = 0  # do not wait for it


def last_pid() -> int:
    """The newest pid in this pid namespace."""
    return int(proc.read("loadavg").split()[-1])


class Moment(NamedTuple):
    """A point in time that can be compared with the start of processes."""

    ticks: int
    """Clock ticks since the boot, as in the start time of a process."""
    pid: int
    """The newest pid at that time."""
    round_seconds: float = 5
    """The kernel needs longer than this to use all pids, 32,768 or more, once."""

    @classmethod
    def now(cls) -> Moment:
        return cls(int(time.clock_gettime(time.CLOCK_BOOTTIME) * os.sysconf("SC_CLK_TCK")), last_pid())

    def comparable_by_pid(self) -> bool:
        """Whether newer processes certainly have greater pids: the kernel has not wrapped around since."""
        now = Moment.now()
        return now.pid >= self.pid and now.ticks - self.ticks < self.round_seconds * os.sysconf("SC_CLK_TCK")


BEGINNING, END = Moment(0, 0), Moment(sys.maxsize, 0)


def kill_all(find: Callable[[], set[int]]) -> int:
    """Kill the processes that ``find`` returns, until it returns none. Returns how many were killed.

    It stops all of them first. Otherwise a shell whose child dies would continue with its next line.
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
    """Kill every process with ``marker`` in its environment. Returns how many. Blocks.

    Processes inherit the mark across fork, exec and setsid, so it finds those that left the process group. A
    process may have emptied its environment: so it also kills processes that work in the directory ``strays``
    without a mark and without a terminal. It ignores processes older than ``since``.
    """
    return kill_all(
        lambda: {found.pid for found in SCANNER.scan(since) if found.has(marker) or found.strays(strays)}
    )


class LiveProcess(NamedTuple):
    """A process that runs."""

    pid: int
    environment: bytes
    place: str
    """Its working directory, if it has no mark of ours and no terminal."""

    def has(self, marker: str) -> bool:
        """Whether the mark is in its environment. An empty mark is in none."""
        return bool(marker) and b"\0%b\0" % marker.encode() in b"\0%b\0" % self.environment

    def strays(self, directory: str) -> bool:
        return bool(directory) and f"{self.place}/".startswith(f"{directory}/")


class ProcessScanner:
    """Scans /proc. One scan serves all threads that waited for it when it began."""

    def __init__(self) -> None:
        self.scans = 0
        self._next = _Scan()
        self._guard = threading.Lock()
        self._turn = threading.Lock()

    def scan(self, since: Moment) -> Sequence[LiveProcess]:
        """The processes newer than ``since``, and maybe others. Blocks. Raises OSError."""
        with self._guard:
            scan = self._next
            scan.since = min(scan.since, since)
        with self._turn:
            if scan.found is None:
                # A later caller may look for a process that this scan has already passed.
                with self._guard:
                    self._next = _Scan()
                self.scans += 1
                scan.found = list(_newer(scan.since))
        return scan.found


class _Scan:
    def __init__(self) -> None:
        self.since = END
        self.found: Sequence[LiveProcess] | None = None


SCANNER = ProcessScanner()


def _newer(since: Moment) -> Iterator[LiveProcess]:
    # To read the start time of every process costs ten times as much as to compare pids.
    by_pid = since.comparable_by_pid()
    for pid in proc.pids():
        if pid == os.getpid() or (by_pid and pid <= since.pid):
            continue
        with contextlib.suppress(OSError):  # it has ended, or belongs to another user
            if not by_pid and proc.stat(pid).started < since.ticks:
                continue
            environment = proc.environment(pid)
            marked = b"DUTYFREE_" in environment
            yield LiveProcess(pid, environment, "" if marked else _place(pid))


def _place(pid: int) -> str:
    seen = proc.stat(pid)
    return os.readlink(f"/proc/{pid}/cwd") if not seen.terminal and seen.state not in "ZX" else ""


def is_alive(pid: int) -> bool:
    """Whether the process exists and has not begun to exit. Blocks."""
    try:
        return not proc.stat(pid).is_exiting
    except OSError:
        return False


_CHANGED = (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ESTALE)
"""Errors if somebody writes to a tree while it is removed."""


def remove_tree(path: str) -> None:
    """Remove a directory tree, if it exists; others may remove it at the same time. Raises OSError.

    It removes read-only directories too, such as Go's module cache, and trees of any depth. It follows no
    link.
    """
    for attempt in range(12):
        try:
            _remove_once(path)
        except OSError as error:
            # A dying process may have written a last file, so try again.
            if error.errno not in _CHANGED or attempt > 10:
                raise
        else:
            return


def _remove_once(path: str) -> None:
    try:
        top = _open_directory(path)
    except FileNotFoundError:
        return
    _empty(top)
    with contextlib.suppress(FileNotFoundError):
        Path(path).rmdir()


class _Level(NamedTuple):
    """A directory on the way to the current one."""

    identity: tuple[int, int]
    left: list[str]
    """Names of its directories that are still there. The way goes through the last one."""


def _empty(current: int) -> None:
    """Remove all that is in a directory, and close its descriptor, the only one that it needs.

    It goes down and up from one directory to the next, so neither the depth of a tree nor the length of its
    paths matters; on its way up it makes sure that it comes back to the same directory.
    """
    try:
        levels = [_entered(current)]
        while True:
            if left := levels[-1].left:
                try:
                    below = _open_directory(left[-1], current)
                except FileNotFoundError:
                    left.pop()
                    continue
                os.close(current)
                current = below
                levels.append(_entered(current))
                continue
            levels.pop()
            if not levels:
                return
            above = os.open("..", _DIRECTORY, dir_fd=current)
            os.close(current)
            current = above
            if _identity(current) != levels[-1].identity:
                raise OSError(errno.ESTALE, "a directory was moved while it was removed")
            with contextlib.suppress(FileNotFoundError):
                os.rmdir(levels[-1].left.pop(), dir_fd=current)
    finally:
        os.close(current)


_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def _open_directory(name: str, parent: int | None = None) -> int:
    """Open a directory, which becomes writable for us. Raises OSError."""
    try:
        opened = os.open(name, _DIRECTORY, dir_fd=parent)
    except PermissionError:
        place = os.open(name, _DIRECTORY | os.O_PATH, dir_fd=parent)
        try:
            Path(f"/proc/self/fd/{place}").chmod(0o700)
        finally:
            os.close(place)
        opened = os.open(name, _DIRECTORY, dir_fd=parent)
    if os.fstat(opened).st_mode & 0o700 != 0o700:
        with contextlib.suppress(OSError):
            os.fchmod(opened, 0o700)
    return opened


def _entered(directory: int) -> _Level:
    """Remove the files of a directory."""
    with os.scandir(directory) as found:
        entries = list(found)
    left = []
    for one in entries:
        if one.is_dir(follow_symlinks=False):
            left.append(one.name)
        else:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(one.name, dir_fd=directory)
    return _Level(_identity(directory), left)


def _identity(directory: int) -> tuple[int, int]:
    found = os.fstat(directory)
    return found.st_dev, found.st_ino


def remove_owned(directory: str) -> None:
    """Remove a directory, and then the link that names its owner. Raises OSError."""
    remove_tree(directory)
    Path(directory).with_suffix(OWNER).unlink(missing_ok=True)


class _UnixConnection(HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=60)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def remove_containers(path: str, label: str) -> int:
    """Remove the containers and images with ``label`` (``name=value``). Returns how many."""
    from urllib.parse import quote

    connection = _UnixConnection(path)
    filters = quote(json.dumps({"label": [label]}))
    removed = 0
    # Containers first: an image cannot be removed while a container uses it. Later calls try again.
    for kind, query in (("containers", "force=1&v=1"), ("images", "")):
        connection.request("GET", f"/{kind}/json?all={int(kind == 'containers')}&filters={filters}")
        for found in json.loads(connection.getresponse().read()):
            connection.request("DELETE", f"/{kind}/{found['Id']}?{query}")
            response = connection.getresponse()
            response.read()
            removed += response.status < 300
    return removed


def remove_groups(name: str, seconds: float = 10.0) -> None:
    """Kill all processes in the control groups with this name, in all hierarchies, and remove the groups.

    Raises OSError. Blocks.
    """
    until = time.monotonic() + seconds
    tops = (GROUPS / name, *GROUPS.glob(f"*/{glob.escape(name)}"))
    for top in tops:
        _thaw(top)
    for top in tops:
        while top.exists():
            for directory, _, _ in os.walk(top, topdown=False):
                _signal(_members(Path(directory)), signal.SIGKILL)
                try:
                    Path(directory).rmdir()
                except FileNotFoundError:
                    pass
                except OSError:
                    if time.monotonic() > until:
                        raise
            if top.exists():
                time.sleep(0.005)  # the kernel tells nobody when a killed process has left the group


def _thaw(top: Path) -> None:
    """Let frozen processes go on: else they cannot die."""
    for directory, _, files in os.walk(top):
        for file, running in (("freezer.state", "THAWED"), ("cgroup.freeze", "0")):
            if file in files:
                with contextlib.suppress(OSError):
                    Path(directory, file).write_text(running)


def _members(group: Path) -> set[int]:
    with contextlib.suppress(OSError):
        return set(map(int, (group / "cgroup.procs").read_text().split()))
    return set()


def _clean(orders: dict[str, str]) -> None:
    if orders["groups"]:
        with contextlib.suppress(OSError):
            remove_groups(orders["groups"])
    if orders["directory"]:
        _clear(orders["directory"], orders["marker"], orders["groups"])
    if orders["docker"]:
        # The engine may still be creating a container: search until none has appeared for a while. Wait
        # longer if the engine is slow.
        quiet_since, patience = time.monotonic(), 3.0
        while time.monotonic() - quiet_since < patience:
            asked = time.monotonic()
            with contextlib.suppress(OSError, HTTPException, ValueError):
                if remove_containers(orders["docker"], orders["label"]):
                    quiet_since = time.monotonic()
                patience = max(patience, min(50 * (time.monotonic() - asked), 60))
            time.sleep(0.2)


def _clear(directory: str, marker: str, groups: str = "") -> None:
    """Repeat until it is gone: a process that was just starting when the owner died has no mark yet."""
    for _ in range(20):
        kill_marked(marker, strays=directory)
        with contextlib.suppress(OSError):
            if groups:  # a runtime that was just starting may have made them again
                remove_groups(groups)
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

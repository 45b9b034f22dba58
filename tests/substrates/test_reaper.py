"""Finding processes: which are looked at, and by how many looks. Removing what others remove too."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest

from dutyfree.substrates.local import reaper
from dutyfree.substrates.local.container_processes import Unmarked, is_in_group, strays
from dutyfree.substrates.local.reaper import BEGINNING, Moment, ProcessScanner, kill_marked


def mark(name: str) -> str:
    """Others may run the same tests at the same time."""
    return f"DUTYFREE_TEST={os.getpid()} {name}"


def marked(name: str) -> subprocess.Popen[bytes]:
    variable, _, value = mark(name).partition("=")
    return subprocess.Popen(["sleep", "600"], env={**os.environ, variable: value})


class Queue:
    """A lock that knows how many have come to it."""

    def __init__(self) -> None:
        self.came = threading.Semaphore(0)
        self.lock = threading.Lock()

    def __enter__(self) -> None:
        self.came.release()
        self.lock.acquire()

    def __exit__(self, *_: object) -> None:
        self.lock.release()


def test_one_look_serves_all_who_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    scanner, queue = ProcessScanner(), Queue()
    monkeypatch.setattr(scanner, "_turn", queue)
    threads = [threading.Thread(target=scanner.scan, args=[Moment.now()]) for _ in range(32)]
    with queue.lock:
        for thread in threads:
            thread.start()
        for _ in threads:
            assert queue.came.acquire(timeout=60)
    for thread in threads:
        thread.join()
    assert scanner.scans == 1


def test_a_look_under_way_is_not_shared() -> None:
    """It may have passed a process already that was started meanwhile."""
    scanner = ProcessScanner()
    scanner._turn.acquire()
    asked = Moment.now()
    answers: list[set[int]] = []
    first = threading.Thread(target=lambda: answers.append({found.pid for found in scanner.scan(asked)}))
    first.start()
    with marked("late") as process:
        scanner._turn.release()
        first.join()
        assert process.pid in {found.pid for found in scanner.scan(asked)}
        process.kill()
    assert scanner.scans == 2


def test_processes_are_found_by_their_mark() -> None:
    since = Moment.now()
    with marked("wanted") as wanted, marked("wanted not") as other:
        assert kill_marked(mark("wanted"), since) == 1
        assert wanted.wait(60) == -9
        assert other.poll() is None
        assert kill_marked(mark("wanted not"), BEGINNING) == 1


def test_older_processes_are_passed_over() -> None:
    with marked("older") as process:
        time.sleep(0.05)
        assert kill_marked(mark("older"), Moment.now()) == 0
        process.kill()


@pytest.mark.parametrize("rounds", ["below", "above"])
def test_pids_that_came_round(rounds: str) -> None:
    """After so long a time the kernel may have passed the pid again: the start tells."""
    now = Moment.now()._replace(round_seconds=0)
    since = now._replace(pid=4_000_000 if rounds == "below" else now.pid + 1000)
    with marked("rounds") as older:
        time.sleep(0.05)
        assert kill_marked(mark("rounds"), Moment.now()._replace(pid=0, round_seconds=0)) == 0
        assert kill_marked(mark("rounds"), since) == 1
        assert older.wait(60) == -9


def test_two_remove_the_same_tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other is always a little faster."""
    tree = tmp_path / "tree"
    tree.mkdir()
    for number in range(50):
        (tree / str(number)).touch()
    unlink = os.unlink

    def beaten(path: str, *, dir_fd: int | None = None) -> None:
        unlink(path, dir_fd=dir_fd)
        unlink(path, dir_fd=dir_fd)

    monkeypatch.setattr(os, "unlink", beaten)
    reaper.remove_tree(str(tree))
    assert not tree.exists()


def test_what_is_written_to_while_it_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a command that the owner was about to start when it died, and that bears no mark yet."""
    tree, link = tmp_path / "tree", tmp_path / f"tree{reaper.OWNER}"
    tree.mkdir()
    link.symlink_to("somebody")
    remove = os.rmdir
    late = iter(range(25))

    def refilled(path: str, *, dir_fd: int | None = None) -> None:
        if next(late, None) is not None:
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), path)
        remove(path, dir_fd=dir_fd)

    monkeypatch.setattr(os, "rmdir", refilled)
    reaper._clear(str(tree), mark("none"))
    monkeypatch.undo()
    assert not list(tmp_path.iterdir())


def deepen(directory: Path, depth: int) -> None:
    """Make a directory that is so deep that its path has too many characters."""
    current = os.open(directory, os.O_RDONLY)
    for _ in range(depth):
        os.mkdir("d", dir_fd=current)
        below = os.open("d", os.O_RDONLY, dir_fd=current)
        os.close(current)
        current = below
    os.close(os.open("file", os.O_CREAT | os.O_WRONLY, 0o600, dir_fd=current))
    os.close(current)


def test_a_tree_of_any_depth_is_removed(tmp_path: Path) -> None:
    """With few descriptors, and without recursion."""
    tree = tmp_path / "tree"
    for name in ("one", "other"):
        (tree / name).mkdir(parents=True)
        deepen(tree / name, 5000)
    _, hard = limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 4, hard))
    try:
        reaper.remove_tree(str(tree))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert not tree.exists()


UNPRIVILEGED = """
import os, sys
from dutyfree.substrates.local.reaper import remove_tree
if os.getuid() == 0:
    os.setgroups([]), os.setgid(65534), os.setuid(65534)
os.makedirs(sys.argv[1] + "/closed/below")
open(sys.argv[1] + "/closed/below/file", "w").close()
for name, mode in (("/closed/below", 0o555), ("/closed", 0), ("", 0o500)):
    os.chmod(sys.argv[1] + name, mode)
remove_tree(sys.argv[1])
assert not os.path.exists(sys.argv[1])
"""


def test_closed_directories_are_removed() -> None:
    """Also if we are not root, who may enter all of them."""
    with tempfile.TemporaryDirectory(dir="/tmp") as parent:
        Path(parent).chmod(0o777)
        command = [sys.executable, "-c", UNPRIVILEGED, f"{parent}/tree"]
        subprocess.run(command, check=True, timeout=60)


def test_nothing_is_removed_through_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if a directory becomes a link a moment before it is entered."""
    outside, tree = tmp_path / "outside", tmp_path / "tree"
    for directory in (outside, tree / "real"):
        directory.mkdir(parents=True)
        (directory / "file").touch()
    (tree / "link").symlink_to(outside)
    opened = os.open

    def swapped(path: str, flags: int, *, dir_fd: int | None = None) -> int:
        if path == "real" and not (tree / "real").is_symlink():
            (tree / "real").rename(tmp_path / "moved")
            (tree / "real").symlink_to(outside)
        return opened(path, flags, dir_fd=dir_fd)

    monkeypatch.setattr(os, "open", swapped)
    reaper.remove_tree(str(tree))
    assert not tree.exists()
    assert (outside / "file").exists()
    assert (tmp_path / "moved" / "file").exists()


def test_a_directory_that_moves_while_it_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its parent is another one then, of which nothing is removed."""
    tree, other = tmp_path / "tree", tmp_path / "other"
    (tree / "a" / "b").mkdir(parents=True)
    (other / "b").mkdir(parents=True)
    (other / "file").touch()
    opened = os.open

    def moved(path: str, flags: int, *, dir_fd: int | None = None) -> int:
        if path == ".." and (tree / "a" / "b").exists():
            (tree / "a" / "b").rename(other / "b")
        return opened(path, flags, dir_fd=dir_fd)

    monkeypatch.setattr(os, "open", moved)
    reaper.remove_tree(str(tree))
    assert not tree.exists()
    assert {path.name for path in other.iterdir()} == {"b", "file"}


def test_no_marker_is_no_process_s() -> None:
    """What asks for none, such as a reaper that has only a directory to remove, kills no stranger."""
    found = reaper.LiveProcess(1, b"PATH=/bin\0HOME=/\0", "")
    assert found.has("HOME=/")
    assert not found.has("")
    assert not reaper.LiveProcess(1, b"", "").has("")


@pytest.mark.parametrize(
    ("groups", "is_in"),
    [
        ("0::/dutyfree-oci-a/oci-a-1\n", True),
        ("0::/dutyfree-oci-a/oci-a-1/below\n", True),
        ("5:memory:/other\n4:pids:/dutyfree-oci-a/oci-a-1", True),
        ("0::/../dutyfree-oci-a/oci-a-1\n", True),
        ("0::/dutyfree-oci-a/oci-a-10\n", False),
        ("0::/dutyfree-oci-a/oci-a-1.scope.mine\n", False),
        ("0::/mydutyfree-oci-a/oci-a-1\n", False),
        ("", False),
    ],
)
def test_groups_of_a_container_are_whole_names(groups: str, is_in: bool) -> None:
    assert is_in_group(groups, "dutyfree-oci-a/oci-a-1") is is_in


def test_strays_are_all_but_the_session_of_pid_1() -> None:
    own, keeper = Unmarked((100, 1), 100), Unmarked((107, 7), 100)
    stray, posing = Unmarked((120, 20), 118), Unmarked((130, 30, 1), 130)
    below = Unmarked((131, 31, 2), 130)
    assert strays([posing, below, stray, keeper, own]) == {120, 130, 131}
    assert strays([own, keeper]) == set()
    in_an_engine_of_its_own = [one._replace(pids=(9000 + one.pids[0], *one.pids)) for one in (own, stray)]
    assert strays([one._replace(session=one.session + 9000) for one in in_an_engine_of_its_own]) == {9120}


def test_strays_of_an_unknown_container() -> None:
    """Without its PID 1 nothing distinguishes them from the container's own."""
    assert strays([Unmarked((120, 20), 118)]) == set()


def test_groups_that_systemd_names() -> None:
    assert is_in_group("0::/system.slice/docker-0123abcd.scope\n", "0123abcd")
    assert is_in_group("0::/docker/0123abcd\n", "0123abcd")
    assert not is_in_group("0::/system.slice/docker-0123abcde.scope\n", "0123abcd")

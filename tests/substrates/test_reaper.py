"""Finding processes: which are looked at, and by how many looks. Removing what others remove too."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import threading
import time
from pathlib import Path

import pytest

from dutyfree.substrates.local import reaper
from dutyfree.substrates.local.container_processes import is_in_group
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
    remove = shutil.rmtree
    late = iter(range(25))

    def refilled(path: str) -> None:
        if next(late, None) is not None:
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), path)
        remove(path)

    monkeypatch.setattr(shutil, "rmtree", refilled)
    reaper._clear(str(tree), mark("none"))
    monkeypatch.undo()
    assert not list(tmp_path.iterdir())


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


def test_groups_that_systemd_names() -> None:
    assert is_in_group("0::/system.slice/docker-0123abcd.scope\n", "0123abcd")
    assert is_in_group("0::/docker/0123abcd\n", "0123abcd")
    assert not is_in_group("0::/system.slice/docker-0123abcde.scope\n", "0123abcd")

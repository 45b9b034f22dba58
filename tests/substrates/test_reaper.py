"""Finding processes: which are looked at, and by how many looks."""

from __future__ import annotations

import os
import subprocess
import threading
import time

import pytest

from dutyfree.substrates import reaper
from dutyfree.substrates.reaper import BEGINNING, Census, Moment, kill_marked


def marked(name: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(["sleep", "60"], env={**os.environ, "DUTYFREE_TEST": name})


def test_one_look_serves_all_who_wait() -> None:
    census = Census()
    census._turn.acquire()
    threads = [threading.Thread(target=census.take, args=(Moment.now(),)) for _ in range(32)]
    for thread in threads:
        thread.start()
    time.sleep(0.3)  # all are waiting for their turn, or the machine is very slow
    census._turn.release()
    for thread in threads:
        thread.join()
    assert 1 <= census.looks < 8, f"{census.looks} looks for 32 questions"


def test_a_look_under_way_is_not_shared() -> None:
    """It may have passed a process already that was started meanwhile."""
    census = Census()
    census._turn.acquire()
    asked = Moment.now()
    answers: list[set[int]] = []
    first = threading.Thread(target=lambda: answers.append({found.pid for found in census.take(asked)}))
    first.start()
    with marked("late") as process:
        census._turn.release()
        first.join()
        assert process.pid in {found.pid for found in census.take(asked)}
        process.kill()
    assert census.looks == 2


def test_processes_are_found_by_their_mark() -> None:
    since = Moment.now()
    with marked("wanted") as wanted, marked("wanted not") as other:
        assert kill_marked("DUTYFREE_TEST=wanted", since) == 1
        assert wanted.wait(5) == -9
        assert other.poll() is None
        assert kill_marked("DUTYFREE_TEST=wanted not", BEGINNING) == 1


def test_older_processes_are_passed_over() -> None:
    with marked("older") as process:
        time.sleep(0.05)
        assert kill_marked("DUTYFREE_TEST=older", Moment.now()) == 0
        process.kill()


@pytest.mark.parametrize("rounds", ["below", "above"])
def test_pids_that_came_round(rounds: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """After so long a time the kernel may have passed the pid again: the start tells."""
    monkeypatch.setattr(reaper, "ROUND_SECONDS", 0)
    now = Moment.now()
    since = now._replace(pid=4_000_000 if rounds == "below" else now.pid + 1000)
    with marked("rounds") as older:
        time.sleep(0.05)
        assert kill_marked("DUTYFREE_TEST=rounds", Moment.now()._replace(pid=0)) == 0
        assert kill_marked("DUTYFREE_TEST=rounds", since) == 1
        assert older.wait(5) == -9

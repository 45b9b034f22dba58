"""Atomic files: readers see the old file or the new one."""

from __future__ import annotations

import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from dutyfree.analysis.atomic_file import atomic_write

KILLED = """
import os, signal, sys
from pathlib import Path
from dutyfree.analysis.atomic_file import atomic_write

with atomic_write(Path(sys.argv[1])) as draft:
    draft.write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_many_write_the_same_and_each_is_read_whole(tmp_path):
    path = tmp_path / "summary.json"

    def write(number):
        for _ in range(50):
            with atomic_write(path) as draft:
                draft.write_text(f"{number}" * 100_000)
            assert len(path.read_text()) == 100_000

    with ThreadPoolExecutor(4) as writers:
        list(writers.map(write, range(4)))
    assert [*tmp_path.iterdir()] == [path]


def test_the_draft_of_a_killed_one_is_gone_with_the_next(tmp_path):
    path = tmp_path / "summary.json"
    done = subprocess.run([sys.executable, "-c", KILLED, str(path)], check=False)
    assert done.returncode == -signal.SIGKILL
    assert not path.exists()
    with atomic_write(path) as draft:
        assert draft.read_text() == "half"
        draft.write_text("whole")
    assert [*tmp_path.iterdir()] == [path]
    assert path.read_text() == "whole"


def test_a_failed_one_leaves_what_was_there(tmp_path):
    path = tmp_path / "summary.json"
    path.write_text("old")

    def fail():
        with atomic_write(path) as draft:
            draft.write_text("new")
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert [*tmp_path.iterdir()] == [path]
    assert path.read_text() == "old"

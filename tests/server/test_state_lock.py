"""The lock of a state directory: only the process that holds it is ever told to stop."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from dutyfree.contract.errors import Unavailable
from dutyfree.server.state_lock import locked, stop_holder

HOLDER = """
import sys, time
from pathlib import Path
from dutyfree.server.state_lock import locked
with locked(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


@contextmanager
def running(*command: str) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen([sys.executable, "-c", *command], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            yield process
        finally:
            process.kill()


@contextmanager
def bystander() -> Iterator[subprocess.Popen[str]]:
    with running("import time; print(flush=True); time.sleep(600)") as process:
        yield process


def test_the_holder_is_told_to_stop(tmp_path: Path) -> None:
    with running(HOLDER, str(tmp_path)) as holder, locked(tmp_path, replace=True):
        assert holder.wait() == -signal.SIGTERM
        assert (tmp_path / "lock").read_text() == str(os.getpid())


def test_a_process_with_the_number_of_an_earlier_holder_is_left_alone(tmp_path: Path) -> None:
    """The file still has the number of a server that has ended, and another process has got it."""
    with bystander() as other:
        (tmp_path / "lock").write_text(str(other.pid))
        with locked(tmp_path, replace=True):
            assert other.poll() is None


def test_a_process_that_only_waits_for_the_lock_is_left_alone(tmp_path: Path) -> None:
    waiting = "import os, sys, time; os.open(sys.argv[1], os.O_RDWR); print(flush=True); time.sleep(600)"
    with locked(tmp_path), running(waiting, str(tmp_path / "lock")) as other:
        descriptor = os.open(tmp_path / "lock", os.O_RDWR)
        assert not stop_holder(other.pid, descriptor)
        os.close(descriptor)
        assert other.poll() is None


def test_a_number_of_another_pid_namespace_is_not_used(tmp_path: Path) -> None:
    """A server in a container with the same state directory: its number is that of someone else here."""
    with running(HOLDER, str(tmp_path)) as holder, bystander() as other:
        (tmp_path / "lock").write_text(str(other.pid))
        with (
            pytest.raises(Unavailable, match="not a process that this one can see"),
            locked(tmp_path, replace=True, unknown_seconds=0.2),
        ):
            pass
        assert (holder.poll(), other.poll()) == (None, None)


@pytest.mark.parametrize("number", [0, 2**40])
def test_numbers_that_no_process_has(tmp_path: Path, number: int) -> None:
    descriptor = os.open(tmp_path, os.O_RDONLY)
    assert not stop_holder(number, descriptor)
    os.close(descriptor)

"""``dutyfree ps`` with hostile sandboxes and users: no escape sequence reaches the terminal."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import anyio
import anyio.to_thread
import pytest

import dutyfree
from dutyfree.engine.host import census
from tests.engine import unprivileged
from tests.terminals import is_quiet, on_terminal

pytestmark = pytest.mark.native

EVIL = "\x1b]0;owned\x07\x1b[2J\x9b31mEVIL\u202e\nroot"

POSING = rf"""
import ctypes, os, shutil, sys, tempfile, time
EVIL = {EVIL!r}
if sys.argv[1] != "posing":  # the owner, whose command line is shown too
    program = os.memfd_create("dutyfree-init", 0)
    real = os.path.realpath(shutil.which("python3"))
    with open(real, "rb") as source, open(program, "wb", closefd=False) as copy:
        shutil.copyfileobj(source, copy)
    if not os.fork():
        os.execv(f"/proc/self/fd/{{program}}", ["/usr/bin/python3", *sys.orig_argv[1:3], "posing"])
    time.sleep(1000)
ctypes.CDLL(None).prctl(15, b"dutyfree-engine")
os.chdir(tempfile.mkdtemp())
with open("sandbox", "w") as script:
    script.write("echo posing; sleep 1000; :")
if not os.fork():
    os.execv("/bin/sh", ["sh", "sandbox", f"7 1 {{EVIL}}"])
time.sleep(1000)
"""

IN_A_SANDBOX = """
import anyio, dutyfree, sys

async def main():
    async with dutyfree.open("native") as substrate, substrate.sandbox() as sandbox:
        command = ["python3", "-c", sys.argv[1], sys.argv[2]]
        async for item in sandbox.stream(command):
            sys.stdout.buffer.write(item.data) if hasattr(item, "data") else print(item)
            sys.stdout.flush()

anyio.run(main)
"""


@pytest.fixture(autouse=True, scope="module")
def _copy_is_removed() -> Iterator[None]:
    yield
    unprivileged.remove()


def _ps(*arguments: str, terminal: bool = False) -> str:
    command = [sys.executable, "-m", "dutyfree", "ps", *arguments]
    if not terminal:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return on_terminal(*command, columns=0)


@pytest.fixture
def posing() -> Iterator[subprocess.Popen[str]]:
    """A process of another user, outside of all sandboxes, that looks like a launcher with a sandbox."""
    process = unprivileged.start("-c", POSING, EVIL)
    yield from _while_it_poses(process)


@pytest.fixture
def posing_inside() -> Iterator[subprocess.Popen[str]]:
    """The same in a rootless sandbox, whose processes have the id of its owner."""
    process = unprivileged.start("-c", IN_A_SANDBOX, POSING, EVIL)
    yield from _while_it_poses(process)


def _while_it_poses(process: subprocess.Popen[str]) -> Iterator[subprocess.Popen[str]]:
    assert process.stdout is not None
    begun = process.stdout.readline()
    if begun != "posing\n":
        process.kill()
        pytest.skip(f"nothing could pose: {begun}{process.communicate()[1][-500:]}")
    yield process
    for pid in (*_descendants(process.pid), process.pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.communicate()


def _descendants(pid: int) -> list[int]:
    processes = census._processes()
    return [one for one in processes if pid in census._ancestors(processes, one)]


@pytest.mark.parametrize("terminal", [False, True])
def test_ps_prints_nothing_that_speaks_to_a_terminal(posing: subprocess.Popen[str], terminal: bool) -> None:
    shown = _ps(terminal=terminal)
    assert f"native-{posing.pid}-7" in shown
    assert "EVIL" in shown
    assert is_quiet(shown)
    (row,) = [line for line in shown.splitlines() if line.startswith(f"native-{posing.pid}-7")]
    assert "\\x1b" in row


def test_ps_as_json_tells_all_but_quietly(posing: subprocess.Popen[str]) -> None:
    shown = _ps("--json")
    assert is_quiet(shown)
    (living,) = [living for living in json.loads(shown) if living["owner"] == posing.pid]
    assert living["image"] == EVIL


def test_what_poses_in_a_sandbox_is_no_launcher(posing_inside: subprocess.Popen[str]) -> None:
    names = {pid: Path(f"/proc/{pid}/comm").read_text() for pid in _descendants(posing_inside.pid)}
    alike = [pid for pid, name in names.items() if name == f"{census.LAUNCHER}\n"]
    assert len(alike) == 2  # the real one, and the impostor in its sandbox
    found = [living for living in census.sandboxes() if living.launcher in names]
    assert [living.owner for living in found] == [posing_inside.pid]
    assert {launcher.pid for launcher in census.launchers()} & {*alike} == {found[0].launcher}


OTHERS = """
import json, sys
from dutyfree.engine.host import census
print(json.dumps([[one.state, one.processes] for one in census.sandboxes() if one.init == int(sys.argv[1])]))
"""


async def test_everybody_sees_whether_a_sandbox_of_others_is_idle() -> None:
    """Without permission to read its namespaces."""

    async def seen_by_another(init: int) -> object:
        said = await anyio.to_thread.run_sync(unprivileged.run, "-c", OTHERS, str(init))
        return json.loads(said)

    async with dutyfree.open("native") as substrate, substrate.sandbox() as sandbox:
        found = await anyio.to_thread.run_sync(census.sandboxes)
        (init,) = [living.init for living in found if living.id == sandbox.id]
        assert await seen_by_another(init) == [["idle", 0]]
        await sandbox.exec("sleep 1000 >/dev/null 2>&1 &")
        assert await seen_by_another(init) == [["running", 1]]

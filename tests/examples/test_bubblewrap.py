"""The example of a substrate keeps every promise that it makes, under its name as third parties give it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest

import dutyfree
from dutyfree import Limits, Recipe, Stage
from dutyfree.conformance import CHECKS
from dutyfree.contract.errors import CreateError, ExecError, SandboxClosed, Unavailable
from tests.awaiting import enter
from tests.engine import unprivileged
from tests.examples.loading import EXAMPLES

WORKS = shutil.which("bwrap") and shutil.which("nsenter") and shutil.which("setpriv")
needs_bubblewrap = pytest.mark.skipif(
    not WORKS, reason="bubblewrap is missing; to enable it: apt-get install bubblewrap util-linux"
)
NAME = "bubblewrap:Bubblewrap"
ABILITIES = {"abilities", "actions", "network"}
"""Subjects of checks that are about what it does not offer."""
OTHERS = {"user", "edits_that_do_not_fit", "searches_that_cannot_be", "a_full_disk", "no_processes_left"}
OTHERS |= {"out_of_memory", "out_of_memory_in_the_background"}
"""Checks of other subjects that are about another user, edits, searches and limits of resources."""


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """The example as an installed package with an entry point, as pip leaves it."""
    shutil.copy(EXAMPLES / "bubblewrap.py", tmp_path)
    info = tmp_path / "theirs-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[dutyfree.substrates]\nwrapped = {NAME}\n")
    return tmp_path


def judged(told: str) -> dict[str, int]:
    found = json.loads(told)
    assert [result for result in found["results"] if result["outcome"] == "failed"] == []
    subjects = {check.name: check.subject for check in CHECKS}
    lacking = {result["check"] for result in found["results"] if result["outcome"] == "not offered"}
    assert {name for name in lacking if subjects[name] not in ABILITIES} <= OTHERS
    return {key: found[key] for key in ("passed", "failed", "left_out")}


@needs_bubblewrap
@pytest.mark.slow
def test_it_keeps_every_promise(installed: Path) -> None:
    command = [sys.executable, "-m", "dutyfree.conformance", "wrapped", "--json"]
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    counts = judged(done.stdout)
    assert done.returncode == 0
    assert counts["left_out"] == 0
    assert counts["passed"] > 80


@needs_bubblewrap
@pytest.mark.slow
def test_it_keeps_them_without_root(installed: Path) -> None:
    installed.chmod(0o755)
    program = f"import sys; sys.path.insert(0, {str(installed)!r})\n"
    # This one may lie where only root can start it again, as the reaper does.
    program += "import shutil; sys.executable = shutil.which('python3')\n"
    program += "from dutyfree.conformance.__main__ import main; sys.exit(main(sys.argv[1:]))"
    for parent in installed.parents:
        if parent.stat().st_mode & 0o777 == 0o700:  # pytest's own directories, down from /tmp
            parent.chmod(0o755)
    assert judged(unprivileged.run("-c", program, NAME, "--json"))["passed"] > 80


@needs_bubblewrap
async def test_a_sandbox_that_dies_is_no_failure_of_the_command() -> None:
    async with dutyfree.open(NAME) as substrate, substrate.sandbox() as sandbox:
        first = sandbox._first  # type: ignore[attr-defined]
        async with anyio.create_task_group() as tasks:

            async def kill() -> None:
                await sandbox.exec("until [ -e begun ]; do :; done")
                os.kill(first, signal.SIGKILL)

            tasks.start_soon(kill)
            with pytest.raises(ExecError, match="ended while the command ran"):
                await sandbox.exec("touch begun; sleep 600")
        with pytest.raises(SandboxClosed):
            await sandbox.exec("true")
        with pytest.raises(SandboxClosed):
            await sandbox.read("begun")


@needs_bubblewrap
async def test_a_command_that_removes_its_directory_has_run() -> None:
    async with dutyfree.open(NAME) as substrate, substrate.sandbox() as sandbox:
        await sandbox.write("here/file", b"")
        seen = await sandbox.exec('rm -r "$PWD"; no-such-program', cwd="here")
        assert (seen.exit_code, seen.started) == (127, True)
        assert not (await sandbox.exec("true", cwd="here")).started


@needs_bubblewrap
async def test_it_isolates(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("of the host")
    async with dutyfree.open(NAME) as substrate, substrate.sandbox() as sandbox:
        seen = await sandbox.exec(f"cat {secret}; touch /usr/mine; ls /proc | grep -c '^[0-9]'; ip link 2>&1")
        assert b"of the host" not in seen.stdout
        assert b"Read-only file system" in seen.stderr
        assert int(seen.stdout.split()[0]) < 10
        # A link leads where it does inside: nothing of the host is read or written through it.
        await sandbox.exec(f"ln -s {secret} link")
        with pytest.raises(OSError, match="No such file"):
            await sandbox.read("link")
        with pytest.raises(OSError, match=r"\w"):
            await sandbox.write("/usr/mine", b"")
    assert secret.read_text() == "of the host"


LEAVE = """
import os, signal, anyio, dutyfree

async def main():
    async with dutyfree.open("bubblewrap:Bubblewrap") as substrate, substrate.sandbox() as sandbox:
        await sandbox.exec("setsid sleep 600 </dev/null >/dev/null 2>&1 &")
        print(sandbox.workdir, sandbox._first, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)

anyio.run(main)
"""


@needs_bubblewrap
async def test_nothing_outlives_a_killed_owner(bystander: subprocess.Popen[bytes]) -> None:
    environment = {**os.environ, "PYTHONPATH": str(EXAMPLES)}
    done = await anyio.run_process([sys.executable, "-c", LEAVE], env=environment, check=False)
    assert done.returncode == -signal.SIGKILL
    workdir, first = done.stdout.decode().split()
    with anyio.fail_after(60):
        while await anyio.Path(workdir).parent.exists() or await anyio.Path(f"/proc/{first}").exists():  # noqa: ASYNC110
            await anyio.sleep(0.05)
    assert bystander.poll() is None


@pytest.fixture
def bystander() -> Iterator[subprocess.Popen[bytes]]:
    """A process that is none of the substrate's."""
    with subprocess.Popen(["sleep", "600"]) as process:
        yield process
        process.kill()


@needs_bubblewrap
async def test_what_it_does_not_offer_is_refused() -> None:
    async with dutyfree.open(NAME) as substrate:
        for recipe, limits, said in (
            (Recipe(image="debian:12"), None, "bubblewrap cannot use images, and the recipe has 'debian:12'"),
            (None, Limits(memory=1 << 30, pids=9), "bubblewrap cannot limit memory, pids"),
            (None, Limits(network="on"), "bubblewrap cannot limit network"),
            (Recipe(stages=(Stage("setup", ("exit 3",)),)), None, "'exit 3' ended with 3"),
        ):
            with pytest.raises(CreateError, match=said):
                await enter(substrate.sandbox(recipe, limits=limits))


async def test_without_its_tools_it_is_unavailable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(Unavailable, match=r"there is no bwrap \(apt-get install bubblewrap util-linux\)"):
        await enter(dutyfree.open(NAME))


def test_it_is_short() -> None:
    assert len((EXAMPLES / "bubblewrap.py").read_text().splitlines()) < 100

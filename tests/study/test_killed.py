"""A study killed at any moment resumes, ends with the same trials, and leaves nothing behind."""

from __future__ import annotations

import math
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dutyfree.study import records
from tests.processes import eventually
from tests.substrates.test_bare import processes_marked

PLAN = """
name = "killed"
substrates = {substrates}
warmups = 1
[workloads]
T0 = {trials}
T1 = 3
[parallel]
T0 = [4]
"""


def command(tmp_path, *arguments):
    return [sys.executable, "-m", "dutyfree", "study", "--out", str(tmp_path / "out"), *arguments]


def workers(process):
    """The pids of a study's workers."""
    try:
        threads = Path(f"/proc/{process.pid}/task").iterdir()
        children = [int(pid) for thread in threads for pid in (thread / "children").read_text().split()]
        return [*filter(is_worker, children)]
    except OSError:
        return []


def is_worker(pid):
    """Whether it runs; the command of one that has ended, and that nobody has waited for, is empty."""
    try:
        return b"study.worker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def started(tmp_path, plan):
    (tmp_path / "plan.toml").write_text(plan)
    (tmp_path / "tmp").mkdir()
    line = command(tmp_path, "--plan", str(tmp_path / "plan.toml"))
    environment = os.environ | {"TMPDIR": str(tmp_path / "tmp")}
    return subprocess.Popen(line, env=environment, stderr=subprocess.PIPE, text=True)


def wait_until_nothing_is_left(tmp_path, owners):
    assert eventually(lambda: not leftovers(tmp_path, owners), 100)


def leftovers(tmp_path, owners):
    """Files and processes of the study, its workers ``owners``, and containers that these made."""
    found = [*tmp_path.glob("tmp/*"), *processes_marked(str(tmp_path)), *filter(is_worker, owners)]
    if shutil.which("docker"):
        shown = '{{.ID}} {{.Label "dutyfree.process"}}'
        command = ["docker", "ps", "--all", "--filter", "label=dutyfree", "--format", shown]
        listed = subprocess.run(command, capture_output=True, text=True, check=False).stdout.splitlines()
        found += [line for line in listed if line.split("/")[2:3] and int(line.split("/")[2]) in owners]
    return found


def wait_for_trials(process, path, more, seconds=math.inf):
    """Return when ``path`` has ``more`` lines than now, when the process has ended, or after some time.

    The pids of its workers that were seen.
    """
    seen = set()

    def lines():
        return path.read_bytes().count(b"\n") if path.exists() else 0

    wanted, until = lines() + more, time.monotonic() + seconds
    while lines() < wanted and process.poll() is None and time.monotonic() < until:
        seen.update(workers(process))
        time.sleep(0.001)
    return seen


def kill_again_and_again(tmp_path, substrates, trials):
    """Run the study to its end through twelve kills; the pids of its workers.

    It is killed as it starts, and a few trials later: how far it comes is counted, not timed, so that no
    machine is too fast to be caught in the middle. If we stand still until it ends, it is begun anew.
    """
    plan = tmp_path / "plan.toml"
    plan.write_text(PLAN.format(substrates=substrates, trials=trials))
    (tmp_path / "tmp").mkdir()
    environment = os.environ | {"TMPDIR": str(tmp_path / "tmp")}
    owners = []
    for seed in range(7, 12):
        ran, kills = run_through_kills(tmp_path, plan, environment, random.Random(seed))
        owners += ran
        if kills >= 3:
            return owners
        shutil.rmtree(tmp_path / "out")
    raise AssertionError("it was hardly ever killed in the middle")


def run_through_kills(tmp_path, plan, environment, chance):
    owners, kills = [], 0
    for attempt in range(13):
        arguments = ["--plan", str(plan), *["--resume"] * (attempt > 0)]
        process = subprocess.Popen(
            command(tmp_path, *arguments), env=environment, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL
        )
        if attempt < 12:
            more, seconds = chance.randint(1, 3), math.inf if attempt % 4 else chance.uniform(0, 1)
            owners += wait_for_trials(process, tmp_path / "out" / records.FILE, more, seconds)
            time.sleep(chance.uniform(0, 0.01))
            process.kill()
        _, said = process.communicate(timeout=600)
        if process.returncode != -signal.SIGKILL:
            assert process.returncode == 0, said.decode()
            break
        kills += 1
    return owners, kills


def judge(tmp_path, labels, trials, owners):
    found = records.read(tmp_path / "out")
    ids = [one.id for one in found.measured]
    assert len(ids) == len(set(ids)) == (trials * 2 + 3) * len(labels)  # both T0 cells and T1
    assert {one.substrate for one in found.measured} == set(labels)
    assert all(one.ok for one in found.trials), [one.failure for one in found.trials if one.failure]
    wait_until_nothing_is_left(tmp_path, owners)
    assert (tmp_path / "out" / "report.html").exists()


@pytest.mark.slow
def test_a_killed_study_on_bare(tmp_path):
    owners = kill_again_and_again(tmp_path, '["bare"]', trials=100)
    judge(tmp_path, ["bare"], 100, owners)


@pytest.mark.slow
@pytest.mark.docker
def test_a_killed_study_on_docker(tmp_path):
    owners = kill_again_and_again(tmp_path, '["bare", "docker"]', trials=12)
    judge(tmp_path, ["bare", "docker"], 12, owners)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("substrate", ["bare", pytest.param("docker", marks=pytest.mark.docker)])
def test_an_interrupted_study_says_how_to_go_on(tmp_path, substrate, number):
    process = started(tmp_path, PLAN.format(substrates=f'["{substrate}"]', trials=20_000))
    path = tmp_path / "out" / records.FILE
    while process.poll() is None and (not path.exists() or path.read_bytes().count(b"\n") < 10):
        time.sleep(0.05)
    owners = workers(process)
    process.send_signal(number)
    _, said = process.communicate(timeout=100)
    assert process.returncode == 130
    assert f"dutyfree study --resume --out {tmp_path / 'out'}" in said
    assert len(records.read(tmp_path / "out").trials) >= 5
    assert not leftovers(tmp_path, owners)


@pytest.mark.parametrize("victim", ["study", "worker"])
def test_whatever_is_killed_nothing_is_left(tmp_path, victim):
    labels = '["bare", "bare-again"]\noptions.bare-again.use="bare"'
    process = started(tmp_path, PLAN.format(substrates=labels, trials=999))
    wait_for_trials(process, tmp_path / "out" / records.FILE, 10)
    owners = workers(process)
    assert len(owners) == 2
    assert leftovers(tmp_path, [])
    os.kill(process.pid if victim == "study" else owners[0], signal.SIGKILL)
    _, said = process.communicate(timeout=100)
    wait_until_nothing_is_left(tmp_path, owners)
    if victim == "worker":
        assert process.returncode == 1
        assert "was killed by SIGKILL" in said
        assert "continue with --resume" in said


def test_a_worker_is_small():
    """What ``bare`` runs is started from it: a large process forks slowly."""
    program = "import sys, dutyfree.study.worker, dutyfree.substrates.bare; print(*sys.modules)"
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert not {"numpy", "scipy", "matplotlib", "rich", "cyclopts"} & {*said.split()}

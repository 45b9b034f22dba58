"""A study killed at any moment resumes, ends with the same trials, and leaves nothing behind."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time

import pytest

from dutyfree.study import records
from tests.substrates.test_bare import processes_marked

PLAN = """
name = "killed"
substrates = {substrates}
warmups = 1
[workloads]
T0 = 12
T1 = 3
[parallel]
T0 = [4]
"""
WANTED = 1 * 2 + 12 * 2 + 3  # warm-ups of both workloads, both T0 cells, T1; on every substrate


def command(tmp_path, *arguments):
    return [sys.executable, "-m", "dutyfree", "study", "--out", str(tmp_path / "out"), *arguments]


def leftovers(tmp_path, docker):
    found = [*tmp_path.glob("tmp/*"), *processes_marked(str(tmp_path))]
    if docker:
        listed = subprocess.run(
            ["docker", "ps", "-aq", "--filter", "label=dutyfree"], capture_output=True, text=True, check=True
        )
        found += listed.stdout.split()
    return found


def kill_again_and_again(tmp_path, substrates, docker):
    plan = tmp_path / "plan.toml"
    plan.write_text(PLAN.format(substrates=substrates))
    (tmp_path / "tmp").mkdir()
    environment = os.environ | {"TMPDIR": str(tmp_path / "tmp")}
    chance = random.Random(7)
    first = ["--plan", str(plan)]
    for attempt in range(40):
        arguments = first if attempt == 0 else ["--resume", "--plan", str(plan)]
        process = subprocess.Popen(
            command(tmp_path, *arguments), env=environment, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL
        )
        try:
            _, said = process.communicate(timeout=chance.uniform(0.3, 3.0) if attempt < 12 else 200)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
        else:
            assert process.returncode == 0, said.decode()
            return attempt
    return None


def judge(tmp_path, labels, docker):
    found = records.read(tmp_path / "out")
    ids = [one.id for one in found.trials]
    assert len(ids) == len(set(ids)) == WANTED * len(labels)
    assert {one.substrate for one in found.trials} == set(labels)
    assert all(one.ok for one in found.trials), [one.failure for one in found.trials if one.failure]
    until = time.monotonic() + 20
    while leftovers(tmp_path, docker) and time.monotonic() < until:
        time.sleep(0.1)
    assert not leftovers(tmp_path, docker)
    assert (tmp_path / "out" / "report.html").exists()


@pytest.mark.slow
def test_a_killed_study_on_bare(tmp_path):
    kills = kill_again_and_again(tmp_path, '["bare"]', docker=False)
    assert kills is not None
    assert kills >= 3, "it was hardly ever killed in the middle"
    judge(tmp_path, ["bare"], docker=False)


@pytest.mark.slow
@pytest.mark.docker
def test_a_killed_study_on_docker(tmp_path):
    kills = kill_again_and_again(tmp_path, '["bare", "docker"]', docker=True)
    assert kills is not None
    assert kills >= 3, "it was hardly ever killed in the middle"
    judge(tmp_path, ["bare", "docker"], docker=True)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_study_says_how_to_go_on(tmp_path, number):
    plan = tmp_path / "plan.toml"
    plan.write_text(PLAN.format(substrates='["bare"]').replace("T0 = 12", "T0 = 2000"))
    (tmp_path / "tmp").mkdir()
    process = subprocess.Popen(
        command(tmp_path, "--plan", str(plan)),
        env=os.environ | {"TMPDIR": str(tmp_path / "tmp")},
        stderr=subprocess.PIPE,
        text=True,
    )
    path = tmp_path / "out" / records.FILE
    until = time.monotonic() + 60
    while time.monotonic() < until and (not path.exists() or path.read_bytes().count(b"\n") < 20):
        time.sleep(0.05)
    process.send_signal(number)
    _, said = process.communicate(timeout=30)
    assert process.returncode == 130
    assert f"dutyfree study --resume --out {tmp_path / 'out'}" in said
    assert len(records.read(tmp_path / "out").trials) >= 15
    assert not leftovers(tmp_path, docker=False)

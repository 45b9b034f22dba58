"""``scripts/study-all`` ends what it started, and only that. The scripts that it calls are stand-ins here."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts/study-all"
STAND_IN = """#!/bin/sh
echo "$(basename "$0") $*" >> "$LOG"
case "$1" in status) exit ${RUNS:-3};; esac
"""
STUDY = """#!/bin/sh
echo "dutyfree $*" >> "$LOG"
exec %s
"""
STARTED = ["docker-engine install", "docker-engine start", "k8s-cluster up"]


@pytest.fixture
def scripts(tmp_path):
    shutil.copy(SCRIPT, tmp_path / "study-all")
    for name in ("docker-engine", "k8s-cluster", "host-tools"):
        make(tmp_path / name, STAND_IN)
    return tmp_path


def make(path, text):
    path.write_text(text)
    path.chmod(0o755)


def start(scripts, study, **environment):
    make(scripts / "dutyfree", STUDY % study)
    return subprocess.Popen(
        [scripts / "study-all", scripts / "dutyfree", "--budget", "1m"],
        env={"LOG": str(scripts / "log"), "PATH": f"{scripts}:{os.environ['PATH']}", **environment},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def calls(scripts):
    log = scripts / "log"
    lines = log.read_text().splitlines() if log.exists() else []
    return [line for line in lines if not line.startswith("host-tools")]


def wait_for_study(scripts, process):
    while not any(line.startswith("dutyfree") for line in calls(scripts)):
        assert process.poll() is None
        time.sleep(0.01)


@pytest.mark.parametrize("status", [0, 1])
def test_what_was_started_ends_after_the_study(scripts, status):
    process = start(scripts, "false" if status else "true")
    assert process.wait(60) == status
    asked = [line for line in calls(scripts) if not line.endswith("status")]
    ended = ["k8s-cluster down", "docker-engine stop"]
    assert asked == [*STARTED, "dutyfree study --budget 1m", *ended]


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_what_was_started_ends_after_a_signal(scripts, number, status):
    process = start(scripts, "sleep 1000")
    wait_for_study(scripts, process)
    os.killpg(process.pid, number)  # as Ctrl-C does
    assert process.wait(60) == status
    assert calls(scripts)[-2:] == ["k8s-cluster down", "docker-engine stop"]


def test_what_ran_before_goes_on(scripts):
    assert start(scripts, "true", RUNS="0").wait(60) == 0
    assert calls(scripts) == ["docker-engine status", "k8s-cluster status", "dutyfree study --budget 1m"]

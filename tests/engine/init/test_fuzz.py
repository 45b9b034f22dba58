"""Run each fuzz harness for a short time, from its seeds: nothing fails, and the fuzzer finds new inputs.

``make fuzz`` runs them for longer.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TypeAlias

import pytest

from tests.fuzz import __main__ as fuzz
from tests.fuzz import build, seeds
from tests.processes import ran

RUNS = 6000
"""Runs of each harness: seconds on most machines, and enough to find new inputs."""

HANGS = "-timeout=300"
"""An input that takes this many seconds is a finding. High, because a loaded machine may pause."""

Done: TypeAlias = subprocess.CompletedProcess[str]


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    if reason := build.missing():
        pytest.skip(f"{reason}; to enable it: {build.REMEDY}")
    return build.build(tmp_path_factory.mktemp("programs"))


def _run(program: Path, home: Path, start: Path, *options: str) -> Done:
    words = fuzz.command(program, home, start, *options)
    return ran(words, env=fuzz.environment(home), errors="replace")


def _judged(done: Done) -> Done:
    if done.returncode == fuzz.NO_JAIL:
        pytest.skip(f"{done.stderr.strip()}; to enable it: {fuzz.HARMLESS}")
    return done


@pytest.fixture(scope="module")
def homes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The parent of all targets' directories."""
    return tmp_path_factory.mktemp("fuzz")


@pytest.fixture(scope="module")
def runs(programs: dict[str, Path], homes: Path) -> Iterator[dict[str, Future[Done]]]:
    """Run all targets, as many at once as there are CPUs."""
    seeds.write(homes / "seeds")
    limits = f"-runs={RUNS}", HANGS
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        yield {
            target: pool.submit(_run, program, homes / target, homes / "seeds" / target, *limits)
            for target, program in programs.items()
        }


@pytest.mark.parametrize("target", build.TARGETS)
def test_nothing_is_found(runs: dict[str, Future[Done]], homes: Path, target: str) -> None:
    done = _judged(runs[target].result())
    assert done.returncode == 0, done.stderr[-4000:]
    assert list((homes / target / "corpus").iterdir()), "the fuzzer kept no input"
    assert not list((homes / target / "jail").iterdir()), "a harness wrote outside its jail"


def test_a_finding_is_kept(programs: dict[str, Path], tmp_path: Path) -> None:
    """The fuzzer can write outside the jail: it saves an input that needs too much memory."""
    seeds.write(tmp_path / "seeds")
    home, limits = tmp_path / "tree_streams", ("-rss_limit_mb=1", "-max_total_time=600")
    done = _judged(_run(programs["tree_streams"], home, tmp_path / "seeds/tree_streams", *limits))
    assert done.returncode != 0
    assert list((home / "crashes").iterdir()), done.stderr[-2000:]

"""Each parser's harness under libFuzzer, from its seeds and for a while: that all hold, and can find more.

The long runs are those of ``make fuzz``.
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
from tests.fuzz import building, seeds

RUNS = 6000
"""Of each: on most machines, seconds; on none too few to learn something."""

HANGS = "-timeout=300"
"""Seconds after which an input is a finding: a machine may stand still for some."""

Done: TypeAlias = subprocess.CompletedProcess[str]


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    if reason := building.missing():
        pytest.skip(f"{reason}; to enable it: {building.REMEDY}")
    return building.build(tmp_path_factory.mktemp("programs"))


def _run(program: Path, home: Path, start: Path, *options: str) -> Done:
    words = fuzz.command(program, home, start, *options)
    return subprocess.run(
        words, env=fuzz.environment(home), capture_output=True, text=True, errors="replace", check=False
    )


def _judged(done: Done) -> Done:
    if done.returncode == fuzz.NO_JAIL:
        pytest.skip(f"{done.stderr.strip()}; to enable it: {fuzz.HARMLESS}")
    return done


@pytest.fixture(scope="module")
def homes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directories of all targets."""
    return tmp_path_factory.mktemp("fuzz")


@pytest.fixture(scope="module")
def runs(programs: dict[str, Path], homes: Path) -> Iterator[dict[str, Future[Done]]]:
    """All targets, each for its runs: as many at once as there are processors."""
    seeds.write(homes / "seeds")
    limits = f"-runs={RUNS}", HANGS
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        yield {
            target: pool.submit(_run, program, homes / target, homes / "seeds" / target, *limits)
            for target, program in programs.items()
        }


@pytest.mark.parametrize("target", building.TARGETS)
def test_nothing_is_found(runs: dict[str, Future[Done]], homes: Path, target: str) -> None:
    done = _judged(runs[target].result())
    assert done.returncode == 0, done.stderr[-4000:]
    assert list((homes / target / "corpus").iterdir()), "it learnt nothing from its seeds"
    assert not list((homes / target / "jail").iterdir()), "something was written beside the jail"


def test_a_finding_is_kept(programs: dict[str, Path], tmp_path: Path) -> None:
    """The jail is the input's, not the fuzzer's: here, what needs too much memory is written down."""
    seeds.write(tmp_path / "seeds")
    home, limits = tmp_path / "archives", ("-rss_limit_mb=1", "-max_total_time=600")
    done = _judged(_run(programs["archives"], home, tmp_path / "seeds/archives", *limits))
    assert done.returncode != 0
    assert list((home / "crashes").iterdir()), done.stderr[-2000:]

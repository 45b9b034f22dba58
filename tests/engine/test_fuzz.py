"""Each parser's harness under libFuzzer, from its seeds and for a moment: that all hold, and can find more.

The long runs are those of ``make fuzz``.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.fuzz import __main__ as fuzz
from tests.fuzz import building, seeds

SECONDS = 2


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    if reason := building.missing():
        pytest.skip(f"{reason}; to enable it: {building.REMEDY}")
    return building.build(tmp_path_factory.mktemp("programs"))


def _run(program: Path, home: Path, start: Path, *options: str) -> subprocess.CompletedProcess[str]:
    words = fuzz.command(program, home, start, *options)
    done = subprocess.run(
        words, env=fuzz.environment(home), capture_output=True, text=True, errors="replace", check=False
    )
    if done.returncode == fuzz.NO_JAIL:
        pytest.skip(f"{done.stderr.strip()}; to enable it: {fuzz.HARMLESS}")
    return done


@pytest.mark.parametrize("target", building.TARGETS)
def test_nothing_is_found(programs: dict[str, Path], target: str, tmp_path: Path) -> None:
    seeds.write(tmp_path / "seeds")
    limit = f"-max_total_time={SECONDS}"
    done = _run(programs[target], tmp_path / target, tmp_path / "seeds" / target, limit)
    assert done.returncode == 0, done.stderr[-4000:]
    assert list((tmp_path / target / "corpus").iterdir()), "it learnt nothing from its seeds"
    assert not list((tmp_path / target / "jail").iterdir()), "something was written beside the jail"


def test_a_finding_is_kept(programs: dict[str, Path], tmp_path: Path) -> None:
    """The jail is the input's, not the fuzzer's: here, what needs too much memory is written down."""
    seeds.write(tmp_path / "seeds")
    home, limits = tmp_path / "archives", ("-rss_limit_mb=1", "-max_total_time=60")
    done = _run(programs["archives"], home, tmp_path / "seeds/archives", *limits)
    assert done.returncode != 0
    assert list((home / "crashes").iterdir()), done.stderr[-2000:]

"""The example as it is written, and what its attempts do when a sandbox dies."""

from __future__ import annotations

import importlib.util
import os
import random
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import anyio.to_thread
import pytest

import dutyfree
from tests.engine import counts

EXAMPLE = Path(__file__).parents[2] / "examples" / "training_loop.py"

pytestmark = pytest.mark.native


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DUTYFREE_CACHE", str(tmp_path / "cache"))


def example() -> Any:
    spec = importlib.util.spec_from_file_location("training_loop", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look for it
    spec.loader.exec_module(module)
    return module


def test_it_runs_as_written() -> None:
    done = subprocess.run([sys.executable, str(EXAMPLE)], capture_output=True, text=True, check=True)
    steps = re.findall(r"^step \d: (\d+) rewards, mean (\d\.\d\d)$", done.stdout, re.MULTILINE)
    assert [rewards for rewards, _ in steps] == ["24", "24", "16"]
    assert "lost is left out: stage 'repository'" in done.stdout
    assert "the best branch of a2 is +" in done.stdout
    served = re.findall(r"^(?:warm|promoted|joined|layer|forked|cold) +\w+ +(\d+)", done.stdout, re.MULTILINE)
    assert sum(map(int, served)) == 65  # the groups, and the root of the tree
    assert " s saved" in done.stdout


@pytest.mark.anyio
async def test_an_attempt_survives_its_sandbox(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    module = example()
    task = (await anyio.to_thread.run_sync(module.make_tasks, tmp_path))[0]
    async with dutyfree.open("native") as native, native.sandbox(task.recipe) as sandbox:
        for init in await anyio.to_thread.run_sync(counts.sandboxes, os.getpid()):
            os.kill(init, signal.SIGKILL)
        assert await module.persistent(native, task, sandbox, random.Random(1)) in (0.0, 1.0)
        told = capsys.readouterr().out
        assert re.match(rf"{task.name}: (dispatch|exec): .*{sandbox.id}.*; once more\n", told), told

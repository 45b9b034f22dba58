"""The example as it is written, and what its attempts do when a sandbox dies."""

from __future__ import annotations

import os
import random
import re
import signal
from pathlib import Path

import anyio.to_thread
import pytest

import dutyfree
from tests.engine import counts
from tests.examples.loading import example, printed

pytestmark = pytest.mark.native


def test_it_runs_as_written() -> None:
    told = printed("training_loop")
    steps = re.findall(r"^step \d: (\d+) rewards, mean (\d\.\d\d)$", told, re.MULTILINE)
    assert [rewards for rewards, _ in steps] == ["24", "24", "16"]
    assert "lost is left out: stage 'repository'" in told
    assert "the best branch of a2 is +" in told
    served = re.findall(r"^(?:warm|promoted|joined|layer|forked|cold) +\w+ +(\d+)", told, re.MULTILINE)
    assert sum(map(int, served)) == 65  # the groups, and the root of the tree
    assert " s saved" in told


async def test_an_attempt_survives_its_sandbox(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    module = example("training_loop")
    task = (await anyio.to_thread.run_sync(module.make_tasks, tmp_path))[0]
    async with dutyfree.open("native") as native, native.sandbox(task.recipe) as sandbox:
        for init in await anyio.to_thread.run_sync(counts.sandboxes, os.getpid()):
            os.kill(init, signal.SIGKILL)
        assert await module.persistent(native, task, sandbox, random.Random(1)) in (0.0, 1.0)
        told = capsys.readouterr().out
        assert re.match(rf"{task.name}: .*{sandbox.id}.*; once more\n", told), told

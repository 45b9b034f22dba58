"""The example as it is written, and what it makes of a sandbox that breaks."""

from __future__ import annotations

import os
import signal

import anyio
import anyio.to_thread
import pytest

import dutyfree
from tests.engine import counts
from tests.examples.loading import example, printed

pytestmark = pytest.mark.native


def test_it_runs_as_written() -> None:
    for seconds in (6, 60):  # a machine may stand still for as long as the attempts have
        lines = printed("grpo_group", "--timeout", str(seconds)).splitlines()
        rewards = [line.split()[1] for line in lines]
        if rewards[0] == rewards[4] == "1":
            break
    assert rewards == ["1", "0", "0", "0", "1", "0", "0", "0"]
    assert "advantage +1.73" in lines[0]
    assert "advantage -0.58" in lines[1]
    assert sum("(forked in" in line for line in lines) == 7


async def test_a_sandbox_that_breaks_is_no_reward() -> None:
    module = example("grpo_group")
    async with dutyfree.open("native") as substrate, substrate.sandbox(module.RECIPE) as sandbox:

        async def kill() -> None:
            await sandbox.exec("until grep -qs 'tes[t].py' /proc/[0-9]*/cmdline; do :; done")
            for init in await anyio.to_thread.run_sync(counts.sandboxes, os.getpid()):
                os.kill(init, signal.SIGKILL)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(kill)
            broken = await module.attempt(sandbox, "[only for only in iter(lambda: 0, 1)]", 60)
    assert broken.reward is None
    assert broken.failure.startswith("sandbox")
    good, bad = module.Outcome("", reward=1.0), module.Outcome("", reward=0.0)
    assert module.advantages([good, broken, bad]) == [1.0, None, -1.0]
    assert module.advantages([good, broken, good]) == [None, None, None]

"""The training loop of docs/training.md, word for word, with agents that do their worst."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest

import dutyfree
from dutyfree import Edit, Limits, Recipe, Stage
from dutyfree.contract.errors import UsageError
from dutyfree.engine.launcher.timeouts import Timeouts
from dutyfree.substrates.native import Native, NativeConfig
from tests.attacks import FORK_BOMB
from tests.awaiting import appeared
from tests.engine import counts

pytestmark = pytest.mark.native

PAGE = Path(__file__).parents[2] / "docs" / "training.md"
LIMITS = Limits(memory=160 << 20, pids=40, disk=32 << 20)
SOLVED = 1.0


@pytest.fixture
def loop() -> dict[str, Any]:
    """The page's program, up to where it is run."""
    (program,) = re.findall(r"```python\n(.*?)anyio\.run\(main\)\n```", PAGE.read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(program, str(PAGE), "exec"), names)
    return names


@pytest.fixture(scope="module")
async def native() -> AsyncIterator[Any]:
    async with dutyfree.open("native", limits=LIMITS) as substrate:
        yield substrate


async def left_behind(sandbox: Any, script: str) -> None:
    await sandbox.write("script.py", script.encode())
    await sandbox.exec("python3 script.py >/dev/null 2>&1 </dev/null &")
    await appeared(sandbox, "ready")


STOPPER = "import os\nopen('ready', 'w')\nwhile True:\n  try: os.kill(-1, 19)\n  except OSError: pass"
FAR = {"PATH": ":".join([*(f"/{number}" for number in range(4000)), "/usr/bin"])}


async def in_turn(*steps: Coroutine[Any, Any, Any]) -> Any:
    """The result of the last step."""
    try:
        return [await step for step in steps][-1]
    finally:
        for step in steps:
            step.close()  # those after one that failed


async def solved(*steps: Coroutine[Any, Any, Any]) -> float:
    """An agent that solves its task, unless a step fails."""
    await in_turn(*steps)
    return SOLVED


async def ok(*steps: Coroutine[Any, Any, Any]) -> float:
    """An agent that is rewarded if its last command succeeds."""
    return float((await in_turn(*steps)).ok)


async def runs_nul_bytes(sandbox: Any) -> float:
    seen = await sandbox.exec("echo a\0b")
    assert seen.exit_code == 126
    return float(seen.ok)


async def runs_a_command_among_its_fork_bomb(sandbox: Any) -> float:
    await left_behind(sandbox, FORK_BOMB)
    seen = await sandbox.exec("true; true", timeout=30)
    return float(seen.ok and b"unavailable" not in seen.stderr)


async def searches_among_its_fork_bomb(sandbox: Any) -> float:
    await left_behind(sandbox, FORK_BOMB)
    while True:
        await sandbox.search(".", "text")


async def uses_up_its_memory(sandbox: Any) -> float:
    seen = await sandbox.exec(["python3", "-c", "held = bytearray(600 << 20)"], timeout=60)
    assert seen.oom
    return float(seen.ok)


async def ends_its_shell(sandbox: Any) -> float:
    async with sandbox.shell() as held:
        return await solved(held.run("exit 3"), held.run("true"))


async def stops_its_init(sandbox: Any) -> float:
    await left_behind(sandbox, STOPPER)
    while True:
        await sandbox.exec(["true"], env=FAR, timeout=0.2)


async def fails_in_a_batch(sandbox: Any) -> float:
    (error,) = await sandbox.batch([Edit("missing", b"a", b"b")])
    raise error


HOSTILE: dict[str, Callable[[Any], Awaitable[float]]] = {
    "edits_what_is_absent": lambda one: solved(one.write("file", b"text"), one.edit("file", b"absent", b"")),
    "edits_what_is_there_twice": lambda one: solved(one.write("file", b"a a"), one.edit("file", b"a", b"")),
    "edits_nothing": lambda one: solved(one.write("file", b"text"), one.edit("file", b"", b"x")),
    "searches_for_nonsense": lambda one: solved(one.search(".", "(", regex=True)),
    "reads_what_is_missing": lambda one: solved(one.read("missing")),
    "reads_a_path_that_is_too_long": lambda one: solved(one.read("x" * 100_000)),
    "reads_a_pipe": lambda one: solved(one.exec("mkfifo answer"), one.read("answer")),
    "reads_memory": lambda one: solved(one.exec("ln -s /proc/self/mem answer"), one.read("answer")),
    "writes_to_a_full_disk": lambda one: solved(
        one.exec("cat /dev/zero > full"), one.write("answer", b"x" * (1 << 20))
    ),
    "runs_nothing": lambda one: ok(one.exec([])),
    "kills_its_first_process": lambda one: ok(one.exec("kill -9 1; kill -9 -1"), one.exec("false")),
    "removes_the_shell": lambda one: ok(one.exec("rm -f /bin/sh /usr/bin/sh"), one.exec("true")),
    "removes_its_directory": lambda one: solved(
        one.exec("cd /; rm -rf /workspace; ln -s workspace /workspace"), one.write("/workspace/answer", b"")
    ),
}
OWN = (
    runs_nul_bytes,
    runs_a_command_among_its_fork_bomb,
    searches_among_its_fork_bomb,
    uses_up_its_memory,
    ends_its_shell,
    stops_its_init,
    fails_in_a_batch,
)
HOSTILE |= {agent.__name__: agent for agent in OWN}


class Counted:
    """A rollout, and how often it was begun."""

    def __init__(self, rollout: Callable[[Any], Awaitable[float]]) -> None:
        self.times = 0
        self._rollout = rollout

    async def __call__(self, sandbox: Any) -> float:
        self.times += 1
        return await self._rollout(sandbox)


@pytest.mark.parametrize("hostile", HOSTILE)
async def test_a_hostile_agent_gets_no_reward_and_no_second_try(loop: dict[str, Any], hostile: str) -> None:
    timeouts = Timeouts(answer=1.5 if hostile == "stops_its_init" else 20.0)
    config = NativeConfig(limits=LIMITS)
    if hostile == "removes_its_directory":  # a plain directory is a mount point: it stays
        config = NativeConfig(limits=LIMITS, plain=())
    loop["rollout"] = rollout = Counted(HOSTILE[hostile])
    with anyio.fail_after(200):
        async with Native(config, timeouts) as substrate, substrate.sandbox() as sandbox:
            assert await loop["attempt"](substrate, Recipe(), sandbox) == 0.0
    assert rollout.times == 1


async def test_a_machine_that_fails_costs_no_reward(loop: dict[str, Any], native: Any) -> None:
    """Killed from outside, as by the host: another try, in another sandbox."""

    async def killed_once(sandbox: Any) -> float:
        if rollout.times == 1:
            for init in await anyio.to_thread.run_sync(counts.sandboxes, os.getpid()):
                os.kill(init, signal.SIGKILL)
        return float((await sandbox.exec("true", timeout=60)).ok)

    loop["rollout"] = rollout = Counted(killed_once)
    async with native.sandbox() as sandbox:
        assert await loop["attempt"](native, Recipe(), sandbox) == SOLVED
    assert rollout.times == 2


async def test_a_mistake_of_the_program_raises(loop: dict[str, Any], native: Any) -> None:
    async def mistaken(sandbox: Any) -> float:
        return float((await sandbox.exec("true", timeout="5")).ok)

    loop["rollout"] = rollout = Counted(mistaken)
    async with native.sandbox() as sandbox:
        with pytest.raises(UsageError, match="a number of seconds"):
            await loop["attempt"](native, Recipe(), sandbox)
    assert rollout.times == 1


async def test_a_task_whose_stage_fails_is_left_out(
    loop: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    fails, works = (Recipe(stages=(Stage("setup", (command,)),)) for command in ("exit 3", "true"))
    loop["tasks"], loop["rollout"] = [fails, works], Counted(solves)
    await loop["main"]()
    left_out, rewards, *_ = capsys.readouterr().out.splitlines()
    assert left_out.startswith("left out: stage 'setup': 'exit 3' ended with 3")
    assert rewards == str([SOLVED] * 8)


async def solves(sandbox: Any) -> float:
    return SOLVED

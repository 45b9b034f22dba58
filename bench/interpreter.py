"""A preloaded interpreter for the Python actions of T1 and T2 (docs/warm-processes.md)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from rounds import Measured, Row, figure, interleaved, ratio

import dutyfree
from dutyfree import Exec, Recipe, Stage, paths, recipes
from dutyfree.workloads import fixture, tiers
from dutyfree.workloads.project import ATTRS
from dutyfree.workloads.workload import Step

NOTHING = ("python3", "-c", "pass")


async def preloaded(rounds: int) -> list[Row]:
    """T1's syntax search and T2's tests: with a new interpreter, and with a fork of the preloaded one."""
    rows: list[Row] = []
    async with dutyfree.open("native") as substrate:
        given = fixture.build(paths.cache())
        checkout = Stage("repository", files={ATTRS.name: given.checkout})
        install = (
            "python3 -m pip --isolated install -q --no-index --find-links wheels --no-cache-dir --target deps"
        )
        wheels = Stage("files", files={"wheels": given.wheels})
        dependencies = Stage("dependencies", commands=(f"{install} pytest hypothesis cloudpickle pympler",))
        state = Recipe(stages=(checkout, wheels, dependencies))
        (search,) = [step for step in tiers.t1(given).actions if step.label == "symbols"]
        async with substrate.sandbox(_with(state, recipes.python("ast"))) as sandbox:
            rows += await _compare(
                sandbox, "N", "empty program", tiers.run("none", "command", NOTHING), rounds
            )
            rows += await _compare(sandbox, "S", "T1's syntax search", search, rounds)
        env = {**ATTRS.python, "PYTHONPATH": "/workspace/deps"}
        modules = [
            "pytest",
            "unittest.mock",
            "urllib.request",
            "pdb",
            "asyncio",
            *await _plugins(substrate, state, env),
        ]
        failing = tiers.pytest("test", ATTRS.failing, exit_code=1, says=b"1 failed")
        wider = tiers.pytest("wider", *tiers.WIDER, exit_code=1, says=b"1 failed, 259 passed")
        async with substrate.sandbox(_with(state, recipes.python(*modules, env=env))) as sandbox:
            rows += await _compare(sandbox, "T", "T2's one test", failing, max(5, rounds // 4))
            rows += await _compare(sandbox, "W", "T2's wider tests", wider, max(5, rounds // 10))
    return rows


def _with(state: Recipe, service: Any) -> Recipe:
    return Recipe(state.image, state.stages, (service,))


async def _plugins(substrate: Any, state: Recipe, env: dict[str, str]) -> list[str]:
    """The plugins that pytest imports when it starts."""
    code = "import _pytest.config as config; print(*('_pytest.' + name for name in config.default_plugins))"
    async with substrate.sandbox(state) as sandbox:
        seen = await sandbox.exec(["python3", "-c", code], env=env)
        assert seen.ok, seen
        return str(seen.stdout, "utf-8").split()


async def _compare(sandbox: Any, letter: str, what: str, step: Step, rounds: int) -> list[Row]:
    action = step.action
    assert isinstance(action, Exec)
    assert action.command[0] == "python3"
    arguments = list(action.command[1:])

    explain = {**(action.env or {}), "DUTYFREE_EXPLAIN": "1"}
    seen = await sandbox.call("python", arguments, cwd=action.cwd, env=explain)
    assert not seen.stderr.startswith(b"a new interpreter"), seen.stderr

    def side(run: Callable[[], Awaitable[Any]]) -> Callable[[], Awaitable[None]]:
        async def measured() -> None:
            problem = step.expect.problem(await run())
            assert problem is None, problem

        return measured

    found: Measured = await interleaved(
        rounds,
        {
            "new": side(lambda: sandbox.exec(action.command, cwd=action.cwd, env=action.env)),
            "fork": side(lambda: sandbox.call("python", arguments, cwd=action.cwd, env=action.env)),
        },
    )
    (state,) = await sandbox.services()
    assert state.starts == 1
    return [
        figure(f"{letter}1", f"{what}: a new interpreter, ms", _median(found["new"]), found["new"]),
        figure(f"{letter}2", f"{what}: a fork, ms", _median(found["fork"]), found["fork"]),
        ratio(f"{letter}3", f"{what}: a fork ÷ a new interpreter", found["fork"], found["new"]),
    ]


def _median(seconds: list[float]) -> float:
    return sorted(seconds)[len(seconds) // 2] * 1e3

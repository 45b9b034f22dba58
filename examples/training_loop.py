"""A small training loop: tasks of two repositories, groups of eight, the next batch prefetched.

    python examples/training_loop.py --steps 3

It has everything but the model and its updates. Attempts pause in the middle, as partial rollouts do. If a
sandbox dies, its attempt runs again in another one, and the reward is not affected. If a recipe fails, only
its task is left out. At the end the program searches one task as a tree, and prints what the pool saved.
"""

from __future__ import annotations

import argparse
import random
import statistics
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import anyio

import dutyfree
from dutyfree import Recipe, Stage, recipes
from dutyfree.contract.errors import Quarantined, StageError, SubstrateError, verdict
from dutyfree.substrates.native import Native, NativeSandbox

GROUP = 8
REPEATS = 2
"""How many more sandboxes one attempt may use, if the infrastructure fails."""


@dataclass(frozen=True)
class Task:
    """A bug to fix. The recipe gives the state in which the attempt starts."""

    name: str
    recipe: Recipe
    """Create it once and keep it: dutyfree reads the files of a recipe once per object."""


def prepared(repository: Path, commit: str) -> Recipe:
    """All tasks of a repository share the layer of its copy. The history ends with the bug."""
    return Recipe(
        stages=(
            recipes.repository(repository),
            recipes.checkout(commit, only_past=True),
            # Checked by hash: the default check misses an edit of the same size in the same second.
            Stage("setup", ("python3 -m compileall -q --invalidation-mode checked-hash repository",)),
        )
    )


def make_tasks(root: Path) -> list[Task]:
    """Two repositories with four bugs each, and a task that fails: its commit does not exist."""
    tasks = []
    for letter in "ab":
        repository = root / letter
        _git(root, "init", "-q", letter)
        for number in range(1, 5):
            (repository / f"m{number}.py").write_text(f"def f(x):\n    return x + {number}\n")
        _commit(repository, "all is well")
        _git(repository, "tag", "well")
        for number in range(1, 5):
            _git(repository, "checkout", "-q", "-b", f"bug-{number}", "well")
            (repository / f"m{number}.py").write_text(f"def f(x):\n    return x - {number}\n")
            (repository / "test.py").write_text(f"from m{number} import f\nassert f(1) == {1 + number}\n")
            _commit(repository, f"bug {number}")
            commit = _git(repository, "rev-parse", "HEAD")
            tasks.append(Task(f"{letter}{number}", prepared(repository, commit)))
    return [*tasks, Task("lost", prepared(repository, "0" * 40))]


# --- One attempt -------------------------------------------------------------------------------------


async def attempt(sandbox: NativeSandbox, chance: random.Random) -> float:
    """Find the bug, change the code, run the test. The reward is 1 if it passes. Raises DutyfreeError."""
    seen = await sandbox.exec("grep -l ' - ' m*.py", cwd="repository", timeout=30)
    suspect = seen.stdout.decode().strip()
    await sandbox.pause()  # while the weights are updated: no process and no timeout runs
    await sandbox.resume()
    await guess(sandbox, suspect, " + " if chance.random() < 0.5 else " * ")
    return await reward(sandbox)


async def guess(sandbox: NativeSandbox, suspect: str, operator: str) -> None:
    await sandbox.edit(f"repository/{suspect}", b" - ", operator.encode())


async def reward(sandbox: NativeSandbox) -> float:
    seen = await sandbox.exec(["python3", "test.py"], cwd="repository", timeout=30)
    return float(seen.ok)  # a timeout is a failure of the attempt too


async def persistent(
    native: Native, task: Task, sandbox: NativeSandbox, chance: random.Random
) -> float | None:
    """An attempt that survives the loss of its sandbox; None if the infrastructure failed each time."""
    reward = await outcome(task, sandbox, chance)
    for _ in range(REPEATS):
        if reward is None:
            try:
                async with native.sandbox(task.recipe) as fresh:
                    reward = await outcome(task, fresh, chance)
            except SubstrateError as error:
                print(f"{task.name}: {error.phase}: {error}")
    return reward


async def outcome(task: Task, sandbox: NativeSandbox, chance: random.Random) -> float | None:
    """The reward, or None if the infrastructure failed."""
    try:
        return await attempt(sandbox, chance)
    except Exception as error:
        match verdict(error):
            case "task":  # the model caused it, such as an edit that does not match: it counts
                return 0.0
            case "infrastructure":
                print(f"{task.name}: {error}; once more")
                return None
        raise  # a bug in this program


# --- Groups, batches, trees --------------------------------------------------------------------------


async def rollouts(native: Native, task: Task, chance: random.Random) -> list[float | None]:
    """One group: a reward for each attempt. Raises SubstrateError if it gets no sandboxes."""
    rewards: list[float | None] = [None] * GROUP
    async with native.group(task.recipe, GROUP) as sandboxes, anyio.create_task_group() as tasks:

        async def one(number: int) -> None:
            rewards[number] = await persistent(native, task, sandboxes[number], chance)

        for number in range(GROUP):
            tasks.start_soon(one, number)
    return rewards


async def step(
    native: Native, batch: Sequence[Task], following: Sequence[Task], chance: random.Random
) -> dict[str, list[float | None]]:
    """Run all groups of a batch at once, and prepare the next batch in the background."""
    await native.prefetch([task.recipe for task in following], GROUP)
    results: dict[str, list[float | None]] = {}

    async def one(task: Task) -> None:
        try:
            results[task.name] = await rollouts(native, task, chance)
        except (StageError, Quarantined) as error:  # the recipe fails: a retry would not help
            print(f"{task.name} is left out: {error.message.splitlines()[0]}")

    async with anyio.create_task_group() as tasks:
        for task in batch:
            tasks.start_soon(one, task)
    return results


async def best_branch(native: Native, task: Task) -> str:
    """A tree of one level: find the bug, fork, and try every operator."""
    operators = (" + ", " * ", " / ", " % ")
    async with native.sandbox(task.recipe) as root:
        seen = await root.exec("grep -l ' - ' m*.py", cwd="repository", timeout=30)
        (suspect,) = seen.stdout.decode().split()
        async with root.fork(len(operators)) as branches:
            found = []
            for branch, operator in zip(branches, operators, strict=True):
                await guess(branch, suspect, operator)
                found.append((await reward(branch), operator))
    return max(found)[1].strip()


async def train(root: Path, steps: int) -> None:
    chance = random.Random(1)  # noqa: S311 (a stand-in for a model)
    tasks = await anyio.to_thread.run_sync(make_tasks, root)
    batches = [tasks[3 * number % len(tasks) :][:3] for number in range(steps + 1)]
    async with dutyfree.open("native") as native:
        assert isinstance(native, Native)  # so that type checkers know all of its methods
        for number in range(steps):
            results = await step(native, batches[number], batches[number + 1], chance)
            rewards = [one for group in results.values() for one in group if one is not None]
            print(f"step {number}: {len(rewards)} rewards, mean {statistics.fmean(rewards):.2f}")
        print(f"the best branch of {tasks[1].name} is {await best_branch(native, tasks[1])}")
        assert native.pool is not None
        print(native.pool.ledger)  # for programs there are .figures() and .prometheus()


# --- Git ---------------------------------------------------------------------------------------------


def _git(directory: Path, *arguments: str) -> str:
    author = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    done = subprocess.run(
        ["git", *author, *arguments], cwd=directory, check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


def _commit(repository: Path, message: str) -> None:
    _git(repository, "add", ".")
    _git(repository, "commit", "-q", "-m", message)


def main() -> None:
    parser = argparse.ArgumentParser(description="A small training loop.")
    parser.add_argument("--steps", type=int, default=3)
    with tempfile.TemporaryDirectory() as root:
        anyio.run(partial(train, Path(root), parser.parse_args().steps))


if __name__ == "__main__":
    main()

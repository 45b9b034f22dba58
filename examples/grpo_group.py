"""A group of rollouts for GRPO: eight sandboxes in the same state, one attempt in each.

    python examples/grpo_group.py

The state is a small project with a bug, and its tests. It is prepared once. Each attempt edits the source and
runs the tests, and its reward is 1 if they pass. If a sandbox breaks, its attempt has no reward, and does not
count in the group's baseline. So the model learns nothing from a broken machine.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial

import anyio

import dutyfree
from dutyfree import Recipe, Sandbox, Stage
from dutyfree.contract.abilities import Pooling
from dutyfree.contract.errors import verdict

SOURCE = "def middle(values):\n    return sorted(values)[len(values) // 2 + 1]\n"
TEST = """\
from project import middle
assert middle([3, 1, 2]) == 2
assert middle([5]) == 5
assert middle([30, 1, 2]) == 2
"""

RECIPE = Recipe(
    stages=(
        Stage("repository", (f"cat > project.py <<'.'\n{SOURCE}.", f"cat > test.py <<'.'\n{TEST}.")),
        # Checked by hash: the default check misses an edit of the same size in the same second.
        Stage("dependencies", ("python3 -m compileall -q --invalidation-mode checked-hash project.py",)),
    )
)

SAMPLES = (
    "sorted(values)[len(values) // 2]",
    "sorted(values)[len(values) // 2 + 1]",
    "sorted(values)[1]",
    "sum(values) / len(values)",
    "sorted(values)[(len(values) - 1) // 2]",
    "values[len(values) // 2]",
    "sorted(values)[-1",
    "max(iter(lambda: 0, 1))",
)
"""What a model might write. The seventh is not valid Python, the last never ends."""


@dataclass(frozen=True)
class Outcome:
    """The reward of one attempt, or the failure of the infrastructure. Errors of the agent give 0."""

    sample: str
    reward: float | None = None
    failure: str = ""
    served: str = ""


async def attempt(sandbox: Sandbox, sample: str, seconds: float) -> Outcome:
    served = getattr(sandbox, "served", None)
    how = "" if served is None else f"{served.kind} in {served.seconds * 1e3:.1f} ms"
    try:
        await sandbox.write("project.py", f"def middle(values):\n    return {sample}\n".encode())
        seen = await sandbox.exec(["python3", "test.py"], timeout=seconds)
    except Exception as error:
        match verdict(error):
            case "task":  # the model caused it, such as a full disk: it counts
                return Outcome(sample, reward=0.0, served=how)
            case "infrastructure":
                return Outcome(sample, failure=str(error), served=how)
        raise  # a bug in this program
    return Outcome(sample, reward=float(seen.ok), served=how)


def advantages(outcomes: Sequence[Outcome]) -> list[float | None]:
    """Each reward relative to its group. None without a reward, or if all rewards are equal."""
    rewards = [outcome.reward for outcome in outcomes if outcome.reward is not None]
    spread = statistics.pstdev(rewards) if rewards else 0.0
    if not spread:
        return [None for _ in outcomes]
    mean = statistics.fmean(rewards)
    return [None if found.reward is None else (found.reward - mean) / spread for found in outcomes]


async def rollouts(samples: Sequence[str], seconds: float) -> list[Outcome]:
    outcomes: dict[int, Outcome] = {}
    async with AsyncExitStack() as stack:
        substrate = await stack.enter_async_context(dutyfree.open("native"))
        assert isinstance(substrate, Pooling)
        group = await stack.enter_async_context(substrate.group(RECIPE, len(samples)))

        async def one(number: int) -> None:
            outcomes[number] = await attempt(group[number], samples[number], seconds)

        async with anyio.create_task_group() as tasks:
            for number in range(len(samples)):
                tasks.start_soon(one, number)
    return [outcomes[number] for number in range(len(samples))]


async def show(seconds: float) -> None:
    outcomes = await rollouts(SAMPLES, seconds)
    for outcome, advantage in zip(outcomes, advantages(outcomes), strict=True):
        weight = "none" if advantage is None else f"{advantage:+.2f}"
        verdict = outcome.failure or f"reward {outcome.reward:g}"
        print(f"{verdict:10} advantage {weight:>5}  ({outcome.served})  {outcome.sample}")


def main() -> None:
    parser = argparse.ArgumentParser(description="A group of rollouts for GRPO.")
    parser.add_argument("--timeout", type=float, default=6, help="seconds for the tests of one attempt")
    anyio.run(partial(show, parser.parse_args().timeout))


if __name__ == "__main__":
    main()

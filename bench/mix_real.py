"""The mix of ``mix.py`` on real sandboxes: small repositories, real installations, groups of eight.

It imitates a training loop: request a batch of groups, run a few commands in each rollout, learn for a
moment, request the next batch. Every policy gets the same batches, and starts with an empty cache.

    python bench/run.py mix
"""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import mix
import msgspec
from rounds import Row, figure

import dutyfree
from dutyfree import paths
from dutyfree.contract import Recipe, Stage
from dutyfree.engine.pool.scheduler.values import Budget
from dutyfree.workloads import fixture

LOAD = replace(mix.Workload(), groups=4, batches=5)
FILES = 100
LEARNING = 2.0
"""Seconds between two batches."""
POLICIES = ("no pool", "exact match", "distance", "distance, prefetch")
PACKAGES = ("cloudpickle", "pympler", "iniconfig", "packaging", "pluggy")


def repositories(root: Path, wheels: Path) -> list[Path]:
    """Make git repositories, and a directory with the wheels that they depend on. Blocks."""
    made = []
    (root / "wheels").mkdir()
    for wheel in wheels.iterdir():
        if wheel.name.lower().startswith(PACKAGES):
            shutil.copy(wheel, root / "wheels")
    for number in range(LOAD.repositories):
        source = root / str(number)
        source.mkdir()
        chance = random.Random(number)  # noqa: S311
        for file in range(FILES):
            lines = [f"def f{line}(x):\n    return x * {chance.random()}\n" for line in range(40)]
            (source / f"module{file}.py").write_text("".join(lines))
        git = partial(subprocess.run, cwd=source, check=True, capture_output=True)
        git(["git", "init", "--quiet"])
        git(["git", "add", "."])
        git(["git", "-c", "user.name=a", "-c", "user.email=a@b", "commit", "--quiet", "-m", "all"])
        made.append(source)
    return made


def recipe(number: int, sources: list[Path]) -> Recipe:
    source = sources[number % LOAD.repositories]
    packages = random.Random(number).sample(PACKAGES, 3)  # noqa: S311
    pip = "python3 -m pip --isolated install --quiet --disable-pip-version-check --no-index --no-deps"
    install = f"{pip} --no-cache-dir --find-links wheels --target deps {' '.join(packages)}"
    files = {"repository": source, "wheels": source.parent / "wheels"}
    return Recipe(
        stages=(
            Stage("repository", ("git -C repository checkout --quiet -b work",), files=files),
            Stage("dependencies", (install, f"echo {number} > deps/number")),
            Stage("setup", (f"echo {number} > number",)),
        )
    )


class Outcome:
    def __init__(self) -> None:
        self.ready: list[float] = []
        self.kinds: Counter[str] = Counter()


async def run(name: str, recipes: list[Recipe]) -> Outcome:
    restricted, prefetch = mix.POLICIES[name]
    batches: dict[int, list[int]] = {}
    for arrival in mix.arrivals(LOAD):
        batches.setdefault(arrival.batch, []).append(arrival.recipe)
    found = Outcome()
    leased, stocked = LOAD.groups * LOAD.group, int(LOAD.recipes * LOAD.share)
    policy = msgspec.structs.replace(restricted, starting=8, idle_seconds=None)
    with tempfile.TemporaryDirectory() as cache:
        os.environ["DUTYFREE_CACHE"] = cache
        async with dutyfree.open("native", policy=policy, budget=Budget(leased + stocked)) as opened:
            substrate: Any = opened
            await substrate.prepare()
            await substrate.pooled()

            async def rollout(sandbox: Any, number: int) -> None:
                seen = await sandbox.exec("cat number deps/number; python3 -c 'import sys; print(sys.path)'")
                assert seen.stdout.startswith(f"{number}\n{number}\n".encode())
                found.ready.append(sandbox.served.seconds)
                found.kinds[sandbox.served.kind] += 1

            async def group(number: int) -> None:
                async with substrate.group(recipes[number], LOAD.group) as sandboxes:
                    await asyncio.gather(*(rollout(sandbox, number) for sandbox in sandboxes))

            for batch in range(LOAD.batches):
                if prefetch:  # a trainer knows its next batch when it starts one
                    for number in batches.get(batch + 1, ()):
                        await substrate.prefetch([recipes[number]], LOAD.group)
                await asyncio.gather(*(group(number) for number in batches[batch]))
                await anyio.sleep(LEARNING)
    return found


async def real_mix(rounds: int) -> list[Row]:
    """Mean seconds until a sandbox is ready, by policy; and the ratio of exact match to distance."""
    del rounds
    attrs = await anyio.to_thread.run_sync(fixture.build, paths.cache(), partial(print, file=sys.stderr))
    rows, means = [], {}
    before = os.environ.get("DUTYFREE_CACHE")
    with tempfile.TemporaryDirectory() as directory:
        sources = await anyio.to_thread.run_sync(repositories, Path(directory), attrs.wheels)
        recipes = [recipe(number, sources) for number in range(LOAD.recipes)]
        try:
            for number, name in enumerate(POLICIES):
                found = await run(name, recipes)
                means[name] = statistics.fmean(found.ready)
                kinds = ", ".join(f"{kind} {count}" for kind, count in found.kinds.most_common())
                print(f"{name}: {kinds}", file=sys.stderr)
                what = f"real mix: mean ready, {name}, ms"
                rows.append(figure(f"real-{number}", what, means[name] * 1e3, found.ready))
        finally:
            os.environ.pop("DUTYFREE_CACHE", None)
            if before is not None:
                os.environ["DUTYFREE_CACHE"] = before
    gain = means["exact match"] / means["distance"]
    rows.append(figure("real", "real mix: exact match ÷ distance, mean ready", gain, [gain], at_least=2.0))
    return rows

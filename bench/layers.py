"""Copying layers compared with building them; and the cost of a long chain of snapshots.

The recipe is T2's: the wheels, the clone of attrs, its test dependencies. In turns, it is built into an
empty store, exported to an archive, imported into another empty store, and fetched into a third one from the
directory of the first. Then, in turns: the first sandbox of a node that builds the recipe, and of one that
fetches it from a peer, which has packed it already or not. Then a sandbox on sixty snapshots, each taken
from a sandbox on the one before, is compared with a fresh one. Prints medians, and the load of the machine.

    .venv/bin/python bench/layers.py [--rounds 5] [--image IMAGE]
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread

import dutyfree
import dutyfree.substrates.native
from dutyfree import Recipe, layers, paths
from dutyfree.server.tokens import Tokens
from dutyfree.workloads import fixture, tiers
from dutyfree.workloads.gitserver import listen_address, serve

CHAIN = 60
LOOKUPS = "for i in $(seq 300); do [ -e /usr/bin/absent$i ] || [ -e /workspace/absent$i ]; done"


async def timed(times: dict[str, list[float]], name: str, work: Callable[[], Any]) -> Any:
    begin = time.perf_counter()
    result = await anyio.to_thread.run_sync(work)
    times[name].append(time.perf_counter() - begin)
    return result


def use(root: Path, name: str) -> Path:
    """Switch to an empty cache."""
    shutil.rmtree(root / name, ignore_errors=True)
    os.environ["DUTYFREE_CACHE"] = str(root / name)
    return root / name


async def copy(root: Path, recipe: Recipe, rounds: int) -> None:
    times: dict[str, list[float]] = defaultdict(list)
    native: Any
    for _ in range(rounds):
        here = use(root, "here")
        # Both sides have the image before the measurement, because only the layers on it matter.
        async with dutyfree.open("native") as native:
            await native.prepare(Recipe(recipe.image))
            begin = time.perf_counter()
            await native.prepare(recipe)
            times["build until it can be used"].append(time.perf_counter() - begin)
        times["build until it is on disk"].append(time.perf_counter() - begin)
        export = partial(layers.export, [recipe], root / "recipe.tar", image=False)
        done = await timed(times, "export to an archive", export)
        await timed(times, "export again", export)
        for name, source in (
            ("import of the archive", root / "recipe.tar"),
            ("fetch from the other cache", here),
        ):
            use(root, "there")
            async with dutyfree.open("native") as native:
                await native.prepare(Recipe(recipe.image))
            (came,) = await timed(times, name, partial(layers.bring, source, [recipe]))
            assert came.layers == len(recipe.stages)
        async with dutyfree.open("native") as native:
            begin = time.perf_counter()
            await native.prepare(recipe)
            times["prepare with all layers on disk"].append(time.perf_counter() - begin)
    size = sum(kept.size for kept in layers.ls()) / 1e6
    print(f"on image {recipe.image or 'host'}: {size:.1f} MB on disk, {done.size / 1e6:.1f} MB as an archive")
    show(times)


async def first(root: Path, recipe: Recipe, rounds: int) -> None:
    """From the request to the first result, on a node that has only the image."""
    native: Any
    times: dict[str, list[float]] = defaultdict(list)
    ratios: dict[str, list[float]] = defaultdict(list)
    here = use(root, "here")
    async with dutyfree.open("native") as native:
        await native.prepare(recipe)
    with served(root, here) as peer:
        for turn in range(rounds):
            took: dict[str, float] = {}
            methods = [
                ("built", ()),
                ("fetched, packed on request", (peer,)),
                ("fetched, packed in advance", (peer,)),
            ]
            for number, (name, peers) in enumerate(methods[turn % 3 :] + methods[: turn % 3]):
                if name.endswith("on request"):
                    for packed in here.glob("layers/kept/*/*/packed"):
                        shutil.rmtree(packed)
                # A new cache each time, and a sync: creating files is slow where many were removed.
                use(root, f"node-{turn}-{number}")
                async with dutyfree.open("native", peers=peers) as native:
                    await native.prepare(Recipe(recipe.image))
                    await anyio.to_thread.run_sync(os.sync)
                    begin = time.perf_counter()
                    async with native.sandbox(recipe) as sandbox:
                        await sandbox.exec(["/bin/true"])
                        took[name] = time.perf_counter() - begin
                        assert sandbox.served.kind == ("fetched" if peers else "layer")
            for name, seconds in took.items():
                times[f"first result, {name}"].append(seconds)
                if name != "built":
                    ratios[name].append(seconds / took["built"])
    show(times)
    for name, found in ratios.items():
        low, high = min(found), max(found)
        print(f"  {name} ÷ built: {statistics.median(found):.2f} ({low:.2f} to {high:.2f})")


@contextlib.contextmanager
def served(root: Path, cache: Path) -> Iterator[str]:
    """Serve the layers of a cache; the URL. This process has a token for it."""
    with Tokens(root / "state/server.sqlite") as tokens:
        os.environ["DUTYFREE_PEER_TOKEN"] = tokens.create("operator")
    state = ("--state", str(root / "state"))
    command = [sys.executable, "-m", "dutyfree", "serve", "--listen", "127.0.0.1:0", "--until-eof", *state]
    environment = {**os.environ, "DUTYFREE_CACHE": str(cache)}
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True
    )
    try:
        assert process.stdout is not None
        yield process.stdout.readline().partition("serving sandboxes at ")[2].partition(";")[0]
    finally:
        process.communicate()
        del os.environ["DUTYFREE_PEER_TOKEN"]


async def chain(root: Path, rounds: int) -> None:
    times: dict[str, list[float]] = defaultdict(list)
    native: Any
    for named in (False, True):
        use(root, "here")
        async with dutyfree.open("native") as native:
            recipe = Recipe()
            for turn in range(CHAIN):
                async with native.sandbox(recipe) as sandbox:
                    await sandbox.exec(f"mkdir d{turn}; echo {turn} > d{turn}/f")
                    begin = time.perf_counter()
                    recipe = await sandbox.snapshot(f"at-{turn}" if named else None)
                    kind = "with a name" if named else "in memory"
                    times[f"snapshot {kind}"].append(time.perf_counter() - begin)
            async with native.sandbox(recipe) as last, native.sandbox() as first:
                for _ in range(40 * rounds):
                    for name, one in (("a fresh sandbox", first), (f"one on {CHAIN} {kind}", last)):
                        times[f"/bin/true in {name}"].append((await one.exec(["/bin/true"])).seconds)
                for _ in range(10 * rounds):
                    for name, one in (("a fresh sandbox", first), (f"one on {CHAIN} {kind}", last)):
                        times[f"600 lookups in {name}"].append((await one.exec(LOOKUPS)).seconds)
    show(times)


def show(times: dict[str, list[float]]) -> None:
    for name, found in times.items():
        print(f"  {name:<48} {statistics.median(found) * 1e3:9.2f} ms   n={len(found)}")


async def main(rounds: int, image: str | None) -> None:
    made = await anyio.to_thread.run_sync(fixture.build, paths.cache())
    before = os.environ.get("DUTYFREE_CACHE")
    root = Path(await anyio.to_thread.run_sync(tempfile.mkdtemp))
    try:
        async with serve(made, [listen_address(dutyfree.substrates.native.Native.host_address)]) as server:
            url = server.url(dutyfree.substrates.native.Native.host_address)
            stages = (*tiers.recipe(made).stages, *tiers.setup(made, url))
            await copy(root, Recipe(image, stages), rounds)
            await first(root, Recipe(image, stages), rounds)
        await chain(root, rounds)
    finally:
        os.environ.pop("DUTYFREE_CACHE")
        if before:
            os.environ["DUTYFREE_CACHE"] = before
        shutil.rmtree(root, ignore_errors=True)
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} processors")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--image")
    arguments = parser.parse_args()
    anyio.run(main, arguments.rounds, arguments.image)

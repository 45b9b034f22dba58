"""Warm sandboxes: the time of a lease (P5), and the time that each warmth saves in T2."""

from __future__ import annotations

import random
import statistics
from contextlib import AsyncExitStack
from time import perf_counter
from typing import Any

import anyio
import anyio.to_thread
from rounds import Row, figure, interleaved, ratio

import dutyfree
from dutyfree import paths
from dutyfree.contract import Limits, Recipe
from dutyfree.workloads import fixture, tiers
from dutyfree.workloads.gitserver import listen_address, serve

TRUE = ["/bin/true"]
FIRST = ["echo", "ready"]
SETTLE = 0.2
"""Seconds until a returned sandbox is ready again."""

WARMTHS = ("cold", "base", "image", "repository", "dependencies", "warm")


async def leases(rounds: int) -> list[Row]:
    """P5: a warm lease, from the request to the first result, compared with an exec in a running sandbox."""
    async with dutyfree.open("native-warm") as warm, dutyfree.open("native") as native:
        await warm.prepare()
        pool: Any = warm.pool  # type: ignore[attr-defined]
        async with warm.sandbox():  # the pool makes another one meanwhile: then there are five
            pass
        async with native.sandbox() as sandbox:

            async def lease() -> float:
                start = perf_counter()
                async with warm.sandbox() as leased:
                    await leased.exec(TRUE)
                    seconds = perf_counter() - start
                await pool.until_idle(Recipe(), 5)  # so that its reset does not slow the next side
                return seconds

            async def create() -> float:
                start = perf_counter()
                async with native.sandbox() as made:
                    await made.exec(TRUE)
                    return perf_counter() - start

            async def execute() -> None:
                await sandbox.exec(TRUE)

            sides = {"lease": lease, "create": create, "exec": execute}
            found = await interleaved(rounds, sides)
        assert pool.ledger.served.total() == pool.ledger.served["warm", "image"]
    return [
        ratio("P5", "warm lease to first result ÷ native exec", found["lease"], found["exec"], at_most=1.25),
        ratio("P5-create", "warm lease ÷ create, to first result", found["lease"], found["create"]),
    ]


async def stages(rounds: int) -> list[Row]:
    """T2 from the request to its first result by warmth, and the share of the cold time that is saved."""
    seconds: dict[str, list[float]] = {warmth: [] for warmth in WARMTHS}
    attrs = await anyio.to_thread.run_sync(fixture.build, paths.cache(), print)
    async with AsyncExitStack() as stack:
        recipes: dict[str, tuple[Any, Recipe]] = {}
        for warmth in WARMTHS:
            substrate: Any = await stack.enter_async_context(dutyfree.open(f"native-{warmth}"))
            address = substrate.host_address
            if not recipes:
                server = await stack.enter_async_context(serve(attrs, [listen_address(address)]))
            recipe = tiers.t2(attrs, server.url(address)).with_setup_in_recipe().recipe
            await substrate.prepare(recipe)
            recipes[warmth] = substrate, recipe
        chance = random.Random(1)  # noqa: S311
        for _ in range(rounds):
            for warmth in chance.sample(WARMTHS, len(WARMTHS)):
                substrate, recipe = recipes[warmth]
                await anyio.sleep(SETTLE)
                start = perf_counter()
                async with substrate.sandbox(recipe, limits=Limits(network="on")) as sandbox:
                    assert (await sandbox.exec(FIRST)).ok
                    seconds[warmth].append(perf_counter() - start)
    cold = statistics.median(seconds["cold"])
    return [
        figure(
            f"T2-{warmth}",
            f"T2 ready, {warmth}: share of the cold time saved",
            1 - statistics.median(found) / cold,
            found,
        )
        for warmth, found in seconds.items()
    ]


async def warm(rounds: int) -> list[Row]:
    return [*await leases(rounds), *await stages(max(3, rounds // 30))]

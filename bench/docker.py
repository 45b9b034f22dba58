"""Docker at its best, compared with Docker as it comes: P16, K1 to K5.

P16: an action through our init, over one kept stream, against an exec of Docker's API for each action. The
others: the round trip alone, an edit, and a container that is made on demand or was ready.

    scripts/with-docker .venv/bin/python bench/run.py docker
"""

from __future__ import annotations

import statistics
from contextlib import AsyncExitStack
from time import perf_counter

from rounds import Row, figure, interleaved, ratio

import dutyfree
from dutyfree.contract import Sandbox, Substrate
from dutyfree.contract.action import Edit
from dutyfree.contract.perform import perform

TRUE = ["/bin/true"]
READY = 2


async def best(rounds: int) -> list[Row]:
    async with AsyncExitStack() as stack:

        async def opened(**options: object) -> Substrate:
            substrate: Substrate = await stack.enter_async_context(dutyfree.open("docker", **options))
            await substrate.prepare()
            return substrate

        plain, kept = await opened(), await opened(actions="init")
        rows = await _actions(rounds, plain, kept)
        return rows + await _creation(
            max(5, rounds // 4), plain, kept, await opened(actions="init", ready=READY)
        )


async def _actions(rounds: int, plain: Substrate, kept: Substrate) -> list[Row]:
    async with plain.sandbox() as by_exec, kept.sandbox() as by_init:
        for sandbox in (by_exec, by_init):
            await sandbox.write("file", b"one two")

        async def run(sandbox: Sandbox) -> None:
            await sandbox.exec(TRUE)

        async def edit(sandbox: Sandbox) -> None:
            await perform(sandbox, Edit("file", b"one", b"one "))

        found = await interleaved(
            rounds,
            {
                "exec": lambda: run(by_exec),
                "init": lambda: run(by_init),
                "read": lambda: _read(by_init),
                "edit by exec": lambda: edit(by_exec),
                "edit by init": lambda: edit(by_init),
            },
        )
    return [
        ratio(
            "P16",
            "action through our init ÷ exec of Docker's API",
            found["init"],
            found["exec"],
            at_most=0.03,
        ),
        figure("K1", "round trip to init (a small read), ms", *_milliseconds(found["read"])),
        ratio("K2", "edit through our init ÷ by one exec", found["edit by init"], found["edit by exec"]),
    ]


async def _read(sandbox: Sandbox) -> None:
    await sandbox.read("file")


async def _creation(rounds: int, plain: Substrate, kept: Substrate, ready: Substrate) -> list[Row]:
    """From the request to the first result."""

    async def create(substrate: Substrate) -> float:
        await substrate.prepare()  # waits until the pool is full again
        start = perf_counter()
        async with substrate.sandbox() as sandbox:
            await sandbox.exec(TRUE)
            return perf_counter() - start

    found = await interleaved(
        rounds,
        {"exec": lambda: create(plain), "init": lambda: create(kept), "ready": lambda: create(ready)},
    )
    return [
        figure("K3", "Docker, creation to first result by exec, ms", *_milliseconds(found["exec"])),
        ratio("K4", "creation to first result: our init ÷ exec", found["init"], found["exec"]),
        ratio("K5", "the same with containers ready ÷ exec", found["ready"], found["exec"]),
    ]


def _milliseconds(seconds: list[float]) -> tuple[float, list[float]]:
    return statistics.median(seconds) * 1e3, seconds

"""One substrate three ways: an action through its own exec, through our init, and with sandboxes ready."""

from __future__ import annotations

import statistics
from contextlib import AsyncExitStack
from time import perf_counter
from typing import NamedTuple

from rounds import Row, figure, interleaved, ratio

import dutyfree
from dutyfree.contract import Sandbox, Substrate
from dutyfree.contract.action import Edit
from dutyfree.contract.perform import perform

TRUE = ["/bin/true"]
READY = 2


class Archetype(NamedTuple):
    """What to measure, and the ids of its rows."""

    substrate: str
    target: str
    """The id of the row of actions."""
    at_most: float
    rows: str
    """The letters before the numbers of the other rows."""
    by: str
    """How its own actions are called."""


async def measure(rounds: int, archetype: Archetype) -> list[Row]:
    async with AsyncExitStack() as stack:

        async def opened(**options: object) -> Substrate:
            made = dutyfree.open(archetype.substrate, **options)
            substrate: Substrate = await stack.enter_async_context(made)
            await substrate.prepare()
            return substrate

        plain, kept = await opened(actions="exec"), await opened(actions="init")
        rows = await _actions(rounds, archetype, plain, kept)
        ready = await opened(actions="init", ready=READY)
        return rows + await _creation(max(5, rounds // 4), archetype, plain, kept, ready)


async def _actions(rounds: int, archetype: Archetype, plain: Substrate, kept: Substrate) -> list[Row]:
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
    letters = archetype.rows
    return [
        ratio(
            archetype.target,
            f"action through our init ÷ {archetype.by}",
            found["init"],
            found["exec"],
            at_most=archetype.at_most,
        ),
        figure(f"{letters}1", "round trip to init (a small read), ms", *_milliseconds(found["read"])),
        ratio(
            f"{letters}2", "edit through our init ÷ by one exec", found["edit by init"], found["edit by exec"]
        ),
    ]


async def _read(sandbox: Sandbox) -> None:
    await sandbox.read("file")


async def _creation(
    rounds: int, archetype: Archetype, plain: Substrate, kept: Substrate, ready: Substrate
) -> list[Row]:
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
    name, letters = archetype.substrate.capitalize(), archetype.rows
    return [
        figure(f"{letters}3", f"{name}, creation to first result by exec, ms", *_milliseconds(found["exec"])),
        ratio(f"{letters}4", "creation to first result: our init ÷ exec", found["init"], found["exec"]),
        ratio(f"{letters}5", "the same with sandboxes ready ÷ exec", found["ready"], found["exec"]),
    ]


def _milliseconds(seconds: list[float]) -> tuple[float, list[float]]:
    return statistics.median(seconds) * 1e3, seconds

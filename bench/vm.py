"""Virtual machines: actions through our init and over ssh, creation by boot and by restore: V1 to V6.

Without KVM the machines are emulated: then only the ratios say something, and only about each other.

    .venv/bin/python bench/run.py vm
"""

from __future__ import annotations

import statistics
from contextlib import AsyncExitStack
from time import perf_counter

from rounds import Row, figure, interleaved, ratio

import dutyfree
from dutyfree.contract import Sandbox, Substrate

TRUE = ["/bin/true"]


async def machines(rounds: int) -> list[Row]:
    async with AsyncExitStack() as stack:

        async def opened(**options: object) -> Substrate:
            substrate: Substrate = await stack.enter_async_context(dutyfree.open("vm", **options))
            await substrate.prepare()
            return substrate

        booted, restored = await opened(), await opened(restore=True)
        over_ssh = await opened(restore=True, actions="exec")
        rows = await _actions(rounds, restored, over_ssh)
        return rows + await _creation(max(5, rounds // 4), booted, restored, over_ssh)


async def _actions(rounds: int, restored: Substrate, over_ssh: Substrate) -> list[Row]:
    async with restored.sandbox() as by_init, over_ssh.sandbox() as by_ssh:
        await by_init.write("file", b"one")

        async def run(sandbox: Sandbox) -> None:
            await sandbox.exec(TRUE)

        async def read() -> None:
            await by_init.read("file")

        found = await interleaved(
            rounds, {"init": lambda: run(by_init), "ssh": lambda: run(by_ssh), "read": read}
        )
    return [
        figure("V1", "round trip to init (a small read), ms", *_milliseconds(found["read"])),
        figure("V2", "exec of /bin/true through our init, ms", *_milliseconds(found["init"])),
        ratio("V3", "exec through our init ÷ over ssh", found["init"], found["ssh"]),
    ]


async def _creation(rounds: int, booted: Substrate, restored: Substrate, over_ssh: Substrate) -> list[Row]:
    """From the request to the first result."""

    async def create(substrate: Substrate) -> float:
        start = perf_counter()
        async with substrate.sandbox() as sandbox:
            await sandbox.exec(TRUE)
            return perf_counter() - start

    found = await interleaved(
        rounds,
        {
            "boot": lambda: create(booted),
            "restore": lambda: create(restored),
            "ssh": lambda: create(over_ssh),
        },
    )
    return [
        figure("V4", "boot to first result, ms", *_milliseconds(found["boot"])),
        ratio("V5", "creation to first result: restore ÷ boot", found["restore"], found["boot"]),
        ratio("V6", "the same over ssh: restore ÷ boot with our init", found["ssh"], found["boot"]),
    ]


def _milliseconds(seconds: list[float]) -> tuple[float, list[float]]:
    return statistics.median(seconds) * 1e3, seconds

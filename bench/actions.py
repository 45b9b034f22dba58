"""Batch, edit and search compared with the commands that they replace, in one native sandbox.

    python bench/actions.py [--rounds 200]

Rounds are interleaved. Compare the ratios of the medians.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
from collections.abc import Awaitable, Callable
from time import perf_counter
from typing import Any

import dutyfree
from dutyfree import Exec, Read

Side = Callable[[], Awaitable[object]]


async def interleaved(rounds: int, sides: dict[str, Side]) -> dict[str, float]:
    found: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds + rounds // 10):
        for name, side in sides.items():
            start = perf_counter()
            await side()
            found[name].append(perf_counter() - start)
    return {name: statistics.median(values[rounds // 10 :]) for name, values in found.items()}


def show(what: str, found: dict[str, float]) -> None:
    (first, ours), (second, theirs) = found.items()
    print(
        f"{what}: {first} {ours * 1e6:.0f} us, {second} {theirs * 1e6:.0f} us: {theirs / ours:.1f} times"
        f" (the first is {ours / theirs:.2f} of the second)"
    )


async def batches(sandbox: Any, rounds: int) -> None:
    async def execs() -> None:
        for _ in range(10):
            await sandbox.exec(["/bin/true"])

    async def reads() -> None:
        for _ in range(10):
            await sandbox.read("small")

    true = [Exec(("/bin/true",))] * 10
    await sandbox.write("small", bytes(4096))
    show(
        "10 x /bin/true",
        await interleaved(rounds, {"batch": lambda: sandbox.batch(true), "one by one": execs}),
    )
    files = [Read("small")] * 10
    show(
        "10 reads of 4 KiB",
        await interleaved(rounds, {"batch": lambda: sandbox.batch(files), "one by one": reads}),
    )


async def edits(sandbox: Any, rounds: int) -> None:
    await sandbox.write("text", b"".join(b"line %d of it\n" % number for number in range(1000)))

    async def by_init() -> None:
        await sandbox.edit("text", b"line 500 of", b"LINE 500 of")
        await sandbox.edit("text", b"LINE 500 of", b"line 500 of")

    async def by_sed() -> None:
        await sandbox.exec(["sed", "-i", "s/line 500 of/LINE 500 of/", "text"])
        await sandbox.exec(["sed", "-i", "s/LINE 500 of/line 500 of/", "text"])

    async def from_outside() -> None:
        for old, new in ((b"line 500 of", b"LINE 500 of"), (b"LINE 500 of", b"line 500 of")):
            text = await sandbox.read("text")
            assert text.count(old) == 1
            await sandbox.write("text", text.replace(old, new))

    show("two edits", await interleaved(rounds, {"edit": by_init, "sed -i": by_sed}))
    show("two edits", await interleaved(rounds, {"edit": by_init, "read and write": from_outside}))


async def searches(sandbox: Any, rounds: int) -> None:
    await sandbox.exec(
        "for d in $(seq 20); do mkdir -p src/$d; for f in $(seq 20); do seq 200 > src/$d/$f.py; done; done;"
        "echo needle >> src/7/7.py"
    )
    for what, ours, theirs in (
        ("text in 400 files", {"text": "needle"}, ["grep", "-rnF", "needle", "src"]),
        (
            "expression in 400 files",
            {"text": "need[a-m]e", "regex": True},
            ["grep", "-rnE", "need[a-m]e", "src"],
        ),
        ("names of 400 files", {"names": ["7.py"]}, ["find", "src", "-name", "7.py"]),
    ):
        sides: dict[str, Side] = {
            "search": lambda ours=ours: sandbox.search("src", **ours),  # type: ignore[misc]
            theirs[0]: lambda theirs=theirs: sandbox.exec(theirs),  # type: ignore[misc]
        }
        show(what, await interleaved(rounds, sides))


async def main(rounds: int) -> None:
    async with dutyfree.open("native") as substrate, substrate.sandbox() as sandbox:
        await batches(sandbox, rounds)
        await edits(sandbox, rounds)
        await searches(sandbox, rounds)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=200)
    asyncio.run(main(parser.parse_args().rounds))

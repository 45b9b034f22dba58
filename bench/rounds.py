"""Interleaved rounds of measurements, and the rows of the result table."""

from __future__ import annotations

import asyncio
import random
import statistics
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from time import perf_counter
from typing import Any

Side = Callable[[], Awaitable[float | None]]
Measured = dict[str, list[float]]
Row = dict[str, Any]

IN_A_ROW = 4
"""Measured calls of a side in a row, if there is a pause before."""


async def interleaved(rounds: int, sides: Mapping[str, Side], settle: float = 0) -> Measured:
    """Seconds of each side, called once per round. The first tenth is warm-up and is dropped.

    Each round has a random order, because the side before affects caches. Daemons work on after they answer,
    so ``settle`` seconds pass before each side; the side is then called once unmeasured and measured in a
    short loop. A side that returns a number has measured itself.
    """
    found: Measured = {name: [] for name in sides}
    times = IN_A_ROW if settle else 1
    order, chance = list(sides), random.Random(1)  # noqa: S311
    for _ in range(rounds + rounds // 10):
        chance.shuffle(order)
        for name in order:
            if settle:
                await asyncio.sleep(settle)
                await sides[name]()
            for _ in range(times):
                start = perf_counter()
                own = await sides[name]()
                found[name].append(perf_counter() - start if own is None else own)
    return {name: values[rounds // 10 * times :] for name, values in found.items()}


def ratio(
    identity: str,
    what: str,
    over: list[float],
    under: list[float],
    *,
    at_most: float = 0,
    at_least: float = 0,
) -> Row:
    """A row with the ratio of two medians, and its target if it has one."""
    value = statistics.median(over) / statistics.median(under)
    return figure(identity, what, value, over, at_most=at_most, at_least=at_least)


def figure(
    identity: str, what: str, value: float, seconds: list[float], *, at_most: float = 0, at_least: float = 0
) -> Row:
    ordered = sorted(seconds)
    return {
        "id": identity,
        "what": what,
        "value": round(value, 4),
        "target": at_most or at_least or None,
        "holds": value <= at_most if at_most else value >= at_least if at_least else None,
        "n": len(ordered),
        "p50": statistics.median(ordered),
        "p95": percentile(ordered, 0.95),
    }


def percentile(seconds: list[float], share: float) -> float:
    return sorted(seconds)[int(share * (len(seconds) - 1))]


def available() -> int:
    """Bytes of memory that are available to programs."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    raise RuntimeError("no MemAvailable")

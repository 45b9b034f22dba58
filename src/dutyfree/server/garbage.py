"""Python's garbage collector in a server: complete collections are rare, because each stops all calls.

A thousand sandboxes are so many objects that a complete collection takes 60 to 100 ms, and Python makes one
every few seconds under load. It finds little: calls leave no cycles (a test sees to it), and most other
cycles are found while they are young.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import AsyncIterator

PERIOD = 30.0
"""Seconds between two complete collections."""

_NEVER = 1 << 30


@contextlib.asynccontextmanager
async def rare_collections() -> AsyncIterator[None]:
    """In this context the oldest generation is collected once in a period only. It is for a whole process."""
    thresholds = gc.get_threshold()
    gc.collect()
    gc.freeze()  # modules and classes stay anyway
    gc.set_threshold(*thresholds[:2], _NEVER)
    collecting = asyncio.create_task(_collect())
    try:
        yield
    finally:
        collecting.cancel()
        gc.set_threshold(*thresholds)
        gc.unfreeze()


async def _collect() -> None:
    while True:
        await asyncio.sleep(PERIOD)
        gc.collect()

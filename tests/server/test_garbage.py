"""Calls leave nothing to the garbage collector: with many sandboxes, it stops the server for long."""

from __future__ import annotations

import gc
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

import dutyfree
from dutyfree.contract import Sandbox
from tests.server.in_process import served

CALLS: dict[str, Callable[[Sandbox], Awaitable[object]]] = {
    "exec": lambda sandbox: sandbox.exec(["/bin/true"], timeout=60),
    "input": lambda sandbox: sandbox.exec("cat", stdin=b"x"),
    "read": lambda sandbox: sandbox.read("file"),
    "write": lambda sandbox: sandbox.write("file", bytes(4096)),
    "list": lambda sandbox: sandbox.list("."),
}
COUNT = 50


@pytest.mark.native
async def test_calls_leave_no_cycles(tmp_path: Path) -> None:
    async with (
        served(tmp_path) as (_, address),
        dutyfree.open("hosted", url=f"http://{address}") as hosted,
        hosted.sandbox() as sandbox,
    ):
        await sandbox.write("file", bytes(4096))
        left: dict[str, int] = {}
        for name, call in CALLS.items():
            for _ in range(3):  # what is made once
                await call(sandbox)
            gc.collect()
            gc.disable()
            try:
                for _ in range(COUNT):
                    await call(sandbox)
                left[name] = gc.collect()
            finally:
                gc.enable()
        assert all(found < COUNT for found in left.values()), left

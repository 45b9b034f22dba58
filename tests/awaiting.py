"""What tests wait for, for as long as a slow machine may need."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

import anyio

from dutyfree import Sandbox
from dutyfree.contract import Observation

PATIENCE = (3, 15, 60)
"""Seconds after which a command is ended: so many times as a slow machine needs for it to have begun."""


async def appeared(sandbox: Sandbox, name: str) -> None:
    """A file in its working directory, by which a command says how far it has come."""
    with anyio.fail_after(60):
        while not any(entry.name == name for entry in await sandbox.list(".")):  # noqa: ASYNC110 (files tell nobody)
            await anyio.sleep(0.02)


async def overrun(sandbox: Sandbox, command: str | Sequence[str], said: bytes) -> Observation:
    """A command that its timeout ends, though not before it has said so much."""
    for seconds in PATIENCE:
        seen = await sandbox.exec(command, timeout=seconds)
        if said in seen.stdout:
            break
    return seen


async def enter(manager: AbstractAsyncContextManager[Any]) -> None:
    """Enter a context, and leave it at once."""
    async with manager:
        pass

"""What tests wait for, for as long as a slow machine may need."""

from __future__ import annotations

import anyio

from dutyfree import Sandbox


async def appeared(sandbox: Sandbox, name: str) -> None:
    """A file in its working directory, by which a command says how far it has come."""
    with anyio.fail_after(60):
        while not any(entry.name == name for entry in await sandbox.list(".")):  # noqa: ASYNC110 (files tell nobody)
            await anyio.sleep(0.02)

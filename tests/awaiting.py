"""What tests wait for, for as long as a slow machine may need."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

import anyio

from dutyfree import Sandbox
from dutyfree.contract import Observation

PATIENCE = (3, 15, 60)
"""Seconds after which a command is ended: so many times as a slow machine needs for it to have begun."""


async def a_moment() -> None:
    await anyio.sleep(0.01)


async def until(look: Callable[[], Any], changed: Callable[[], Awaitable[object]] = a_moment) -> Any:
    """Look again and again, also at what is awaited, until there is something. Returns it."""
    with anyio.fail_after(60):
        while not (found := await seen if inspect.isawaitable(seen := look()) else seen):
            await changed()
    return found


async def until_not(look: Callable[[], Awaitable[object]]) -> None:
    """Look again and again, until there is nothing."""
    with anyio.fail_after(60):
        while await look():
            await a_moment()


async def together(*functions: Callable[[], Coroutine[Any, Any, object]]) -> None:
    """Run all at the same time, until the last one ends."""
    async with anyio.create_task_group() as tasks:
        for function in functions:
            tasks.start_soon(function)


async def appeared(sandbox: Sandbox, name: str) -> None:
    """A file in its working directory, by which a command says how far it has come."""
    with anyio.fail_after(60):
        while not any(entry.name == name for entry in await sandbox.list(".")):
            await a_moment()


async def service_ended(sandbox: Any) -> None:
    """The first service of a sandbox."""
    with anyio.fail_after(60):
        while (await sandbox.services())[0].running:
            await a_moment()


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


async def overrun_beside(sandbox: Sandbox) -> tuple[Observation, Observation]:
    """A command that its timeout ends, and one that began later and has emptied its environment."""
    lives = "echo > second; until [ -e over ]; do sleep 0.02; done; echo lives"
    later: list[Observation] = []

    async def follow() -> None:
        await appeared(sandbox, "first")
        later.append(await sandbox.exec(["env", "-i", "/bin/sh", "-c", lives]))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(follow)
        seen = await sandbox.exec("echo > first; sleep 1000", timeout=5)
        await appeared(sandbox, "second")
        await sandbox.write("over", b"")
    return seen, later[0]

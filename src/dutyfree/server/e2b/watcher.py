"""A watch of E2B's API whose events the client asks for, and the names of these events."""

from __future__ import annotations

import asyncio
from typing import Any

from dutyfree.contract.abilities import Change
from dutyfree.contract.errors import DutyfreeError
from dutyfree.engine.sandbox.sandbox import NativeSandbox

EVENTS = {
    "created": "EVENT_TYPE_CREATE",
    "moved_to": "EVENT_TYPE_CREATE",
    "modified": "EVENT_TYPE_WRITE",
    "deleted": "EVENT_TYPE_REMOVE",
    "moved_from": "EVENT_TYPE_RENAME",
    "attributes": "EVENT_TYPE_CHMOD",
}
"""The kinds of E2B by ours. Those that it does not have are left out."""

EVENTS_KEPT = 10_000
"""Events that a watcher keeps for a client that asks for them later."""


class Watcher:
    """A watch whose events are kept until the client asks for them."""

    def __init__(self, sandbox: NativeSandbox, path: str, *, recursive: bool) -> None:
        self._events: list[dict[str, Any]] = []
        self._begun: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._watch(sandbox, path, recursive))

    async def _watch(self, sandbox: NativeSandbox, path: str, recursive: bool) -> None:
        try:
            async with sandbox.watch(path, recursive=recursive) as changes:
                self._begun.set_result(None)
                async for change in changes:
                    if (event := event_of(change)) is not None and len(self._events) < EVENTS_KEPT:
                        self._events.append(event)
        except DutyfreeError as error:
            if not self._begun.done():
                self._begun.set_exception(error)

    async def begun(self) -> None:
        await self._begun

    def take(self) -> list[dict[str, Any]]:
        taken, self._events = self._events, []
        return taken

    def end(self) -> None:
        self._task.cancel()


def event_of(change: Change) -> dict[str, Any] | None:
    kind = EVENTS.get(change.kind)
    return None if kind is None else {"name": change.path, "type": kind}

"""Watches of files: init reports changes below a path, as inotify tells it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from dutyfree.contract.abilities import Change
from dutyfree.contract.errors import CollectError
from dutyfree.engine.launcher import protocol
from dutyfree.engine.launcher.protocol import Frame
from dutyfree.engine.sandbox.channel import Channel
from dutyfree.engine.sandbox.observation import check

DIRECTORIES_MAX = 4096
"""Directories that one watch covers at most."""

EARLY_MAX = 1 << 16
"""Changes that we keep before init says that the watch has begun."""

_RECORD_MAX = 1 << 14
_KINDS: Final = (
    (0x002, "modified"),
    (0x004, "attributes"),
    (0x008, "closed"),
    (0x040, "moved_from"),
    (0x080, "moved_to"),
    (0x100, "created"),
    (0x200, "deleted"),
    (0x400, "deleted"),
    (0x800, "moved_from"),
    (0x4000, "lost"),
)
_DIRECTORY = 0x40000000


@asynccontextmanager
async def watch(
    channel: Channel, located: bytes, path: str, *, recursive: bool
) -> AsyncIterator[AsyncIterator[Change]]:
    """Changes below ``path``, whose form for init is ``located``. Raises ActionError, CollectError."""
    flags = protocol.WatchFlag.RECURSIVE if recursive else 0
    arrived: asyncio.Queue[bytes | None] = asyncio.Queue()
    payload = protocol.WATCH.pack(flags, DIRECTORIES_MAX) + located
    identity, answer = channel.begin(Frame.WATCH, payload, arrived.put_nowait)
    answer.done.add_done_callback(lambda _: arrived.put_nowait(None))
    decoder = ChangeDecoder()
    early: list[Change] = []

    async def take() -> tuple[list[Change], bool] | None:
        data = await arrived.get()
        if data is None:
            return None
        # Credit only for what was taken: the changes of a slow reader wait in the sandbox.
        channel.credit(identity, len(data) + protocol.FRAME_COST)
        return decoder.add(data)

    async def changes() -> AsyncIterator[Change]:
        for change in early:
            yield change
        while (taken := await take()) is not None:
            for change in taken[0]:
                yield change

    try:
        begun = False
        while not begun:
            taken = await take()
            if taken is None:
                check(answer.done.result(), path)
                return
            early += taken[0]
            if len(early) > EARLY_MAX:
                raise CollectError("the sandbox sent changes of a watch that has not begun")
            begun = taken[1]
        yield changes()
    finally:
        if not answer.done.done():
            channel.kill(identity)


class ChangeDecoder:
    """Decode the records of a watch, which may arrive in pieces of any size."""

    def __init__(self) -> None:
        self._pending = bytearray()

    def add(self, data: bytes) -> tuple[list[Change], bool]:
        """The changes that are complete now, and whether one of the records says that the watch has begun.

        Raises CollectError.
        """
        self._pending += data
        changes, begun, at = [], False, 0
        while at + protocol.CHANGE.size <= len(self._pending):
            kind, size = protocol.CHANGE.unpack_from(self._pending, at)
            if size > _RECORD_MAX:
                raise CollectError(f"the sandbox sent a change with a path of {size} bytes")
            end = at + protocol.CHANGE.size + size
            if end > len(self._pending):
                break
            path = os.fsdecode(bytes(self._pending[at + protocol.CHANGE.size : end]))
            at = end
            if kind == 0:
                begun = True
            for bit, name in _KINDS:
                if kind & bit:
                    changes.append(Change(name, path, bool(kind & _DIRECTORY)))  # type: ignore[arg-type]
        del self._pending[:at]
        return changes, begun

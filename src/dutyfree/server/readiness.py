"""Whether the server can serve: what ``/readyz`` answers. ``/healthz`` only says that the process runs."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from time import monotonic

import anyio.to_thread
import msgspec

from dutyfree import paths
from dutyfree.contract.errors import DutyfreeError
from dutyfree.engine.launcher.protocol import Request
from dutyfree.server.files import check_disk
from dutyfree.substrates.native import Native

ENGINE_SECONDS = 5.0
"""In how many seconds the launcher must answer."""
FRESH = 1.0
"""For how many seconds an answer is kept: whoever may ask must not keep the engine busy."""
OK = "ok"


class Ready(msgspec.Struct, frozen=True):
    """The answer of ``/readyz``: for each condition "ok", or what is wrong."""

    ready: bool
    engine: str = OK
    disk: str = OK
    draining: bool = False


class Readiness:
    """Looks whether the parts work that every request needs."""

    def __init__(self, native: Native, state: Path) -> None:
        self._native = native
        self._directories = (state, paths.cache())
        self.draining = False
        """Whether the server ends, and clients should go elsewhere."""
        self._last: tuple[float, Ready] | None = None
        self._looking = asyncio.Lock()

    async def look(self) -> Ready:
        """What holds now, or held a moment ago."""
        async with self._looking:
            now = monotonic()
            if self._last is None or now - self._last[0] > FRESH or self._last[1].draining != self.draining:
                engine, disk = await self._engine(), await anyio.to_thread.run_sync(self._disk)
                ready = engine == disk == OK and not self.draining
                self._last = now, Ready(ready, engine, disk, self.draining)
            return self._last[1]

    async def _engine(self) -> str:
        try:
            async with asyncio.timeout(ENGINE_SECONDS):
                await self._native.node.launcher.ask(Request.HELLO)
        except TimeoutError:
            return f"the launcher does not answer within {ENGINE_SECONDS:g} s"
        except DutyfreeError as error:
            return error.message
        return OK

    def _disk(self) -> str:
        for directory in self._directories:
            try:
                check_disk(_existing(directory))
            except DutyfreeError as error:
                return error.message
            except OSError as error:
                return f"the disk cannot be read: {os.strerror(error.errno or 0)}"
        return OK


def _existing(directory: Path) -> Path:
    """The directory, or the nearest one above it that exists."""
    while not directory.exists() and directory != directory.parent:
        directory = directory.parent
    return directory

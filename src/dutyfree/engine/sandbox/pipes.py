"""A descriptor of the owner's that leads into a sandbox: read and written without ever blocking."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable

from dutyfree.contract.errors import InputClosed
from dutyfree.engine.host import fork_guard

_CHUNK = 1 << 16


class Descriptor:
    """Closed once. Belongs to the event loop that it was made in."""

    def __init__(self, number: int) -> None:
        os.set_blocking(number, False)
        self._number = number
        self._loop = asyncio.get_running_loop()
        self._waiting: set[asyncio.Future[None]] = set()
        self._reading = asyncio.Lock()
        self._writing = asyncio.Lock()
        fork_guard.bind(self)

    @property
    def closed(self) -> bool:
        return self._number < 0

    @property
    def number(self) -> int:
        """Raises InputClosed when it is closed."""
        if self._number < 0:
            raise InputClosed("it is closed")
        return self._number

    async def read(self, finished: Callable[[], bool]) -> bytes:
        """What is there, as soon as something is; empty at the end, or if ``finished`` says so."""
        async with self._reading:
            while self._number >= 0 and not _waits(self._number):
                try:
                    return os.read(self._number, _CHUNK)
                except BlockingIOError:
                    if finished():
                        break
                except OSError:
                    break  # a terminal without another side
                await self._until(self._loop.add_reader, self._loop.remove_reader)
        return b""

    async def write(self, data: bytes) -> None:
        """All of it. Raises InputClosed if nobody reads it any more."""
        rest = memoryview(data)
        async with self._writing:
            while rest:
                if _waits(self.number):
                    raise InputClosed("a process in the sandbox has made it blocking")
                try:
                    rest = rest[os.write(self.number, rest) :]
                except BlockingIOError:
                    await self._until(self._loop.add_writer, self._loop.remove_writer)
                except OSError as error:
                    raise InputClosed("nobody reads it any more") from error

    async def _until(self, add: Callable[..., object], remove: Callable[[int], object]) -> None:
        ready: asyncio.Future[None] = self._loop.create_future()
        add(self._number, _resolve, ready)
        self._waiting.add(ready)
        try:
            await ready
        finally:
            self._waiting.discard(ready)
            if self._number >= 0:
                remove(self._number)

    def wake(self) -> None:
        """Let those who wait look again."""
        for ready in self._waiting:
            _resolve(ready)

    def close(self) -> None:
        if self._number < 0:
            return
        number, self._number = self._number, -1
        self._loop.remove_reader(number)
        self._loop.remove_writer(number)
        os.close(number)
        self.wake()

    def orphan(self) -> None:
        number, self._number = self._number, -1
        if number >= 0:
            with contextlib.suppress(OSError):
                os.close(number)


def _waits(number: int) -> bool:
    """Whether a process that has a copy of it made it blocking: our event loop would block too."""
    return os.get_blocking(number)


def _resolve(ready: asyncio.Future[None]) -> None:
    if not ready.done():
        ready.set_result(None)

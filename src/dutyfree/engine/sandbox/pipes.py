"""Pipes and terminals that lead into a sandbox, read and written without blocking the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterable, AsyncIterator, Callable

from dutyfree.contract.errors import DispatchError, InputClosed
from dutyfree.engine.host import capacity, fork_guard

_CHUNK = 1 << 16


def create_pipe() -> tuple[int, int]:
    """The read end and the write end of a new pipe. Raises DispatchError."""
    try:
        return os.pipe()
    except OSError as error:
        raise no_descriptor(error) from error


def no_descriptor(error: OSError) -> DispatchError:
    """The error for a descriptor that this process cannot create."""
    return DispatchError(
        f"this process cannot open a file to pass data to the sandbox: {error.strerror}",
        remedy=capacity.RAISE_OPEN_FILES,
    )


class AsyncDescriptor:
    """Our end of a pipe or terminal. It belongs to the event loop in which it was created."""

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
        """Raises InputClosed if it is closed."""
        if self._number < 0:
            raise InputClosed("it is closed")
        return self._number

    async def read(self, finished: Callable[[], bool]) -> bytes:
        """Wait for data. Empty at the end, or when there is none and ``finished`` returns True."""
        async with self._reading:
            while self._number >= 0 and not _is_blocking(self._number):
                try:
                    return os.read(self._number, _CHUNK)
                except BlockingIOError:
                    if finished():
                        break
                except OSError:
                    break  # a terminal whose other end is closed
                await self._wait(self._loop.add_reader, self._loop.remove_reader)
        return b""

    async def write(self, data: bytes) -> None:
        """Write all of it. Raises InputClosed if the other end is closed."""
        rest = memoryview(data)
        async with self._writing:
            while rest:
                if _is_blocking(self.number):
                    raise InputClosed("a process in the sandbox has made it blocking")
                try:
                    rest = rest[os.write(self.number, rest) :]
                except BlockingIOError:
                    await self._wait(self._loop.add_writer, self._loop.remove_writer)
                except OSError as error:
                    raise InputClosed("the other end is closed") from error

    async def _wait(self, add: Callable[..., object], remove: Callable[[int], object]) -> None:
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
        """Let waiting readers and writers check again."""
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
        """Close it in a forked child of this process (see ``fork_guard``)."""
        number, self._number = self._number, -1
        if number >= 0:
            with contextlib.suppress(OSError):
                os.close(number)


def _is_blocking(number: int) -> bool:
    """Whether a process that shares the open file has made it blocking, which would block our event loop."""
    return os.get_blocking(number)


def _resolve(ready: asyncio.Future[None]) -> None:
    if not ready.done():
        ready.set_result(None)


@contextlib.asynccontextmanager
async def fed(source: AsyncIterable[bytes]) -> AsyncIterator[int]:
    """The read end of a pipe into which a task writes what ``source`` yields, as fast as it is read.

    On exit it raises what the source raised.
    """
    theirs, ours = create_pipe()
    pipe = AsyncDescriptor(ours)
    task = asyncio.get_running_loop().create_task(_feed(source, pipe))
    task.add_done_callback(lambda _: pipe.close())
    try:
        yield theirs
    finally:
        if not task.done():
            task.cancel()
        await asyncio.wait([task])
    if not task.cancelled():
        task.result()


async def _feed(source: AsyncIterable[bytes], pipe: AsyncDescriptor) -> None:
    with contextlib.suppress(BrokenPipeError):  # a command need not read all of its input
        async for part in source:
            await pipe.write(part)

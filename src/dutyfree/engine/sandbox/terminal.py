"""A command in a terminal of its own. Its other side is a descriptor of ours: init has no part in it."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import struct
import termios
from collections.abc import Callable

import anyio

from dutyfree.contract import Observation
from dutyfree.contract.errors import ActionError, InputClosed, LimitError, SubstrateError
from dutyfree.engine.sandbox.channel import Channel
from dutyfree.engine.sandbox.pending import Running
from dutyfree.engine.sandbox.pipes import Descriptor

GRACE = 1.0
"""So long a command may take to end by itself after its terminal was hung up."""

_SIZE_MAX = 0xFFFF


def check_size(rows: int, columns: int) -> None:
    """Raises LimitError."""
    if not (0 < rows <= _SIZE_MAX and 0 < columns <= _SIZE_MAX):
        raise LimitError(f"a terminal of {rows} rows and {columns} columns cannot be")


class NativeTerminal:
    def __init__(
        self,
        name: str,
        channel: Channel,
        identity: int,
        running: Running,
        observe: Callable[[tuple[int, ...]], Observation],
    ) -> None:
        self.id = name
        self._channel = channel
        self._identity = identity
        self._running = running
        self._observe = observe
        self._side: Descriptor | None = None
        self._closed = False
        self._started: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        running.on_started = self._take
        running.ended.add_done_callback(self._ended)

    def _take(self, descriptor: int) -> None:
        # It comes from the sandbox: it need not be what was asked for; or it comes too late.
        if self._closed or self._side is not None or not os.isatty(descriptor):
            os.close(descriptor)
            return
        self._side = Descriptor(descriptor)
        if not self._started.done():
            self._started.set_result(None)

    def _ended(self, _: asyncio.Future[tuple[int, ...]]) -> None:
        if not self._started.done():
            self._started.set_result(None)
        if self._side is not None:
            self._side.wake()

    async def opened(self) -> None:
        """It stands. Raises ActionError, DispatchError, ExecError."""
        await self._started
        if self._side is None:
            self._running.ended.result()
            # Init opened one, but the kernel lets its user send no more descriptors: too many are under way.
            raise ActionError(
                "the sandbox gave no terminal: it has no descriptors left", kind="no_descriptors"
            )

    async def read(self) -> bytes:
        return await self._open().read(self._running.ended.done)

    async def write(self, data: bytes) -> None:
        if self._running.ended.done():
            raise InputClosed("the command has ended")
        await self._open().write(data)

    async def resize(self, rows: int, columns: int) -> None:
        """Raises LimitError for a size that cannot be. Whoever runs there is told by SIGWINCH."""
        check_size(rows, columns)
        with contextlib.suppress(OSError):  # it has ended: there is nobody to see it
            fcntl.ioctl(self._open().number, termios.TIOCSWINSZ, struct.pack("=HHHH", rows, columns, 0, 0))

    async def wait(self) -> Observation:
        return self._observe(await asyncio.shield(self._running.ended))

    async def kill(self) -> None:
        if not self._running.ended.done():
            self._channel.kill(self._identity)
            await asyncio.wait([self._running.ended])

    async def close(self) -> None:
        """Hang up, and kill what does not end by that."""
        self._closed = True
        if self._side is not None:
            self._side.close()
        with anyio.CancelScope(shield=True), contextlib.suppress(SubstrateError, ActionError):
            if not self._running.ended.done() and not self._channel.held:
                await asyncio.wait([self._running.ended], timeout=GRACE)
            if not self._running.ended.done():
                self._channel.kill(self._identity)
            if not self._channel.held:
                await asyncio.wait([self._running.ended])

    def _open(self) -> Descriptor:
        assert self._side is not None, "used before it stood"
        return self._side

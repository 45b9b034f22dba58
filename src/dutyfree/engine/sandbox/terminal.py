"""A command in a terminal. The other side of the terminal is ours: its data does not go through init."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import struct
import termios
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from time import perf_counter

import anyio
import msgspec

from dutyfree.contract import Exec, Observation
from dutyfree.contract.arguments import check_exec
from dutyfree.contract.errors import ActionError, InputClosed, LimitError, SubstrateError
from dutyfree.engine.launcher import protocol
from dutyfree.engine.launcher.protocol import Frame
from dutyfree.engine.sandbox.channel import Channel
from dutyfree.engine.sandbox.commands import CommandRunner
from dutyfree.engine.sandbox.lifecycle import Lifecycle
from dutyfree.engine.sandbox.observation import observe
from dutyfree.engine.sandbox.pending import PendingCommand
from dutyfree.engine.sandbox.pipes import AsyncDescriptor

GRACE = 1.0
"""Seconds that a command has to end by itself after its terminal was closed."""

_SIZE_MAX = 0xFFFF


def check_size(rows: int, columns: int) -> None:
    """Raises LimitError."""
    if not (0 < rows <= _SIZE_MAX and 0 < columns <= _SIZE_MAX):
        raise LimitError(f"a terminal of {rows} rows and {columns} columns: both must be 1 to {_SIZE_MAX}")


@asynccontextmanager
async def open_terminal(
    lifecycle: Lifecycle,
    commands: CommandRunner,
    action: Exec,
    rows: int,
    columns: int,
    term: str,
) -> AsyncIterator[NativeTerminal]:
    """Run the command in a terminal, and kill it on exit. ``term`` is the default of TERM.

    Raises ActionError, UsageError, DispatchError.
    """
    check_size(rows, columns)
    asked = perf_counter()
    check_exec(action)
    channel = lifecycle.channel()
    action = msgspec.structs.replace(action, env={"TERM": term, **(action.env or {})})
    payload = commands.encode(action, protocol.EXEC_STREAM)
    identity, running = channel.exec(protocol.WINDOW.pack(rows, columns) + payload, kind=Frame.TERMINAL)
    observed = partial(observe, action, running, asked=asked, user=commands.defaults.user)
    terminal = NativeTerminal(f"{lifecycle.name}-{identity}", channel, identity, running, observed)
    try:
        await terminal.wait_open()
        yield terminal
    finally:
        await terminal.close()


class NativeTerminal:
    """A terminal in a sandbox. See ``abilities.Terminal``."""

    def __init__(
        self,
        name: str,
        channel: Channel,
        identity: int,
        running: PendingCommand,
        observe: Callable[[tuple[int, ...]], Observation],
    ) -> None:
        self.id = name
        self._channel = channel
        self._identity = identity
        self._running = running
        self._observe = observe
        self._side: AsyncDescriptor | None = None
        self._closed = False
        self._started: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        running.on_started = self._take
        running.ended.add_done_callback(self._ended)

    def _take(self, descriptor: int) -> None:
        # The sandbox sent it, so it may be something else than a terminal; or it comes too late.
        if self._closed or self._side is not None or not os.isatty(descriptor):
            os.close(descriptor)
            return
        self._side = AsyncDescriptor(descriptor)
        if not self._started.done():
            self._started.set_result(None)

    def _ended(self, _: asyncio.Future[tuple[int, ...]]) -> None:
        if not self._started.done():
            self._started.set_result(None)
        if self._side is not None:
            self._side.wake()

    async def wait_open(self) -> None:
        """Wait until the terminal is there. Raises ActionError, DispatchError, ExecError."""
        await self._started
        if self._side is None:
            self._running.ended.result()
            # Init opened one, but the kernel does not let its user send more descriptors.
            raise ActionError(
                "the sandbox could not open a terminal: it has no descriptors left", kind="no_descriptors"
            )

    async def read(self) -> bytes:
        return await self._open_side().read(self._running.ended.done)

    async def write(self, data: bytes) -> None:
        if self._running.ended.done():
            raise InputClosed("the command has ended")
        await self._open_side().write(data)

    async def resize(self, rows: int, columns: int) -> None:
        """Change the size; the kernel sends SIGWINCH. Raises LimitError."""
        check_size(rows, columns)
        size = struct.pack("=HHHH", rows, columns, 0, 0)
        with contextlib.suppress(OSError):  # the command has ended
            fcntl.ioctl(self._open_side().number, termios.TIOCSWINSZ, size)

    async def wait(self) -> Observation:
        return self._observe(await asyncio.shield(self._running.ended))

    async def kill(self) -> None:
        if not self._running.ended.done():
            self._channel.kill(self._identity)
            await asyncio.wait([self._running.ended])

    async def close(self) -> None:
        """Close the terminal, so that the command gets SIGHUP, and kill it if it does not end."""
        self._closed = True
        if self._side is not None:
            self._side.close()
        with anyio.CancelScope(shield=True), contextlib.suppress(SubstrateError, ActionError):
            if not self._running.ended.done() and not self._channel.frozen:
                await asyncio.wait([self._running.ended], timeout=GRACE)
            if not self._running.ended.done():
                self._channel.kill(self._identity)
            if not self._channel.frozen:
                await asyncio.wait([self._running.ended])

    def _open_side(self) -> AsyncDescriptor:
        assert self._side is not None, "used before wait_open"
        return self._side

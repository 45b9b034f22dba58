"""The life of one sandbox: its channel and its launcher handle, pause and resume, reset, end."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any, Protocol

import anyio

from dutyfree.contract.errors import DispatchError, SandboxClosed, SubstrateError
from dutyfree.engine.launcher import protocol
from dutyfree.engine.launcher.handle import SandboxHandle
from dutyfree.engine.launcher.protocol import Frame
from dutyfree.engine.sandbox.channel import Channel
from dutyfree.engine.sandbox.observation import check


class SandboxControl(Protocol):
    """How a sandbox is stopped and ended from outside: by the launcher, or by another runtime."""

    @property
    def freezer(self) -> bool:
        """Whether ``freeze`` stops all processes; otherwise init alone."""

    async def freeze(self) -> None:
        """Raises ExecError, ActionTimeout."""

    async def thaw(self) -> None:
        """Let all processes go on, within a bounded time: nothing can cancel it."""

    async def destroy(self) -> None:
        """End it, and wait until nothing is left. Raises CleanupError."""


class Lifecycle:
    """Whether a sandbox is usable, and through which channel and handle.

    A reset replaces both; a snapshot of an idle sandbox replaces the handle.
    """

    def __init__(self, name: str, channel: Channel, handle: SandboxControl) -> None:
        self.name = name
        self.handle = handle
        self.lock = anyio.Lock()
        """Held while the sandbox is paused, resumed or captured: each of them freezes or thaws it."""
        self.closed = False
        self._channel = channel
        self._destroyed = False
        self._paused_at: float | None = None

    @property
    def alive(self) -> bool:
        """Whether the sandbox is open, and init has not ended as far as we know."""
        return not self.closed and not self._channel.closed

    @property
    def paused(self) -> bool:
        return self._paused_at is not None

    def channel(self) -> Channel:
        """The channel to init. Raises SandboxClosed, and DispatchError while the sandbox is paused."""
        if self.closed:
            raise SandboxClosed(f"sandbox {self.name} is closed")
        if self._paused_at is not None and not self._channel.closed:
            raise DispatchError(f"sandbox {self.name} is paused", remedy="resume it first")
        return self._channel

    @contextmanager
    def launcher_request(self) -> Iterator[Channel]:
        """Wrap a request to the launcher. If the request fails because the sandbox has ended, say that.

        Raises SandboxGone, SandboxClosed.
        """
        channel = self.channel()
        channel.check()
        try:
            yield channel
        except SubstrateError:
            channel.check()
            raise

    def replace(self, channel: Channel, handle: SandboxControl) -> None:
        """Continue with a new sandbox."""
        self._channel, self.handle = channel, handle

    # --- Pause --------------------------------------------------------------------------------------

    async def pause(self) -> None:
        """Stop all processes. If this fails or is cancelled, they go on."""
        async with self.lock:
            with self.launcher_request() as channel:
                self._paused_at = perf_counter()
                try:
                    await self.freeze(channel)
                except BaseException:
                    if not self.closed:
                        await self._resume()
                    raise

    async def resume(self) -> None:
        """Continue all processes. Once begun, nothing cancels it. If it fails, the sandbox stays paused."""
        async with self.lock:
            await self._resume()

    async def _resume(self) -> None:
        if self._paused_at is None or self.closed:
            self.channel()
            return
        # If it fails, a later one must not postpone the deadlines by the same time again.
        since, self._paused_at = self._paused_at, perf_counter()
        await to_the_end(self._end_pause(since))

    async def _end_pause(self, since: float) -> None:
        await self._thaw(self._channel, since)
        self._paused_at = None

    async def freeze(self, channel: Channel) -> None:
        """Stop all processes. If this fails, some may have stopped: call ``thaw`` then too."""
        channel.freeze_deadlines()
        if not self.handle.freezer:
            await self.signal(channel, signal.SIGSTOP)
        await self.handle.freeze()

    async def thaw(self, channel: Channel, since: float) -> None:
        """Continue all processes; timeouts move by the time since ``since``. Nothing cancels it."""
        # Half of it would leave a frozen sandbox without deadlines.
        await to_the_end(self._thaw(channel, since))

    async def _thaw(self, channel: Channel, since: float) -> None:
        pause = int((perf_counter() - since) * 1e9)
        # Sent before the thaw, so that init moves its deadlines before it checks them.
        channel.tell(Frame.POSTPONE, 0, protocol.NANOSECONDS.pack(pause))
        await self.handle.thaw()
        channel.thaw_deadlines()  # init runs, so it must answer
        if not self.handle.freezer:
            await self.signal(channel, signal.SIGCONT)

    async def signal(self, channel: Channel, number: signal.Signals) -> None:
        """Send a signal to all processes of the sandbox."""
        answer = await channel.ask(Frame.SIGNAL_ALL, protocol.NUMBER.pack(number), timeout=0.0)
        check(answer.done.result(), "/")

    # --- End ----------------------------------------------------------------------------------------

    def abandon(self) -> None:
        if not self.closed:
            self.closed = True
            self._channel.close()

    async def close(self) -> None:
        if self._destroyed:
            return
        self.closed = self._destroyed = True
        self._channel.close()
        with anyio.CancelScope(shield=True):
            await self.handle.destroy()


async def to_the_end(work: Coroutine[Any, Any, None]) -> None:
    """Do ``work``. If the caller is cancelled meanwhile, the cancellation waits for its end.

    A shield of anyio alone does not stop ``Task.cancel``, and so ``asyncio.timeout``.
    """
    task = asyncio.create_task(work)
    cancelled: asyncio.CancelledError | None = None
    with anyio.CancelScope(shield=True):
        while not task.done():
            try:
                await asyncio.wait([task])
            except asyncio.CancelledError as error:
                cancelled = error
    if cancelled is not None:
        raise cancelled from task.exception()
    task.result()


class NativeLifecycle(Lifecycle):
    """The life of a sandbox that the launcher made."""

    handle: SandboxHandle

    def __init__(self, name: str, channel: Channel, handle: SandboxHandle) -> None:
        super().__init__(name, channel, handle)

    @property
    def paused_at(self) -> float | None:
        """``perf_counter`` at the pause, which all processes of a host share; None if it is not paused."""
        return self._paused_at

    def adopt_pause(self, since: float) -> None:
        """It was paused when its former owner ended."""
        self._paused_at = since
        self._channel.freeze_deadlines()

    def abandon(self) -> None:
        if not self.closed:
            self.handle.give_up()  # a sandbox that outlives its owner does not end with the channel
        super().abandon()

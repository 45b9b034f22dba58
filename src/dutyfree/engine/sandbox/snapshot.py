"""Snapshots and forks: keep the present files of a live sandbox as layers that others can start from.

If nothing runs in the sandbox, its writable layer becomes read-only, and the sandbox continues in a successor
on top of it. That costs the same for any number of files; only a few files are copied instead. If something
runs, the sandbox is frozen while its files are copied.
"""

from __future__ import annotations

import asyncio
import errno
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from time import perf_counter
from typing import TypeAlias, TypeVar

import anyio
import msgspec

from dutyfree.contract.errors import ActionError, CreateError, ExecError, file_error
from dutyfree.contract.served import Served
from dutyfree.engine.launcher.client import LauncherError
from dutyfree.engine.launcher.handle import SandboxHandle
from dutyfree.engine.launcher.protocol import Request, Tree
from dutyfree.engine.layers.disk_bridge import TOO_DEEP
from dutyfree.engine.layers.memory_layers import MemoryLayers
from dutyfree.engine.layers.start_state import StartState
from dutyfree.engine.sandbox.channel import Channel, SetupError
from dutyfree.engine.sandbox.lifecycle import NativeLifecycle

T = TypeVar("T")

Create: TypeAlias = Callable[[tuple[Tree, ...]], Awaitable[tuple[Channel, SandboxHandle]]]
"""Create a sandbox like this one on other trees. Raises CreateError."""

EXHAUSTED = ("no_space", "no_memory", "no_processes", "no_descriptors")
"""Errors of a new sandbox that are the host's: no process of the sandbox has run yet."""


class SandboxLayers:
    """The layers that one sandbox uses, and what it has written since.

    The substrate holds the layers of ``start``, for a reset; this class holds the others.
    """

    def __init__(
        self, lifecycle: NativeLifecycle, start: StartState, layers: MemoryLayers, create: Create
    ) -> None:
        self.start = start
        """The state in which the sandbox was handed out."""
        self.trees = start.trees
        """The layers that it uses now."""
        self._lifecycle = lifecycle
        self._layers = layers
        self._create = create

    async def capture(self) -> StartState:
        """The present files, held once for the caller. Raises ExecError, ActionError."""
        lifecycle = self._lifecycle
        async with lifecycle.lock:
            try:
                if lifecycle.paused and not lifecycle.closed:
                    return self._state(await self._keep(Request.SNAPSHOT_COPY))
                with lifecycle.launcher_request() as channel:
                    idle = await channel.queue_if_idle()
                    return self._state(await (self._take(channel) if idle else self._copy(channel)))
            except LauncherError as error:
                raise self._not_kept(error) from error

    async def final(self) -> StartState:
        """Kill all processes and keep the files, as the last action on this sandbox. Raises ExecError."""
        lifecycle = self._lifecycle
        await lifecycle.signal(lifecycle.channel(), signal.SIGKILL)
        try:
            return self._state(await self._keep(Request.SNAPSHOT_MOVE, final=True))
        except LauncherError as error:
            raise ExecError(
                f"the files of sandbox {lifecycle.name} could not be kept: {error.message}"
            ) from error

    def adopt(self, trees: tuple[Tree, ...]) -> None:
        """It uses these layers since before it was adopted."""
        if trees != self.start.trees:
            self._use_layers(trees)

    def reset(self) -> None:
        """Go back to the layers of ``start``, and release the others: no sandbox uses them any more."""
        self._use_layers(self.start.trees)

    def _state(self, trees: tuple[Tree, ...]) -> StartState:
        return StartState(trees, self.start.defaults, self.start.origin)

    def _not_kept(self, error: LauncherError) -> ActionError | ExecError:
        what = f"the files of sandbox {self._lifecycle.name} could not be kept: {error.message}"
        return ActionError(what, kind="name_too_long") if error.number in TOO_DEEP else ExecError(what)

    def _use_layers(self, trees: tuple[Tree, ...]) -> None:
        if trees is not self.start.trees:
            self._layers.hold(trees)
        if self.trees is not self.start.trees:
            self._layers.release(self.trees)
        self.trees = trees

    async def _keep(self, kind: Request, *, final: bool = False) -> tuple[Tree, ...]:
        return await self._layers.keep(kind, self._lifecycle.handle.number, self.trees, final=final)

    async def _take(self, channel: Channel) -> tuple[Tree, ...]:
        """Make the writable layer read-only, and continue in a successor on top of it.

        Copies instead if the launcher answers EBUSY: there is little to copy, or taking would lose something.
        """
        try:
            try:
                trees = await self._keep(Request.SNAPSHOT_MOVE)
            except LauncherError as error:
                if error.number != errno.EBUSY:
                    raise
                trees = await self._keep(Request.SNAPSHOT_COPY)
                channel.send_queued()
                return trees
        except BaseException:
            channel.send_queued()
            raise
        try:
            successor, handle = await self._create(trees)
        except BaseException as error:
            self._layers.release(trees)
            channel.send_queued()
            if isinstance(error, SetupError):
                raise unusable(error) from error
            raise
        former, self._lifecycle.handle = self._lifecycle.handle, handle
        channel.send_queued(successor)
        if not self._lifecycle.closed:
            self._use_layers(trees)
        with anyio.CancelScope(shield=True):
            await former.destroy()
        return trees

    async def _copy(self, channel: Channel) -> tuple[Tree, ...]:
        """Copy the written files while everything is frozen."""
        begin = perf_counter()
        try:
            await self._lifecycle.freeze(channel)
            return await self._keep(Request.SNAPSHOT_COPY)
        finally:
            await self._lifecycle.thaw(channel, begin)


def unusable(error: SetupError) -> CreateError | ActionError:
    """The error for a sandbox that cannot start from the files of another: they or the host are the cause."""
    cause = file_error(error.number, "")
    if isinstance(cause, ActionError) and cause.kind not in EXHAUSTED:
        return ActionError(error.message, kind=cause.kind)
    return error


def served_fork(child: Served | None, parent: Served | None) -> Served | None:
    """How a fork was served. Its cold start would have taken as long as that of its parent."""
    if child is None or parent is None:
        return child
    return msgspec.structs.replace(child, cold_seconds=parent.cold_seconds)


@asynccontextmanager
async def enter_all(managers: Sequence[AbstractAsyncContextManager[T]]) -> AsyncIterator[list[T]]:
    """Enter all context managers at the same time, and leave them at the same time."""
    entering = [asyncio.ensure_future(manager.__aenter__()) for manager in managers]
    try:
        yield list(await asyncio.gather(*entering))
    except BaseException:
        for task in entering:
            task.cancel()
        await _leave(managers, entering, quiet=True)
        raise
    await _leave(managers, entering, quiet=False)


async def _leave(
    managers: Sequence[AbstractAsyncContextManager[T]],
    entering: Sequence[asyncio.Future[T]],
    *,
    quiet: bool,
) -> None:
    with anyio.CancelScope(shield=True):
        came = await asyncio.gather(*entering, return_exceptions=True)
        inside = [
            manager for manager, one in zip(managers, came, strict=True) if not isinstance(one, BaseException)
        ]
        left = await asyncio.gather(
            *(manager.__aexit__(None, None, None) for manager in inside), return_exceptions=True
        )
    failed = [one for one in left if isinstance(one, BaseException)]
    if failed and not quiet:
        raise failed[0]

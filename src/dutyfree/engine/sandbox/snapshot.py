"""Snapshots and forks of a sandbox that lives: its files as they are now, for others to start from.

A sandbox in which nothing runs is replaced by another upon what it wrote, which is then written to no more:
that costs the same however many files there are. A few files are copied instead. Where something runs,
everything is frozen, and what was written is copied.
"""

from __future__ import annotations

import asyncio
import errno
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from time import perf_counter
from typing import Any, Protocol, TypeVar

import anyio
import msgspec

from dutyfree.contract import Recipe
from dutyfree.contract.arguments import check_count
from dutyfree.contract.errors import ActionError, CreateError, ExecError, file_error
from dutyfree.contract.served import Served
from dutyfree.engine.launcher.client import LauncherError
from dutyfree.engine.launcher.handle import SandboxHandle
from dutyfree.engine.launcher.protocol import Request, Tree
from dutyfree.engine.layers.disk_bridge import DEEP, StartState
from dutyfree.engine.layers.memory_layers import MemorySnapshots
from dutyfree.engine.layers.named_snapshots import NamedSnapshots
from dutyfree.engine.sandbox.channel import Channel, SetupError
from dutyfree.engine.sandbox.commands import CommandSandbox

One = TypeVar("One")

EXHAUSTED = ("no_space", "no_memory", "no_processes", "no_descriptors")
"""Of the host, if a new sandbox meets it: nothing has run in that one yet."""


class Keeper(Protocol):
    """What the substrate does for a sandbox that is kept."""

    snapshots: MemorySnapshots
    named: NamedSnapshots

    async def succeed(self, trees: tuple[Tree, ...]) -> tuple[Channel, SandboxHandle]:
        """A sandbox as this one, upon these trees. Raises CreateError."""
        ...

    def child(self, recipe: Recipe) -> AbstractAsyncContextManager[ForkingSandbox]:
        """Another with the same limits and the same network, in the state of the recipe."""
        ...


class ForkingSandbox(CommandSandbox):
    def __init__(self, *arguments: Any, keeper: Keeper, base: StartState) -> None:
        super().__init__(*arguments)
        self._keeper = keeper
        self.base = base
        """What it was handed out upon."""
        self._handed_out = self._trees = base.trees
        self._of_image = base.defaults
        self._origin = base.origin
        self._layers = keeper.snapshots.layers
        self._keeping = anyio.Lock()

    async def snapshot(self, name: str | None = None) -> Recipe:
        """Keep the present files: in memory, until ``forget`` or the substrate's end; by name, on the disk.

        Raises ExecError if there is no room, or the sandbox cannot be frozen; UsageError for a name that
        cannot be one, or is taken.
        """
        if name is not None:
            await self._keeper.named.check(name)
        base = StartState(await self._keep(), self._of_image, self._origin)
        if name is None:
            return self._keeper.snapshots.add(base)
        try:
            return await self._keeper.named.keep(name, base)
        finally:
            self._layers.release(base.trees)

    @asynccontextmanager
    async def fork(self, count: int) -> AsyncIterator[Sequence[ForkingSandbox]]:
        """Raises UsageError, and CreateError if one of them cannot be made: then none is left.

        Raises ActionError if what ran here left files that no sandbox can start from.
        """
        count = check_count(count, 0)
        recipe = await self.snapshot()
        try:
            async with AsyncExitStack() as stack:
                entering = entered([self._keeper.child(recipe) for _ in range(count)])
                try:
                    children = await stack.enter_async_context(entering)
                except SetupError as error:
                    raise _unusable(error) from error
                for child in children:
                    child.served = _forked(child.served, self.served)
                yield children
        finally:
            self._keeper.snapshots.forget(recipe)

    async def final(self) -> StartState:
        """What it has written, for others to start from, as the last that is done with it.

        All that runs is ended. Raises ExecError.
        """
        channel = self._usable()
        await self._signal(channel, signal.SIGKILL)
        try:
            trees = await self._layers.keep(Request.SNAPSHOT_MOVE, self._box.number, self._trees, final=True)
            return StartState(trees, self._of_image, self._origin)
        except LauncherError as error:
            raise ExecError(f"sandbox {self.id} could not be kept: {error.message}") from error

    async def pause(self) -> None:
        async with self._keeping:  # which stops and goes on by itself
            await super().pause()

    async def resume(self) -> None:
        async with self._keeping:  # of what stands still
            await super().resume()

    async def reset(self) -> None:
        await super().reset()
        self._stand_on(self._handed_out)

    async def close(self) -> None:
        self._stand_on(self._handed_out)
        await super().close()

    def _stand_on(self, trees: tuple[Tree, ...]) -> None:
        """The layers of the hand-out stay, for a reset: the substrate holds them."""
        if trees is not self._handed_out:
            self._layers.hold(trees)
        if self._trees is not self._handed_out:
            self._layers.release(self._trees)
        self._trees = trees

    async def _keep(self) -> tuple[Tree, ...]:
        """Trees with what was written, held once."""
        async with self._keeping:
            try:
                if self._paused is not None and not self._closed:
                    return await self._layers.keep(Request.SNAPSHOT_COPY, self._box.number, self._trees)
                with self._launcher_request() as channel:
                    return await (self._take(channel) if await channel.detain() else self._copy(channel))
            except LauncherError as error:
                what = f"sandbox {self.id} could not be kept: {error.message}"
                if error.number in DEEP:
                    raise ActionError(what, kind="name_too_long") from error
                raise ExecError(what) from error

    async def _take(self, channel: Channel) -> tuple[Tree, ...]:
        """A successor upon what was written; or a copy, where there is little, or more would be lost."""
        try:
            try:
                trees = await self._layers.keep(Request.SNAPSHOT_MOVE, self._box.number, self._trees)
            except LauncherError as error:
                if error.number != errno.EBUSY:
                    raise
                trees = await self._layers.keep(Request.SNAPSHOT_COPY, self._box.number, self._trees)
                channel.carry_on()
                return trees
        except BaseException:
            channel.carry_on()
            raise
        try:
            successor, box = await self._keeper.succeed(trees)
        except BaseException as error:
            self._layers.release(trees)
            channel.carry_on()
            if isinstance(error, SetupError):
                raise _unusable(error) from error
            raise
        former, self._box = self._box, box
        channel.carry_on(successor)
        if not self._closed:
            self._stand_on(trees)
        with anyio.CancelScope(shield=True):
            await former.destroy()
        return trees

    async def _copy(self, channel: Channel) -> tuple[Tree, ...]:
        begin = perf_counter()
        try:
            await self._stand_still(channel)
            return await self._layers.keep(Request.SNAPSHOT_COPY, self._box.number, self._trees)
        finally:
            await self._go_on(channel, begin)


def _unusable(error: SetupError) -> CreateError | ActionError:
    """Why a sandbox cannot start from the files of another one: because of them, or of the host."""
    cause = file_error(error.number, "")
    if isinstance(cause, ActionError) and cause.kind not in EXHAUSTED:
        return ActionError(error.message, kind=cause.kind)
    return error


def _forked(child: Served | None, parent: Served | None) -> Served | None:
    """How it was handed out: with nothing at hand, its parent would have to be made first."""
    if child is None:
        return None
    cold = child.cold_seconds if parent is None else parent.cold_seconds
    return msgspec.structs.replace(child, kind="forked", stage="snapshot", cold_seconds=cold)


@asynccontextmanager
async def entered(
    managers: Sequence[AbstractAsyncContextManager[One]],
) -> AsyncIterator[list[One]]:
    """All of them, entered and left at the same time."""
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
    managers: Sequence[AbstractAsyncContextManager[One]],
    entering: Sequence[asyncio.Future[One]],
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

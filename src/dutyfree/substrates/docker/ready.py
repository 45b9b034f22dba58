"""Containers that are ready before they are asked for: each is used once, and replaced in the background."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Hashable
from contextlib import suppress
from typing import Generic, TypeVar

import anyio

from dutyfree.contract.errors import CleanupError, SubstrateError
from dutyfree.substrates.docker.containers import Container

KINDS = 8
"""Kinds of containers that are kept; the containers of the kind that was not used longest are removed."""

K = TypeVar("K", bound=Hashable)


class ReadyContainers(Generic[K]):
    """Up to ``count`` containers of each kind that was asked for lately.

    ``make`` makes a container of a kind. If that fails, the pool tries again with the next request only.
    """

    def __init__(self, count: int, make: Callable[[K], Awaitable[Container]]) -> None:
        self._count = count
        self._make = make
        self._stock: OrderedDict[K, deque[Container]] = OrderedDict()
        self._tasks: dict[K, asyncio.Task[None]] = {}
        self._removing: set[asyncio.Task[None]] = set()
        self._closed = False

    def __repr__(self) -> str:
        return f"<{sum(map(len, self._stock.values()))} containers ready, of {len(self._stock)} kinds>"

    async def take(self, kind: K) -> Container | None:
        """A container that works, or None if none is ready. Others are made in the background."""
        stock = self._stock_of(kind)
        found = None
        while found is None and stock:
            candidate = stock.popleft()
            if await candidate.works():
                found = candidate
            else:
                self._discard(candidate)
        self._refill(kind)
        return found

    async def fill(self, kind: K) -> None:
        """Wait until all containers of a kind are ready. Raises CreateError."""
        self._stock_of(kind)
        self._refill(kind)
        task = self._tasks.get(kind)
        if task is not None:
            await asyncio.shield(task)

    def _stock_of(self, kind: K) -> deque[Container]:
        stock = self._stock.setdefault(kind, deque())
        self._stock.move_to_end(kind)
        while len(self._stock) > KINDS:
            _, unused = self._stock.popitem(last=False)
            for container in unused:
                self._discard(container)
        return stock

    def _refill(self, kind: K) -> None:
        if not self._closed and kind not in self._tasks and len(self._stock[kind]) < self._count:
            task = self._tasks[kind] = asyncio.get_running_loop().create_task(self._make_all(kind))
            task.add_done_callback(lambda done: self._made(kind, done))

    async def _make_all(self, kind: K) -> None:
        while kind in self._stock and len(self._stock[kind]) < self._count:
            made = await self._make(kind)
            stock = self._stock.get(kind)
            if stock is None or self._closed:
                self._discard(made)
                return
            stock.append(made)

    def _made(self, kind: K, task: asyncio.Task[None]) -> None:
        del self._tasks[kind]
        if not task.cancelled():
            task.exception()  # marks it as retrieved: the next request makes its own, and gets the error

    def _discard(self, container: Container) -> None:
        task = asyncio.get_running_loop().create_task(_remove(container))
        self._removing.add(task)
        task.add_done_callback(self._removing.discard)

    async def close(self) -> None:
        """Remove all containers that are ready. What cannot be removed is left to the substrate."""
        self._closed = True
        with anyio.CancelScope(shield=True):
            for task in (*self._tasks.values(),):
                task.cancel()
            await asyncio.gather(*self._tasks.values(), return_exceptions=True)
            for stock in self._stock.values():
                for container in stock:
                    self._discard(container)
            self._stock.clear()
            await asyncio.gather(*self._removing, return_exceptions=True)


async def _remove(container: Container) -> None:
    with suppress(CleanupError, SubstrateError):
        await container.remove()

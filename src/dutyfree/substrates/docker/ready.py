"""Containers that are ready before they are asked for: each is used once, and replaced in the background."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Hashable
from contextlib import suppress
from typing import Generic, TypeVar

import anyio

from dutyfree.contract.errors import CleanupError
from dutyfree.substrates.docker.containers import Container

KINDS = 8
"""Kinds of containers that are kept; the containers of the kind that was not used longest are removed."""

REMOVING = 32
"""Containers that are removed at the same time. A caller that gives back one more waits for its removal."""

K = TypeVar("K", bound=Hashable)


class ReadyContainers(Generic[K]):
    """Up to ``count`` containers of each kind that was asked for lately.

    ``make`` makes a container of a kind. If that fails, the pool tries again with the next request only.
    """

    def __init__(self, count: int, make: Callable[[K], Awaitable[Container]]) -> None:
        self.count = count
        self._make = make
        self._stocks: OrderedDict[K, _Stock] = OrderedDict()
        self._removing: set[asyncio.Task[None]] = set()
        self._closed = False

    def __repr__(self) -> str:
        ready = sum(len(stock.ready) for stock in self._stocks.values())
        return f"<{ready} containers ready, of {len(self._stocks)} kinds>"

    async def take(self, kind: K) -> Container | None:
        """A container that works; None if none is ready, and none is about to be.

        Others are made in the background.
        """
        stock = self._stock(kind)
        found = None
        while found is None and stock.ready:
            candidate = stock.ready.popleft()
            works = False
            try:
                works = await candidate.works()
            finally:  # also if the request is cancelled meanwhile
                if not works:
                    self.discard(candidate)
            found = candidate if works else None
        # One is being made already, which takes less long than another one would.
        if found is None and stock.making is not None and stock.waiting is None:
            found = await self._next(stock)
        self._refill(kind, stock)
        return found

    async def fill(self, kind: K) -> None:
        """Wait until all containers of a kind are ready. Raises CreateError."""
        stock = self._stock(kind)
        self._refill(kind, stock)
        if stock.making is not None:
            await asyncio.shield(stock.making)

    async def settle(self) -> None:
        """Wait until no container is being made or removed in the background."""
        while tasks := self._removing | {
            stock.making for stock in self._stocks.values() if stock.making is not None
        }:
            await asyncio.wait(tasks)

    async def _next(self, stock: _Stock) -> Container | None:
        waiting: asyncio.Future[Container | None] = asyncio.get_running_loop().create_future()
        stock.waiting = waiting
        try:
            return await waiting
        except asyncio.CancelledError:
            if waiting.done() and not waiting.cancelled() and (made := waiting.result()) is not None:
                self.discard(made)
            raise
        finally:
            stock.waiting = None

    def _stock(self, kind: K) -> _Stock:
        stock = self._stocks.setdefault(kind, _Stock())
        self._stocks.move_to_end(kind)
        while len(self._stocks) > KINDS:
            self.drop(next(iter(self._stocks)))
        return stock

    def drop(self, kind: K) -> None:
        """Keep no containers of this kind any more, until the next request for one."""
        unused = self._stocks.pop(kind, None)
        if unused is not None:
            unused.kept = False
            for container in unused.ready:
                self.discard(container)
            unused.ready.clear()

    def _refill(self, kind: K, stock: _Stock) -> None:
        if stock.making is None and len(stock.ready) < self.count and stock.kept and not self._closed:
            stock.making = asyncio.get_running_loop().create_task(self._make_all(kind, stock))
            stock.making.add_done_callback(stock.made)

    async def _make_all(self, kind: K, stock: _Stock) -> None:
        while len(stock.ready) < self.count and stock.kept:
            made = await self._make(kind)
            if not stock.kept or self._closed:
                self.discard(made)
            elif stock.waiting is not None and not stock.waiting.done():
                stock.waiting.set_result(made)
            else:
                stock.ready.append(made)

    def discard(self, container: Container) -> None:
        """Remove a container in the background."""
        task = asyncio.get_running_loop().create_task(_remove(container))
        self._removing.add(task)
        task.add_done_callback(self._removing.discard)

    @property
    def is_busy(self) -> bool:
        """Whether as many containers are being removed as should be at the same time."""
        return len(self._removing) >= REMOVING

    async def close(self) -> None:
        """Remove all containers that are ready. What cannot be removed is left to the substrate."""
        self._closed = True
        with anyio.CancelScope(shield=True):
            making = [stock.making for stock in self._stocks.values() if stock.making is not None]
            for task in making:
                task.cancel()
            await asyncio.gather(*making, return_exceptions=True)
            for stock in self._stocks.values():
                for container in stock.ready:
                    self.discard(container)
            self._stocks.clear()
            await asyncio.gather(*self._removing, return_exceptions=True)


class _Stock:
    """The containers of one kind."""

    def __init__(self) -> None:
        self.ready: deque[Container] = deque()
        self.making: asyncio.Task[None] | None = None
        self.waiting: asyncio.Future[Container | None] | None = None
        """The request that gets the next one."""
        self.kept = True

    def made(self, task: asyncio.Task[None]) -> None:
        self.making = None
        if not task.cancelled():
            task.exception()  # marks it as retrieved: the request makes its own, and gets the error
        if self.waiting is not None and not self.waiting.done():
            self.waiting.set_result(None)


async def _remove(container: Container) -> None:
    with suppress(CleanupError):
        await container.remove()

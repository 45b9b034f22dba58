"""Create instances, wait for them and end them: at most one for each name, whatever the network does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from time import monotonic
from typing import TypeVar

import anyio
import anyio.to_thread

from dutyfree.contract.errors import CreateError
from dutyfree.substrates.cloud.api import MAYBE, RUN, Api, ApiError, Instance, Order
from dutyfree.substrates.cloud.config import CloudConfig

T = TypeVar("T")

FIRST_PAUSE, LONGEST_PAUSE = 0.5, 10.0
ADDRESS_SECONDS = 15.0
"""How long an instance that runs may have no address."""


class Instances:
    """The instances of one opening. ``run`` is in the tags of each."""

    def __init__(self, api: Api, run: str, config: CloudConfig) -> None:
        self._api = api
        self._run = run
        self._config = config
        self._ids: dict[str, str] = {}
        self._made_at: dict[str, float] = {}
        self._requests: dict[str, asyncio.Task[Instance]] = {}
        self._unclear: set[str] = set()
        self._listing = anyio.Lock()
        self._listed: Sequence[Instance] = ()
        self._listed_at = float("-inf")

    # --- Creation -----------------------------------------------------------------------------------------

    async def create(self, order: Order) -> Instance:
        """Request an instance, again if the provider is busy or does not answer. Raises ApiError.

        After a request without an answer, the instance may exist: then that one is taken.
        """
        until, pause = monotonic() + self._config.create_seconds, FIRST_PAUSE
        while True:
            try:
                return await self._request(order)
            except ApiError as error:
                if not error.passing or monotonic() + pause > until:
                    raise
            await anyio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)
            if order.name in self._unclear and (found := await self._existing(order.name)):
                return found

    async def _request(self, order: Order) -> Instance:
        # A cancelled caller leaves the request behind, and ``end`` waits for its answer.
        request = asyncio.create_task(anyio.to_thread.run_sync(self._api.create, order))
        self._requests[order.name] = request
        try:
            made = await asyncio.shield(request)
        except ApiError as error:
            if error.kind in MAYBE:
                self._unclear.add(order.name)
            raise
        self._know(order.name, made)
        return made

    def _know(self, name: str, instance: Instance) -> None:
        self._ids[name] = instance.id
        self._made_at.setdefault(name, monotonic())

    async def _existing(self, name: str) -> Instance | None:
        try:
            found = [one for one in await self.listed() if one.name == name and one.state != "ended"]
        except ApiError:
            return None
        if found:
            self._know(name, found[0])
        return found[0] if found else None

    async def until_running(self, name: str) -> Instance:
        """Wait until an instance runs and has the address that we need. Raises ApiError, CreateError."""
        running_since, said = float("inf"), "it is not in the provider's list"
        with anyio.move_on_after(self._config.boot_seconds):
            while True:
                one = None
                try:
                    one = next(
                        (o for o in await self.listed(self._config.poll_seconds) if o.name == name), None
                    )
                    said = f"it is {one.state}" if one else said
                except ApiError as error:
                    if not error.passing:
                        raise
                    said = str(error)
                if one is not None and one.state in ("ended", "stopped"):
                    raise CreateError(
                        f"the instance {one.id} ended while it booted: {one.reason or 'no reason'}"
                    )
                if one is not None and one.state == "running":
                    if self.address(one):
                        return one
                    running_since = min(running_since, monotonic())
                    if monotonic() - running_since > ADDRESS_SECONDS:
                        raise CreateError(
                            f"the instance {one.id} has no {self._config.address} address",
                            remedy="set the option address=, or a subnet that gives such addresses",
                        )
                await anyio.sleep(self._config.poll_seconds)
        raise CreateError(
            f"the instance {name} did not run within {self._config.boot_seconds:g} s: {said}",
            remedy="the option boot_seconds= is the limit",
        )

    def address(self, instance: Instance) -> str:
        """What ssh connects to; empty if the instance has no such address yet."""
        if self._config.address == "id":
            return instance.id
        return instance.public if self._config.address == "public" else instance.private

    # --- State --------------------------------------------------------------------------------------------

    async def listed(self, age: float = 0.0) -> Sequence[Instance]:
        """All instances of this opening, as they were at most ``age`` seconds ago. Raises ApiError.

        All who wait share one request, so their number does not matter to the provider.
        """
        oldest = monotonic() - age
        async with self._listing:
            if self._listed_at < oldest:
                begin = monotonic()
                self._listed = await self._call(lambda: self._api.find({RUN: self._run}))
                self._listed_at = begin
            return self._listed

    async def _call(self, request: Callable[[], T]) -> T:
        return await anyio.to_thread.run_sync(request)

    # --- The end ------------------------------------------------------------------------------------------

    async def end(self, name: str) -> bool:
        """End the instance of a name. Returns False if it is not known yet whether there is one.

        Raises ApiError, TimeoutError.
        """
        await self._answered(name)
        pause = FIRST_PAUSE
        with anyio.fail_after(self._config.end_seconds):
            while True:
                try:
                    return await self._ended(name)
                except ApiError as error:
                    if not error.passing:
                        raise
                await anyio.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE)

    async def _answered(self, name: str) -> None:
        """Wait for the answer to a request whose caller was cancelled."""
        request = self._requests.pop(name, None)
        if request is None:
            return
        await asyncio.wait([request])
        error = None if request.cancelled() else request.exception()
        if isinstance(error, ApiError):
            if error.kind in MAYBE:
                self._unclear.add(name)
        elif not request.cancelled() and error is None:
            self._know(name, request.result())

    async def _ended(self, name: str) -> bool:
        """Raises ApiError."""
        known, accepted = self._ids.get(name), False
        while True:
            if known is not None and not accepted:
                accepted = await self._call(lambda: self._api.end(known))
            found = [one for one in await self.listed() if one.name == name]
            living = [one.id for one in found if one.state != "ended"]
            if found and not living:
                return True
            if not found and known is None:
                return name not in self._unclear
            # A new instance may be unknown to the provider for a while, an old one is forgotten.
            if not found and (accepted or monotonic() - self._made_at[name] > self._config.settle_seconds):
                return True
            for one in {*living} - {known}:
                await self._call(lambda one=one: self._api.end(one))  # type: ignore[misc]
            await anyio.sleep(min(self._config.poll_seconds, 1.0))

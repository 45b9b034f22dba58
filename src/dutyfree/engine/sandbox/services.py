"""Services of a sandbox: started when it stands, watched, started again; and calls, which fork them."""

from __future__ import annotations

import asyncio
import errno
import posixpath
from collections.abc import Mapping, Sequence
from time import perf_counter
from typing import Any

import msgspec

from dutyfree.contract import Observation, Recipe
from dutyfree.contract.arguments import Unrunnable, check_command, not_started
from dutyfree.contract.errors import (
    ActionError,
    CreateError,
    DispatchError,
    ExecError,
    SubstrateError,
    UsageError,
)
from dutyfree.contract.services import ServiceState
from dutyfree.engine.launcher import protocol
from dutyfree.engine.launcher.protocol import Await, Frame
from dutyfree.engine.sandbox import contents
from dutyfree.engine.sandbox.channel import Channel
from dutyfree.engine.sandbox.commands import _kill
from dutyfree.engine.sandbox.observation import check, observe
from dutyfree.engine.sandbox.pending import Refused, Unstarted
from dutyfree.engine.sandbox.snapshot import ForkingSandbox
from dutyfree.engine.sandbox.warm import Warm

SHOWN = 40
"""Characters of each word of a command that an error tells."""

STARTS = 3
"""So often a call has its service started, if that ends each time before it forks."""


class ServingSandbox(ForkingSandbox):
    """One whose recipe may have services."""

    def __init__(self, *arguments: Any, recipe: Recipe, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self._recipe = recipe
        self.weight = 0
        """Bytes of memory that its services were found to take; 0 without control groups."""
        self._services = {service.name: Warm(service) for service in recipe.services}

    def be_of(self, recipe: Recipe) -> None:
        """Run commands with the variables of this recipe from now on; it has the same files and services."""
        if recipe is not self._recipe:
            self._recipe = recipe
            self._usual = self.base.defaults.with_recipe(recipe)

    async def serve(self) -> None:
        """Start all services, each when the one before it is ready. Raises CreateError."""
        for warm in self._services.values():
            await self._begin(warm)

    async def weigh(self) -> None:
        """Find out what its services take, from outside: no program of theirs is asked. Raises ExecError."""
        if self._services:
            self.weight, _ = await self._box.audit()

    @property
    def alive(self) -> bool:
        """Whether nothing is known against it, nor against its services once they were ready."""
        return super().alive and all(warm.running or not warm.settled for warm in self._services.values())

    async def services(self) -> tuple[ServiceState, ...]:
        self._usable()
        return tuple(warm.state() for warm in self._services.values())

    async def restart(self, service: str) -> None:
        warm = self._named(service)
        async with warm.lock:
            await warm.end()
            await self._again(warm)

    async def call(
        self,
        service: str,
        arguments: Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bytes | None = None,
        timeout: float | None = None,
    ) -> Observation:
        asked = perf_counter()
        warm = self._named(service)
        if not warm.service.forks:
            raise UsageError(f"the service {service!r} does not fork: it cannot be called")
        # Its own directory may be another than that of the sandbox.
        directory = posixpath.join(self.workdir, cwd or "")
        variables = {**warm.service.env, **(env or {})}
        check_command(arguments, cwd=cwd, env=env, stdin=stdin, timeout=timeout)
        try:
            payload = self._payload([*arguments], directory, variables, timeout, None)
        except Unrunnable as error:
            return error.observation
        for _ in range(STARTS):
            identity = await self._awake(warm)
            given = None if stdin is None else await contents.memory_file(stdin)
            channel = self._usable()
            wanted = protocol.CALL_REQUEST.pack(identity) + payload
            identity, running = channel.exec(wanted, given, timeout, Frame.CALL)
            try:
                ended = await running.ended
            except asyncio.CancelledError:
                await _kill(channel, identity, running)
                raise
            except Refused as refused:
                if refused.number != errno.ESRCH:
                    raise DispatchError(f"the service {service!r} cannot fork: {refused.message}") from None
                continue  # it ended before it forked, so nothing was done yet
            except Unstarted as error:
                return not_started(error.message, seconds=perf_counter() - asked)
            return observe(arguments, None, cwd, running, ended, asked)
        raise ActionError(f"the service {service!r} ends whenever it is to fork: {warm.said()}", kind="ended")

    async def snapshot(self, name: str | None = None) -> Recipe:
        """As files alone: whoever starts from them has services and variables by the recipe."""
        kept, mine = await super().snapshot(name), self._recipe
        return msgspec.structs.replace(kept, services=mine.services, env=mine.env, path=mine.path)

    async def reset(self) -> None:
        await super().reset()
        for warm in self._services.values():
            warm.forget()
        await self.serve()

    def _named(self, name: str) -> Warm:
        self._usable()
        if name not in self._services:
            there = ", ".join(self._services) or "none"
            raise UsageError(f"the sandbox has no service {name!r}", remedy=f"its recipe has {there}")
        return self._services[name]

    async def _awake(self, warm: Warm) -> int:
        """The number by which init knows the service, started again if it has ended. Raises ActionError."""
        if not warm.running:
            async with warm.lock:
                if not warm.running:
                    await self._again(warm)
        return warm.identity

    async def _again(self, warm: Warm) -> None:
        """Start a service that was ready in this sandbox before.

        Raises ActionError if it does not become ready: what ran here since is the reason. Raises ExecError if
        the machinery failed.
        """
        try:
            await self._begin(warm)
        except CreateError as error:
            self._usable().check()
            message = f"{error.message} (started again)"
            if isinstance(error.__cause__, SubstrateError):
                raise ExecError(message, remedy=error.remedy) from error
            raise ActionError(message, kind="ended", remedy=error.remedy) from error

    async def _begin(self, warm: Warm) -> None:
        """Start it, and wait until it is ready. Raises CreateError, and then it does not run."""
        service, channel = warm.service, self._usable()
        try:
            payload = self._payload(
                service.command, service.cwd, service.env, None, None, protocol.EXEC_STREAM
            )
            warm.began(channel, *channel.exec(payload, kind=Frame.SERVICE if service.forks else Frame.EXEC))
            await self._settle(warm, channel)
        except (ActionError, DispatchError, ExecError) as error:
            raise CreateError(f"service {service.name!r}: {error.message}") from error
        finally:
            if not warm.settled:
                channel.kill(warm.identity)

    async def _settle(self, warm: Warm, channel: Channel) -> None:
        service = warm.service
        ready = asyncio.ensure_future(self._readiness(warm, channel))
        ended = asyncio.ensure_future(warm.wait())
        try:
            await asyncio.wait([ready, ended], timeout=service.seconds, return_when=asyncio.FIRST_COMPLETED)
            if ended.done():
                ended.result()
                raise CreateError(_failure(warm, f"ended with {warm.exit_code()}"))
            if not ready.done():
                raise CreateError(
                    _failure(warm, f"was not ready within {service.seconds:g} s: {service.ready}")
                )
            ready.result()
            warm.settled = True
        finally:
            ready.cancel()
            ended.cancel()
            await asyncio.gather(ready, ended, return_exceptions=True)

    async def _readiness(self, warm: Warm, channel: Channel) -> None:
        ready = warm.service.ready
        if ready.line is not None:
            await warm.printed
        elif ready.file is not None or ready.socket is not None:
            kind = Await.FILE if ready.file is not None else Await.SOCKET
            path = self._path(ready.file or ready.socket or "")
            answer = await channel.ask(Frame.AWAIT, protocol.AWAIT_REQUEST.pack(kind) + path)
            check(answer.done.result(), ready.file or ready.socket or "")
        else:
            await channel.ask(Frame.PING, b"")  # answered after a refusal to start it


def _failure(warm: Warm, what: str) -> str:
    command, said = warm.service.command, warm.said()
    words = [command] if isinstance(command, str) else command
    shown = " ".join(word if len(word) <= SHOWN else f"{word[:SHOWN]}…" for word in words)
    return f"service {warm.service.name!r}: {shown!r} {what}" + (f"; its last output: {said}" if said else "")

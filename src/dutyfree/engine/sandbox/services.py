"""Services of one sandbox: start them, wait until they are ready, restart them, fork them for calls."""

from __future__ import annotations

import asyncio
import errno
import os
import posixpath
from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter

import anyio
import msgspec

from dutyfree.contract import Exec, Observation
from dutyfree.contract.arguments import NOT_RUNNABLE, Unrunnable, check_exec, not_started
from dutyfree.contract.errors import (
    ActionError,
    CreateError,
    DispatchError,
    ExecError,
    SubstrateError,
    UsageError,
)
from dutyfree.contract.services import Service, ServiceState
from dutyfree.engine.launcher import protocol
from dutyfree.engine.launcher.protocol import AwaitKind, Frame
from dutyfree.engine.sandbox import contents
from dutyfree.engine.sandbox.channel import Channel
from dutyfree.engine.sandbox.commands import CommandRunner
from dutyfree.engine.sandbox.kept import KeptService
from dutyfree.engine.sandbox.lifecycle import Lifecycle
from dutyfree.engine.sandbox.observation import REFUSED, check, final_code, observe
from dutyfree.engine.sandbox.output_credit import OutputCredit
from dutyfree.engine.sandbox.pending import CommandNotStarted, CommandRejected, PendingCommand

OUTPUT_MAX = 2000
"""Bytes of the end of a service's output that we keep."""

WORD_MAX = 40
"""Characters of each word of a command that an error message shows."""

CALL_STARTS = 3
"""How often a call starts its service, if the service ends each time before it forks."""


class ServiceProcess:
    """The process of one service in one sandbox: its output, and how it ended."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self.lock = anyio.Lock()
        """Held while it is started."""
        self.forget()

    def forget(self) -> None:
        """Start from zero, after a reset of the sandbox."""
        self.identity = 0
        self.was_ready = False
        self._starts = 0
        self._running: PendingCommand | None = None
        self._tail = b""

    def started(self, channel: Channel, identity: int, running: PendingCommand) -> None:
        self.identity, self._running, self._channel = identity, running, channel
        self.was_ready = False
        self._starts += 1
        self._tail = b""
        self._credit = OutputCredit(partial(self._give_credit, running))
        self._unmatched = {1: b"", 2: b""}
        self._line = (self.service.ready.line or "").encode()
        self.printed = asyncio.get_running_loop().create_future()
        """Done when it has printed the line of its readiness condition."""
        running.on_output = self._add_output

    def kept(self) -> KeptService:
        return KeptService(self.service.name, self.identity, self._starts)

    def adopted(self, channel: Channel, kept: KeptService, running: PendingCommand) -> None:
        """It runs, and was ready: a former owner started it."""
        self.started(channel, kept.identity, running)
        self._starts, self.was_ready = kept.starts, True
        self.printed.set_result(None)

    def _add_output(self, stream: int, data: bytes) -> None:
        self._tail = (self._tail + data)[-OUTPUT_MAX:]
        if not self.printed.done():
            seen = self._unmatched[stream] + data
            self._unmatched[stream] = seen[max(0, len(seen) - len(self._line) + 1) :]
            if self._line in seen:
                self.printed.set_result(None)
        self._credit.use(len(data) + protocol.FRAME_COST)

    def _give_credit(self, running: PendingCommand, size: int) -> None:
        if running is self._running and self.running:
            self._channel.credit(self.identity, size)

    @property
    def running(self) -> bool:
        return self._running is not None and not self._running.ended.done()

    async def wait(self) -> None:
        """Wait until it has ended. Raises SubstrateError if its sandbox ends."""
        if self._running is not None:
            await asyncio.shield(self._running.ended)

    async def end(self) -> None:
        if self.running:
            self._channel.kill(self.identity)
            await self.wait()

    def output(self) -> str:
        """The end of its output, or why it did not start."""
        text = self._tail.decode(errors="replace").strip()
        return text or self._refusal()

    def _refusal(self) -> str:
        if self._running is None or not self._running.ended.done():
            return ""
        if error := self._running.ended.exception():
            return error.message if isinstance(error, CommandNotStarted) else ""
        status, flags = self._running.ended.result()[:2]
        return os.strerror(status) if flags & REFUSED else ""

    def exit_code(self) -> int | None:
        """127 or 126 if it could not be started; None while it runs, or if its sandbox has ended."""
        if self._running is None or not self._running.ended.done():
            return None
        if error := self._running.ended.exception():
            return NOT_RUNNABLE if isinstance(error, CommandNotStarted) else None
        return final_code(*self._running.ended.result()[:2])

    def state(self) -> ServiceState:
        return ServiceState(self.service.name, self.running, self._starts, self.exit_code(), self._tail)


class Services:
    """The services of one sandbox, in the order of its recipe."""

    def __init__(
        self,
        lifecycle: Lifecycle,
        commands: CommandRunner,
        encode_path: Callable[[str], bytes],
        workdir: str,
        services: Sequence[Service],
    ) -> None:
        self._lifecycle = lifecycle
        self._commands = commands
        self._encode_path = encode_path
        self._workdir = workdir
        self._processes = {service.name: ServiceProcess(service) for service in services}

    def __len__(self) -> int:
        return len(self._processes)

    def kept(self) -> tuple[KeptService, ...]:
        """Those that run, on record."""
        return tuple(one.kept() for one in self._processes.values() if one.running and one.was_ready)

    def adopt(self, kept: KeptService) -> None:
        """A service that a former owner started."""
        process, channel = self._processes[kept.name], self._lifecycle.channel()
        started = Exec(process.service.command, process.service.cwd, process.service.env)
        payload = self._commands.encode(started, protocol.EXEC_STREAM)
        process.adopted(channel, kept, channel.claim(kept.identity, payload))

    @property
    def alive(self) -> bool:
        """Whether all services that became ready still run."""
        return all(one.running or not one.was_ready for one in self._processes.values())

    async def start(self) -> None:
        """Start all services, each when the one before it is ready. Raises CreateError."""
        for process in self._processes.values():
            await self._start(process)

    async def start_again(self) -> None:
        """Start all services in the new sandbox, after a reset. Raises CreateError."""
        for process in self._processes.values():
            process.forget()
        await self.start()

    def states(self) -> tuple[ServiceState, ...]:
        self._lifecycle.channel()
        return tuple(process.state() for process in self._processes.values())

    async def restart(self, name: str) -> None:
        process = self._named(name)
        async with process.lock:
            await process.end()
            await self._restart(process)

    async def call(self, name: str, action: Exec) -> Observation:
        """Run a fork of a service, with the command of the action as its arguments."""
        asked = perf_counter()
        process = self._named(name)
        if not process.service.forks:
            raise UsageError(f"the service {name!r} does not fork: it cannot be called")
        # An absolute directory, because the service may run in another one than the sandbox.
        directory = posixpath.join(self._workdir, action.cwd or "")
        check_exec(action)
        variables = {**process.service.env, **(action.env or {})}
        try:
            payload = self._commands.encode(msgspec.structs.replace(action, cwd=directory, env=variables))
        except Unrunnable as error:
            return error.observation
        for _ in range(CALL_STARTS):
            identity = await self._running(process)
            given = None if action.stdin is None else await contents.memory_file(action.stdin)
            channel = self._lifecycle.channel()
            call = protocol.CALL_REQUEST.pack(identity) + payload
            identity, running = channel.exec(call, given, action.timeout, Frame.CALL)
            try:
                ended = await running.ended
            except asyncio.CancelledError:
                await channel.kill_and_wait(identity, running)
                raise
            except CommandRejected as rejected:
                if rejected.number != errno.ESRCH:
                    raise DispatchError(f"the service {name!r} cannot fork: {rejected.message}") from None
                continue  # it ended before it forked, so the call had no effect
            except CommandNotStarted as error:
                return not_started(error.message, seconds=perf_counter() - asked)
            return observe(action, running, ended, asked)
        raise ActionError(
            f"the service {name!r} ended {CALL_STARTS} times before it forked: {process.output()}",
            kind="ended",
        )

    def _named(self, name: str) -> ServiceProcess:
        self._lifecycle.channel()
        if name not in self._processes:
            known = ", ".join(self._processes) or "none"
            raise UsageError(f"the sandbox has no service {name!r}", remedy=f"its recipe has {known}")
        return self._processes[name]

    async def _running(self, process: ServiceProcess) -> int:
        """Init's number of a service, which is started if it does not run. Raises ActionError."""
        if not process.running:
            async with process.lock:
                if not process.running:
                    await self._restart(process)
        return process.identity

    async def _restart(self, process: ServiceProcess) -> None:
        """Start a service that was ready before.

        Raises ActionError if it does not become ready: then what ran in the sandbox since is the cause.
        Raises ExecError if the machinery fails.
        """
        try:
            await self._start(process)
        except CreateError as error:
            self._lifecycle.channel().check()
            message = f"{error.message} (restarted)"
            if isinstance(error.__cause__, SubstrateError):
                raise ExecError(message, remedy=error.remedy) from error
            raise ActionError(message, kind="ended", remedy=error.remedy) from error

    async def _start(self, process: ServiceProcess) -> None:
        """Start it, and wait until it is ready. If it raises CreateError, the service does not run."""
        service, channel = process.service, self._lifecycle.channel()
        try:
            started = Exec(service.command, service.cwd, service.env)
            payload = self._commands.encode(started, protocol.EXEC_STREAM)
            kind = Frame.SERVICE if service.forks else Frame.EXEC
            process.started(channel, *channel.exec(payload, kind=kind))
            await self._wait_ready(process, channel)
        except (ActionError, DispatchError, ExecError) as error:
            raise CreateError(f"service {service.name!r}: {error.message}") from error
        finally:
            if not process.was_ready:
                channel.kill(process.identity)

    async def _wait_ready(self, process: ServiceProcess, channel: Channel) -> None:
        service = process.service
        ready = asyncio.ensure_future(self._condition(process, channel))
        ended = asyncio.ensure_future(process.wait())
        try:
            await asyncio.wait([ready, ended], timeout=service.seconds, return_when=asyncio.FIRST_COMPLETED)
            if ended.done():
                ended.result()
                raise CreateError(_failure(process, f"ended with {process.exit_code()}"))
            if not ready.done():
                raise CreateError(
                    _failure(process, f"was not ready within {service.seconds:g} s: {service.ready}")
                )
            ready.result()
            process.was_ready = True
        finally:
            ready.cancel()
            ended.cancel()
            await asyncio.gather(ready, ended, return_exceptions=True)

    async def _condition(self, process: ServiceProcess, channel: Channel) -> None:
        """Wait for the readiness condition of the service."""
        ready = process.service.ready
        if ready.line is not None:
            await process.printed
        elif ready.file is not None or ready.socket is not None:
            kind = AwaitKind.FILE if ready.file is not None else AwaitKind.SOCKET
            path = ready.file or ready.socket or ""
            answer = await channel.ask(
                Frame.AWAIT, protocol.AWAIT_REQUEST.pack(kind) + self._encode_path(path)
            )
            check(answer.done.result(), path)
        else:
            await channel.ask(Frame.PING, b"")  # init answers it after it has tried to start the service


def _failure(process: ServiceProcess, what: str) -> str:
    command, output = process.service.command, process.output()
    words = [command] if isinstance(command, str) else command
    shown = " ".join(word if len(word) <= WORD_MAX else f"{word[:WORD_MAX]}…" for word in words)
    said = f"; its last output: {output}" if output else ""
    return f"service {process.service.name!r}: {shown!r} {what}{said}"

"""Run one command in a container: create an exec, read its stream, inspect its end.

The Docker API cannot kill an exec. So every command has a mark in its environment, which finds its processes:
children inherit it, also those that left the session.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import secrets
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import anyio
import anyio.to_thread
import msgspec

from dutyfree.contract import KILLED, Cut, Observation, Span
from dutyfree.contract.arguments import not_started
from dutyfree.contract.errors import (
    CollectError,
    DispatchError,
    ExecError,
    SandboxGone,
    SubstrateError,
)
from dutyfree.contract.output import Collector
from dutyfree.substrates.docker import ending
from dutyfree.substrates.docker.engine import CHUNK, Connection, Engine, EngineError, EngineLost
from dutyfree.substrates.local.container_processes import kill_tree
from dutyfree.substrates.local.kill_script import KILL_SCRIPT, KILLER, MARK

KEEPER = ("sleep", "2147483647")
"""The container's own command: it does nothing, and keeps the container running."""

KILL_SECONDS = 15.0
"""How long to wait for the end of a killed command."""


class ExecRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A command, with its environment and limits."""

    command: str | tuple[str, ...]
    cwd: str
    env: Mapping[str, str] = {}
    stdin: bytes | None = None
    timeout: float | None = None
    user: str | None = None
    output: int
    """Bytes kept of each stream."""
    with_strays: bool = False
    """Whether to kill processes without a mark too, while no other command runs: they belong to this one."""


class Execution:
    """Runs one ExecRequest. Use it once."""

    def __init__(
        self, engine: Engine, container: str, request: ExecRequest, alone: Callable[[], bool]
    ) -> None:
        """``alone``: whether no other command runs in the container now."""
        self._engine = engine
        self._container = container
        self._request = request
        self._alone = alone
        self._variable = f"{MARK}={secrets.token_hex(8)}"
        self._exec = ""
        self._connection: Connection | None = None
        self._accepted = False
        self._killers: list[str] = []
        self._frame: tuple[int, int] = (0, 0)
        """The stream of the current frame, and how many bytes of it are missing."""
        self._streams = {1: Collector(request.output), 2: Collector(request.output)}

    async def run(self) -> Observation:
        """Raises DispatchError (SandboxClosed), ExecError, CollectError."""
        started = time.perf_counter()
        clock = _Clock(started)
        timeout = self._request.timeout
        facts: dict[str, Any] | None = None
        try:
            with anyio.move_on_after(timeout) as scope:
                await self._create()
                await self._start()
                clock.mark("dispatch")
                await self._converse()
                last = time.perf_counter()
                facts = await self._inspect()
                clock.mark("collect", since=last)
            if facts is None:
                with anyio.CancelScope(shield=True):
                    facts = await self._end()
        except BaseException:
            with anyio.CancelScope(shield=True), contextlib.suppress(SubstrateError, SandboxGone):
                await self._end()
            raise
        finally:
            if self._connection is not None:
                self._connection.close()
        return self._observation(facts, scope.cancelled_caught, clock)

    async def _create(self) -> None:
        request = self._request
        body: dict[str, object] = {
            "Cmd": ("/bin/sh", "-c", command) if isinstance(command := request.command, str) else command,
            "Env": [*(f"{name}={value}" for name, value in request.env.items()), self._variable],
            "WorkingDir": request.cwd,
            "AttachStdin": request.stdin is not None,
            "AttachStdout": True,
            "AttachStderr": True,
        }
        if request.user is not None:
            body["User"] = request.user
        try:
            made = await self._engine.request("POST", f"/containers/{self._container}/exec", json=body)
        except EngineError as error:
            if _has_ended(error):
                await self._require_running()
            raise ending.refusal(error, self._container) from error
        except EngineLost as error:
            raise DispatchError(str(error)) from error
        self._exec = made["Id"]

    async def _start(self) -> None:
        body = b'{"Detach":false,"Tty":false}'
        headers = {"Content-Type": "application/json", "Connection": "Upgrade", "Upgrade": "tcp"}
        target = f"{self._engine.prefix}/exec/{self._exec}/start"
        try:
            self._connection = await self._engine.connect()
        except EngineLost as error:
            raise DispatchError(str(error)) from error
        self._connection.send("POST", target, len(body), headers, body)
        await self._accept()

    async def _accept(self) -> None:
        """Read the head of the answer. It can be called again after a cancellation."""
        assert self._connection is not None
        try:
            response = await self._connection.head()
            if response.status < 400:
                self._accepted = True
                return
            error = EngineError(response.status, await response.message())
        except (asyncio.IncompleteReadError, OSError) as lost:
            self._abandon()
            raise DispatchError(f"the Docker engine closed the connection: {lost}") from lost
        self._abandon()
        if _has_ended(error):
            await self._require_running()
        raise ending.refusal(error, self._container) from error

    def _abandon(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    async def _converse(self) -> None:
        """Send stdin, and read both streams to their end."""
        if self._request.stdin is None:
            lost = await self._receive()
        else:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._feed, self._request.stdin)
                lost = await self._receive()
                tasks.cancel_scope.cancel()
        if lost is not None:
            raise ExecError(f"the Docker engine closed the connection: {lost}") from lost

    async def _feed(self, data: bytes) -> None:
        assert self._connection is not None
        writer = self._connection.writer
        view = memoryview(data)
        # The command may end before it has read everything. That is not an error.
        with contextlib.suppress(ConnectionError):
            for start in range(0, len(view), CHUNK):
                writer.write(view[start : start + CHUNK])
                await writer.drain()
            writer.write_eof()

    async def _receive(self) -> Exception | None:
        """Read frames to the end. Returns the error that broke them off. It can be called again."""
        assert self._connection is not None
        reader = self._connection.reader
        try:
            while True:
                stream, missing = self._frame
                if missing == 0:
                    header = await reader.readexactly(8)
                    self._frame = header[0], int.from_bytes(header[4:])
                    continue
                piece = await reader.read(min(missing, CHUNK))
                if not piece:
                    return EOFError("in the middle of the output")
                self._streams[2 if stream == 2 else 1].add(piece)
                self._frame = stream, missing - len(piece)
        except asyncio.IncompleteReadError as error:
            return error if error.partial else None
        except OSError as error:
            return error

    async def _inspect(self) -> dict[str, Any]:
        """Wait until the engine knows the exit code. Returns the facts of the exec."""
        delay = 0.002
        try:
            while True:
                facts: dict[str, Any] = await self._engine.request("GET", f"/exec/{self._exec}/json")
                if not facts["Running"] and facts["ExitCode"] is not None:
                    return facts
                # The streams end before the command does, and no request waits for the end of the command.
                await anyio.sleep(delay)
                delay = min(2 * delay, 0.1)
                if delay == 0.1:
                    await self._require_running()
        except EngineError as error:
            await self._require_running()
            raise CollectError(f"the Docker engine has lost the result of the command: {error}") from error
        except EngineLost as error:
            raise ExecError(f"the Docker engine closed the connection: {error}") from error

    async def _require_running(self) -> None:
        await ending.require_running(self._engine, self._container)

    async def _end(self) -> dict[str, Any] | None:
        """Kill the command, in any phase, and read the rest of its output."""
        if self._connection is None:
            return None
        facts: dict[str, Any] | None = None
        failure: SubstrateError | SandboxGone | None = None
        with anyio.move_on_after(KILL_SECONDS):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._kill)
                try:
                    if not self._accepted:
                        await self._accept()
                    await self._receive()
                    facts = await self._inspect()
                except (SubstrateError, SandboxGone) as error:
                    failure = error
                tasks.cancel_scope.cancel()
        with anyio.move_on_after(KILL_SECONDS, shield=True):
            await self._killers_end()
        if failure is not None:
            raise failure
        return facts

    async def _killers_end(self) -> None:
        """Wait for the kill scripts: they could kill the next command, which has no mark at its start."""
        with contextlib.suppress(EngineError, EngineLost):
            for killer in self._killers:
                while (await self._engine.request("GET", f"/exec/{killer}/json"))["Running"]:  # noqa: ASYNC110 (the engine has no event for it)
                    await anyio.sleep(0.01)

    async def _kill(self) -> None:
        """Repeat the kill, because the engine may start the command a moment later."""
        seen = 0
        delay = 0.02
        for attempt in itertools.count():
            seen += await self._kill_from_here()
            if not seen and (attempt > 2 or os.geteuid() != 0):
                await self._kill_inside()
            await anyio.sleep(delay)
            delay = min(2 * delay, 0.5)

    @property
    def _kills_strays(self) -> bool:
        return self._request.with_strays and self._alone()

    async def _kill_from_here(self) -> int:
        """Kill from this host. Only root on the engine's own host sees the container's processes."""
        if os.geteuid() != 0:
            return 0
        pid = 0
        with contextlib.suppress(EngineError, EngineLost):
            facts = await self._engine.request("GET", f"/exec/{self._exec}/json")
            pid = facts["Pid"] if facts["Running"] else 0
        strays = self._container if self._kills_strays else ""
        kill = partial(kill_tree, self._variable, pid, self._container, strays=strays)
        return await anyio.to_thread.run_sync(kill)

    async def _kill_inside(self) -> None:
        strays = "-" if self._kills_strays else ""
        argv = ("/bin/sh", "-c", KILL_SCRIPT, "kill", self._variable, strays)
        body = {"Cmd": argv, "User": "0", "Env": [f"{MARK}={KILLER}"]}
        with contextlib.suppress(EngineError, EngineLost), anyio.CancelScope(shield=True):
            made = await self._engine.request("POST", f"/containers/{self._container}/exec", json=body)
            self._killers.append(made["Id"])
            await self._engine.request("POST", f"/exec/{made['Id']}/start", json={"Detach": True})

    def _observation(self, facts: dict[str, Any] | None, timed_out: bool, clock: _Clock) -> Observation:
        code = facts["ExitCode"] if facts else KILLED + 9
        stdout, stderr = (self._streams[number].value() for number in (1, 2))
        if facts and facts["Pid"] == 0 and not timed_out:
            # The command did not run; the engine writes the reason to its stdout.
            reason = stdout.replace(b"\r\n", b"\n").decode(errors="surrogateescape").rstrip("\n")
            return not_started(reason, _unstarted(stdout), time.perf_counter() - clock.zero)
        return Observation(
            exit_code=code,
            signal=code - KILLED if KILLED < code <= KILLED + 64 else None,
            stdout=stdout,
            stderr=stderr,
            timed_out=timed_out,
            cut=Cut(self._streams[1].cut, self._streams[2].cut),
            seconds=time.perf_counter() - clock.zero,
            spans=tuple(clock.spans),
        )


def _unstarted(reason: bytes) -> int:
    """The exit code that a shell has for a program that cannot start. Engines have different ones."""
    missing = (b"executable file not found", b"no such file or directory")
    return 127 if any(text in reason.lower() for text in missing) else 126


def _has_ended(error: EngineError) -> bool:
    """Whether the container has ended: status 409, or 500 if it ended a moment ago."""
    return error.status == 409 or "is not running" in error.message


class _Clock:
    """Measures the spans of an action."""

    def __init__(self, zero: float) -> None:
        self.zero = zero
        self.spans: list[Span] = []

    def mark(self, name: str, since: float | None = None) -> None:
        start = self.zero if since is None else since
        self.spans.append(Span(name, start - self.zero, time.perf_counter() - start))

"""One command in a container: exec create, a taken-over stream, exec inspect.

The engine has no way to end an exec, so every command carries a mark in its environment, by which its
processes are found and killed: children inherit it, also those that left the session.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import secrets
import time
from collections.abc import Mapping
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
    SandboxClosed,
    SandboxGone,
    SubstrateError,
)
from dutyfree.contract.output import Collector
from dutyfree.substrates.docker.engine import CHUNK, Connection, Engine, EngineError, EngineLost
from dutyfree.substrates.docker.processes import KEEPER, kill_tree

MARK = "DUTYFREE_EXEC"
KILL_SECONDS = 15.0
"""How long a killed command may take to end before its stream is given up."""

# In the container, when its processes cannot be seen from here: first all are stopped, lest a shell whose
# child died go on to the next line; then killed; again until none is left.
KILL_SCRIPT = """
hit() { [ "$2" = $$ ] || [ "$2" = 1 ] || { kill "$1" "$2" && found=1; } 2>/dev/null; }
each() {
  for file in $(grep -l "$2" /proc/[0-9]*/environ 2>/dev/null); do
    pid=${file#/proc/}; hit "$1" "${pid%/*}"
  done
  [ -n "$3" ] && for path in /proc/[0-9]*; do
    grep -q DUTYFREE_EXEC= "$path/environ" || grep -q "$3" "$path/cmdline" || hit "$1" "${path#/proc/}"
  done 2>/dev/null
}
n=0
while [ $n -lt 50 ]; do
  found=
  each -STOP "$@"
  each -STOP "$@"
  each -KILL "$@"
  [ -n "$found" ] || exit 0
  n=$((n+1))
done
"""
"""Arguments: the mark; and, if processes without any are to go too, what the container's own is known by."""


class ExecRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be run."""

    command: str | tuple[str, ...]
    cwd: str
    env: Mapping[str, str] = {}
    stdin: bytes | None = None
    timeout: float | None = None
    user: str | None = None
    output: int
    """Bytes kept of each stream."""
    lone: bool = False
    """No other command was under way: when it is killed, processes without a mark are its own."""


class Execution:
    """Runs one ExecRequest; used once."""

    def __init__(self, engine: Engine, container: str, request: ExecRequest) -> None:
        self._engine = engine
        self._container = container
        self._request = request
        self._variable = f"{MARK}={secrets.token_hex(8)}"
        self._exec = ""
        self._connection: Connection | None = None
        self._accepted = False
        self._killers: list[str] = []
        self._frame: tuple[int, int] = (0, 0)
        """The stream of the frame being read, and how much of it is missing."""
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
            raise refusal(error, self._container) from error
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
        """The answer's head; can be taken up again after a cancellation."""
        assert self._connection is not None
        try:
            response = await self._connection.head()
            if response.status < 400:
                self._accepted = True
                return
            error = EngineError(response.status, await response.message())
        except (asyncio.IncompleteReadError, OSError) as lost:
            self._abandon()
            raise DispatchError(f"the Docker engine went away: {lost}") from lost
        self._abandon()
        if _has_ended(error):
            await self._require_running()
        raise refusal(error, self._container) from error

    def _abandon(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    async def _converse(self) -> None:
        """Feed stdin, and read to the end of both streams."""
        if self._request.stdin is None:
            lost = await self._receive()
        else:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._feed, self._request.stdin)
                lost = await self._receive()
                tasks.cancel_scope.cancel()
        if lost is not None:
            raise ExecError(f"the Docker engine went away: {lost}") from lost

    async def _feed(self, data: bytes) -> None:
        assert self._connection is not None
        writer = self._connection.writer
        view = memoryview(data)
        # The command may end without reading all: no error, as in a shell's pipe.
        with contextlib.suppress(ConnectionError):
            for start in range(0, len(view), CHUNK):
                writer.write(view[start : start + CHUNK])
                await writer.drain()
            writer.write_eof()

    async def _receive(self) -> Exception | None:
        """Frames of a stream number and a size, to the end; what broke it off. Can be taken up again."""
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
        """What the engine knows of the ended exec."""
        delay = 0.002
        try:
            while True:
                facts: dict[str, Any] = await self._engine.request("GET", f"/exec/{self._exec}/json")
                if not facts["Running"] and facts["ExitCode"] is not None:
                    return facts
                # The streams' end and the command's end are two events, and no request awaits the second.
                await anyio.sleep(delay)
                delay = min(2 * delay, 0.1)
                if delay == 0.1:
                    await self._require_running()
        except EngineError as error:
            await self._require_running()
            raise CollectError(f"the engine has lost the command's result: {error}") from error
        except EngineLost as error:
            raise ExecError(f"the Docker engine went away: {error}") from error

    async def _require_running(self) -> None:
        try:
            facts = await self._engine.request("GET", f"/containers/{self._container}/json")
        except EngineError as error:
            raise refusal(error, self._container) from error
        except EngineLost as error:
            raise ExecError(f"the Docker engine went away: {error}") from error
        if not (state := facts["State"])["Running"]:
            raise await self._ended(state)

    async def _ended(self, state: Mapping[str, Any]) -> SandboxClosed | SandboxGone:
        """Why the container has ended. Only what the engine knows for sure is the agent's doing."""
        name = f"the container {self._container[:12]}"
        if state.get("OOMKilled"):
            return SandboxGone(f"{name} was killed by its memory limit")
        events = await self._last_events()
        if "kill" in events:
            return SandboxClosed(f"{name} was killed or stopped from outside")
        if "die" not in events:
            return SandboxClosed(f"{name} has ended, and the Docker engine does not remember why")
        return SandboxGone(f"{name} ended with code {state.get('ExitCode')}")

    async def _last_events(self) -> set[str]:
        """Which of "kill" (a signal by the engine) and "die" it remembers.

        It keeps a few hundred events of all containers, and none after a restart. The kill comes before the
        death: if it remembers the death and no kill, there was none.
        """
        filters = json.dumps({"container": [self._container], "event": ["kill", "die"]})
        query = {"since": "1", "until": f"{time.time():.9f}", "filters": filters}
        said = b""
        with contextlib.suppress(EngineError, EngineLost):
            async with self._engine.stream("GET", "/events", query=query) as response:
                said = b"".join([piece async for piece in response.pieces()])
        return {json.loads(line)["Action"] for line in said.splitlines() if line.strip()}

    async def _end(self) -> dict[str, Any] | None:
        """Kill the command, however far it came, and take what it still said."""
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
        """They would take the beginning of the next command, which bears no mark yet, for a stray."""
        with contextlib.suppress(EngineError, EngineLost):
            for killer in self._killers:
                while (await self._engine.request("GET", f"/exec/{killer}/json"))["Running"]:  # noqa: ASYNC110 (the engine tells only when asked)
                    await anyio.sleep(0.01)

    async def _kill(self) -> None:
        """Again and again: the engine may only be about to start it."""
        seen = 0
        delay = 0.02
        for attempt in itertools.count():
            seen += await self._kill_from_here()
            if not seen and (attempt > 2 or os.geteuid() != 0):
                await self._kill_inside()
            await anyio.sleep(delay)
            delay = min(2 * delay, 0.5)

    async def _kill_from_here(self) -> int:
        """Root on the engine's own host sees the container's processes."""
        if os.geteuid() != 0:
            return 0
        pid = 0
        with contextlib.suppress(EngineError, EngineLost):
            facts = await self._engine.request("GET", f"/exec/{self._exec}/json")
            pid = facts["Pid"] if facts["Running"] else 0
        kill = partial(kill_tree, self._variable, pid, self._container, strays=self._request.lone)
        return await anyio.to_thread.run_sync(kill)

    async def _kill_inside(self) -> None:
        strays = KEEPER[-1] if self._request.lone else ""
        argv = ("/bin/sh", "-c", KILL_SCRIPT, "kill", self._variable, strays)
        body = {"Cmd": argv, "User": "0"}
        with contextlib.suppress(EngineError, EngineLost), anyio.CancelScope(shield=True):
            made = await self._engine.request("POST", f"/containers/{self._container}/exec", json=body)
            self._killers.append(made["Id"])
            await self._engine.request("POST", f"/exec/{made['Id']}/start", json={"Detach": True})

    def _observation(self, facts: dict[str, Any] | None, timed_out: bool, clock: _Clock) -> Observation:
        code = facts["ExitCode"] if facts else KILLED + 9
        stdout, stderr = (self._streams[number].value() for number in (1, 2))
        if facts and facts["Pid"] == 0 and not timed_out:
            # It never ran: the engine tells why on its stdout.
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
    """The shell's code for a program that could not be started; engines differ in theirs."""
    missing = (b"executable file not found", b"no such file or directory")
    return 127 if any(text in reason.lower() for text in missing) else 126


def _has_ended(error: EngineError) -> bool:
    """Whether the engine says so of the container: with 409, or with 500 if it ended a moment ago."""
    return error.status == 409 or "is not running" in error.message


def refusal(error: EngineError, container: str) -> DispatchError:
    """The engine's refusal of an action, as the caller must see it."""
    if error.status == 404 or "is not running" in error.message:
        return SandboxClosed(f"the container {container[:12]} is gone: {error}")
    return DispatchError(f"the Docker engine refused: {error}")


class _Clock:
    """Spans since the action was asked for."""

    def __init__(self, zero: float) -> None:
        self.zero = zero
        self.spans: list[Span] = []

    def mark(self, name: str, since: float | None = None) -> None:
        start = self.zero if since is None else since
        self.spans.append(Span(name, start - self.zero, time.perf_counter() - start))

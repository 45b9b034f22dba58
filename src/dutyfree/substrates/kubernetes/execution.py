"""Run one command in a pod by an exec of the cluster.

An exec has no directory, no environment, no end of stdin, and nothing that kills it; and a process that a
command leaves in the background holds it. So a small shell script runs the command. It writes a mark to both
streams when the command ends. Another exec kills the command, by a mark in its environment.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import secrets
import shlex
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import anyio
import msgspec

from dutyfree.contract import KILLED, Cut, Observation, Span
from dutyfree.contract.arguments import NOT_RUNNABLE, not_started
from dutyfree.contract.errors import DispatchError, DutyfreeError, ExecError
from dutyfree.contract.output import Collector
from dutyfree.substrates.kubernetes.api import Api, ApiError, ApiLost
from dutyfree.substrates.kubernetes.guest import explain
from dutyfree.substrates.kubernetes.pods import Pods
from dutyfree.substrates.kubernetes.status import CONTAINER
from dutyfree.substrates.kubernetes.stream import CHUNK, STATUS, STDERR, STDOUT, exit_code, parsed_status
from dutyfree.substrates.local.kill_script import KILL_SCRIPT, MARK

if TYPE_CHECKING:
    import aiohttp

KILL_SECONDS = 15.0
TEXT_MAX = 900 << 10
"""Bytes of a command: it travels in a URL, and servers accept 1 MiB."""

RUNNER = "dutyfree-runner"
"""A word in the command line of the script, which distinguishes it from processes of the agent."""

# Only the command has the environment that the kill looks for: the shell lives on, and writes the marks. The
# shell's own stderr, on which it reports a killed child, is not that of the command.
#
# The first line of stdin is the mark of the streams, which a command could otherwise write itself. Then come
# lines with the variables, quoted for the shell: what is in the command line of an exec is in the logs of the
# cluster.
_RUN = r"""
cwd=$1 lines=$2 size=$3; shift 3
IFS= read -r mark
given= between=
while [ "$lines" -gt 0 ]; do
  IFS= read -r line; given=$given$between$line; lines=$((lines - 1))
  between='
'
done
eval "set -- $given \"\$@\""
exec 3>&2 2>/dev/null
if ! cd -- "$cwd"; then code=refused
elif [ "$size" -lt 0 ]; then ( exec env "$@" </dev/null 2>&3 3>&- ); code=$?
else head -c "$size" 3>&- | ( exec env "$@" 2>&3 3>&- ); code=$?
fi
killed=0
for file in /sys/fs/cgroup/memory.events /sys/fs/cgroup/memory/memory.oom_control; do
  while read -r name count; do [ "$name" = oom_kill ] && killed=$count; done <"$file"
done
printf '\n%s %s %s\n' "$mark" "$code" "$killed"
printf '\n%s -\n' "$mark" >&3
"""


# What runtimes say of a command that they cannot start, if the agent is at fault: it has changed the
# shell, or killed the process that was to become it. What may be the node's fault is not here.
_FAILED = "OCI runtime exec failed.*"
_NOT_RUNNABLE = re.compile(
    rf"{_FAILED}(a directory|permission denied|no such file|file not found|format error|file busy|symbolic)"
)
_KILLED_EARLY = re.compile(
    rf"{_FAILED}(init-p|sync socket|procReady|setns process|unexpected EOF|reset by peer)"
)


class ExecRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A command, with its environment and limits."""

    words: tuple[str, ...]
    cwd: str
    env: Mapping[str, str] = {}
    stdin: bytes | None = None
    timeout: float | None = None
    output: int
    """Bytes kept of each stream."""
    with_strays: bool = False
    """Whether to kill processes without a mark too, while no other command runs: they belong to this one."""


class MarkedStream:
    """One stream until its mark: keeps what comes before it, and the rest of the line after it."""

    _WORD_MAX = 64

    def __init__(self, mark: bytes, limit: int) -> None:
        self._sought = b"\n" + mark + b" "
        self._rest = b""
        self._kept = Collector(limit)
        self.word: bytes | None = None
        """What follows the mark, when it has come."""

    def add(self, data: bytes) -> None:
        if self.word is not None:
            return  # of a process in the background
        data = self._rest + data
        before, found, after = data.partition(self._sought)
        if found and (b"\n" in after or len(after) > self._WORD_MAX):
            self._kept.add(before)
            self.word = after.partition(b"\n")[0][: self._WORD_MAX]
            self._rest = b""
            return
        held = len(before) if found else max(0, len(data) - len(self._sought))
        self._kept.add(data[:held])
        self._rest = data[held:]

    def value(self) -> tuple[bytes, int]:
        """The bytes that were kept, and how many were cut."""
        if self._rest:
            self._kept.add(self._rest)
            self._rest = b""
        return self._kept.value(), self._kept.cut


class Execution:
    """Runs one ExecRequest. Use it once."""

    def __init__(
        self, api: Api, pods: Pods, pod: str, request: ExecRequest, alone: Callable[[], bool]
    ) -> None:
        """``alone``: whether no other command runs in the pod now."""
        self._api = api
        self._pods = pods
        self._pod = pod
        self._request = request
        self._alone = alone
        self._processes, self._mark = secrets.token_hex(8), secrets.token_hex(16)
        """What marks the command's processes, which they know, and the end of its streams."""
        mark = self._mark.encode()
        self._streams = {number: MarkedStream(mark, request.output) for number in (STDOUT, STDERR)}
        self._status: dict[str, Any] = {}
        self._node_answers = False
        """Whether the node accepted the exec that kills the command."""
        self.oom_kills = 0
        """How many processes of the container the memory limit had killed when the command ended."""

    async def run(self) -> Observation | None:
        """None if the directory cannot be entered.

        Raises DispatchError (SandboxClosed), ExecError, SandboxGone.
        """
        begun = time.perf_counter()
        command = self._command()
        if sum(len(quote(word, errors="replace")) for word in command) > TEXT_MAX:
            return not_started("the command is too long for an exec of Kubernetes", NOT_RUNNABLE)
        execution = self._api.execution(self._pod, command, container=CONTAINER, stdin=True)
        try:
            async with execution as websocket:
                dispatched = time.perf_counter()
                timed_out = await self._converse(websocket)
        except (ApiError, ApiLost) as error:
            raise await self._broken(DispatchError(f"the exec could not be started: {error}")) from error
        ended = time.perf_counter()
        spans = (
            Span("dispatch", 0.0, dispatched - begun),
            Span("run", dispatched - begun, ended - dispatched),
        )
        return await self._observation(timed_out, spans)

    def _command(self) -> tuple[str, ...]:
        request = self._request
        words = request.words
        if "=" in words[0] or words[0].startswith("-"):  # env would take it as its own argument
            words = ("/bin/sh", "-c", 'exec "$0" "$@"', *words)
        size = -1 if request.stdin is None else len(request.stdin)
        lines = self._variables().count(b"\n")
        run = ("/bin/sh", "-c", _RUN, RUNNER, request.cwd, str(lines), str(size))
        return (*run, f"{MARK}={self._processes}", *words)

    def _variables(self) -> bytes:
        """The variables of the command as words of the shell, in whole lines."""
        words = shlex.join(f"{name}={value}" for name, value in self._request.env.items())
        return os.fsencode(f"{words}\n") if words else b""

    async def _converse(self, websocket: aiohttp.ClientWebSocketResponse) -> bool:
        """Send stdin, and receive until both marks have come. Returns whether the timeout was reached."""
        received = asyncio.create_task(self._receive(websocket))
        data = self._mark.encode() + b"\n" + self._variables() + (self._request.stdin or b"")
        sent = asyncio.create_task(_feed(websocket, data))
        try:
            await asyncio.wait([received], timeout=self._request.timeout)
            if received.done():
                return False
            await self._kill(received)
            return True
        except BaseException:
            with anyio.CancelScope(shield=True):
                await self._kill(received)
            raise
        finally:
            for task in (sent, received):
                task.cancel()
            with anyio.CancelScope(shield=True):
                await asyncio.wait([sent, received])

    async def _receive(self, websocket: aiohttp.ClientWebSocketResponse) -> None:
        async for message in websocket:
            data = message.data
            if not isinstance(data, bytes) or len(data) < 2:
                continue
            if data[0] in self._streams:
                self._streams[data[0]].add(data[1:])
                if all(stream.word is not None for stream in self._streams.values()):
                    return
            elif data[0] == STATUS:
                self._status = parsed_status(data[1:])

    async def _kill(self, received: asyncio.Task[None]) -> None:
        """Kill the command and its descendants, and wait for the rest of the output."""
        with anyio.CancelScope(shield=True), anyio.move_on_after(KILL_SECONDS):
            while not received.done():  # the command may start a moment later
                strays = RUNNER if self._request.with_strays and self._alone() else ""
                command = ("/bin/sh", "-c", KILL_SCRIPT, RUNNER, f"{MARK}={self._processes}", strays)
                with contextlib.suppress(ApiError, ApiLost):
                    execution = self._api.execution(self._pod, command, container=CONTAINER, stdin=False)
                    async with execution as websocket:
                        self._node_answers = True
                        async for _ in websocket:
                            pass
                await asyncio.wait([received], timeout=0.2)

    async def _observation(self, timed_out: bool, spans: tuple[Span, ...]) -> Observation | None:
        words = (self._streams[STDOUT].word or b"").split()
        if words[:1] == [b"refused"]:
            return None
        if len(words) == 2 and all(word.isdigit() for word in words):
            code, self.oom_kills = (int(word) for word in words)
        elif (found := exit_code(self._status)) is not None:
            code = found  # the command killed the script too, or the end of the pod did
            if not timed_out:
                lost = ExecError("the exec was killed")
                if (reason := await self._broken(lost)) is not lost:
                    raise reason
        elif timed_out and self._node_answers:
            code = KILLED + 9
        elif timed_out:
            raise await self._broken(ExecError("the node does not answer, so the command was not killed"))
        else:
            said = str(self._status.get("message") or "no reason")
            if _NOT_RUNNABLE.search(said):
                return not_started(said)
            lost = ExecError(f"the exec broke off: {said}")
            if (reason := await self._broken(lost)) is lost and _KILLED_EARLY.search(said):
                return not_started(said)
            raise reason
        (stdout, left_out), (stderr, left_err) = (
            self._streams[number].value() for number in (STDOUT, STDERR)
        )
        return Observation(
            exit_code=code,
            signal=code - KILLED if KILLED < code <= KILLED + 64 else None,
            stdout=stdout,
            stderr=stderr,
            timed_out=timed_out,
            cut=Cut(left_out, left_err),
            seconds=spans[-1].start + spans[-1].seconds,
            spans=spans,
        )

    async def _broken(self, error: DutyfreeError) -> Exception:
        """The reason why the pod has ended, if it has; else the error."""
        found = await explain(self._pods, self._pod)
        return error if type(found) is ExecError and "was lost" in found.message else found


async def _feed(websocket: aiohttp.ClientWebSocketResponse, data: bytes) -> None:
    # The command may end before it has read everything. That is not an error.
    with contextlib.suppress(ConnectionError):
        for start in range(0, len(data), CHUNK):
            await websocket.send_bytes(b"\0" + data[start : start + CHUNK])

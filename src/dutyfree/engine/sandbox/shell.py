"""A shell session: one shell that runs commands one after the other.

Each command is written to a file that the shell sources, so that variables, functions and the working
directory stay. After the command the shell prints a random token and the exit code to both streams.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import secrets
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from time import perf_counter

import anyio
import msgspec

from dutyfree.contract import KILLED, Cut, Exec, Observation, Span
from dutyfree.contract.arguments import check_command, encoded
from dutyfree.contract.errors import ActionError, SubstrateError
from dutyfree.contract.output import Collector
from dutyfree.engine.launcher import protocol
from dutyfree.engine.launcher.protocol import Frame
from dutyfree.engine.sandbox.channel import Channel
from dutyfree.engine.sandbox.commands import CommandRunner
from dutyfree.engine.sandbox.files import SandboxFiles
from dutyfree.engine.sandbox.lifecycle import Lifecycle
from dutyfree.engine.sandbox.observation import final_code
from dutyfree.engine.sandbox.output_credit import OutputCredit
from dutyfree.engine.sandbox.pipes import create_pipe

GRACE = 2.0
"""Seconds that the shell has to continue after its command was killed."""

_CODE_MAX = 16  # bytes of an exit code


@asynccontextmanager
async def open_shell(
    lifecycle: Lifecycle, commands: CommandRunner, files: SandboxFiles, program: str
) -> AsyncIterator[NativeShell]:
    """Start a shell, and kill it on exit. Raises DispatchError."""
    channel = lifecycle.channel()
    payload = commands.encode(Exec((program,)), protocol.EXEC_STREAM)
    shell = NativeShell(channel, payload, files, commands.output_limit)
    try:
        yield shell
    finally:
        await shell.close()


class NativeShell:
    """A shell session. See ``abilities.Shell``."""

    def __init__(self, channel: Channel, payload: bytes, files: SandboxFiles, limit: int) -> None:
        self._channel = channel
        self._files = files
        self._token = secrets.token_hex(16)
        self._script = f"/tmp/.shell-{self._token[:12]}"  # noqa: S108 (in the sandbox)
        self._busy = asyncio.Lock()
        self._streams = (_Stream(self._token, limit), _Stream(self._token, limit))
        self._end = asyncio.Event()
        theirs, self._input = create_pipe()
        os.set_blocking(self._input, False)
        try:
            self._identity, self._running = channel.exec(payload, theirs)
        except BaseException:
            os.close(self._input)
            raise
        self._credit = OutputCredit(partial(channel.credit, self._identity))
        self._running.on_output = self._add_output
        self._running.ended.add_done_callback(self._ended)

    async def run(self, command: str, *, timeout: float | None = None) -> Observation:
        """Raises ActionError if the shell has ended: by ``exit``, or because it had to be killed."""
        asked = perf_counter()
        check_command(command, timeout=timeout)
        text = encoded(command, "a command", "bad_request")
        async with self._busy:
            self._check()
            # With a timeout nothing here waits forever: a cancelled write ends, or its sandbox does.
            longest = None if timeout is None else timeout + self._channel.answer_timeout
            with anyio.move_on_after(longest) as waiting:
                await self._files.write(self._script, text + b"\n", 0o644)
            if waiting.cancelled_caught:
                return Observation(
                    exit_code=KILLED + 9, signal=9, timed_out=True, seconds=perf_counter() - asked
                )
            for stream in self._streams:
                stream.begin()
            self._end.clear()
            mark = f"printf '\\n%s %d\\n' {self._token} $code"
            line = f"{{ . {self._script}; }} </dev/null; code=$?; {mark}; {mark} >&2\n"
            # Shorter than a pipe's buffer, so it fails only if a process in the sandbox has filled the pipe.
            try:
                os.write(self._input, line.encode())
            except OSError as error:
                raise ActionError("the shell does not read commands any more", kind="ended") from error
            began = perf_counter()
            timed_out = not await self._finished(timeout)
            done = perf_counter()
            self._channel.check()
            seen = self._observe(timed_out, asked, began, done)
            for stream in self._streams:
                stream.begin()  # frees the output
            # Ask init only if it may be an out-of-memory kill: other commands need no second round trip.
            killed = not timed_out and seen.exit_code == KILLED + signal.SIGKILL
            return msgspec.structs.replace(seen, oom=True) if killed and await self._oom() else seen

    async def _oom(self) -> bool:
        answer = await self._channel.ask(Frame.PING, b"", timeout=0.0)
        return b"".join(answer.data) != bytes(protocol.NUMBER.size)

    def _observe(self, timed_out: bool, asked: float, began: float, done: float) -> Observation:
        out, err = self._streams
        code = out.code
        if self._running.ended.done():  # by ``exit``, or killed
            for stream in self._streams:
                stream.finish()
            code = final_code(*self._running.ended.result()[:2])
        return Observation(
            exit_code=KILLED + signal.SIGKILL if timed_out else code,
            signal=signal.SIGKILL if timed_out else code - KILLED if code > KILLED else None,
            stdout=out.kept.value(),
            stderr=err.kept.value(),
            timed_out=timed_out,
            cut=Cut(out.kept.cut, err.kept.cut),
            seconds=done - asked,
            spans=(
                Span("dispatch", 0.0, began - asked),
                Span("run", began - asked, done - began),
            ),
        )

    async def _finished(self, timeout: float | None) -> bool:
        """Wait for both tokens; False if the timeout is over and the command was killed."""
        try:
            with anyio.move_on_after(timeout):
                await self._end.wait()
                return True
            return False
        finally:
            if not self._end.is_set():
                with anyio.CancelScope(shield=True):
                    await self._kill_command()

    async def _kill_command(self) -> None:
        """Kill the children of the shell. If it does not continue after that, kill the shell too."""
        with anyio.move_on_after(GRACE):
            while not self._end.is_set():
                # Repeated, because the shell goes on to the next line of the command.
                self._channel.tell(Frame.KILL, self._identity, flags=protocol.SPARE)
                with anyio.move_on_after(0.02):
                    await self._end.wait()
        if not self._end.is_set():
            self._channel.kill(self._identity)
            await self._end.wait()

    def _add_output(self, stream: int, data: bytes) -> None:
        self._credit.use(len(data) + protocol.FRAME_COST)
        self._streams[stream - 1].add(data)
        if all(part.ended for part in self._streams):
            self._end.set()

    def _ended(self, _: asyncio.Future[tuple[int, ...]]) -> None:
        self._end.set()

    def _check(self) -> None:
        self._channel.check()
        if self._running.ended.done():
            raise ActionError("the shell has ended", kind="ended", remedy="open another shell")

    async def close(self) -> None:
        os.close(self._input)
        with anyio.CancelScope(shield=True):
            if not self._running.ended.done():
                self._channel.kill(self._identity)
                await asyncio.wait([self._running.ended])
            if not self._channel.closed:
                with (
                    anyio.move_on_after(self._channel.answer_timeout),
                    contextlib.suppress(ActionError, SubstrateError),
                ):
                    await self._files.remove(self._script)


class _Stream:
    """The output of one stream, up to the token."""

    def __init__(self, token: str, limit: int) -> None:
        # A command can redefine printf, so a token without a short line after it is output.
        self._pattern = re.compile(rb"\n%b ([^\n]{0,%d})\n" % (token.encode(), _CODE_MAX))
        self._longest = len(token) + _CODE_MAX + 3
        self._limit = limit
        self.begin()

    def begin(self) -> None:
        self.kept = Collector(self._limit)
        self._pending = bytearray()
        self.ended = False
        self.code = 0

    def add(self, data: bytes) -> None:
        self._pending += data
        if found := self._pattern.search(self._pending):
            self.code = int(found[1]) & 0xFF if found[1].isdigit() and len(found[1]) < 4 else 1
            self.ended = True
            begin = found.start()
            del found  # it references the buffer
            del self._pending[begin:]
            self.finish()
        elif len(self._pending) > self._longest:
            # Keep the end: it may be the beginning of the token.
            self.kept.add(self._pending[: -self._longest])
            del self._pending[: -self._longest]

    def finish(self) -> None:
        """Keep the rest: no more output comes."""
        self.kept.add(self._pending)
        self._pending.clear()

"""Run one command in a sandbox of Daytona.

By default in a session of its own, which gives stdout and stderr apart: one request makes the session, one
runs the command and waits for it, and one removes the session, after the result is there. With ``plain``, by
the call ``exec``: one request in all, whose one text has both frames. Input or output that is long takes an
upload or a download more.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import posixpath
import secrets
import shlex
import signal as signals
from collections.abc import Mapping
from time import perf_counter
from typing import Any

import anyio
import msgspec
from daytona import AsyncSandbox, SessionExecuteRequest

from dutyfree.contract import KILLED, Command, Cut, Observation, Span
from dutyfree.contract.arguments import NOT_FOUND, NOT_RUNNABLE, not_started
from dutyfree.contract.errors import CollectError, DispatchError, ExecError
from dutyfree.substrates.daytona.errors import FOREIGN, mapped
from dutyfree.substrates.daytona.wrapper import (
    INLINE_MAX,
    NO_INPUT,
    TEXT_MAX,
    Frame,
    Refusal,
    found_frame,
    inline_input,
    shell_code,
)
from dutyfree.substrates.local.kill_script import KILL_SCRIPT, MARK

KILL_SECONDS = 15.0
"""How long to wait for the end of a killed command, and for its output."""
LONGEST = 7 * 86400
"""Seconds of a request for a command without a timeout. By default, the HTTP client gives up earlier."""
UPLOADS = "/tmp"  # noqa: S108 -- in the sandbox, and the names cannot be guessed
LOG_READS, LOG_PAUSE = 40, 0.05
"""How often to read the log of a session again, and seconds between: see ``Execution._frames_of_session``."""


class ExecRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A command, with its environment and limits."""

    command: Command
    cwd: str
    env: Mapping[str, str] = {}
    stdin: bytes | None = None
    timeout: float | None = None
    output: int
    """Bytes kept of each stream."""
    plain: bool = False
    """Use the call ``exec`` instead of a session."""


class Execution:
    """Runs one ExecRequest. Use it once."""

    def __init__(self, box: AsyncSandbox, request: ExecRequest) -> None:
        self._box = box
        self._request = request
        self._mark = f"dutyfree-{secrets.token_hex(8)}"
        self._dispatched: float | None = None
        self.session = ""
        """The session to remove after the command, if there is one."""

    async def run(self) -> Observation:
        """Raises DispatchError, SandboxClosed, ExecError, CollectError, Exhausted."""
        begin = perf_counter()
        # A task: a request that is given up would lose the output of a command that still runs.
        running = asyncio.create_task(self._frames(begin))
        try:
            done, _ = await asyncio.wait([running], timeout=self._request.timeout)
            if not done:
                await self._end(running)
        except asyncio.CancelledError:
            running.cancel()
            with anyio.CancelScope(shield=True), contextlib.suppress(*FOREIGN):
                await self._kill()
            raise
        finally:
            if not running.done():
                running.cancel()
                with anyio.CancelScope(shield=True):
                    await asyncio.wait([running])
        if running.cancelled():
            raise CollectError(
                "the command was killed after its timeout, and Daytona did not give its output"
            )
        return self._observed(running.result(), perf_counter() - begin, timed_out=not done)

    async def _end(self, running: asyncio.Task[Any]) -> None:
        """Kill the command, and wait for its output. It may begin only now: so it is killed once more."""
        deadline = perf_counter() + KILL_SECONDS
        while not running.done() and perf_counter() < deadline:
            with mapped(ExecError, "the command could not be killed"):
                await self._kill()
            await asyncio.wait([running], timeout=1.0)

    def _observed(
        self, frames: tuple[Frame, Frame] | Refusal, seconds: float, *, timed_out: bool
    ) -> Observation:
        if isinstance(frames, Refusal):
            missing = "o such file" in frames.reason
            return not_started(frames.reason, NOT_FOUND if missing else NOT_RUNNABLE, seconds)
        out, err = frames
        spans = () if self._dispatched is None else (Span("dispatch", 0.0, self._dispatched),)
        return Observation(
            exit_code=KILLED + signals.SIGKILL if timed_out else out.code,
            signal=int(signals.SIGKILL) if timed_out else None,
            stdout=out.data,
            stderr=err.data,
            timed_out=timed_out,
            cut=Cut(max(0, out.size - len(out.data)), max(0, err.size - len(err.data))),
            seconds=seconds,
            spans=spans,
        )

    # --- The SDK ----------------------------------------------------------------------------------------

    async def _frames(self, begin: float) -> tuple[Frame, Frame] | Refusal:
        with mapped(DispatchError, "the command was not sent to Daytona"):
            text = await self._text()
            if not self._request.plain:
                await self._box.process.create_session(self._mark)
                self.session = self._mark
        self._dispatched = perf_counter() - begin
        with mapped(ExecError, "the command failed in Daytona"):
            frames = await (
                self._frames_of_text(text) if self._request.plain else self._frames_of_session(text)
            )
        if isinstance(frames, Refusal):
            return frames
        with mapped(CollectError, "the output could not be downloaded"):
            return await self._whole(*frames)

    async def _text(self) -> str:
        """The shell code of the command. Input and code that are too long are uploaded first."""
        request = self._request
        stdin = NO_INPUT
        if request.stdin is not None and len(request.stdin) <= INLINE_MAX:
            stdin = inline_input(request.stdin)
        elif request.stdin is not None:
            stdin = f"{UPLOADS}/{self._mark}.in"
            await self._box.fs.upload_file(bytes(request.stdin), stdin)
        second = 1 if request.plain else 2
        text = shell_code(
            self._mark,
            request.command,
            cwd=request.cwd,
            env=request.env,
            keep=request.output,
            stdin=stdin,
            second=second,
        )
        data = text.encode(errors="surrogateescape")
        # A request is JSON, which has no other bytes than UTF-8.
        if len(data) <= TEXT_MAX and not any("\ud800" <= letter <= "\udfff" for letter in text):
            return text
        path = f"{UPLOADS}/{self._mark}.sh"
        await self._box.fs.upload_file(f"rm -f {path}\n".encode() + data + b"\n", path)
        return f"/bin/sh {path}"

    async def _frames_of_text(self, text: str) -> tuple[Frame, Frame] | Refusal:
        timeout = self._request.timeout
        # Longer than our own timeout: a command that Daytona kills loses its output.
        limit = LONGEST if timeout is None else math.ceil(timeout + 2 * KILL_SECONDS)
        done = await self._box.process.exec(text, timeout=limit)
        return _pair(done.result, done.result, self._mark) or self._lost(done.result)

    async def _frames_of_session(self, text: str) -> tuple[Frame, Frame] | Refusal:
        """Run the command in the session.

        Daytona answers as soon as the command has ended, and other processes copy its output into the log:
        the end may be missing. There is no event to wait for, so the log is read again.
        """
        request = SessionExecuteRequest(command=text, run_async=False)
        done = await self._box.process.execute_session_command(self._mark, request, timeout=LONGEST)
        out, err = done.stdout or "", done.stderr or ""
        for _ in range(LOG_READS):
            if frames := _pair(out, err, self._mark):
                return frames
            await asyncio.sleep(LOG_PAUSE)
            log = await self._box.process.get_session_command_logs(self._mark, done.cmd_id)
            out, err = log.stdout or "", log.stderr or ""
        return self._lost(out + err)

    def _lost(self, said: str) -> Refusal:
        raise CollectError(
            f"Daytona did not give the whole output of the command: {said[:200]!r}",
            remedy="try the option commands=exec; the sandbox needs the tools that docs/providers.md names",
        )

    async def _whole(self, out: Frame, err: Frame) -> tuple[Frame, Frame]:
        """Download what was too long for a frame, and remove its directory."""
        found = []
        for frame in (out, err):
            if frame.path:
                data = await self._box.fs.download_file(frame.path)
                found.append(msgspec.structs.replace(frame, data=bytes(data or b"")))
            else:
                found.append(frame)
        if path := out.path or err.path:
            with contextlib.suppress(*FOREIGN):
                await self._box.fs.delete_file(posixpath.dirname(path), recursive=True)
        return found[0], found[1]

    async def _kill(self) -> None:
        """Kill the whole process tree of the command. Its wrapper lives on, and gives the output."""
        words = ("/bin/sh", "-c", KILL_SCRIPT, "kill", f"{MARK}={self._mark}")
        with anyio.move_on_after(KILL_SECONDS):
            await self._box.process.exec(shlex.join(words), timeout=int(KILL_SECONDS))


def _pair(out: str, err: str, mark: str) -> tuple[Frame, Frame] | Refusal | None:
    """Both frames, if they are there. Raises CollectError."""
    try:
        first, second = found_frame(out, mark, "out"), found_frame(err, mark, "err")
    except ValueError as error:
        raise CollectError(f"the answer of Daytona cannot be read: {error}") from error
    if isinstance(first, Refusal):
        return first
    if first is None or second is None or isinstance(second, Refusal):
        return None
    return first, second

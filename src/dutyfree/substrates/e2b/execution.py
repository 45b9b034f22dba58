"""Run one command in a sandbox of E2B.

The SDK runs a text in a login shell. So a command is quoted, its directory is entered by the shell, and PATH
is restored after the profile has set it. The SDK decodes output as UTF-8 and replaces what is not: to keep
the bytes, its decoders are exchanged for Latin-1, in which each byte is one character.
"""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import re
import secrets
import shlex
import signal as signals
from collections.abc import Awaitable, Callable, Mapping
from time import perf_counter
from typing import Any, Literal

import anyio
import msgspec
from e2b import AsyncSandbox, CommandExitException
from e2b.exceptions import AuthenticationException, InvalidArgumentException

from dutyfree.contract import KILLED, Command, Cut, Observation, Span
from dutyfree.contract.arguments import NOT_FOUND, NOT_RUNNABLE, not_started
from dutyfree.contract.errors import DispatchError, ExecError, Unavailable
from dutyfree.contract.output import Collector
from dutyfree.substrates.e2b.errors import FOREIGN, restated
from dutyfree.substrates.local.kill_script import KILL_SCRIPT, MARK

KILL_SECONDS = 15.0
"""How long to wait for the end of a killed command."""
PART = 1 << 20
"""Bytes of input in one message."""
KEPT_PATH = "DUTYFREE_PATH"

_SIGNAL = re.compile(r"signal:? (?P<name>[a-z0-9 ]+)")
_NAMES = {"killed": 9, "terminated": 15, "interrupt": 2, "hangup": 1, "quit": 3, "aborted": 6, "trap": 5}
_NAMES |= {"segmentation fault": 11, "bus error": 7, "illegal instruction": 4, "broken pipe": 13}
"""Signals as E2B's own server names them."""

OnOutput = Callable[[Literal["stdout", "stderr"], bytes], Awaitable[None] | None]


class ExecRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A command, with its environment and limits."""

    command: Command
    cwd: str
    env: Mapping[str, str] = {}
    stdin: bytes | None = None
    timeout: float | None = None
    user: str | None = None
    output: int
    """Bytes kept of each stream."""


class Execution:
    """Runs one ExecRequest. Use it once."""

    def __init__(self, box: AsyncSandbox, request: ExecRequest, on_output: OnOutput | None = None) -> None:
        self._box = box
        self._request = request
        self._on_output = on_output
        self._mark = secrets.token_hex(8)
        self._streams = {"stdout": Collector(request.output), "stderr": Collector(request.output)}
        self._starting: asyncio.Task[Any] | None = None
        self._handle: Any = None
        self.started = asyncio.Event()
        """Set as soon as the command runs, or cannot."""

    @property
    def id(self) -> str:
        return self._mark

    async def run(self) -> Observation:
        """Raises DispatchError, SandboxClosed, ExecError."""
        try:
            return await self._run()
        finally:
            self.started.set()

    async def _run(self) -> Observation:
        begin = perf_counter()
        dispatched = None
        ended: tuple[int, int | None] | None = None
        try:
            with anyio.move_on_after(self._request.timeout):
                try:
                    self._starting = asyncio.create_task(self._start())
                    # Shielded: a start that is cancelled half-way would leave a process without a handle.
                    self._handle = await asyncio.shield(self._starting)
                except (InvalidArgumentException, AuthenticationException) as error:
                    return self._refused(str(error), perf_counter() - begin)
                dispatched = perf_counter() - begin
                self.started.set()
                await self._feed()
                ended = await self._wait()
            if ended is None:
                with anyio.CancelScope(shield=True):
                    await self.kill()
        except FOREIGN as error:
            phase = DispatchError if self._handle is None else ExecError
            raise restated(error, phase, "the command failed in E2B") from error
        except BaseException:
            with anyio.CancelScope(shield=True), contextlib.suppress(*FOREIGN):
                await self.kill()
            raise
        code, number = ended or (KILLED + signals.SIGKILL, int(signals.SIGKILL))
        return self._observed(code, number, perf_counter() - begin, dispatched, timed_out=ended is None)

    def _refused(self, reason: str, seconds: float) -> Observation:
        missing = "o such file" in reason
        return not_started(reason, NOT_FOUND if missing else NOT_RUNNABLE, seconds)

    def _observed(
        self, code: int, number: int | None, seconds: float, dispatched: float | None, *, timed_out: bool
    ) -> Observation:
        out, err = self._streams["stdout"], self._streams["stderr"]
        said = err.value()
        if said.startswith(b"dutyfree-" + self._mark.encode()):  # the shell could not enter the directory
            return self._refused(said.partition(b" ")[2].decode(errors="replace").strip(), seconds)
        spans = () if dispatched is None else (Span("dispatch", 0.0, dispatched),)
        return Observation(
            exit_code=code,
            signal=number,
            stdout=out.value(),
            stderr=said,
            timed_out=timed_out,
            cut=Cut(out.cut, err.cut),
            seconds=seconds,
            spans=spans,
        )

    # --- The SDK ----------------------------------------------------------------------------------------

    async def _start(self) -> Any:
        request = self._request
        env = {**request.env, MARK: self._mark}
        if "PATH" in env:
            env[KEPT_PATH] = env.pop("PATH")
        handle = await self._box.commands.run(
            self._text(),
            background=True,
            envs=env,
            user=request.user,
            cwd="/",
            on_stdout=self._receiver("stdout"),
            on_stderr=self._receiver("stderr"),
            stdin=request.stdin is not None,
            timeout=0,
            retain_output=False,
        )
        for name in ("_stdout_decoder", "_stderr_decoder"):
            if not hasattr(handle, name):
                raise Unavailable(
                    "this version of the package e2b does not give the bytes of output",
                    remedy="install a version that was tested: docs/providers.md",
                )
            setattr(handle, name, codecs.getincrementaldecoder("latin-1")())
        return handle

    def _text(self) -> str:
        """The shell code of the command. What fails before it starts says so with the mark."""
        request = self._request
        if isinstance(request.command, str):
            words: tuple[str, ...] = ("/bin/sh", "-c", request.command)
        else:
            words = tuple(request.command)
        path = f'export PATH="${KEPT_PATH}"; unset {KEPT_PATH}; ' if "PATH" in request.env else ""
        cwd = shlex.quote(request.cwd)
        why = f"$(LC_ALL=C; export LC_ALL; cd -- {cwd} 2>&1)"
        leave = f'{{ echo "dutyfree-{self._mark} {why}" >&2; exit {NOT_RUNNABLE}; }}'
        return f"set +x; {path}cd -- {cwd} 2>/dev/null || {leave}; exec -- {shlex.join(words)}"

    def _receiver(self, stream: Literal["stdout", "stderr"]) -> Callable[[str], Any]:
        def receive(text: str) -> Awaitable[None] | None:
            data = text.encode("latin-1", errors="replace")
            self._streams[stream].add(data)
            return None if self._on_output is None else self._on_output(stream, data)

        return receive

    async def _feed(self) -> None:
        """Send the input. A command that does not read it, or has ended, is no error."""
        if (data := self._request.stdin) is None:
            return
        with contextlib.suppress(*FOREIGN):
            for at in range(0, len(data), PART):
                await self._handle.send_stdin(data[at : at + PART])
            await self._handle.close_stdin()

    async def _wait(self) -> tuple[int, int | None]:
        """The exit code, and the signal that ended the command."""
        try:
            done = await self._handle.wait()
        except CommandExitException as error:
            done = error
        found = _SIGNAL.search(done.error or "")
        if found is None:
            return done.exit_code, None
        name = found["name"].strip()
        number = int(name) if name.isdigit() else _NAMES.get(name, int(signals.SIGKILL))
        return KILLED + number, number

    async def kill(self) -> None:
        """Kill the whole process tree, also if the answer to the start did not come yet."""
        with anyio.move_on_after(KILL_SECONDS):
            with contextlib.suppress(*FOREIGN):
                if self._starting is not None:
                    self._handle = self._handle or await self._starting
                if self._handle is not None:
                    await self._handle.kill()
            words = ("/bin/sh", "-c", KILL_SCRIPT, "kill", f"{MARK}={self._mark}")
            with contextlib.suppress(CommandExitException):
                await self._box.commands.run(shlex.join(words), user=self._request.user, cwd="/", timeout=0)

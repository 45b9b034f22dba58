"""Processes, shells and terminals of a scripted sandbox."""

from __future__ import annotations

import posixpath
import shlex
from collections.abc import AsyncIterator, Callable, Mapping
from typing import TYPE_CHECKING

import anyio
import anyio.lowlevel
import msgspec

from dutyfree.contract import KILLED, Command, Observation, Sandbox
from dutyfree.contract.abilities import Piece, Process
from dutyfree.contract.errors import ArgumentError, InputClosed, LimitError
from dutyfree.substrates.scripted.files import MemoryFiles

if TYPE_CHECKING:
    from dutyfree.substrates.scripted.sandbox import ScriptedSandbox


class ScriptedProcess:
    """A command that "runs" for the seconds of its answer, whether or not a caller waits for it."""

    def __init__(
        self,
        sandbox: ScriptedSandbox,
        command: Command,
        answer: Observation,
        dispatch: float,
        answered: Callable[[bytes], Observation] | None = None,
    ) -> None:
        self.id = f"{sandbox.id}-{id(self):x}"
        self.command = command
        self._sandbox = sandbox
        self._answer = answer
        self._answered = answered
        self._input = b""
        self._dispatch = dispatch
        self._begun = anyio.current_time()
        self._changed = anyio.Event()
        self._stopped = False

    @property
    def running(self) -> bool:
        return not self._stopped and anyio.current_time() < self._begun + self._answer.seconds

    async def wait(self) -> Observation:
        while self.running:
            with anyio.move_on_after(self._begun + self._answer.seconds - anyio.current_time()):
                await self._changed.wait()
        await self._sandbox.awake()
        return await self._sandbox.collect(self, self._answer, self._dispatch)

    async def kill(self) -> None:
        await self.signal(9)

    async def signal(self, number: int) -> None:
        if not 0 < number < 65:
            raise LimitError(f"there is no signal {number}")
        await anyio.lowlevel.checkpoint()
        self.stop(number)

    def stop(self, number: int = 9) -> None:
        if self.running:
            lived = anyio.current_time() - self._begun
            self._answer = msgspec.structs.replace(killed(self._answer, number), seconds=lived)
            self._stopped = True
            self._wake()

    async def output(self, after: int = 0) -> AsyncIterator[Piece]:
        """Yield everything at the end, because the whole answer is known only then."""
        seen = await self.wait()
        for position, stream, data in (
            (0, "stdout", seen.stdout),
            (len(seen.stdout), "stderr", seen.stderr),
        ):
            begin = max(0, after - position)
            if data[begin:]:
                yield Piece(position + begin, stream, data[begin:])  # type: ignore[arg-type]

    async def write(self, data: bytes) -> None:
        await anyio.lowlevel.checkpoint()
        if self._answered is None:
            raise ArgumentError("the process was started without a stdin", remedy="give start(stdin=True)")
        if not self.running:
            raise InputClosed("the process has ended")
        self._input += data

    async def close_stdin(self) -> None:
        await anyio.lowlevel.checkpoint()
        if self._answered is not None and self.running:
            self._answer = self._answered(self._input)
            self._begun = anyio.current_time()
            self._wake()
        self._answered = None

    def _wake(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()


def killed(answer: Observation, number: int = 9) -> Observation:
    return msgspec.structs.replace(answer, exit_code=KILLED + number, signal=number)


class ScriptedShell:
    """A shell that keeps its working directory and variables between commands."""

    def __init__(self, sandbox: Sandbox, files: MemoryFiles) -> None:
        self._files = files
        self._sandbox = sandbox
        self._cwd = sandbox.workdir
        self._env: dict[str, str] = {}

    async def run(self, command: str, *, timeout: float | None = None) -> Observation:
        match command.split(maxsplit=1):
            case ["cd", path]:
                try:
                    self._cwd = self._files.directory(posixpath.join(self._cwd, path))
                except OSError as error:
                    return Observation(exit_code=1, stderr=f"cd: {error}\n".encode())
                command = "true"
            case ["export", assignment]:
                name, _, value = shlex.split(assignment)[0].partition("=")
                self._env[name] = value
                command = "true"
        return await self._sandbox.exec(command, cwd=self._cwd, env=self._env, timeout=timeout)


class ScriptedTerminal:
    """A terminal of one command, or of a shell that echoes its input and runs each whole line."""

    def __init__(
        self, sandbox: Sandbox, started: Process | None, cwd: str | None, env: Mapping[str, str] | None
    ) -> None:
        self.id = f"{sandbox.id}-terminal-{id(self):x}"
        self._sandbox = sandbox
        self._started = started
        self._cwd = cwd
        self._env = env
        self._typed = b""
        self._output = b""
        self._changed = anyio.Event()
        self._end: Observation | None = None

    async def _run(self, line: str) -> None:
        self._say(await self._sandbox.exec(line, cwd=self._cwd, env=self._env), line.split()[0] == "exit")

    def _say(self, seen: Observation, last: bool) -> None:
        self._output += (seen.stdout + seen.stderr).replace(b"\n", b"\r\n")
        if last:
            self._end = Observation(exit_code=seen.exit_code, signal=seen.signal)
        self._wake()

    async def _finished(self) -> None:
        if self._started is not None and self._end is None:
            self._say(await self._started.wait(), last=True)

    async def read(self) -> bytes:
        await self._finished()
        while not self._output and self._end is None:
            await self._changed.wait()
        said, self._output = self._output, b""
        return said

    async def write(self, data: bytes) -> None:
        if self._end is not None:
            raise InputClosed("the command has ended")
        self._output += data.replace(b"\n", b"\r\n")
        self._typed += data
        self._wake()
        while b"\n" in self._typed and self._end is None:
            line, _, self._typed = self._typed.partition(b"\n")
            words = line.decode(errors="surrogateescape")
            if words.strip():
                await self._run(words)

    async def resize(self, rows: int, columns: int) -> None:
        if not (0 < rows < 1 << 16 and 0 < columns < 1 << 16):
            raise LimitError(f"a terminal cannot have {rows} rows and {columns} columns")
        self.size = (rows, columns)

    async def wait(self) -> Observation:
        await self._finished()
        while self._end is None:
            await self._changed.wait()
        return self._end

    async def kill(self) -> None:
        if self._started is not None:
            await self._started.kill()
        elif self._end is None:
            self._end = Observation(exit_code=KILLED + 9, signal=9)
            self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()

"""The commands of one sandbox as E2B knows them: by a number, with output for any number of readers.

A command is a background process or a terminal of ours. It goes on when its client disconnects. The number of
a process is its pid in the sandbox, as with E2B: clients send signals to it with ``kill``. The init of a
sandbox does not tell pids, so a shell prints its own before it becomes the command.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import deque
from collections.abc import AsyncIterator
from typing import Any, Literal, NamedTuple, TypeAlias

import anyio

from dutyfree.contract import Observation
from dutyfree.contract.errors import ArgumentError, DutyfreeError, UnknownProcess
from dutyfree.engine.sandbox.processes import NativeProcess
from dutyfree.engine.sandbox.sandbox import NativeSandbox
from dutyfree.engine.sandbox.terminal import NativeTerminal

Stream: TypeAlias = Literal["stdout", "stderr", "pty"]

TERMINALS = 10_000_000
"""Numbers of terminals begin here, where no pid is."""

_WITH_PID = ("/bin/sh", "-c", 'echo $$; exec "$@"', "sh")
_PID_DIGITS = 10

TERMINAL_KEPT = 1 << 20
"""Bytes of a terminal's output that are kept for readers who come later."""
_PIECE_COST = 64
"""Bytes that each piece of it counts besides its own."""


class CommandConfig(NamedTuple):
    """What a client asked to run."""

    words: tuple[str, ...]
    env: dict[str, str]
    cwd: str | None
    user: str | None
    tag: str | None


class ProcessCommand:
    """A command without a terminal. The first line of its stdout is its pid, which readers do not see."""

    def __init__(self, pid: int, config: CommandConfig, process: NativeProcess, begin: int) -> None:
        """``begin``: the position in the output at which the stdout of the command begins."""
        self.pid = pid
        self.config = config
        self._process = process
        self._begin = begin

    @staticmethod
    async def of(config: CommandConfig, process: NativeProcess) -> ProcessCommand:
        """Read the pid. Raises ArgumentError if the process ends without one, as in a missing directory."""
        line = b""
        async for piece in process.output():
            if piece.stream == "stderr":  # the loader complains there, about a wrong LD_PRELOAD
                continue
            begun = len(line)
            line += piece.data
            number, newline, _ = line.partition(b"\n")
            if newline and number.isdigit():
                begin = piece.position + len(number) + 1 - begun
                return ProcessCommand(int(number), config, process, begin)
            if newline or len(line) > _PID_DIGITS:
                raise ArgumentError("the command did not start: /bin/sh of the sandbox is no shell")
        seen = await process.wait()
        raise ArgumentError(f"the command did not start: {seen.stderr.decode(errors='replace')[:1000]}")

    @property
    def running(self) -> bool:
        return self._process.running

    async def output(self) -> AsyncIterator[tuple[Stream, bytes]]:
        """All of its output that is kept, and what comes, until it ends."""
        async for piece in self._process.output():
            data = piece.data
            if piece.stream == "stdout":
                data = data[max(0, self._begin - piece.position) :]
            if data:
                yield piece.stream, data

    async def wait(self) -> Observation:
        return await self._process.wait()

    async def write(self, data: bytes) -> None:
        await self._process.write(data)

    async def close_stdin(self) -> None:
        await self._process.close_stdin()

    async def signal(self, number: int) -> None:
        await (self._process.kill() if number == 9 else self._process.signal(number))


class TerminalCommand:
    """A command in a terminal, which a task of ours reads."""

    def __init__(
        self, pid: int, config: CommandConfig, sandbox: NativeSandbox, rows: int, columns: int
    ) -> None:
        self.pid = pid
        self.config = config
        self._kept: deque[bytes] = deque()
        self._size = 0
        self._dropped = 0
        self._changed = asyncio.Event()
        self._opened: asyncio.Future[NativeTerminal] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._hold(sandbox, rows, columns))

    async def _hold(self, sandbox: NativeSandbox, rows: int, columns: int) -> Observation:
        config = self.config
        try:
            async with sandbox.terminal(
                config.words, rows=rows, columns=columns, cwd=config.cwd, env=config.env, user=config.user
            ) as terminal:
                self._opened.set_result(terminal)
                while data := await terminal.read():
                    self._kept.append(data)
                    self._size += len(data) + _PIECE_COST
                    while self._size > TERMINAL_KEPT:
                        self._size -= len(self._kept.popleft()) + _PIECE_COST
                        self._dropped += 1
                    self._wake()
                return await terminal.wait()
        except BaseException as error:
            if not self._opened.done():
                self._opened.set_exception(error)
                self._opened.exception()
            raise
        finally:
            self._wake()

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def opened(self) -> NativeTerminal:
        return await asyncio.shield(self._opened)

    @property
    def running(self) -> bool:
        return not self._task.done()

    async def output(self) -> AsyncIterator[tuple[Stream, bytes]]:
        at = 0
        while True:
            while (at := max(at, self._dropped)) < self._dropped + len(self._kept):
                yield "pty", self._kept[at - self._dropped]  # meanwhile, pieces may be dropped
                at += 1
            if self._task.done():
                return
            await self._changed.wait()

    async def wait(self) -> Observation:
        return await asyncio.shield(self._task)

    async def write(self, data: bytes) -> None:
        await (await self.opened()).write(data)

    async def close_stdin(self) -> None:
        await self.write(b"\x04")  # end of input, as typed

    async def resize(self, rows: int, columns: int) -> None:
        await (await self.opened()).resize(rows, columns)

    async def signal(self, _number: int) -> None:
        await (await self.opened()).kill()


Command: TypeAlias = ProcessCommand | TerminalCommand


class Commands:
    """All commands that E2B clients started in one sandbox."""

    def __init__(self, sandbox: NativeSandbox) -> None:
        self._sandbox = sandbox
        self._numbers = itertools.count(TERMINALS)
        self._commands: dict[int, Command] = {}

    async def start(self, config: CommandConfig, *, stdin: bool) -> ProcessCommand:
        """Raises ActionError, SubstrateError."""
        words = (*_WITH_PID, *config.words)
        process = await self._sandbox.start(
            words, cwd=config.cwd, env=config.env, stdin=stdin, user=config.user
        )
        try:
            command = await ProcessCommand.of(config, process)
        except BaseException:  # no client could end it
            with anyio.CancelScope(shield=True), contextlib.suppress(DutyfreeError):
                await process.kill()
            raise
        self._add(command)
        return command

    async def open(self, config: CommandConfig, rows: int, columns: int) -> TerminalCommand:
        """Raises ActionError, SubstrateError."""
        command = TerminalCommand(next(self._numbers), config, self._sandbox, rows, columns)
        await command.opened()
        self._add(command)
        return command

    def _add(self, command: Command) -> None:
        self._commands = {pid: one for pid, one in self._commands.items() if one.running}
        self._commands[command.pid] = command

    def running(self) -> list[Command]:
        return [command for command in self._commands.values() if command.running]

    def get(self, selector: dict[str, Any]) -> Command:
        """The command that a request selects, by pid or by tag. Raises UnknownProcess."""
        for command in self.running():
            if command.pid == selector.get("pid") or (
                command.config.tag is not None and command.config.tag == selector.get("tag")
            ):
                return command
        raise UnknownProcess(str(selector.get("pid") or selector.get("tag")))

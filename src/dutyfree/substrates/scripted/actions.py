"""The further abilities of a scripted sandbox: real over its files, scripted over its commands."""

from __future__ import annotations

import fnmatch
import posixpath
import re
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager

import anyio

from dutyfree.contract import KILLED, Action, Command, Found, Match, Observation, Result, Sandbox, Search
from dutyfree.contract import perform as performing
from dutyfree.contract.abilities import BackgroundProcesses, Change, Process
from dutyfree.contract.arguments import check_search, encoded
from dutyfree.contract.errors import InputClosed, LimitError, RequestError, UnknownProcess
from dutyfree.substrates.scripted.files import Files, Kind, Node
from dutyfree.substrates.scripted.processes import ScriptedProcess

QUEUE = 1024
"""So many changes wait for a reader; then they are lost."""


class ScriptedActions(ABC):
    """What ScriptedSandbox has beside the contract's commands and files."""

    id: str
    workdir: str
    files: Files
    started: dict[str, ScriptedProcess]

    @abstractmethod
    async def touch(self) -> None:
        """Whatever every action does first: the latency and the failures that were told beforehand."""

    async def edit(self, path: str, old: bytes, new: bytes) -> None:
        await self.touch()
        text = performing.edited(path, self.files.read(path), old, new)
        self.files.write(path, Node("file", self.files.mode(path), text))

    async def search(
        self,
        path: str = ".",
        text: str | None = None,
        *,
        regex: bool = False,
        ignore_case: bool = False,
        names: Sequence[str] = (),
        skip: Sequence[str] = (".git",),
        binary: bool = False,
        limit: int = 1000,
        width: int = 500,
        timeout: float | None = 60.0,
    ) -> Found:
        check_search(Search(path, text, names=tuple(names), skip=tuple(skip), limit=limit, timeout=timeout))
        await self.touch()
        expression = None
        if text is not None:
            try:
                words = encoded(text, "a search")
                pattern = words if regex else re.escape(words)
                expression = re.compile(pattern, re.IGNORECASE if ignore_case else 0)
            except re.error as error:
                raise RequestError(f"not a regular expression: {text!r}: {error}", kind="pattern") from error
        matches, unseen = [], 0
        for name, node in self.files.tree(path):
            parts = name.split("/")
            kept = not any(fnmatch.fnmatch(part, one) for part in parts[:-1] for one in skip)
            fits = not names or any(fnmatch.fnmatch(name if "/" in one else parts[-1], one) for one in names)
            if not kept or not fits or (not name and expression is None):
                continue
            full = name if path in ("", ".") else posixpath.join(path, name) if name else path
            if expression is None:
                matches.append(Match(full))
            elif node.kind == "file" and b"\0" in node.data and not binary:
                unseen += 1
            elif node.kind == "file":
                matches += [
                    Match(full, number, line[:width], len(line) > width)
                    for number, line in enumerate(node.data.split(b"\n"), 1)
                    if (line or number == 1) and expression.search(line)
                ]
        return Found(tuple(matches[:limit]), len(matches) > limit, unseen)

    @asynccontextmanager
    async def watch(
        self, path: str = ".", *, recursive: bool = False
    ) -> AsyncIterator[AsyncIterator[Change]]:
        await self.touch()
        at = self.files.directory(path)
        waiting: deque[Change] = deque()
        arrived = [anyio.Event()]

        def told(kind: Kind, changed: str, directory: bool) -> None:
            name = changed[len(posixpath.join(at, "")) :]
            if not f"{changed}/".startswith(posixpath.join(at, "")) or (not recursive and "/" in name):
                return
            if len(waiting) == QUEUE:
                waiting.append(Change("lost"))
            elif len(waiting) < QUEUE:
                waiting.append(Change(kind, name, directory))
            arrived[0].set()

        async def changes() -> AsyncIterator[Change]:
            while True:
                while waiting:
                    change = waiting.popleft()
                    yield change
                    if change.path == "" and change.kind == "deleted":
                        return
                arrived[0] = anyio.Event()
                await arrived[0].wait()

        self.files.on_change.append(told)
        try:
            yield changes()
        finally:
            self.files.on_change.remove(told)

    async def batch(
        self: Sandbox, actions: Sequence[Action], *, stop_on_failure: bool = True
    ) -> tuple[Result | Exception, ...]:
        return await performing.in_order(self, actions, stop_on_failure=stop_on_failure)

    async def processes(self) -> tuple[ScriptedProcess, ...]:
        await self.touch()
        return tuple(self.started.values())

    async def attach(self, id: str) -> ScriptedProcess:  # noqa: A002
        await self.touch()
        if id not in self.started:
            raise UnknownProcess(id)
        return self.started[id]

    @asynccontextmanager
    async def terminal(
        self: Sandbox,
        command: Command | None = None,
        *,
        rows: int = 24,
        columns: int = 80,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
    ) -> AsyncIterator[ScriptedTerminal]:
        assert isinstance(self, BackgroundProcesses)
        started = None if command is None else await self.start(command, cwd=cwd, env=env)
        terminal = ScriptedTerminal(self, started, cwd, env)
        await terminal.resize(rows, columns)
        try:
            yield terminal
        finally:
            await terminal.kill()


class ScriptedTerminal:
    """A shell that echoes what is typed, and runs each line when it is whole; or one command's."""

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
            raise LimitError(f"a terminal of {rows} rows and {columns} columns cannot be")
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

"""A sandbox of the scripted substrate."""

from __future__ import annotations

import functools
import posixpath
from collections.abc import AsyncIterable, AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import anyio
import anyio.to_thread
import msgspec
from anyio.abc import ByteStream

from dutyfree.contract import (
    Action,
    Command,
    Cut,
    Entry,
    Exec,
    Found,
    Limits,
    NetworkPolicy,
    Observation,
    Recipe,
    Result,
    Search,
    Span,
    perform,
)
from dutyfree.contract.abilities import Change, Chunk
from dutyfree.contract.arguments import (
    Unrunnable,
    check_bytes,
    check_command,
    check_mode,
    check_runnable,
    check_search,
)
from dutyfree.contract.entries import Links
from dutyfree.contract.errors import PortClosed, SandboxClosed, UnknownProcess, UsageError
from dutyfree.contract.output import Collector
from dutyfree.substrates.scripted.files import WORKDIR, MemoryFiles, MemoryNode, load, store
from dutyfree.substrates.scripted.processes import ScriptedProcess, ScriptedShell, ScriptedTerminal, killed

if TYPE_CHECKING:
    from dutyfree.substrates.scripted.substrate import Scripted


Server: TypeAlias = Callable[[bytes], bytes]
"""Maps what a client sends to what it gets back."""


class ScriptedSandbox:
    """A sandbox in memory, with every ability: real for its files, scripted for its commands."""

    workdir = WORKDIR

    def __init__(
        self,
        owner: Scripted,
        number: int,
        limits: Limits,
        spans: tuple[Span, ...],
        nodes: Mapping[str, MemoryNode],
    ) -> None:
        self.id = f"scripted-{number}"
        self.spans = spans
        self.files = MemoryFiles(nodes)
        self.initial: Mapping[str, MemoryNode] = {}
        self.recipe = Recipe()
        """Its variables go to the commands, once the stages have run."""
        self._owner = owner
        self._limits = limits
        self.network: NetworkPolicy = limits.network or "off"
        self._closed = False
        self._processes: set[ScriptedProcess] = set()
        self.started: dict[str, ScriptedProcess] = {}
        self._awake = anyio.Event()
        self._awake.set()

    async def exec(
        self,
        command: Command,
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bytes | None = None,
        timeout: float | None = None,
        user: str | None = None,
    ) -> Observation:
        check_command(command, cwd=cwd, env=env, stdin=stdin, timeout=timeout, user=user)
        try:
            check_runnable(command, cwd=cwd, env=env, user=user)
        except Unrunnable as error:
            await self.touch()
            return error.observation
        asked = Exec(_plain(command), cwd=cwd, env=env, stdin=stdin, timeout=timeout, user=user)
        return await (await self._launch(asked)).wait()

    async def read(self, path: str) -> bytes:
        await self.touch()
        return self.files.read(path)

    async def write(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        check_mode(mode)
        check_bytes(data)
        await self.touch()
        self.files.write(path, MemoryNode("file", mode, bytes(data)))

    async def list(self, path: str) -> tuple[Entry, ...]:
        await self.touch()
        return self.files.list(path)

    async def remove(self, path: str) -> None:
        await self.touch()
        self.files.remove(path)

    async def upload(self, source: Path, path: str) -> None:
        await self.touch()
        for relative, node in await anyio.to_thread.run_sync(load, source):
            self.files.write(posixpath.join(path, relative), node)

    async def download(self, path: str, target: Path, *, outside_links: bool = False) -> tuple[str, ...]:
        await self.touch()
        links = Links(path, outside=outside_links)
        await anyio.to_thread.run_sync(store, self.files.tree(path), target, links)
        return tuple(links.left_out)

    async def reset(self) -> None:
        await self.touch()
        self.end()
        self.started.clear()
        self.files = MemoryFiles(self.initial)

    async def snapshot(self) -> Recipe:
        await self.touch()
        return self._owner.keep(self.files, self.recipe)

    @asynccontextmanager
    async def fork(self, count: int) -> AsyncIterator[Sequence[ScriptedSandbox]]:
        await self.touch()
        recipe = self._owner.keep(self.files, self.recipe)
        async with AsyncExitStack() as stack:
            one = functools.partial(self._owner.sandbox, recipe, limits=self._limits)
            yield [await stack.enter_async_context(one()) for _ in range(count)]

    async def pause(self) -> None:
        await self.touch()
        self._awake = anyio.Event()

    async def resume(self) -> None:
        await self.touch()
        self._awake.set()

    async def set_network(self, policy: NetworkPolicy) -> None:
        await self.touch()
        if policy not in ("off", "on") and (isinstance(policy, str) or not policy):
            raise UsageError(f'the network is "off", "on", or a list of what is allowed, not {policy!r}')
        self.network = policy

    async def connect(self, port: int) -> ScriptedStream:
        await self.touch()
        if port not in self._owner.servers:
            raise PortClosed(port)
        return ScriptedStream(self._owner.servers[port])

    @asynccontextmanager
    async def shell(self) -> AsyncIterator[ScriptedShell]:
        await self.touch()
        yield ScriptedShell(self, self.files)

    async def start(
        self,
        command: Command,
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bool = False,
    ) -> ScriptedProcess:
        check_command(command, cwd=cwd, env=env)
        check_runnable(command, cwd=cwd, env=env)
        process = await self._launch(Exec(_plain(command), cwd=cwd, env=env), stdin=stdin)
        self.started[process.id] = process
        return process

    async def stream(
        self,
        command: Command,
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bytes | AsyncIterable[bytes] | None = None,
        timeout: float | None = None,
        user: str | None = None,
    ) -> AsyncIterator[Chunk | Observation]:
        if stdin is not None and not isinstance(stdin, bytes):
            stdin = b"".join([part async for part in stdin])
        result = await self.exec(command, cwd=cwd, env=env, stdin=stdin, timeout=timeout, user=user)
        if result.stdout:
            yield Chunk("stdout", result.stdout)
        if result.stderr:
            yield Chunk("stderr", result.stderr)
        yield msgspec.structs.replace(result, stdout=b"", stderr=b"")

    async def edit(self, path: str, old: bytes, new: bytes) -> None:
        await self.touch()
        text = perform.edited(path, self.files.read(path), old, new)
        self.files.write(path, MemoryNode("file", self.files.mode(path), text))

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
        request = Search(
            path, text, regex, ignore_case, tuple(names), tuple(skip), binary, limit, width, timeout
        )
        check_search(request)
        await self.touch()
        return self.files.search(request)

    @asynccontextmanager
    async def watch(
        self, path: str = ".", *, recursive: bool = False
    ) -> AsyncIterator[AsyncIterator[Change]]:
        await self.touch()
        with self.files.watch(path, recursive=recursive) as changes:
            yield changes

    async def batch(
        self, actions: Sequence[Action], *, stop_on_failure: bool = True
    ) -> tuple[Result | Exception, ...]:
        return await perform.in_order(self, actions, stop_on_failure=stop_on_failure)

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
        self,
        command: Command | None = None,
        *,
        rows: int = 24,
        columns: int = 80,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
    ) -> AsyncIterator[ScriptedTerminal]:
        started = None if command is None else await self.start(command, cwd=cwd, env=env)
        terminal = ScriptedTerminal(self, started, cwd, env)
        await terminal.resize(rows, columns)
        try:
            yield terminal
        finally:
            await terminal.kill()

    def end(self, *, closed: bool = False) -> None:
        """Kill all processes."""
        self._closed = self._closed or closed
        self._awake.set()
        for process in self._processes:
            process.stop()
        self._processes.clear()

    async def awake(self) -> None:
        """Wait while paused. Raises SandboxClosed."""
        await self._awake.wait()
        self._refuse_if_closed()

    async def collect(self, process: ScriptedProcess, answer: Observation, dispatch: float) -> Observation:
        self._processes.discard(process)
        collect = await self._owner.spend("collect")
        stdout, stderr = Collector(self._limits.output), Collector(self._limits.output)
        stdout.add(answer.stdout)
        stderr.add(answer.stderr)
        return msgspec.structs.replace(
            answer,
            stdout=stdout.value(),
            stderr=stderr.value(),
            cut=Cut(answer.cut.stdout + stdout.cut, answer.cut.stderr + stderr.cut),
            seconds=dispatch + answer.seconds + collect,
            spans=(
                Span("dispatch", 0.0, dispatch),
                Span("run", dispatch, answer.seconds),
                Span("collect", dispatch + answer.seconds, collect),
            ),
        )

    async def _launch(self, asked: Exec, *, stdin: bool = False) -> ScriptedProcess:
        self._refuse_if_closed()
        if variables := self.recipe.variables(self.workdir, ""):
            asked = msgspec.structs.replace(asked, env={**variables, **(asked.env or {})})
        dispatch = await self._owner.spend("dispatch")
        self._refuse_if_closed()
        self._owner.check("exec")
        if stdin:  # the answer may depend on what is written to it
            answer = Observation(exit_code=0, seconds=float("inf"))
            answered: Callable[[bytes], Observation] | None = lambda data: self._owner.answer(  # noqa: E731
                msgspec.structs.replace(asked, stdin=data), self.files
            )
        else:
            answer, answered = self._owner.answer(asked, self.files), None
        if asked.timeout is not None and answer.seconds > asked.timeout:
            answer = msgspec.structs.replace(killed(answer), timed_out=True, seconds=asked.timeout)
        process = ScriptedProcess(self, asked.command, answer, dispatch, answered)
        self._processes.add(process)
        return process

    async def touch(self) -> None:
        """Spend the latency of an action on files, and fail if it is its turn."""
        self._refuse_if_closed()
        await anyio.sleep(self._owner.latency("file"))
        self._owner.check("dispatch")
        self._refuse_if_closed()

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise SandboxClosed(f"sandbox {self.id} is closed")


def _plain(command: Command) -> str | tuple[str, ...]:
    return command if isinstance(command, str) else tuple(command)


class ScriptedStream(ByteStream):
    """A connection to a scripted server. It answers each piece, and ends its answers after ``send_eof``."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._answers, self._taken = anyio.create_memory_object_stream[bytes](1024)
        self._rest = b""

    async def send(self, item: bytes) -> None:
        """Raises ClosedResourceError after the end."""
        if answer := self._server(item):
            await self._answers.send(answer)

    async def receive(self, max_bytes: int = 65536) -> bytes:
        """Raises EndOfStream."""
        data = self._rest or await self._taken.receive()
        self._rest = data[max_bytes:]
        return data[:max_bytes]

    async def send_eof(self) -> None:
        await self._answers.aclose()

    async def aclose(self) -> None:
        await self._answers.aclose()
        await self._taken.aclose()

"""A sandbox of the scripted substrate: its files, what runs in it, and a shell that remembers."""

from __future__ import annotations

import functools
import posixpath
import shlex
from collections.abc import AsyncIterable, AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
import anyio.to_thread
import msgspec

from dutyfree.contract import (
    Command,
    Cut,
    Entry,
    Exec,
    Limits,
    NetworkPolicy,
    Observation,
    Recipe,
    Span,
)
from dutyfree.contract.abilities import Chunk
from dutyfree.contract.arguments import Unrunnable, check_bytes, check_command, check_mode, check_runnable
from dutyfree.contract.entries import Links
from dutyfree.contract.errors import PortClosed, SandboxClosed, UsageError
from dutyfree.contract.output import Collector
from dutyfree.substrates.scripted.actions import ScriptedActions
from dutyfree.substrates.scripted.files import WORKDIR, Files, Node, load, store
from dutyfree.substrates.scripted.ports import ScriptedStream
from dutyfree.substrates.scripted.processes import ScriptedProcess, killed

if TYPE_CHECKING:
    from dutyfree.substrates.scripted import Scripted


class ScriptedSandbox(ScriptedActions):
    """A sandbox in memory, with every ability."""

    workdir = WORKDIR

    def __init__(
        self,
        owner: Scripted,
        number: int,
        limits: Limits,
        spans: tuple[Span, ...],
        nodes: Mapping[str, Node],
    ) -> None:
        self.id = f"scripted-{number}"
        self.spans = spans
        self.files = Files(nodes)
        self.initial: Mapping[str, Node] = {}
        self.recipe = Recipe()
        """With the variables that commands get, once the stages have run."""
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
        self.files.write(path, Node("file", mode, bytes(data)))

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
        self.files = Files(self.initial)

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
        yield ScriptedShell(self)

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

    def end(self, *, closed: bool = False) -> None:
        """Kill all that runs."""
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
        if stdin:  # what it answers may depend on what is written to it
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
        self._refuse_if_closed()
        await anyio.sleep(self._owner.latency("file"))
        self._owner.check("dispatch")
        self._refuse_if_closed()

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise SandboxClosed(f"sandbox {self.id} is closed")


class ScriptedShell:
    """Holds a working directory and variables between the commands."""

    def __init__(self, sandbox: ScriptedSandbox) -> None:
        self._sandbox = sandbox
        self._cwd = sandbox.workdir
        self._env: dict[str, str] = {}

    async def run(self, command: str, *, timeout: float | None = None) -> Observation:
        match command.split(maxsplit=1):
            case ["cd", path]:
                try:
                    self._cwd = self._sandbox.files.directory(posixpath.join(self._cwd, path))
                except OSError as error:
                    return Observation(exit_code=1, stderr=f"cd: {error}\n".encode())
                command = "true"
            case ["export", assignment]:
                name, _, value = shlex.split(assignment)[0].partition("=")
                self._env[name] = value
                command = "true"
        return await self._sandbox.exec(command, cwd=self._cwd, env=self._env, timeout=timeout)


def _plain(command: Command) -> str | tuple[str, ...]:
    return command if isinstance(command, str) else tuple(command)

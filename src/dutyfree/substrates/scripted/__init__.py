"""The honest fake: sandboxes in memory that answer from a script, with the latencies and failures asked for.

It runs nothing. A command is answered by the first of these that knows it:

1. ``script``: a mapping from commands to Observations, or a function from Exec to Observation or None;
   the ``seconds`` of an answer, where given, are how long it takes;
2. the configured ``exit_code`` and ``stdout``, where ``exit_code`` is set;
3. a tiny language, given as words or as a string without any shell syntax but quotes:
   ``true``, ``false``, ``exit N``, ``echo WORD…``, ``cat [FILE…]``, ``pwd``, ``printenv NAME``,
   ``sleep SECONDS``, and within a shell session ``cd DIRECTORY`` and ``export NAME=VALUE``;
4. exit code 127, saying so on stderr.

``servers`` maps ports to functions from what a client sends to what it hears.

Files, recipes and every ability are real, in memory. The spans say what was configured, not what a
clock showed, so equal runs give equal observations.

>>> script = {"make test": Observation(exit_code=2, stderr=b"1 failed", seconds=0.5)}
>>> async with Scripted(Scripted.Config(create_seconds=0.2), script=script) as substrate: ...
"""

from __future__ import annotations

import errno
import functools
import itertools
import posixpath
import random
import shlex
from collections import Counter
from collections.abc import AsyncIterable, AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeAlias

import anyio
import anyio.to_thread
import msgspec

from dutyfree import errors
from dutyfree.abilities import Chunk
from dutyfree.contract import (
    Availability,
    Command,
    Cut,
    Entry,
    Exec,
    Limits,
    NetworkPolicy,
    Observation,
    Recipe,
    Span,
    check_mode,
)
from dutyfree.errors import CreateError, Phase, SandboxClosed, UsageError
from dutyfree.substrates.output import Collector
from dutyfree.substrates.scripted.actions import ScriptedActions
from dutyfree.substrates.scripted.files import WORKDIR, Files, Node, load, store
from dutyfree.substrates.scripted.ports import ScriptedStream, Server
from dutyfree.substrates.scripted.processes import ScriptedProcess, killed

Script: TypeAlias = Mapping[Any, Observation] | Callable[[Exec], Observation | None]
"""Keys are commands: strings, or tuples for argument vectors."""

_ERRORS: dict[Phase, type[errors.SubstrateError]] = {
    "create": errors.CreateError,
    "ready": errors.ReadyError,
    "dispatch": errors.DispatchError,
    "exec": errors.ExecError,
    "collect": errors.CollectError,
    "cleanup": errors.CleanupError,
}
_SHELL_SYNTAX = frozenset("|&;<>()$`\\*?[]{}#~\n")


class Scripted:
    """A substrate whose every answer, latency and failure is told beforehand."""

    summary: ClassVar[str] = "scripted answers in memory, for tests and simulation"

    class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
        create_seconds: float = 0.0
        ready_seconds: float = 0.0
        dispatch_seconds: float = 0.0
        exec_seconds: float = 0.0
        collect_seconds: float = 0.0
        cleanup_seconds: float = 0.0
        file_seconds: float = 0.0
        """Of each read, write, list, remove, upload and download."""
        jitter: float = 0.0
        """Latencies are drawn from ±this share around their value."""
        seed: int = 0
        fail_phase: Literal["create", "ready", "dispatch", "exec", "collect", "cleanup"] | None = None
        """The phase that fails each ``fail_every``-th time it is passed, counted over all sandboxes."""
        fail_every: int = 1
        exit_code: int | None = None
        """The answer to every unscripted command; None leaves them to the tiny language."""
        stdout: str = ""

    def __init__(
        self,
        config: Config | None = None,
        *,
        script: Script | None = None,
        servers: Mapping[int, Server] | None = None,
    ) -> None:
        self.name = "scripted"
        self.host_address: str | None = "127.0.0.1"
        self.config = config or Scripted.Config()
        self._script = script
        self.servers = dict(servers or {})
        self._random = random.Random(self.config.seed)  # noqa: S311 (latencies, not secrets)
        self._passed: Counter[Phase] = Counter()
        self._snapshots: dict[str, Mapping[str, Node]] = {}
        self._numbers = itertools.count(1)

    @classmethod
    async def probe(cls, config: msgspec.Struct, /) -> Availability:
        return Availability(True, "in memory; runs no commands")

    async def __aenter__(self) -> Scripted:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._snapshots.clear()

    async def prepare(self, recipe: Recipe | None = None) -> None:
        self._image(recipe or Recipe())

    async def facts(self) -> dict[str, str]:
        return {"answers": "script" if self._script is not None else "none", "seed": str(self.config.seed)}

    @asynccontextmanager
    async def sandbox(
        self,
        recipe: Recipe | None = None,
        *,
        limits: Limits | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> AsyncIterator[ScriptedSandbox]:
        """A sandbox in the recipe's state. Raises CreateError, ReadyError and CleanupError."""
        recipe, limits = recipe or Recipe(), limits or Limits()
        if limits.disk is not None:
            raise CreateError("the scripted substrate cannot limit the disk", remedy="leave the limit out")
        create, ready = await self.spend("create"), self.latency("ready")
        spans = (Span("create", 0.0, create), Span("ready", create, ready))
        sandbox = ScriptedSandbox(self, next(self._numbers), limits, spans, self._image(recipe))
        try:
            await _stage(sandbox, recipe)
            await self.spend("ready", ready)
            sandbox.initial = dict(sandbox.files.nodes)
            yield sandbox
        except BaseException:
            with suppress(errors.CleanupError):
                await self._close(sandbox)
            raise
        await self._close(sandbox)

    async def _close(self, sandbox: ScriptedSandbox) -> None:
        sandbox.end(closed=True)
        with anyio.CancelScope(shield=True):
            await self.spend("cleanup")

    def _image(self, recipe: Recipe) -> Mapping[str, Node]:
        image = recipe.image or ""
        if not image.startswith("snapshot:"):
            return {}
        if image not in self._snapshots:
            raise CreateError(f"there is no {image!r} here")
        return self._snapshots[image]

    def latency(self, phase: Literal[Phase, "file"]) -> float:
        seconds: float = getattr(self.config, f"{phase}_seconds")
        return seconds * (1 + self.config.jitter * self._random.uniform(-1, 1))

    async def spend(self, phase: Phase, seconds: float | None = None) -> float:
        """Spend the phase's latency, or fail in it when its turn has come."""
        seconds = self.latency(phase) if seconds is None else seconds
        await anyio.sleep(seconds)
        self.check(phase)
        return seconds

    def check(self, phase: Phase) -> None:
        self._passed[phase] += 1
        if self.config.fail_phase == phase and self._passed[phase] % self.config.fail_every == 0:
            raise _ERRORS[phase](f"{phase} failed by script, time {self._passed[phase]}")

    def answer(self, asked: Exec, files: Files) -> Observation:
        """What comes back, with the seconds that it takes."""
        found = self._script(asked) if callable(self._script) else (self._script or {}).get(asked.command)
        if found is None and self.config.exit_code is not None:
            found = Observation(exit_code=self.config.exit_code, stdout=self.config.stdout.encode())
        if found is None:
            found = _interpret(asked, files)
        return found if found.seconds else msgspec.structs.replace(found, seconds=self.latency("exec"))

    def keep(self, files: Files) -> Recipe:
        recipe = Recipe(image=f"snapshot:{next(self._numbers)}")
        self._snapshots[str(recipe.image)] = dict(files.nodes)
        return recipe


async def _stage(sandbox: ScriptedSandbox, recipe: Recipe) -> None:
    for number, stage in enumerate(recipe.stages, 1):
        try:
            for path, source in stage.files.items():
                await sandbox.upload(source, path)
        except OSError as error:
            raise CreateError(f"stage {number} ({stage.kind}): {error}") from error
        for command in stage.commands:
            result = await sandbox.exec(command)
            if not result.ok:
                raise CreateError(
                    f"stage {number} ({stage.kind}): {command!r} gave exit code {result.exit_code}: "
                    f"{result.stderr.decode(errors='replace').strip()}"
                )


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
        asked = Exec(_plain(command), cwd=cwd, env=env, stdin=stdin, timeout=timeout, user=user)
        return await (await self._launch(asked)).wait()

    async def read(self, path: str) -> bytes:
        await self.touch()
        return self.files.read(path)

    async def write(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        await self.touch()
        check_mode(mode)
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

    async def download(self, path: str, target: Path) -> None:
        await self.touch()
        await anyio.to_thread.run_sync(store, self.files.tree(path), target)

    async def reset(self) -> None:
        await self.touch()
        self.end()
        self.started.clear()
        self.files = Files(self.initial)

    async def snapshot(self) -> Recipe:
        await self.touch()
        return self._owner.keep(self.files)

    @asynccontextmanager
    async def fork(self, count: int) -> AsyncIterator[Sequence[ScriptedSandbox]]:
        await self.touch()
        recipe = self._owner.keep(self.files)
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
            raise ConnectionRefusedError(errno.ECONNREFUSED, f"nobody listens on port {port}")
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


def _interpret(asked: Exec, files: Files) -> Observation:
    """The tiny language."""
    command, stdin, cwd = asked.command, asked.stdin or b"", asked.cwd or WORKDIR
    words: Sequence[str] = () if isinstance(command, str) else command
    try:
        cwd = files.directory(cwd)
        if isinstance(command, str) and _SHELL_SYNTAX.isdisjoint(command):
            words = shlex.split(command)
        match words:
            case ["true"] | ["exit"]:
                return Observation(exit_code=0)
            case ["false"]:
                return Observation(exit_code=1)
            case ["exit", code] if code.isdigit():
                return Observation(exit_code=int(code) % 256)
            case ["echo", *rest]:
                return Observation(
                    exit_code=0, stdout=(" ".join(rest) + "\n").encode(errors="surrogateescape")
                )
            case ["cat", *paths]:
                found = [files.read(posixpath.join(cwd, path)) for path in paths] if paths else [stdin]
                return Observation(exit_code=0, stdout=b"".join(found))
            case ["pwd"]:
                return Observation(exit_code=0, stdout=f"{cwd}\n".encode(errors="surrogateescape"))
            case ["printenv", name]:
                value = (asked.env or {}).get(name)
                return Observation(
                    exit_code=int(value is None), stdout=f"{value}\n".encode() if value else b""
                )
            case ["sleep", seconds]:
                return Observation(exit_code=0, seconds=float(seconds))
    except (OSError, ValueError) as error:
        return Observation(exit_code=1, stderr=f"{error}\n".encode(errors="replace"))
    return Observation(exit_code=127, stderr=f"no scripted answer to {command!r}\n".encode(errors="replace"))

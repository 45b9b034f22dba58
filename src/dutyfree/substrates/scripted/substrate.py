"""The substrate ``scripted``, and the small command language that it knows."""

from __future__ import annotations

import itertools
import posixpath
import random
import shlex
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, ClassVar, Literal, TypeAlias

import anyio
import msgspec

from dutyfree.contract import Availability, Exec, Limits, Observation, Recipe, Span, errors, limited
from dutyfree.contract.errors import CreateError, Phase
from dutyfree.engine.layers import run_stage
from dutyfree.substrates.scripted.files import WORKDIR, MemoryFiles, MemoryNode
from dutyfree.substrates.scripted.sandbox import ScriptedSandbox, Server

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


class Scripted:
    """A substrate with the answers, latencies and failures of its configuration and script."""

    summary: ClassVar[str] = "scripted answers in memory, for tests and simulation"

    class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
        create_seconds: float = 0.0
        ready_seconds: float = 0.0
        dispatch_seconds: float = 0.0
        exec_seconds: float = 0.0
        collect_seconds: float = 0.0
        cleanup_seconds: float = 0.0
        file_seconds: float = 0.0
        """The latency of each action on files."""
        jitter: float = 0.0
        """Each latency is drawn from its value ± this share of it."""
        seed: int = 0
        fail_phase: Literal["create", "ready", "dispatch", "exec", "collect", "cleanup"] | None = None
        """The phase that fails every ``fail_every``-th time, counted over all sandboxes."""
        fail_every: int = 1
        exit_code: int | None = None
        """The answer to every unscripted command; None leaves them to the small language."""
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
        self._snapshots: dict[str, Mapping[str, MemoryNode]] = {}
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
        return {
            "answers": "script" if self._script is not None else "none",
            "seed": str(self.config.seed),
            "storage": "memory",
            "enforces": "none",
        }

    @asynccontextmanager
    async def sandbox(
        self,
        recipe: Recipe | None = None,
        *,
        limits: Limits | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> AsyncIterator[ScriptedSandbox]:
        """A sandbox in the recipe's state. Raises CreateError, ReadyError and CleanupError."""
        recipe, limits = recipe or Recipe(), limited(limits, Limits())
        if limits.disk is not None:
            raise CreateError("the scripted substrate cannot limit the disk", remedy="leave the limit out")
        create, ready = await self.spend("create"), self.latency("ready")
        spans = (Span("create", 0.0, create), Span("ready", create, ready))
        sandbox = ScriptedSandbox(self, next(self._numbers), limits, spans, self._image(recipe))
        try:
            await _run_stages(sandbox, recipe)
            sandbox.recipe = recipe
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

    def _image(self, recipe: Recipe) -> Mapping[str, MemoryNode]:
        run_stage.refuse_services(recipe, "scripted")
        image = recipe.image or ""
        if not image.startswith("snapshot:"):
            return {}
        if image not in self._snapshots:
            raise CreateError(f"the scripted substrate has no image {image!r}")
        return self._snapshots[image]

    def latency(self, phase: Literal[Phase, "file"]) -> float:
        seconds: float = getattr(self.config, f"{phase}_seconds")
        return seconds * (1 + self.config.jitter * self._random.uniform(-1, 1))

    async def spend(self, phase: Phase, seconds: float | None = None) -> float:
        """Spend the phase's latency, then fail if it is its turn."""
        seconds = self.latency(phase) if seconds is None else seconds
        await anyio.sleep(seconds)
        self.check(phase)
        return seconds

    def check(self, phase: Phase) -> None:
        self._passed[phase] += 1
        if self.config.fail_phase == phase and self._passed[phase] % self.config.fail_every == 0:
            raise _ERRORS[phase](f"{phase} failed by script, time {self._passed[phase]}")

    def answer(self, asked: Exec, files: MemoryFiles) -> Observation:
        """The answer to a command; its ``seconds`` are how long the command takes."""
        found = self._script(asked) if callable(self._script) else (self._script or {}).get(asked.command)
        if found is None and self.config.exit_code is not None:
            found = Observation(exit_code=self.config.exit_code, stdout=self.config.stdout.encode())
        if found is None:
            found = interpret(asked, files)
        return found if found.seconds else msgspec.structs.replace(found, seconds=self.latency("exec"))

    def keep(self, files: MemoryFiles, former: Recipe) -> Recipe:
        recipe = Recipe(image=f"snapshot:{next(self._numbers)}", env=former.env, path=former.path)
        self._snapshots[str(recipe.image)] = dict(files.nodes)
        return recipe


async def _run_stages(sandbox: ScriptedSandbox, recipe: Recipe) -> None:
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


_SHELL_SYNTAX = frozenset("|&;<>()$`\\*?[]{}#~\n")


def interpret(asked: Exec, files: MemoryFiles) -> Observation:
    """The answer of the small language; exit code 127 for a command that it does not have."""
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

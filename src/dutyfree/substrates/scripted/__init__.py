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

import itertools
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any, ClassVar, Literal, TypeAlias

import anyio
import msgspec

from dutyfree import errors
from dutyfree.contract import Availability, Exec, Limits, Observation, Recipe, Span, limited
from dutyfree.contract.errors import CreateError, Phase
from dutyfree.engine.layers import run_stage
from dutyfree.substrates.scripted.files import Files, Node
from dutyfree.substrates.scripted.language import interpret
from dutyfree.substrates.scripted.ports import Server
from dutyfree.substrates.scripted.sandbox import ScriptedSandbox

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
        recipe, limits = recipe or Recipe(), limited(limits, Limits())
        if limits.disk is not None:
            raise CreateError("the scripted substrate cannot limit the disk", remedy="leave the limit out")
        create, ready = await self.spend("create"), self.latency("ready")
        spans = (Span("create", 0.0, create), Span("ready", create, ready))
        sandbox = ScriptedSandbox(self, next(self._numbers), limits, spans, self._image(recipe))
        try:
            await _stage(sandbox, recipe)
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

    def _image(self, recipe: Recipe) -> Mapping[str, Node]:
        run_stage.refuse_services(recipe, "scripted")
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
            found = interpret(asked, files)
        return found if found.seconds else msgspec.structs.replace(found, seconds=self.latency("exec"))

    def keep(self, files: Files, former: Recipe) -> Recipe:
        recipe = Recipe(image=f"snapshot:{next(self._numbers)}", env=former.env, path=former.path)
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

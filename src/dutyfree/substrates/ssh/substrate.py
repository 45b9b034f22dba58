"""The substrate ``ssh``: opening a machine, and creating sandboxes on it."""

from __future__ import annotations

import contextlib
import itertools
import secrets
import shutil
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from time import perf_counter
from types import TracebackType
from typing import ClassVar, Self

import anyio
import anyio.to_thread
import msgspec

from dutyfree.contract import Availability, Limits, Recipe, Span, limited
from dutyfree.contract.errors import CreateError, Unavailable
from dutyfree.contract.substrate import refuse_second_entry, require_open
from dutyfree.engine.layers import run_stage
from dutyfree.engine.layers.command_defaults import CommandDefaults
from dutyfree.engine.sandbox.guest import with_variables
from dutyfree.engine.sandbox.init_sandbox import InitSandbox
from dutyfree.substrates.local.lifecycle import closing
from dutyfree.substrates.local.reaper import Reaper, remove_tree
from dutyfree.substrates.ssh import execution, guest
from dutyfree.substrates.ssh.config import SshConfig
from dutyfree.substrates.ssh.connection import (
    PROGRAM,
    Connection,
    Connections,
    Machine,
    environment,
    missing,
    quoted,
)

PREFIX = "dutyfree-ssh-"


class Ssh:
    """The substrate ``ssh``."""

    summary: ClassVar[str] = "another machine over ssh, in a fresh directory: no isolation"
    Config: ClassVar[type[msgspec.Struct]] = SshConfig
    name = "ssh"
    host_address = None
    """The sandboxes are on another machine."""

    def __init__(self, config: SshConfig, *, patience: float = 0.0) -> None:
        """``patience`` is how many seconds to wait for a machine that boots."""
        self._config = config
        self._patience = patience
        self._numbers = itertools.count(1)
        self._is_open = False

    @classmethod
    async def probe(cls, config: SshConfig) -> Availability:
        try:
            async with cls(config) as opened:
                machine = opened.machine
        except Unavailable as error:
            return Availability(False, error.message, error.remedy)
        return Availability(
            True, f"{config.host}: {machine.system} on {machine.architecture}; isolates nothing"
        )

    async def __aenter__(self) -> Self:
        refuse_second_entry(self._is_open, self.name)
        if not self._config.host:
            raise Unavailable(
                "ssh: no machine is named", remedy="name it with the option host=, as for the program ssh"
            )
        if await anyio.to_thread.run_sync(shutil.which, PROGRAM) is None:
            raise missing()
        self._opening = f"sandbox-{secrets.token_hex(6)}"
        await anyio.to_thread.run_sync(self._open)
        self._connections = Connections(self._config, self._directory, environment(self._mark))
        try:
            self.machine: Machine = await self._connections.machine(self._patience)
            self._base = guest.base(self._config, self.machine)
            self._program = ""
            if self._config.actions == "init":
                program = await guest.Program.load()
                self._program = await program.install(self._connections, self.machine, self._base)
        except BaseException:
            with anyio.CancelScope(shield=True):
                await self._close()
            raise
        self._is_open = True
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_open = False
        with anyio.CancelScope(shield=True):
            await self._close()

    def _open(self) -> None:
        # The reaper starts before the directory exists, so neither it nor a process outlives this one.
        self._directory = Path(tempfile.gettempdir(), f"{PREFIX}{secrets.token_hex(8)}")
        self._reaper = Reaper(directory=str(self._directory), marker=self._mark)
        self._directory.mkdir(mode=0o700)

    async def _close(self) -> None:
        await self._connections.close()
        await anyio.to_thread.run_sync(self._remove)

    def _remove(self) -> None:
        with contextlib.suppress(OSError):
            remove_tree(str(self._directory))
        self._reaper.dismiss()

    @property
    def _mark(self) -> str:
        """The environment entry, ``NAME=value``, of every local ``ssh`` process of this opening."""
        return f"DUTYFREE_OWNER={self._directory.name}"

    # --- Sandboxes --------------------------------------------------------------------------------------

    @asynccontextmanager
    async def sandbox(
        self,
        recipe: Recipe | None = None,
        *,
        limits: Limits | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> AsyncIterator[InitSandbox | execution.ExecSandbox]:
        del labels  # nothing that could carry them outlives the sandbox
        require_open(self._is_open)
        recipe, limits = recipe or Recipe(), limited(limits, Limits())
        run_stage.refuse(self.name, recipe, limits, network=("on",))
        made = self._with_init if self._config.actions == "init" else self._with_exec
        async with self._slot() as connection, made(connection, recipe, limits) as sandbox:
            yield sandbox

    @asynccontextmanager
    async def _with_init(
        self, connection: Connection, recipe: Recipe, limits: Limits
    ) -> AsyncIterator[InitSandbox]:
        begin = perf_counter()
        name = f"{self._opening}-{next(self._numbers)}"
        made = await guest.started(self._connections, connection, self._config, self._program, name)
        created = perf_counter() - begin
        known = self._defaults(name)
        sandbox = made.sandbox(known, limits)
        async with closing(sandbox):
            await run_stage.apply_all(sandbox, recipe)
            if variables := recipe.variables(known.directory, self._config.path):
                sandbox = made.sandbox(with_variables(known, variables), limits)
            sandbox.spans = _spans(begin, created)
            try:
                yield sandbox
            finally:
                sandbox.abandon()

    @asynccontextmanager
    async def _with_exec(
        self, connection: Connection, recipe: Recipe, limits: Limits
    ) -> AsyncIterator[execution.ExecSandbox]:
        begin = perf_counter()
        name = f"{execution.PREFIX}{self._opening}-{next(self._numbers)}"
        async with execution.held(self._connections, connection, self._config, self._base, name):
            created = perf_counter() - begin
            known = self._defaults(name)
            sandbox = execution.ExecSandbox(
                name, self._connections, self._base, self._config, known.environment, limits
            )
            await run_stage.apply_all(sandbox, recipe)
            sandbox.variables = recipe.variables(known.directory, self._config.path)
            sandbox.spans = _spans(begin, created)
            try:
                yield sandbox
            finally:
                sandbox.close()

    @asynccontextmanager
    async def _slot(self) -> AsyncIterator[Connection]:
        """Raises CreateError."""
        async with AsyncExitStack() as stack:
            try:
                connection = await stack.enter_async_context(self._connections.slot())
            except Unavailable as error:
                raise CreateError(error.message, remedy=error.remedy) from error
            yield connection

    def _defaults(self, name: str) -> CommandDefaults:
        root = f"{self._base}/{name}"
        environment = {
            "PATH": self._config.path,
            "HOME": f"{root}/work",
            "TMPDIR": f"{root}/tmp",  # noqa: S108 (of this sandbox alone)
            "LANG": "C.UTF-8",
        }
        return with_variables(CommandDefaults(environment, b"", "", f"{root}/work", ()), {})

    async def prepare(self, recipe: Recipe | None = None) -> None:
        """Check the recipe: each sandbox runs its stages."""
        require_open(self._is_open)
        run_stage.refuse(self.name, recipe)

    async def sandboxes(self) -> list[str]:
        """The ids of the sandboxes of this opening whose directory is on the machine. Raises CreateError."""
        script = 'cd "$1" && for each in "$2"* "exec-$2"*; do [ -d "$each" ] && echo "$each"; done; exit 0'
        command = quoted(("/bin/sh", "-c", script, "sh", self._base, f"{self._opening}-"))
        try:
            code, stdout, said = await self._connections.run(command)
        except Unavailable as error:
            raise CreateError(error.message, remedy=error.remedy) from error
        if code:
            raise CreateError(f"ssh {self._config.host}: the sandboxes cannot be listed: {said}")
        return [line for line in stdout.decode(errors="replace").split() if self._opening in line]

    async def facts(self) -> dict[str, str]:
        facts = {
            "isolation": "none",
            "enforces": "none",
            "actions": self._config.actions,
            "machine": f"{self.machine.system} on {self.machine.architecture}",
            "path": self._config.path,
        }
        async with self.sandbox() as sandbox:
            seen = await sandbox.exec("uname -r; stat -f -c %T .; cat /proc/1/comm")
            lines = [*seen.stdout.decode(errors="replace").splitlines(), "", "", ""]
            facts |= {"kernel": lines[0], "storage": lines[1]}
            facts["processes"] = (
                "own pid namespace" if lines[2] == "dutyfree-init" else "those of the machine"
            )
            return facts | await run_stage.tools(sandbox)


def _spans(begin: float, created: float) -> tuple[Span, ...]:
    """The creation, and the stages of the recipe until now."""
    return (Span("create", 0.0, created), Span("ready", created, perf_counter() - begin - created))

"""A sandbox that a program of this host enters, such as nsenter or ssh."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from secrets import token_hex

import anyio.to_thread

from dutyfree.contract import Command, Limits, Observation, Span
from dutyfree.contract.arguments import (
    NOT_FOUND,
    NOT_RUNNABLE,
    Unrunnable,
    check_command,
    check_runnable,
    not_started,
)
from dutyfree.contract.errors import ActionError, DispatchError, ExecError, SandboxClosed
from dutyfree.substrates.local.command import Commands
from dutyfree.substrates.local.command_files import TOOL_OUTPUT, FilesByCommands


class EnteredSandbox(FilesByCommands):
    """The whole contract, by running each action through a program of this host that enters the sandbox.

    A subclass implements two methods: ``enter`` gives the command of this host; ``is_gone`` distinguishes a
    sandbox that ended from a command that failed. ``environment`` goes to all commands, ``variables`` are the
    recipe's. ``directory`` is the sandbox's own directory on this host, if it has the same path on both
    sides: it finds processes that emptied their environment. Without ``identity`` the id is random.
    """

    def __init__(
        self,
        workdir: str,
        limits: Limits,
        environment: Mapping[str, str],
        directory: str = "",
        identity: str = "",
    ) -> None:
        self.id = identity or token_hex(6)
        self.spans: tuple[Span, ...] = ()
        self.variables: Mapping[str, str] = {}
        self.closed = False
        self.commands = Commands(self.id, directory)
        self._workdir = workdir
        self._limits = limits
        self._environment = environment

    @property
    def workdir(self) -> str:
        return self._workdir

    @abstractmethod
    def enter(self, argv: Sequence[str]) -> Sequence[str]:
        """The command of this host that runs ``argv`` in the sandbox, in the environment of the command."""

    @abstractmethod
    def is_gone(self) -> bool:
        """Whether the sandbox has ended. Called after a failed command; may block."""

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
        self._require_open()
        try:
            check_runnable(command, cwd=cwd, env=env, user=user)
            if user is not None:
                await self._check_user(user)
        except Unrunnable as error:
            return error.observation
        argv = ("/bin/sh", "-c", command) if isinstance(command, str) else tuple(command)
        variables = {**self.variables, **(env or {})}
        seen = await self._run(argv, cwd or ".", variables, stdin, timeout, self._limits.output)
        if cwd is not None and seen.exit_code == NOT_RUNNABLE:  # the code of _START if it cannot enter cwd
            try:
                await self.list(cwd)
            except ActionError as error:
                return not_started(str(error), NOT_FOUND if error.kind == "not_found" else NOT_RUNNABLE)
        return seen

    async def _check_user(self, user: str) -> None:
        """Raises Unrunnable if the user does not exist, and DispatchError if commands cannot run as it."""
        ids = [(await self.run_tool(("id", "-u", *name))).stdout for name in ((), ("--", user))]
        if not ids[1]:
            raise Unrunnable(f"cannot run the command: there is no user {user!r}")
        if ids[0] != ids[1]:
            raise DispatchError(f"all commands run as one user here, not as {user!r}")

    async def run_tool(self, argv: tuple[str, ...], stdin: bytes | None = None) -> Observation:
        return await self._run(argv, "/", {}, stdin, None, TOOL_OUTPUT)

    async def _run(
        self,
        argv: tuple[str, ...],
        cwd: str,
        variables: Mapping[str, str],
        stdin: bytes | None,
        timeout: float | None,
        output: int,
    ) -> Observation:
        self._require_open()
        seen = await self.commands.run(
            self.enter(("/bin/sh", "-c", _START, self.workdir, cwd, *argv)),
            cwd="/",
            env={**self._environment, **variables},
            stdin=stdin,
            timeout=timeout,
            output=output,
        )
        if not seen.ok and self.closed:
            raise SandboxClosed(f"sandbox {self.id} was closed while the command ran")
        if not seen.ok and await anyio.to_thread.run_sync(self.is_gone):
            self.closed = True
            raise ExecError(f"sandbox {self.id} ended while the command ran")
        return seen

    def _require_open(self) -> None:
        if self.closed:
            raise SandboxClosed(f"sandbox {self.id} is closed")


_START = 'cd -- "$0" && cd -- "$1" || exit 126; shift; exec "$@"'

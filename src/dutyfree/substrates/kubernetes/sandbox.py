"""A pod as a sandbox whose actions are execs of the cluster."""

from __future__ import annotations

import posixpath
from collections.abc import Mapping

import msgspec

from dutyfree.contract import Command, Limits, Observation, Span
from dutyfree.contract.arguments import (
    NOT_FOUND,
    NOT_RUNNABLE,
    Unrunnable,
    check_command,
    check_runnable,
    not_started,
)
from dutyfree.contract.errors import ActionError, DispatchError, SandboxClosed, SandboxGone
from dutyfree.engine.layers.command_defaults import WORKDIR
from dutyfree.substrates.kubernetes.api import Api
from dutyfree.substrates.kubernetes.execution import ExecRequest, Execution
from dutyfree.substrates.kubernetes.pods import Pods
from dutyfree.substrates.local.command_files import TOOL_OUTPUT, FilesByCommands


class PodSandbox(FilesByCommands):
    """One running pod."""

    workdir = WORKDIR

    def __init__(self, api: Api, pods: Pods, pod: str, limits: Limits) -> None:
        self.id = pod
        self.spans: tuple[Span, ...] = ()
        self.variables: Mapping[str, str] = {}
        self._api = api
        self._pods = pods
        self._limits = limits
        self._closed = False
        self._running = 0
        self._oom_kills = self._reported = 0
        """Processes that the memory limit killed: those we know of, and those an observation told of."""
        self._gone: SandboxGone | None = None

    def __repr__(self) -> str:
        return f"<PodSandbox {self.id}{' closed' if self._closed else ''}>"

    def close(self) -> None:
        """From now on every method raises SandboxClosed."""
        self._closed = True

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
        words = ("/bin/sh", "-c", command) if isinstance(command, str) else tuple(command)
        try:
            check_runnable(command, cwd=cwd, env=env, user=user)
            if user is not None:
                words = (*await self._as_user(user), *words)
        except Unrunnable as error:
            return error.observation
        seen = await self._run(
            ExecRequest(
                words=words,
                cwd=posixpath.join(WORKDIR, cwd or "."),
                env={**self.variables, **(env or {})},
                stdin=None if stdin is None else bytes(stdin),
                timeout=timeout,
                output=self._limits.output,
                with_strays=True,
            )
        )
        if seen is not None:
            grew, self._reported = self._oom_kills > self._reported, self._oom_kills
            return msgspec.structs.replace(seen, oom=True) if grew else seen
        try:
            await self.list(cwd or ".")
        except ActionError as error:
            return not_started(str(error), NOT_FOUND if error.kind == "not_found" else NOT_RUNNABLE)
        return not_started(f"{cwd}: the directory cannot be entered", NOT_RUNNABLE)

    async def _as_user(self, user: str) -> tuple[str, ...]:
        """The command that changes to a user: an exec has the user of its container.

        Raises Unrunnable if the user does not exist, and DispatchError if the image has no setpriv.
        """
        found = (
            await self.run_tool(("/bin/sh", "-c", 'id -u -- "$0" && id -g -- "$0"', user))
        ).stdout.split()
        if len(found) != 2 or not all(word.isdigit() for word in found):
            raise Unrunnable(f"cannot run the command: there is no user {user!r}")
        if not (await self.run_tool(("/bin/sh", "-c", "command -v setpriv"))).ok:
            raise DispatchError(f"no command can run as {user!r}: the image has no setpriv")
        number, group = (word.decode() for word in found)
        return ("setpriv", f"--reuid={number}", f"--regid={group}", "--init-groups", "--")

    async def run_tool(self, argv: tuple[str, ...], stdin: bytes | None = None) -> Observation:
        seen = await self._run(ExecRequest(words=argv, cwd="/", stdin=stdin, output=TOOL_OUTPUT))
        if seen is None:
            raise ActionError("the shell of the sandbox says that / cannot be entered")
        return seen

    async def _run(self, request: ExecRequest) -> Observation | None:
        self._require_open()
        self._running += 1
        try:
            execution = Execution(self._api, self._pods, self.id, request, alone=lambda: self._running == 1)
            seen = await execution.run()
            self._oom_kills = max(self._oom_kills, execution.oom_kills)
            return seen
        except SandboxGone as error:
            self._gone = error
            raise
        except DispatchError as error:
            # Whatever failed, the cause was that the sandbox was closed.
            if self._closed and not isinstance(error, SandboxClosed):
                raise SandboxClosed(f"the sandbox {self.id} was closed while the action ran") from error
            raise
        finally:
            self._running -= 1

    def _require_open(self) -> None:
        if self._closed:
            raise SandboxClosed(f"the sandbox {self.id} is closed")
        if self._gone is not None:
            raise self._gone

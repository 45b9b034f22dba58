"""A sandbox of Daytona."""

from __future__ import annotations

import asyncio
import contextlib
import posixpath
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import anyio
from daytona import AsyncSandbox, SandboxState

from dutyfree.contract import Command, Limits, Observation, Span
from dutyfree.contract.arguments import Unrunnable, check_command, check_runnable
from dutyfree.contract.errors import (
    CleanupError,
    CollectError,
    DispatchError,
    ExecError,
    SandboxClosed,
)
from dutyfree.substrates.daytona.errors import FOREIGN, is_gone
from dutyfree.substrates.daytona.execution import ExecRequest, Execution
from dutyfree.substrates.local.command_files import TOOL_OUTPUT, FilesByCommands

if TYPE_CHECKING:
    from dutyfree.substrates.daytona.substrate import Daytona

DELETE_SECONDS = 120.0
"""How long a deletion may take."""


class DaytonaSandbox(FilesByCommands):
    """One sandbox."""

    def __init__(self, owner: Daytona, box: AsyncSandbox, limits: Limits) -> None:
        self._owner = owner
        self._box = box
        self._limits = limits
        self.id: str = box.id
        self.spans: tuple[Span, ...] = ()
        self.variables: Mapping[str, str] = {}
        self._workdir = "/"
        self._closed = False
        self._removals: set[asyncio.Task[None]] = set()

    def __repr__(self) -> str:
        return f"<DaytonaSandbox {self.id}{' closed' if self._closed else ''}>"

    @property
    def workdir(self) -> str:
        return self._workdir

    @property
    def box(self) -> AsyncSandbox:
        """The SDK's own object, for what the contract does not have."""
        return self._box

    async def look(self) -> str:
        """Run the first command: find the working directory. Returns PATH. Raises SubstrateError."""
        seen = await self.run_tool(("/bin/sh", "-c", 'cd; pwd; printf %s "$PATH"'))
        workdir, _, path = seen.stdout.decode(errors="replace").partition("\n")
        if not seen.ok or not workdir.startswith("/"):
            raise ExecError(f"the sandbox {self.id} does not run commands: {seen.stderr[:200]!r}")
        self._workdir = workdir
        return path

    # --- Commands ---------------------------------------------------------------------------------------

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
        except Unrunnable as error:
            return error.observation
        if user is not None and user != self._owner.user:
            raise DispatchError(
                f"daytona cannot run one command as {user!r}: a sandbox has one user",
                remedy="open the substrate with the option user",
            )
        request = ExecRequest(
            command=command if isinstance(command, str) else tuple(command),
            cwd=posixpath.join(self.workdir, cwd or "."),
            env={**self.variables, **(env or {})},
            stdin=stdin,
            timeout=timeout,
            output=self._limits.output,
            plain=self._owner.plain,
        )
        return await self._execute(request)

    async def run_tool(self, argv: tuple[str, ...], stdin: bytes | None = None) -> Observation:
        self._require_open()
        return await self._execute(
            ExecRequest(command=argv, cwd="/", stdin=stdin, output=TOOL_OUTPUT, plain=self._owner.plain)
        )

    async def _execute(self, request: ExecRequest) -> Observation:
        execution = Execution(self._box, request)
        try:
            return await execution.run()
        except (DispatchError, ExecError, CollectError) as error:
            if self._closed and not isinstance(error, SandboxClosed):
                raise SandboxClosed(f"the sandbox {self.id} was closed while the action ran") from error
            raise
        finally:
            if execution.session and not self._closed:
                # Its log is in the sandbox. The command has ended, so its caller does not wait for this.
                removal = asyncio.create_task(self._remove_session(execution.session))
                self._removals.add(removal)
                removal.add_done_callback(self._removals.discard)

    async def _remove_session(self, session: str) -> None:
        with contextlib.suppress(*FOREIGN):
            await self._box.process.delete_session(session)

    # --- The whole --------------------------------------------------------------------------------------

    async def extend(self) -> None:
        """Let it live for another lease."""
        if not self._closed:
            with contextlib.suppress(*FOREIGN):
                await self._box.refresh_activity()

    async def close(self) -> None:
        """Delete the sandbox, wait until it is gone, and check it. Raises CleanupError."""
        if self._closed:
            return
        self._closed = True
        for removal in list(self._removals):
            removal.cancel()
        await delete(self._owner.client, self._box, remedy=f"it ends by itself after {self._owner.lease} s")

    def _require_open(self) -> None:
        if self._closed:
            raise SandboxClosed(f"the sandbox {self.id} is closed")


async def delete(client: Any, box: AsyncSandbox, *, remedy: str = "") -> None:
    """Delete a sandbox, wait for it, and ask Daytona whether it is gone. Raises CleanupError."""
    remedy = f"{remedy}; or run: dutyfree gc" if remedy else "run: dutyfree gc"
    try:
        with anyio.fail_after(DELETE_SECONDS):
            await box.delete(timeout=DELETE_SECONDS, wait=True)
            if (await client.get(box.id)).state == SandboxState.DESTROYED:
                return
    except FOREIGN as error:
        if is_gone(error):
            return
        text = f"the sandbox {box.id} could not be deleted: {str(error) or type(error).__name__}"
        raise CleanupError(text, remedy=remedy) from error
    raise CleanupError(f"the sandbox {box.id} still exists", remedy=remedy)


__all__ = ["DaytonaSandbox", "delete"]

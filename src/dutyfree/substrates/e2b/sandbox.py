"""A sandbox of E2B."""

from __future__ import annotations

import asyncio
import contextlib
import posixpath
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import anyio
import msgspec
from e2b import AsyncSandbox

from dutyfree.contract import Command, Limits, Observation, Recipe, Span
from dutyfree.contract.abilities import Chunk
from dutyfree.contract.arguments import (
    Unrunnable,
    check_bytes,
    check_command,
    check_mode,
    check_runnable,
    encoded_path,
)
from dutyfree.contract.errors import CleanupError, DispatchError, ExecError, SandboxClosed, UsageError
from dutyfree.contract.limits import NetworkPolicy
from dutyfree.engine.launcher import network_policy
from dutyfree.substrates.e2b.errors import FOREIGN, is_gone, mapped
from dutyfree.substrates.e2b.execution import ExecRequest, Execution
from dutyfree.substrates.local.command_files import TOOL_OUTPUT, FilesByCommands

if TYPE_CHECKING:
    from dutyfree.substrates.e2b.substrate import E2B

SNAPSHOT_SCHEME = "e2b-snapshot:"
"""Begins the image of a recipe that is a snapshot at E2B."""


class E2BProcess:
    """A command in the background."""

    def __init__(self, execution: Execution, task: asyncio.Task[Observation]) -> None:
        self._execution = execution
        self.task = task
        self.id = execution.id

    async def wait(self) -> Observation:
        return await asyncio.shield(self.task)

    async def kill(self) -> None:
        """Kill its whole process tree. Raises DispatchError."""
        if not self.task.done():
            with mapped(DispatchError, "the process could not be killed"):
                await self._execution.kill()


class E2BSandbox(FilesByCommands):
    """One sandbox."""

    def __init__(self, owner: E2B, box: AsyncSandbox, limits: Limits) -> None:
        self._owner = owner
        self._box = box
        self._limits = limits
        self.id = box.sandbox_id
        self.spans: tuple[Span, ...] = ()
        self.variables: Mapping[str, str] = {}
        self._workdir = "/"
        self._closed = False
        self._paused = False
        self._processes: list[E2BProcess] = []

    def __repr__(self) -> str:
        return f"<E2BSandbox {self.id}{' closed' if self._closed else ''}>"

    @property
    def workdir(self) -> str:
        return self._workdir

    async def look(self) -> str:
        """Run the first command: find the working directory. Returns PATH. Raises SubstrateError."""
        seen = await self._run(("/bin/sh", "-c", 'cd; pwd; printf %s "$PATH"'), {}, None, TOOL_OUTPUT)
        workdir, _, path = seen.stdout.decode(errors="replace").partition("\n")
        if not seen.ok or not workdir.startswith("/"):
            raise ExecError(f"the sandbox {self.id} does not run commands: {seen.stderr[:200]!r}")
        self._workdir = workdir
        return path

    def follow(self, parent: E2BSandbox) -> None:
        """Take over what a fork has in common with its parent."""
        self._workdir, self.variables = parent.workdir, parent.variables

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
        return await self._execute(
            Execution(self._box, self._request(command, cwd, env, stdin, timeout, user))
        )

    async def stream(
        self,
        command: Command,
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bytes | None = None,
        timeout: float | None = None,
        user: str | None = None,
    ) -> AsyncIterator[Chunk | Observation]:
        """Yield output as it arrives. The last item is the Observation, without the output."""
        check_command(command, cwd=cwd, env=env, stdin=stdin, timeout=timeout, user=user)
        self._require_open()
        try:
            check_runnable(command, cwd=cwd, env=env, user=user)
        except Unrunnable as error:
            yield error.observation
            return
        chunks: asyncio.Queue[Chunk | None] = asyncio.Queue(64)

        async def keep(stream: Literal["stdout", "stderr"], data: bytes) -> None:
            await chunks.put(Chunk(stream, data))  # a slow reader stops the SDK's reader

        request = self._request(command, cwd, env, stdin, timeout, user)
        running = asyncio.create_task(self._execute(Execution(self._box, request, keep)))
        running.add_done_callback(lambda _: _finish(chunks))
        try:
            while True:
                chunk = await _next(chunks, running)
                if chunk is None:
                    break
                yield chunk
            seen = await running
            yield msgspec.structs.replace(seen, stdout=b"", stderr=b"" if seen.started else seen.stderr)
        finally:
            running.cancel()
            with anyio.CancelScope(shield=True):
                await asyncio.wait([running])

    async def start(
        self, command: Command, *, cwd: str | None = None, env: Mapping[str, str] | None = None
    ) -> E2BProcess:
        """Start a command and return as soon as it runs."""
        check_command(command, cwd=cwd, env=env, stdin=None, timeout=None, user=None)
        self._require_open()
        execution = Execution(self._box, self._request(command, cwd, env, None, None, None))
        process = E2BProcess(execution, asyncio.create_task(self._execute(execution)))
        self._processes = [one for one in self._processes if not one.task.done()] + [process]
        await execution.started.wait()
        return process

    def _request(
        self,
        command: Command,
        cwd: str | None,
        env: Mapping[str, str] | None,
        stdin: bytes | None,
        timeout: float | None,
        user: str | None,
    ) -> ExecRequest:
        return ExecRequest(
            command=command if isinstance(command, str) else tuple(command),
            cwd=posixpath.join(self.workdir, cwd or "."),
            env={**self.variables, **(env or {})},
            stdin=stdin,
            timeout=timeout,
            user=user or self._owner.user,
            output=self._limits.output,
        )

    async def run_tool(self, argv: tuple[str, ...], stdin: bytes | None = None) -> Observation:
        return await self._run(argv, {}, stdin, TOOL_OUTPUT)

    async def _run(
        self, argv: tuple[str, ...], env: Mapping[str, str], stdin: bytes | None, output: int
    ) -> Observation:
        self._require_open()
        request = ExecRequest(
            command=argv, cwd="/", env=env, stdin=stdin, user=self._owner.user, output=output
        )
        return await self._execute(Execution(self._box, request))

    async def _execute(self, execution: Execution) -> Observation:
        try:
            return await execution.run()
        except (DispatchError, ExecError) as error:
            if self._closed and not isinstance(error, SandboxClosed):
                raise SandboxClosed(f"the sandbox {self.id} was closed while the action ran") from error
            raise

    # --- Files ------------------------------------------------------------------------------------------

    async def read(self, path: str) -> bytes:
        """Through the API of files. If that fails, a script finds out what is wrong with the path."""
        self._require_open()
        if _plain(path):
            with contextlib.suppress(*FOREIGN):
                found = await self._box.files.read(
                    self._absolute(path), format="bytes", user=self._owner.user
                )
                return bytes(found)
        return await super().read(path)

    async def write(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        """Through the API of files, which knows no modes: another mode than the file has is set after it."""
        check_mode(mode)
        check_bytes(data)
        self._require_open()
        if _plain(path) and not path.endswith("/"):
            with contextlib.suppress(*FOREIGN):
                whole = self._absolute(path)
                await self._box.files.write(whole, bytes(data), user=self._owner.user, use_octet_stream=True)
                info = await self._box.files.get_info(whole, user=self._owner.user)
                if info.mode == mode or (await self.run_tool(("chmod", f"{mode:o}", "--", whole))).ok:
                    return
        await super().write(path, data, mode=mode)

    def _absolute(self, path: str) -> str:
        encoded_path(path)
        return posixpath.join(self.workdir, path)

    # --- The whole --------------------------------------------------------------------------------------

    async def pause(self) -> None:
        self._require_open()
        with mapped(DispatchError, "the sandbox cannot be paused"):
            await self._box.pause()
        self._paused = True

    async def resume(self) -> None:
        self._require_open(paused=True)
        with mapped(DispatchError, "the sandbox cannot be resumed"):
            await self._box.connect(timeout=self._owner.lease)
        self._paused = False

    async def snapshot(self) -> Recipe:
        """Keep the files at E2B, until the substrate closes. Sandboxes of the recipe start from them."""
        self._require_open()
        with mapped(ExecError, "the snapshot could not be taken"):
            kept = await self._box.create_snapshot()
        self._owner.keep_snapshot(kept.snapshot_id)
        return Recipe(SNAPSHOT_SCHEME + kept.snapshot_id, env=dict(self.variables))

    @contextlib.asynccontextmanager
    async def fork(self, count: int) -> AsyncIterator[Sequence[E2BSandbox]]:
        """``count`` new sandboxes that start from the files of this one."""
        self._require_open()
        async with self._owner.forked(self, count) as children:
            yield children

    async def set_network(self, policy: NetworkPolicy) -> None:
        self._require_open()
        try:
            network_policy.encode(policy, ())
        except ValueError as error:
            raise UsageError(str(error)) from error
        limits = Limits(network=policy)
        with mapped(DispatchError, "the network of the sandbox cannot change"):
            await self._box.update_network(egress(limits.network))

    async def extend(self) -> None:
        """Let it live for another lease."""
        if not (self._closed or self._paused):
            with contextlib.suppress(*FOREIGN):
                await self._box.set_timeout(self._owner.lease)

    async def close(self) -> None:
        """End the sandbox, and check that it is gone. Raises CleanupError."""
        if self._closed:
            return
        self._closed = True
        for process in self._processes:
            process.task.cancel()
        try:
            if await self._box.kill() and await self._exists():
                raise CleanupError(f"the sandbox {self.id} still exists", remedy="run: dutyfree gc")
        except FOREIGN as error:
            if not is_gone(error):
                raise CleanupError(
                    f"the sandbox {self.id} could not be ended: {error}",
                    remedy=f"it ends by itself after {self._owner.lease} s; or run: dutyfree gc",
                ) from error

    async def _exists(self) -> bool:
        try:
            await self._box.get_info()
        except FOREIGN as error:
            if is_gone(error):
                return False
            raise
        return True

    def _require_open(self, *, paused: bool = False) -> None:
        if self._closed:
            raise SandboxClosed(f"the sandbox {self.id} is closed")
        if self._paused and not paused:
            raise DispatchError(f"the sandbox {self.id} is paused", remedy="call resume first")

    @property
    def box(self) -> AsyncSandbox:
        """The SDK's own object, for what the contract does not have."""
        return self._box

    @property
    def limits(self) -> Limits:
        return self._limits


def egress(policy: NetworkPolicy | None) -> Any:
    """A network policy as E2B takes it: off unless it says otherwise."""
    if policy == "on":
        return {"allow_internet_access": True}
    if policy is None or policy == "off" or not policy:
        return {"allow_internet_access": False}
    return {"allow_out": list(policy), "deny_out": ["0.0.0.0/0"]}


def _plain(path: str) -> bool:
    """Whether the API of files can take a path: its JSON has no other bytes than UTF-8."""
    try:
        return isinstance(path, str) and bool(path.encode()) and "\0" not in path
    except UnicodeEncodeError:
        return False


def _finish(chunks: asyncio.Queue[Chunk | None]) -> None:
    with contextlib.suppress(asyncio.QueueFull):  # then its reader finds the end of the task
        chunks.put_nowait(None)


async def _next(chunks: asyncio.Queue[Chunk | None], running: asyncio.Task[Observation]) -> Chunk | None:
    """The next chunk; None after the last one."""
    if running.done() and chunks.empty():
        return None
    return await chunks.get()


__all__ = ["SNAPSHOT_SCHEME", "E2BSandbox", "egress"]

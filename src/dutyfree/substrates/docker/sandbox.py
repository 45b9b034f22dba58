"""A container as a sandbox."""

from __future__ import annotations

import contextlib
import errno
import posixpath
import tarfile
import tempfile
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import BinaryIO, cast

import anyio
import anyio.to_thread
import msgspec

from dutyfree.contract import Command, Limits, Observation, Span
from dutyfree.contract.arguments import Unrunnable, check_command, check_runnable, encoded_path
from dutyfree.contract.entries import Links
from dutyfree.contract.errors import CollectError, DispatchError, SandboxClosed, SandboxGone, file_error
from dutyfree.substrates.docker.ending import refusal
from dutyfree.substrates.docker.engine import Engine, EngineError, EngineLost
from dutyfree.substrates.docker.execution import ExecRequest, Execution
from dutyfree.substrates.docker.memory import OutOfMemory
from dutyfree.substrates.local.archive import pack, unpack
from dutyfree.substrates.local.command_files import TOOL_OUTPUT, FilesByCommands

WORKDIR = "/workspace"
_ARCHIVE_ERRORS = {
    "no such file": errno.ENOENT,
    "cannot overwrite directory": errno.EISDIR,
    "not a directory": errno.ENOTDIR,
    "cannot overwrite non-directory": errno.ENOTDIR,
    "permission denied": errno.EACCES,
    "read-only": errno.EROFS,
    "file name too long": errno.ENAMETOOLONG,
    "no space left": errno.ENOSPC,
    "too many levels": errno.ELOOP,
    "too many links": errno.ELOOP,
    "file exists": errno.EEXIST,
}
"""Parts of the engine's messages about a path, in lower case."""

SPOOL = 8 << 20
"""Archives above this size go through a file on disk."""


class DockerSandbox(FilesByCommands):
    """One running container."""

    workdir = WORKDIR

    def __init__(
        self,
        engine: Engine,
        container: str,
        limits: Limits,
        variables: Mapping[str, str],
        spans: tuple[Span, ...],
    ) -> None:
        self._engine = engine
        self._container = container
        self.id = container[:12]
        self._limits = limits
        self._variables = variables
        self.spans = spans
        self._closed = False
        self._running = 0
        self._gone: SandboxGone | None = None
        self._oom = OutOfMemory(engine, container, limited=limits.memory is not None)

    def __repr__(self) -> str:
        return f"<DockerSandbox {self.id}{' closed' if self._closed else ''}>"

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
        try:
            check_runnable(command, cwd=cwd, env=env, user=user)
        except Unrunnable as error:
            self._require_open()
            return error.observation
        seen = await self._run(
            ExecRequest(
                command=command if isinstance(command, str) else tuple(command),
                cwd=self._absolute(cwd or "."),
                env={**self._variables, **(env or {})},
                stdin=stdin,
                timeout=timeout,
                user=user,
                output=self._limits.output,
                with_strays=True,
            )
        )
        return msgspec.structs.replace(seen, oom=True) if await self._oom.grew(seen.signal == 9) else seen

    async def upload(self, source: Path, path: str) -> None:
        self._require_open()
        encoded_path(path)
        # Relative to the root, so that the engine makes missing parents and follows links upwards.
        name = posixpath.normpath(self._absolute(path)).lstrip("/")
        async with _spool() as spool:
            await anyio.to_thread.run_sync(pack, source, name, spool)
            size = spool.tell()
            spool.seek(0)
            query = {"path": "/", "noOverwriteDirNonDir": "1"}
            try:
                await self._engine.request("PUT", self._archive, query=query, content=spool, size=size)
            except EngineError as error:
                raise self._archive_error(error, path) from error
            except EngineLost as error:
                raise DispatchError(str(error)) from error

    async def download(self, path: str, target: Path, *, outside_links: bool = False) -> tuple[str, ...]:
        self._require_open()
        encoded_path(path)
        links = Links(path, outside=outside_links)
        async with _spool() as spool:
            try:
                streamed = self._engine.stream("GET", self._archive, query={"path": self._named(path)})
                async with streamed as response:
                    async for piece in response.pieces():
                        await anyio.to_thread.run_sync(spool.write, piece)
            except EngineError as error:
                raise self._archive_error(error, path) from error
            except EngineLost as error:
                raise CollectError(str(error)) from error
            spool.seek(0)
            try:
                await anyio.to_thread.run_sync(unpack, spool, target, links)
            except tarfile.TarError as error:
                raise CollectError(f"the archive of {path!r} is broken: {error}") from error
        return tuple(links.left_out)

    async def pause(self) -> None:
        await self._post("pause")

    async def resume(self) -> None:
        await self._post("unpause")

    @property
    def _archive(self) -> str:
        return f"/containers/{self._container}/archive"

    async def _post(self, operation: str) -> None:
        self._require_open()
        path = f"/containers/{self._container}/{operation}"
        try:
            await self._engine.request("POST", path, deadline=self._engine.answer_seconds)
        except EngineError as error:
            raise refusal(error, self._container) from error
        except EngineLost as error:
            raise DispatchError(str(error)) from error

    async def run_tool(self, argv: tuple[str, ...], stdin: bytes | None = None) -> Observation:
        return await self._run(ExecRequest(command=argv, cwd="/", stdin=stdin, output=TOOL_OUTPUT))

    async def _run(self, request: ExecRequest) -> Observation:
        self._require_open()
        self._running += 1
        try:
            return await Execution(
                self._engine, self._container, request, alone=lambda: self._running == 1
            ).run()
        except SandboxGone as error:
            self._gone = error  # the engine forgets the reason
            raise
        except (DispatchError, CollectError) as error:
            # Whatever failed, the cause was that the sandbox was closed.
            if self._closed and not isinstance(error, SandboxClosed):
                raise SandboxClosed(f"the sandbox {self.id} was closed while the action ran") from error
            raise
        finally:
            self._running -= 1

    def _absolute(self, path: str) -> str:
        return posixpath.join(WORKDIR, path)

    def _named(self, path: str) -> str:
        """An absolute path with a last name, which the engine gives to the top of an archive."""
        absolute = self._absolute(path)
        return posixpath.normpath(absolute) if posixpath.basename(absolute) in ("", ".") else absolute

    def _require_open(self) -> None:
        if self._closed:
            raise SandboxClosed(f"the sandbox {self.id} is closed")
        if self._gone is not None:
            raise self._gone

    def _archive_error(self, error: EngineError, path: str) -> Exception:
        message = error.message.lower()
        # Some engines call a missing path "no such container:path: ...".
        if error.status == 404 and "no such container: " in message:
            return refusal(error, self._container)
        if error.status == 404:
            return file_error(errno.ENOENT, path)
        for text, number in _ARCHIVE_ERRORS.items():
            if text in message:
                return file_error(number, path)
        return refusal(error, self._container)


@contextlib.asynccontextmanager
async def _spool() -> AsyncIterator[BinaryIO]:
    with tempfile.SpooledTemporaryFile(max_size=SPOOL) as file:
        yield cast("BinaryIO", file)

"""A sandbox of ``bare``: a directory of the host, and the commands that run in it."""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TypeVar

import anyio.to_thread

from dutyfree.contract import Command, Entry, Limits, Observation, Recipe, Span
from dutyfree.contract.arguments import (
    Unrunnable,
    check_bytes,
    check_command,
    check_mode,
    check_runnable,
    encoded_path,
)
from dutyfree.contract.entries import KINDS, Links, local_special, unpackable
from dutyfree.contract.errors import ActionError, CreateError, FileError, SandboxClosed, file_error
from dutyfree.substrates.bare import files
from dutyfree.substrates.local.command import Commands
from dutyfree.substrates.local.reaper import remove_tree

T = TypeVar("T")


class BareSandbox:
    """A directory of the host, and the commands started in it.

    ``root`` holds the working directory and the temporary directory. ``mark`` is an environment entry,
    ``NAME=value``, that all commands get; ``path`` is their PATH.
    """

    def __init__(
        self, identity: str, root: Path, mark: str, path: str, limits: Limits, recipe: Recipe
    ) -> None:
        self.id = identity
        self.spans: tuple[Span, ...] = ()
        self._root = root
        self.workdir = str(root / "work")
        self._limits = limits
        self._closed = False
        self._commands = Commands(identity, str(root))
        name, _, value = mark.partition("=")
        self._environment = {
            "PATH": path,
            "HOME": self.workdir,
            "TMPDIR": str(root / "tmp"),
            "LANG": "C.UTF-8",
            name: value,
        }
        self._variables = recipe.variables(self.workdir, path)

    async def make(self, template: Path | None) -> None:
        """Make the directories, with a copy of ``template`` as the working directory. Raises CreateError."""
        wanted = [self._root, self._root / "tmp"] + [Path(self.workdir)] * (template is None)
        try:
            await anyio.to_thread.run_sync(_make, wanted)
        except OSError as error:
            raise CreateError(f"cannot make {error.filename}: {error.strerror}") from error
        if template is not None:
            copied = await self._run(["cp", "-a", "--reflink=auto", str(template), self.workdir], cwd="/")
            if not copied.ok:
                raise CreateError(f"cannot copy the prepared state: {copied.stderr.decode(errors='replace')}")

    async def close(self) -> None:
        """Kill the processes and remove the directory. Raises OSError."""
        self._closed = True
        await anyio.to_thread.run_sync(self._remove)

    def _remove(self) -> None:
        self._commands.kill()
        remove_tree(str(self._root))

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
            self._check()
            return error.observation
        argv = ["/bin/sh", "-c", command] if isinstance(command, str) else [*command]
        env = {**self._variables, **(env or {})}
        return await self._run(argv, cwd=cwd, env=env, stdin=stdin, timeout=timeout, user=user)

    async def _run(
        self,
        argv: list[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bytes | None = None,
        timeout: float | None = None,
        user: str | None = None,
    ) -> Observation:
        self._check()
        return await self._commands.run(
            argv,
            cwd=self.workdir if cwd is None else str(self._path(cwd)),
            env={**self._environment, **(env or {})},
            stdin=stdin,
            timeout=timeout,
            user=user,
            output=self._limits.output,
        )

    async def read(self, path: str) -> bytes:
        return await self._file(partial(files.read, self._path(path)), path)

    async def write(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        check_mode(mode)
        check_bytes(data)
        await self._file(partial(files.write, self._path(path), data, mode), path)

    async def edit(self, path: str, old: bytes, new: bytes) -> None:
        await self._file(partial(files.edit, self._path(path), path, old, new), path)

    async def list(self, path: str) -> tuple[Entry, ...]:
        return await self._file(partial(files.entries, self._path(path)), path)

    async def remove(self, path: str) -> None:
        await self._file(partial(files.remove, self._path(path)), path)

    async def upload(self, source: Path, path: str) -> None:
        found = await anyio.to_thread.run_sync(Path(source).lstat)  # FileNotFoundError: the caller's mistake
        if stat.S_IFMT(found.st_mode) not in KINDS:
            raise local_special(Path(source))
        await self._file(partial(files.copy, Path(source), self._path(path), Links(path, outside=True)), path)

    async def download(self, path: str, target: Path, *, outside_links: bool = False) -> tuple[str, ...]:
        parent = Path(target).parent
        links = Links(path, outside=outside_links)
        await anyio.to_thread.run_sync(partial(parent.mkdir, parents=True, exist_ok=True))
        try:
            await self._file(partial(files.copy, self._path(path), Path(target), links), path)
        except FileError as error:
            # Only writing the target fails with these, not reading the source.
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
                raise unpackable(error, path) from error
            raise
        return tuple(links.left_out)

    async def _file(self, operation: Callable[[], T], path: str) -> T:
        """Run a blocking file operation, and turn its OSErrors into ActionErrors."""
        self._check()
        try:
            return await anyio.to_thread.run_sync(operation)
        except ActionError:
            raise
        except RecursionError:
            raise file_error(errno.ENAMETOOLONG, path) from None
        except shutil.Error as error:  # several errors in one tree, each with its own reason
            raise ActionError(f"{path}: {error}") from error
        except OSError as error:
            raise file_error(error.errno or errno.EIO, error.filename or path) from error

    def _path(self, path: str) -> Path:
        return Path(self.workdir, os.fsdecode(encoded_path(path)))

    def _check(self) -> None:
        if self._closed:
            raise SandboxClosed(f"sandbox {self.id} is closed")


def _make(directories: list[Path]) -> None:
    for directory in directories:
        directory.mkdir()

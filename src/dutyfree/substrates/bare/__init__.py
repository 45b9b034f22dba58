"""``bare``: the host itself, in a fresh directory. The baseline that every tax is counted from.

It isolates nothing: commands see the whole machine and have the caller's rights. They get a small fixed
environment, a directory of their own for work and one for temporary files, and are gone with both when
the sandbox is left.
"""

from __future__ import annotations

import errno
import itertools
import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from time import perf_counter
from types import TracebackType
from typing import ClassVar, Self, TypeVar

import anyio
import anyio.to_thread
import msgspec

from dutyfree.contract import Availability, Command, Entry, Limits, Observation, Recipe, Span, limited
from dutyfree.contract.arguments import (
    Unrunnable,
    check_bytes,
    check_command,
    check_mode,
    check_runnable,
    encoded_path,
)
from dutyfree.contract.entries import KINDS, Links, local_special, unpackable
from dutyfree.contract.errors import (
    ActionError,
    CreateError,
    FileError,
    SandboxClosed,
    Unavailable,
    file_error,
)
from dutyfree.engine.layers import run_stage
from dutyfree.substrates.bare import files
from dutyfree.substrates.bare.leftovers import PREFIX, remove_leftovers
from dutyfree.substrates.local.command import Commands
from dutyfree.substrates.local.edit import replace_once
from dutyfree.substrates.local.lifecycle import closing, refuse_second_entry, require, require_open
from dutyfree.substrates.local.owner import identity
from dutyfree.substrates.local.reaper import OWNER, Reaper, kill_marked, remove_owned, remove_tree

T = TypeVar("T")


class BareConfig(msgspec.Struct, frozen=True):
    directory: str | None = None
    """Where the sandboxes' directories are made; the system's temporary directory by default."""
    path: str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    """PATH of the commands."""


class Bare:
    """The substrate ``bare``."""

    summary: ClassVar[str] = "this host, in a fresh directory: the baseline, no isolation"
    Config: ClassVar[type[msgspec.Struct]] = BareConfig
    name = "bare"
    host_address = "127.0.0.1"

    def __init__(self, config: BareConfig) -> None:
        self._config = config
        self._numbers = itertools.count(1)
        self._templates: dict[int, tuple[Recipe, Path]] = {}
        self._preparing = anyio.Lock()
        self._is_open = False

    @classmethod
    async def probe(cls, config: BareConfig) -> Availability:
        if not hasattr(os, "pidfd_open"):
            return Availability(False, "it needs Linux 5.3 or newer", "run dutyfree on Linux")
        return Availability(True, "the host itself; isolates nothing")

    async def __aenter__(self) -> Self:
        refuse_second_entry(self._is_open, self.name)
        require(await self.probe(self._config), "bare")
        await anyio.to_thread.run_sync(self._open)
        self._is_open = True
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_open = False
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(self._close)

    def _open(self) -> None:
        # Resolved: commands change directories, and the kernel tells the places of processes without links.
        parent = Path(self._config.directory or tempfile.gettempdir()).resolve()
        remove_leftovers(parent)
        self.base = parent / f"{PREFIX}{secrets.token_hex(8)}"
        # Before the directory: from here on nothing of it outlives this process.
        self._reaper = Reaper(directory=str(self.base), marker=self.mark)
        try:
            self.base.with_suffix(OWNER).symlink_to(identity() or "unknown")
            self.base.mkdir()
        except OSError as error:
            self._close()
            raise Unavailable(
                f"bare: cannot make a directory in {parent}: {error.strerror}",
                remedy="name another with the option directory=",
            ) from error
        self.base.chmod(0o755)  # commands of other users must be able to enter

    def _close(self) -> None:
        kill_marked(self.mark, strays=str(self.base))
        try:
            remove_owned(str(self.base))
        except OSError:
            self._reaper.engage()
        else:
            self._reaper.dismiss()

    @property
    def mark(self) -> str:
        return f"DUTYFREE_OWNER={self.base.name}"

    @asynccontextmanager
    async def sandbox(
        self,
        recipe: Recipe | None = None,
        *,
        limits: Limits | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> AsyncIterator[BareSandbox]:
        del labels  # nothing outlives the sandbox that could carry them
        require_open(self._is_open)
        limits = limited(limits, Limits())
        run_stage.refuse("bare", recipe, limits, network=("on",))
        asked = perf_counter()
        template = await self._template(recipe) if recipe and (recipe.stages or recipe.image) else None
        sandbox = BareSandbox(self, f"{self.base.name}-{next(self._numbers)}", limits, recipe or Recipe())
        async with closing(sandbox):
            await sandbox.make(template)
            sandbox.spans = (Span("create", 0.0, perf_counter() - asked),)
            yield sandbox

    async def prepare(self, recipe: Recipe | None = None) -> None:
        run_stage.refuse("bare", recipe)
        if recipe and (recipe.stages or recipe.image):
            await self._template(recipe)

    async def _template(self, recipe: Recipe) -> Path:
        """The directory whose copy is a sandbox in the recipe's state; made once for a recipe."""
        known = self._templates.get(id(recipe))
        if known is not None:
            return known[1]
        try:
            key = await anyio.to_thread.run_sync(recipe.key, len(recipe.stages))
        except OSError as error:
            raise CreateError(f"the recipe names {error.filename}: {error.strerror}") from error
        path = self.base / "templates" / key
        async with self._preparing:
            if not path.exists():
                await self._build(recipe, path)
        # The recipe is kept, so that its id stays its own.
        self._templates[id(recipe)] = (recipe, path)
        return path

    async def _build(self, recipe: Recipe, path: Path) -> None:
        builder = BareSandbox(self, f"{self.base.name}-template-{path.name}", Limits(), Recipe())
        async with closing(builder):
            await builder.make(None)
            await run_stage.apply_all(builder, recipe)
            await anyio.to_thread.run_sync(_move, Path(builder.workdir), path)

    async def sandboxes(self) -> list[str]:
        """The ids of those that exist now."""
        names = await anyio.to_thread.run_sync(os.listdir, self.base)
        return [f"{self.base.name}-{name}" for name in names if name.isdigit()]

    async def facts(self) -> dict[str, str]:
        facts = {"isolation": "none", "path": self._config.path, "kernel": os.uname().release}
        async with self.sandbox() as sandbox:
            seen = await sandbox.exec(["stat", "--file-system", "--format=%T", "."])
            facts["storage"] = seen.stdout.decode(errors="replace").strip() or "unknown"
            facts |= await run_stage.tools(sandbox)
        return facts


class BareSandbox:
    """A directory of the host, and the commands started in it."""

    def __init__(self, substrate: Bare, identity: str, limits: Limits, recipe: Recipe) -> None:
        self.id = identity
        self.spans: tuple[Span, ...] = ()
        self._root = substrate.base / identity.removeprefix(f"{substrate.base.name}-")
        self.workdir = str(self._root / "work")
        self._limits = limits
        self._closed = False
        self._commands = Commands(identity, str(self._root))
        name, _, value = substrate.mark.partition("=")
        self._environment = {
            "PATH": substrate._config.path,
            "HOME": self.workdir,
            "TMPDIR": str(self._root / "tmp"),
            "LANG": "C.UTF-8",
            name: value,
        }
        self._variables = recipe.variables(self.workdir, substrate._config.path)

    async def make(self, template: Path | None) -> None:
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
        await self._file(partial(replace_once, self._path(path), files.read, path, old, new), path)

    async def list(self, path: str) -> tuple[Entry, ...]:
        return await self._file(partial(files.entries, self._path(path)), path)

    async def remove(self, path: str) -> None:
        await self._file(partial(files.remove, self._path(path)), path)

    async def upload(self, source: Path, path: str) -> None:
        found = await anyio.to_thread.run_sync(Path(source).lstat)  # raises FileNotFoundError: the program's
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
            # Reading meets none of these: it is the disk of the target.
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
                raise unpackable(error, path) from error
            raise
        return tuple(links.left_out)

    async def _file(self, operation: Callable[[], T], path: str) -> T:
        self._check()
        try:
            return await anyio.to_thread.run_sync(operation)
        except ActionError:
            raise
        except RecursionError:
            raise file_error(errno.ENAMETOOLONG, path) from None
        except shutil.Error as error:  # of a tree: several, each with its own reason
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


def _move(source: Path, target: Path) -> None:
    target.parent.mkdir(exist_ok=True)
    source.rename(target)

"""The substrate ``bare``: one directory per opening, and one directory below it per sandbox.

A link beside the directory of an opening names its owner. The link is made before the directory and removed
after it, so every directory has one, even if the owner is killed at any moment.
"""

from __future__ import annotations

import itertools
import os
import secrets
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from time import perf_counter
from types import TracebackType
from typing import ClassVar, Literal, Self

import anyio
import anyio.to_thread
import msgspec

from dutyfree.contract import Availability, Limits, Recipe, Span, limited
from dutyfree.contract.errors import CreateError, Unavailable
from dutyfree.contract.substrate import refuse_second_entry, require_open
from dutyfree.engine.host import file_system
from dutyfree.engine.layers import run_stage
from dutyfree.substrates.bare.sandbox import BareSandbox
from dutyfree.substrates.local.lifecycle import closing, require
from dutyfree.substrates.local.owner import abandoned, identity
from dutyfree.substrates.local.reaper import OWNER, Reaper, kill_marked, remove_owned

PREFIX = "dutyfree-bare-"
MEMORY_DIRECTORY = "/dev/shm"  # noqa: S108 (the names in it are random)
"""The tmpfs that every Linux host has."""


class BareConfig(msgspec.Struct, frozen=True):
    """The options of ``bare``."""

    storage: Literal["disk", "memory"] = "disk"
    """Where files are. "memory" needs a tmpfs; "disk" is any other directory."""
    directory: str | None = None
    """Where the sandboxes' directories are made; by default the system's temporary directory or /dev/shm."""
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
        # Resolved, because the kernel reports the working directories of processes without links.
        in_memory = self._config.storage == "memory"
        default = MEMORY_DIRECTORY if in_memory else tempfile.gettempdir()
        parent = Path(self._config.directory or default).resolve()
        if in_memory:
            self._check_memory(parent)
        remove_leftovers(parent)
        self.base = parent / f"{PREFIX}{secrets.token_hex(8)}"
        # The reaper starts before the directory exists, so the directory cannot outlive this process.
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

    def _check_memory(self, parent: Path) -> None:
        """Raises Unavailable unless files there are in memory, and programs can be run from there."""
        found = file_system.kind(parent)
        runnable = parent.is_dir() and not os.statvfs(parent).f_flag & os.ST_NOEXEC
        if found not in file_system.IN_MEMORY or not runnable:
            lack = "is not in memory" if found not in file_system.IN_MEMORY else "does not allow programs"
            raise Unavailable(
                f'bare: storage="memory" needs a tmpfs, and {parent} ({found}) {lack}',
                remedy="mount -t tmpfs tmpfs DIRECTORY, and name it with the option directory=",
            )

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
        """The environment entry, ``NAME=value``, of every command of this opening."""
        return f"DUTYFREE_OWNER={self.base.name}"

    @asynccontextmanager
    async def sandbox(
        self,
        recipe: Recipe | None = None,
        *,
        limits: Limits | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> AsyncIterator[BareSandbox]:
        del labels  # nothing that could carry them outlives the sandbox
        require_open(self._is_open)
        limits = limited(limits, Limits())
        run_stage.refuse("bare", recipe, limits, network=("on",))
        asked = perf_counter()
        template = await self._template(recipe) if recipe and (recipe.stages or recipe.image) else None
        sandbox = self._new(str(next(self._numbers)), limits, recipe or Recipe())
        async with closing(sandbox):
            await sandbox.make(template)
            sandbox.spans = (Span("create", 0.0, perf_counter() - asked),)
            yield sandbox

    def _new(self, name: str, limits: Limits, recipe: Recipe) -> BareSandbox:
        return BareSandbox(
            f"{self.base.name}-{name}", self.base / name, self.mark, self._config.path, limits, recipe
        )

    async def prepare(self, recipe: Recipe | None = None) -> None:
        run_stage.refuse("bare", recipe)
        if recipe and (recipe.stages or recipe.image):
            await self._template(recipe)

    async def _template(self, recipe: Recipe) -> Path:
        """Return the directory whose copy is a sandbox in the recipe's state; built once per recipe."""
        known = self._templates.get(id(recipe))
        if known is not None:
            return known[1]
        try:
            key = await anyio.to_thread.run_sync(recipe.key, len(recipe.stages))
        except OSError as error:
            raise CreateError(f"the recipe names {error.filename}: {error.strerror}") from error
        path = self.base / "templates" / key
        async with self._preparing:
            if not await anyio.Path(path).exists():
                await self._build(recipe, path)
        # The reference to the recipe keeps its id from being reused.
        self._templates[id(recipe)] = (recipe, path)
        return path

    async def _build(self, recipe: Recipe, path: Path) -> None:
        builder = self._new(f"template-{path.name}", Limits(), Recipe())
        async with closing(builder):
            await builder.make(None)
            await run_stage.apply_all(builder, recipe)
            await anyio.to_thread.run_sync(_move, Path(builder.workdir), path)

    async def sandboxes(self) -> list[str]:
        """The ids of the sandboxes that exist now."""
        names = await anyio.to_thread.run_sync(os.listdir, self.base)
        return [f"{self.base.name}-{name}" for name in names if name.isdigit()]

    async def facts(self) -> dict[str, str]:
        facts = {
            "isolation": "none",
            "enforces": "none",
            "creation": "cp -a --reflink=auto of the prepared directory",
            "path": self._config.path,
            "kernel": os.uname().release,
        }
        async with self.sandbox() as sandbox:
            facts["storage"] = await anyio.to_thread.run_sync(file_system.storage_fact, sandbox.workdir)
            facts |= await run_stage.tools(sandbox)
        return facts


def _move(source: Path, target: Path) -> None:
    target.parent.mkdir(exist_ok=True)
    source.rename(target)


# --- Leftovers --------------------------------------------------------------------------------------------


def leftovers(parent: Path) -> Iterator[Path]:
    """Find the directories in ``parent`` whose owner is dead and whose reaper was killed too.

    A directory whose owner cannot be checked from here (another machine, another pid namespace) is skipped.
    """
    return abandoned(parent, PREFIX)


def remove_leftover(path: Path) -> None:
    """Kill the processes of a leftover directory and remove it. Raises OSError."""
    kill_marked(f"DUTYFREE_OWNER={path.name}", strays=str(path))
    remove_owned(str(path))


def remove_leftovers(parent: Path) -> int:
    """Remove all leftovers in ``parent``. Returns how many were removed."""
    removed = 0
    for path in leftovers(parent):
        with suppress(OSError):
            remove_leftover(path)
            removed += 1
    return removed

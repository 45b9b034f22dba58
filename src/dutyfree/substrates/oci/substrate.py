"""The substrate ``oci``: opening a runtime, and creating sandboxes with it."""

from __future__ import annotations

import itertools
import os
import secrets
import subprocess
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

from dutyfree import study_image
from dutyfree.contract import Availability, Limits, Recipe, Span, limited
from dutyfree.contract.errors import CreateError, Unavailable
from dutyfree.contract.substrate import refuse_second_entry, require_open
from dutyfree.engine.host.file_system import storage_fact
from dutyfree.engine.launcher import requirements
from dutyfree.engine.launcher.client import BINARY
from dutyfree.engine.launcher.create import DEFAULT_PIDS
from dutyfree.engine.layers import run_stage
from dutyfree.engine.layers.command_defaults import CommandDefaults
from dutyfree.engine.layers.lower_directories import DirectoryLayers, LowerDirectories
from dutyfree.engine.node import NativeConfig, Node
from dutyfree.engine.sandbox.guest import with_variables
from dutyfree.engine.sandbox.init_sandbox import InitSandbox
from dutyfree.substrates.docker import export
from dutyfree.substrates.local.id_ranges import IdRanges
from dutyfree.substrates.local.lifecycle import closing, require
from dutyfree.substrates.local.owner import identity
from dutyfree.substrates.local.reaper import OWNER, Reaper, remove_groups, remove_owned, remove_tree
from dutyfree.substrates.oci import groups, runtime, spec
from dutyfree.substrates.oci.config import OciConfig
from dutyfree.substrates.oci.container import Container
from dutyfree.substrates.oci.execution import ExecSandbox
from dutyfree.substrates.oci.gc import PREFIX, remove_leftovers
from dutyfree.substrates.oci.groups import Group
from dutyfree.substrates.oci.runtime import Runtime

ISOLATION = {
    "runsc": "gVisor: a kernel of its own in user space; user namespace, dropped capabilities",
    "": "namespaces of all kinds, seccomp filter, dropped capabilities, no new privileges",
}


class Oci:
    """The substrate ``oci``."""

    summary: ClassVar[str] = "containers of crun, runc or gVisor (runsc): no engine, no daemon"
    Config: ClassVar[type[msgspec.Struct]] = OciConfig
    name = "oci"
    host_address = None
    """Sandboxes have no network."""

    def __init__(self, config: OciConfig, node: Node | None = None) -> None:
        """``node``: an open engine, whose recipes and default image are used; by default its own."""
        self._config = config
        self._node = node
        self._numbers = itertools.count(1)
        self._sandboxes: set[str] = set()
        self._checkpointing = anyio.Lock()
        self._is_open = False

    # --- Opening ----------------------------------------------------------------------------------------

    @classmethod
    async def probe(cls, config: OciConfig) -> Availability:
        return await anyio.to_thread.run_sync(_probe, config)

    async def __aenter__(self) -> Self:
        refuse_second_entry(self._is_open, self.name)
        require(await self.probe(self._config), self.name)
        async with AsyncExitStack() as stack:
            await anyio.to_thread.run_sync(self._open)
            stack.push_async_callback(anyio.to_thread.run_sync, self._close)
            if self._node is None:
                self._node = await _own_node(self._config)
                stack.push_async_callback(self._end_node, self._node)
            scratch = self._base / "layers"
            self._layers: DirectoryLayers = self._node.directories(scratch)
            stack.push_async_callback(self._layers.close)
            self._stack = stack.pop_all()
        self._is_open = True
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_open = False
        self._finish = kind is None or issubclass(kind, Exception)
        with anyio.CancelScope(shield=True):
            await self._stack.aclose()

    async def _end_node(self, node: Node) -> None:
        self._node = None
        await node.close(finish=self._finish)

    def _open(self) -> None:
        parent = Path(self._config.directory or tempfile.gettempdir()).resolve()
        remove_leftovers(parent)
        self._base = parent / f"{PREFIX}{secrets.token_hex(6)}"
        # The reaper starts before the directory exists, so the directory cannot outlive this process.
        self._reaper = Reaper(directory=str(self._base), marker=self._mark, groups=self._base.name)
        try:
            self._base.with_suffix(OWNER).symlink_to(identity() or "unknown")
            # The root of a container must reach its own root directory, and nothing else.
            for path in (self._base, self._base / "layers", self._base / "state"):
                path.mkdir(mode=0o700)
            self._base.chmod(0o711)
            (self._base / spec.INIT).write_bytes(BINARY.read_bytes())
            (self._base / spec.INIT).chmod(0o555)
            self._host = groups.hosted()
            program = runtime.find(self._config.runtime, self._config.program)
            self._runtime = Runtime(self._config.runtime, program, self._base / "state", self._host)
            self._version = runtime.version(program)
            self._ids = IdRanges()
        except (OSError, subprocess.SubprocessError) as error:
            self._reaper.engage()
            raise Unavailable(
                f"oci: cannot prepare {self._base}: {error}",
                remedy="name a directory with the option directory=",
            ) from error

    def _close(self) -> None:
        self._ids.close()
        try:
            remove_groups(self._base.name)
            remove_owned(str(self._base))
        except OSError:
            self._reaper.engage()
        else:
            self._reaper.dismiss()

    @property
    def _mark(self) -> str:
        """The environment entry, ``NAME=value``, of every runtime of this opening."""
        return f"DUTYFREE_OWNER={self._base.name}"

    @property
    def _marks(self) -> dict[str, str]:
        name, _, value = self._mark.partition("=")
        return {name: value}

    @property
    def _engine(self) -> Node:
        require_open(self._is_open)
        assert self._node is not None
        return self._node

    # --- Sandboxes --------------------------------------------------------------------------------------

    async def prepare(self, recipe: Recipe | None = None) -> None:
        run_stage.refuse_services(recipe, self.name)
        async with self._lower(self._engine.checked(recipe or Recipe())) as lower:
            await self._image(lower)

    async def _image(self, lower: LowerDirectories) -> Path | None:
        """With ``restore``, a checkpoint of a container on these directories whose init is ready.

        It goes with the directories. Raises CreateError.
        """
        if not self._config.restore:
            return None
        image = lower.directory / "checkpoint"
        async with self._checkpointing:
            if not await anyio.Path(image).exists():
                await self._checkpoint(lower, image)
        return image

    async def _checkpoint(self, lower: LowerDirectories, image: Path) -> None:
        partial = image.with_suffix(".partial")
        container, first_id = await anyio.to_thread.run_sync(self._new)
        try:
            async with closing(_Destroyed(container)):
                await container.start(lower, Limits(), self._marks)
                await anyio.to_thread.run_sync(partial.mkdir)
                await container.checkpoint(partial)
            await anyio.to_thread.run_sync(partial.rename, image)
        except OSError as error:
            raise CreateError(f"the checkpoint of {container.name} cannot be made: {error}") from error
        finally:
            self._ids.release(first_id)
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(remove_tree, str(partial))

    @asynccontextmanager
    async def sandbox(
        self,
        recipe: Recipe | None = None,
        *,
        limits: Limits | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> AsyncIterator[InitSandbox | ExecSandbox]:
        del labels  # nothing that could carry them outlives the sandbox
        recipe, limits = self._engine.checked(recipe or Recipe()), limited(limits, Limits())
        run_stage.refuse_services(recipe, self.name)
        self._refuse_limits(limits)
        if limits.pids is None and "pids" in self._host.enforces:
            limits = msgspec.structs.replace(limits, pids=DEFAULT_PIDS)  # no fork bomb may reach the host
        asked = perf_counter()
        async with self._lower(recipe) as lower:
            image = await self._image(lower)
            opened = perf_counter() - asked
            container, first_id = await anyio.to_thread.run_sync(self._new)
            try:
                async with closing(_Destroyed(container)):
                    await container.start(lower, limits, self._marks, image)
                    if self._config.actions == "exec":
                        await container.known()
                    known = with_variables(lower.defaults, {"HOSTNAME": "sandbox"})
                    sandbox = self._faced(container, known, limits)
                    sandbox.spans = _after(opened, container.spans)
                    self._sandboxes.add(container.name)
                    try:
                        yield sandbox
                    finally:
                        if isinstance(sandbox, ExecSandbox):
                            sandbox.close()
                        else:
                            sandbox.abandon()
            finally:
                self._sandboxes.discard(container.name)
                self._ids.release(first_id)

    def _new(self) -> tuple[Container, int]:
        """Raises CreateError."""
        # gVisor takes the beginning of an id for the id, so none may be the beginning of another one.
        name = f"{self._base.name.removeprefix('dutyfree-')}-{next(self._numbers):08d}"
        directory = self._base / name
        try:
            first_id = self._ids.claim()
            directory.mkdir(mode=0o711)
        except OSError as error:
            raise CreateError(f"the bundle of {name} cannot be made: {error}") from error
        group = Group(f"{self._base.name}/{name}", self._host)
        return Container(name, directory, self._runtime, self._config, group, first_id), first_id

    def _faced(
        self, container: Container, known: CommandDefaults, limits: Limits
    ) -> InitSandbox | ExecSandbox:
        if self._config.actions == "exec":
            return ExecSandbox(container, known, known.environment, limits)
        return container.guest.sandbox(known, limits)

    @asynccontextmanager
    async def _lower(self, recipe: Recipe) -> AsyncIterator[LowerDirectories]:
        async with self._layers.open(recipe) as lower:
            if recipe.image is None and _is_study(self._engine.options.image):
                # The recipe's own variables win.
                given = {**study_image.ENVIRONMENT, **lower.defaults.environment}
                lower = lower._replace(defaults=with_variables(lower.defaults, given))
            yield lower

    def _refuse_limits(self, limits: Limits) -> None:
        """Raises CreateError for a limit that nothing would enforce."""
        refused = []
        names = {"cpus": "cpu", "memory": "memory", "pids": "pids"}
        for name, controller in names.items():
            if getattr(limits, name) is not None and controller not in self._host.enforces:
                refused.append(name)
        if limits.disk is not None and self._config.storage == "disk":
            refused.append("disk")
        if limits.network not in (None, "off"):
            refused.append("network")
        if refused:
            raise CreateError(
                f"oci cannot offer the limit {', '.join(refused)} here",
                remedy="leave it out, or use native"
                + ('; storage="memory" limits the disk' if "disk" in refused else ""),
            )

    async def sandboxes(self) -> list[str]:
        """The ids of the sandboxes that exist now."""
        return sorted(self._sandboxes)

    async def facts(self) -> dict[str, str]:
        facts = {
            "isolation": ISOLATION["runsc" if self._runtime.is_gvisor else ""],
            "runtime": f"{self._config.runtime} {self._version}",
            "actions": self._config.actions,
            "creation": "restore of a checkpoint" if self._config.restore else "run of a bundle",
            "cgroups": f"v{self._host.version}" if self._host.version else "none",
            "enforces": ", ".join(self._host.enforces) or "none",
            "image": self._engine.options.image,
            "kernel": os.uname().release,
            "storage": "memory (tmpfs)",
        }
        if self._config.storage == "disk":
            facts["storage"] = await anyio.to_thread.run_sync(storage_fact, self._base, "a directory")
        async with self.sandbox() as sandbox:
            return facts | await run_stage.tools(sandbox)


class _Destroyed:
    """A container as ``closing`` wants it."""

    def __init__(self, container: Container) -> None:
        self._container = container

    async def close(self) -> None:
        await self._container.destroy()


def _after(opened: float, spans: tuple[Span, ...]) -> tuple[Span, ...]:
    """The spans of the creation: the layers first."""
    moved = [msgspec.structs.replace(span, start=span.start + opened) for span in spans]
    return (Span("layers", 0.0, opened), *moved)


def _is_study(image: str) -> bool:
    return Path(image).parent == study_image.folder()


async def _own_node(config: OciConfig) -> Node:
    """An engine that opens images and builds stages. Raises Unavailable, OptionError."""
    image = config.image or str((await study_image.build(choose=False)).tar)
    return await Node.open(NativeConfig(image=image, ready=0), export.bring)


def _probe(config: OciConfig) -> Availability:
    try:
        program = runtime.find(config.runtime, config.program)
        version = runtime.version(program)
    except Unavailable as error:
        return Availability(False, error.message, error.remedy)
    except (OSError, subprocess.SubprocessError) as error:
        return Availability(False, f"{config.runtime} does not run: {error}", runtime.INSTALL[config.runtime])
    if os.geteuid() != 0:
        return Availability(False, "only root can mount the layers of containers", "run as root")
    found = requirements.check(BINARY)
    if not found.available:
        return found
    detail = f"{config.runtime} {version}"
    if not config.image and study_image.built() is None:
        detail += "; the study's image will be built"
    return Availability(True, detail)

"""The substrate ``vm``: opening it, and creating a virtual machine for each sandbox."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import math
import os
import secrets
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable, Hashable, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, ClassVar, NamedTuple

import anyio
import anyio.to_thread
import msgspec

from dutyfree import study_image
from dutyfree.contract import Availability, Limits, Recipe, Span, limited
from dutyfree.contract.errors import CreateError, Unavailable
from dutyfree.contract.substrate import refuse_second_entry
from dutyfree.engine.host.file_system import storage_fact
from dutyfree.engine.launcher.client import BINARY
from dutyfree.engine.layers import run_stage
from dutyfree.engine.layers.lower_directories import DirectoryLayers, LowerDirectories
from dutyfree.engine.node import Node
from dutyfree.engine.sandbox.guest import Guest
from dutyfree.engine.sandbox.init_sandbox import InitSandbox
from dutyfree.engine.store.locks import try_lock
from dutyfree.substrates.local.id_ranges import IdRanges
from dutyfree.substrates.local.lifecycle import closing, uninterrupted
from dutyfree.substrates.local.reaper import Reaper, remove_tree
from dutyfree.substrates.local.runtime_environment import runtime_environment
from dutyfree.substrates.native import Native, NativeConfig
from dutyfree.substrates.vm import accelerator, disks, kernel, sshd
from dutyfree.substrates.vm.config import LIMITS, VmConfig
from dutyfree.substrates.vm.disks import MOST, OpenDisks, copied
from dutyfree.substrates.vm.machine import Machines, Saved, ready
from dutyfree.substrates.vm.qemu import Files, Hardware, Qemu, Shape, version
from dutyfree.substrates.vm.resource_cache import ResourceCache

PREFIX = "dutyfree-vm-"
HOST = "10.0.2.2"
"""The host's loopback in QEMU's user network."""

MAKERS = 8
"""Threads that open and make disks. They are not those of all others, which big disks would hold up."""

LEAST_MEMORY = 128 << 20
STUDY = "study"


class _Kind(NamedTuple):
    """Machines of one kind can be restored from each other."""

    shape: Shape
    disk: int | None
    layers: Hashable


class Vm:
    """The provider of ``vm``: entering it gives a VmSubstrate."""

    summary: ClassVar[str] = "a virtual machine of QEMU per sandbox, booted or restored"
    Config: ClassVar[type[msgspec.Struct]] = VmConfig

    def __init__(self, config: VmConfig | None = None) -> None:
        self._config = config or VmConfig()
        self._stack = AsyncExitStack()
        self._is_open = False

    @classmethod
    async def probe(cls, config: VmConfig) -> Availability:
        try:
            await anyio.to_thread.run_sync(_require, config)
        except Unavailable as error:
            return Availability(False, error.message, error.remedy)
        found = await Native.probe(NativeConfig())
        if not found.available:
            return Availability(False, f"its disks are made by native: {found.detail}", found.remedy)
        held = await anyio.to_thread.run_sync(kernel.found)
        state = f"kernel {held.version}" if held else f"{kernel.PACKAGE} will be downloaded"
        return Availability(True, f"QEMU, machine {config.machine}; {state}")

    async def __aenter__(self) -> VmSubstrate:
        refuse_second_entry(self._is_open, "vm")
        async with AsyncExitStack() as stack:
            opened = await stack.enter_async_context(_opened(self._config))
            self._stack = stack.pop_all()
        self._is_open = True
        return opened

    async def __aexit__(self, *details: Any) -> bool | None:
        self._is_open = False
        return await self._stack.__aexit__(*details)


def _require(config: VmConfig) -> None:
    """Raises Unavailable."""
    if os.uname().machine != "x86_64":
        raise Unavailable("vm: the machines are of x86_64, and this host is not", remedy="run it there")
    if os.geteuid() != 0:
        raise Unavailable("vm: only root can make its disks of layers", remedy="run as root")
    if not BINARY.exists():
        raise Unavailable(f"{BINARY} is missing", remedy="install a C compiler, and dutyfree again")
    search = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    for program, package in (
        (config.program, "qemu-system-x86"),
        ("mke2fs", "e2fsprogs"),
        ("setpriv", "util-linux"),
    ):
        if shutil.which(program, path=search) is None:
            raise Unavailable(
                f"vm: there is no {program}", remedy=f"on Debian as root: apt-get install {package}"
            )


@asynccontextmanager
async def _opened(config: VmConfig) -> AsyncIterator[VmSubstrate]:
    await anyio.to_thread.run_sync(_require, config)
    image = config.image
    if image == STUDY:
        image = str((await study_image.build(choose=False)).tar)
    async with AsyncExitStack() as stack:
        native = await stack.enter_async_context(Native(NativeConfig(image=image)))
        yield await stack.enter_async_context(opened_with(config, native.node))


@asynccontextmanager
async def opened_with(config: VmConfig, node: Node) -> AsyncIterator[VmSubstrate]:
    """The substrate on the layers and the default image of an open engine. Raises Unavailable."""
    async with AsyncExitStack() as stack:
        directory = await stack.enter_async_context(_directory())
        scratch = directory / "layers"
        await anyio.to_thread.run_sync(partial(scratch.mkdir, mode=0o700))
        layers = node.directories(scratch)
        stack.push_async_callback(layers.close)
        yield await stack.enter_async_context(opened_on(config, layers, directory))


@asynccontextmanager
async def _directory() -> AsyncIterator[Path]:
    """A directory of this opening, removed in any case. The reaper also ends its processes."""
    path = Path(tempfile.gettempdir(), f"{PREFIX}{secrets.token_hex(8)}")

    async def undo(made: tuple[Reaper, int]) -> None:
        await anyio.to_thread.run_sync(_remove, path, *made)

    reaper, lock = await uninterrupted(anyio.to_thread.run_sync(_make, path), undo)
    try:
        yield path
    finally:
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(_remove, path, reaper, lock)


def _make(path: Path) -> tuple[Reaper, int]:
    # The reaper starts before the directory exists, so neither it nor a process outlives this one.
    reaper = Reaper(directory=str(path), marker=_mark(path))
    path.mkdir(mode=0o700)
    lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    fcntl.flock(lock, fcntl.LOCK_EX)  # so that leftovers() does not find it
    return reaper, lock


def _remove(path: Path, reaper: Reaper, lock: int) -> None:
    with contextlib.suppress(OSError):
        remove_tree(str(path))
    os.close(lock)
    reaper.dismiss()


def leftovers() -> Iterator[Path]:
    """The directories of openings whose process, and its reaper, were killed."""
    for path in sorted(Path(tempfile.gettempdir()).glob(f"{PREFIX}*")):
        with contextlib.suppress(OSError):
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                if path.stat().st_uid == os.geteuid() and try_lock(descriptor, fcntl.LOCK_EX):
                    yield path
            finally:
                os.close(descriptor)


async def _descriptor(opened: Callable[[], int]) -> int:
    """Open a descriptor in a thread, and return it. The caller closes it."""

    async def undo(descriptor: int) -> None:
        os.close(descriptor)

    return await uninterrupted(anyio.to_thread.run_sync(opened), undo)


def _mark(directory: Path) -> str:
    """The environment entry, ``NAME=value``, of every process of an opening."""
    return f"DUTYFREE_OWNER={directory.name}"


@asynccontextmanager
async def opened_on(config: VmConfig, layers: DirectoryLayers, directory: Path) -> AsyncIterator[VmSubstrate]:
    """The substrate on layers that the caller opened. ``directory`` and marked processes are the caller's.

    Raises Unavailable.
    """
    await anyio.to_thread.run_sync(_require, config)
    held = await anyio.to_thread.run_sync(kernel.fetch)
    descriptors: list[int] = []
    ranges = IdRanges()
    try:
        first_id = await anyio.to_thread.run_sync(_claimed, ranges)
        descriptors.append(os.open(held.image, os.O_RDONLY | os.O_CLOEXEC))
        descriptors.append(await _descriptor(held.initramfs))
        files = Files(descriptors[0], descriptors[1], ())
        hardware, reason = await accelerator.hardware(config, files, first_id)
        name, _, value = _mark(directory).partition("=")
        machines = Machines(config, hardware, runtime_environment({name: value}))
        keys = None
        if config.actions == "exec":
            keys = await sshd.prepare(directory, {**os.environ, name: value})
        opened = VmSubstrate(config, layers, machines, files, (hardware, reason), held, keys)
        try:
            yield opened
        finally:
            with anyio.CancelScope(shield=True):
                await opened.close()
    finally:
        ranges.close()
        for descriptor in descriptors:
            os.close(descriptor)


def _claimed(ranges: IdRanges) -> int:
    """The first user id of a range for the QEMU processes of an opening. Raises Unavailable."""
    try:
        return ranges.claim()
    except OSError as error:
        raise Unavailable(f"vm: no user ids for QEMU: {error}") from error


class VmSubstrate:
    """An open substrate."""

    name = "vm"
    host_address = HOST

    def __init__(
        self,
        config: VmConfig,
        layers: DirectoryLayers,
        machines: Machines,
        files: Files,
        hardware: tuple[Hardware, str],
        held: kernel.Kernel,
        keys: sshd.Keys | None,
    ) -> None:
        """``files`` has no disks; ``keys`` are for ``actions="exec"``."""
        self._config = config
        self._layers = layers
        self.machines = machines
        self._files = files
        self._hardware, self._reason = hardware
        self._kernel = held
        self._keys = keys
        self._opening = f"vm-{secrets.token_hex(4)}"
        self._numbers = itertools.count(1)
        self._disks: ResourceCache[OpenDisks] = ResourceCache()
        self._empty: ResourceCache[OpenDisks] = ResourceCache()
        self._saved: ResourceCache[Saved] = ResourceCache()
        self._makers = anyio.CapacityLimiter(MAKERS)
        self._living: set[str] = set()

    async def close(self) -> None:
        for cache in (self._saved, self._empty, self._disks):
            await anyio.to_thread.run_sync(cache.close)

    # --- Sandboxes --------------------------------------------------------------------------------------

    @asynccontextmanager
    async def sandbox(
        self,
        recipe: Recipe | None = None,
        *,
        limits: Limits | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> AsyncIterator[InitSandbox | sshd.SshdSandbox]:
        del labels  # nothing that could carry them outlives the sandbox
        recipe, given = recipe or Recipe(), filled(limited(limits, self._config.limits), self._config.limits)
        self._refuse(recipe, given)
        begun = perf_counter()
        async with self._layers.open(recipe) as found:
            kind = _Kind(self._shape(given), given.disk, _layers(found))
            async with self._lower(found) as files:
                marks = [("layers", perf_counter())]
                qemu = await self._machine(kind, files, marks)
            name = f"{self._opening}-{next(self._numbers)}"
            guest = await ready(qemu, name, self._config.boot_seconds)
            marks.append(("ready", perf_counter()))
            sandbox = guest.sandbox(found.defaults, given)
            self._living.add(name)
            try:
                async with closing(sandbox), self._reached(guest, sandbox, qemu, found, given) as reached:
                    if reached is not sandbox:
                        marks.append(("sshd", perf_counter()))
                    reached.spans = _spans(begun, marks)
                    try:
                        yield reached
                    finally:
                        reached.close() if isinstance(reached, sshd.SshdSandbox) else reached.abandon()
            finally:
                self._living.discard(name)

    @asynccontextmanager
    async def _lower(self, found: LowerDirectories) -> AsyncIterator[Files]:
        """The files of a machine, until a QEMU process has inherited them. Raises CreateError."""
        make = partial(self._make_disks, lambda: OpenDisks(self._opened(found)))
        async with self._disks.use(_layers(found), make) as lower:
            if len(lower.descriptors) > MOST:
                raise CreateError(
                    f"vm: the recipe has {len(lower.descriptors)} layers, and a machine at most {MOST} disks",
                    remedy="use fewer stages, or an image with fewer layers",
                )
            yield self._files._replace(lower=lower.descriptors)

    async def _make_disks(self, make: Callable[[], OpenDisks]) -> OpenDisks:
        """In a thread. If the caller is cancelled, they are closed."""

        async def undo(made: OpenDisks) -> None:
            await anyio.to_thread.run_sync(made.close)

        return await uninterrupted(anyio.to_thread.run_sync(make, limiter=self._makers), undo)

    def _opened(self, found: LowerDirectories) -> Iterator[int]:
        """Blocks. Raises CreateError."""
        if self._keys is not None:
            yield from self._keys.disks(found)
        yield from disks.lower(found)

    async def _machine(self, kind: _Kind, files: Files, marks: list[tuple[str, float]]) -> Qemu:
        """A machine whose first process waits for its message. Raises CreateError."""
        forward = "" if self._keys is None else sshd.FORWARD
        upper = -1
        try:
            if self._config.restore:
                async with self._saved.use(kind, partial(self._save, kind, files)) as saved:
                    if saved.upper >= 0:
                        upper = await _descriptor(partial(copied, saved.upper))
                    marks.append(("disk", perf_counter()))
                    qemu = await self.machines.restore(saved, kind.shape, files, upper, forward)
                marks.append(("restore", perf_counter()))
            else:
                upper = await self._upper(kind)
                marks.append(("disk", perf_counter()))
                qemu = await self.machines.boot(kind.shape, files, upper, forward)
                marks.append(("boot", perf_counter()))
        finally:
            if upper >= 0:
                os.close(upper)
        return qemu

    async def _upper(self, kind: _Kind) -> int:
        """A new empty disk, which the caller closes; -1 if the machine has none. Raises CreateError."""
        if kind.shape.upper != "disk":
            return -1
        assert kind.disk is not None
        make = partial(self._make_disks, partial(disks.template, kind.disk))
        async with self._empty.use(kind.disk, make) as template:
            return await _descriptor(partial(copied, template.descriptors[0]))

    async def _save(self, kind: _Kind, files: Files) -> Saved:
        """Boot a machine of a kind, and save it. Raises CreateError."""
        upper = await self._upper(kind)
        try:
            return await self.machines.save(kind.shape, files, upper)
        except BaseException:
            if upper >= 0:
                os.close(upper)
            raise

    @asynccontextmanager
    async def _reached(
        self, guest: Guest, sandbox: InitSandbox, qemu: Qemu, found: LowerDirectories, limits: Limits
    ) -> AsyncIterator[InitSandbox | sshd.SshdSandbox]:
        """The sandbox as the option ``actions`` says."""
        if self._keys is None:
            yield sandbox
            return
        async with self._keys.reached(guest, sandbox, qemu, found.defaults.environment, limits) as over_ssh:
            yield over_ssh

    def _refuse(self, recipe: Recipe, limits: Limits) -> None:
        """``limits`` are those of the machine. Raises CreateError."""
        run_stage.refuse_services(recipe, self.name)
        if limits.network not in (None, "off", "on"):
            raise CreateError(
                "vm has no list of allowed hosts", remedy='use network="on" or "off", or native'
            )
        if limits.cpus is not None and limits.cpus != math.ceil(limits.cpus):
            raise CreateError(f"vm gives whole processors, not {limits.cpus:g}", remedy="round cpus up")
        if limits.pids is not None and self._keys is not None:
            raise CreateError(
                "vm limits no processes if actions go over ssh: its sessions need some too",
                remedy='use actions="init"',
            )
        if limits.memory is not None and limits.memory < LEAST_MEMORY:
            raise CreateError(
                f"no machine boots with {limits.memory >> 20} MB", remedy="memory of 128M or more"
            )

    def _shape(self, limits: Limits) -> Shape:
        memory = (limits.memory or LEAST_MEMORY) >> 20
        upper = "disk"
        if self._config.storage == "memory":
            upper = str(min(limits.disk or memory << 20, memory << 19))
        closed = "off" if self._keys is None else "ssh"
        network = "on" if limits.network == "on" else closed
        return Shape(memory, math.ceil(limits.cpus or 1), limits.pids, upper, network)

    async def prepare(self, recipe: Recipe | None = None) -> None:
        recipe, usual = recipe or Recipe(), filled(self._config.limits, LIMITS)
        self._refuse(recipe, usual)
        async with self._layers.open(recipe) as found, self._lower(found) as files:
            if self._config.restore:
                kind = _Kind(self._shape(usual), usual.disk, _layers(found))
                async with self._saved.use(kind, partial(self._save, kind, files)):
                    pass

    async def sandboxes(self) -> list[str]:
        return sorted(self._living)

    async def facts(self) -> dict[str, str]:
        config = self._config
        facts = {
            "isolation": "virtual machine",
            "machine": config.machine,
            "accelerator": self._hardware.accelerator,
            "created by": "restore" if config.restore else "boot",
            "actions": config.actions,
            "kernel": self._kernel.version,
            "image": config.image,
            "storage": "memory (tmpfs of the guest)",
            "enforces": "cpu, memory, pids" if self._keys is None else "cpu, memory",
            "user": "own" if self._hardware.identity is not None else "that of this process",
        }
        if self._reason:
            facts["without kvm"] = self._reason
        if config.storage == "disk":
            facts["storage"] = await anyio.to_thread.run_sync(
                storage_fact, kernel.folder(), "ext4 of the guest"
            )
        facts["qemu"] = await anyio.to_thread.run_sync(version, config)
        async with self.sandbox() as sandbox:
            return facts | await run_stage.tools(sandbox)


def _layers(found: LowerDirectories) -> Hashable:
    """Names the files of a recipe as long as this opening lasts."""
    return found.key or found.directory


def filled(limits: Limits, option: Limits) -> Limits:
    """The limits of a request, with the option ``limits`` and then LIMITS for what it leaves out."""
    for usual in (option, LIMITS):
        names = ("cpus", "memory", "pids", "disk", "network")
        left = {name: getattr(usual, name) for name in names if getattr(limits, name) is None}
        limits = msgspec.structs.replace(limits, **left)
    return limits


def _spans(begun: float, marks: list[tuple[str, float]]) -> tuple[Span, ...]:
    spans, last = [], begun
    for name, end in marks:
        spans.append(Span(name, last - begun, end - last))
        last = end
    return tuple(spans)

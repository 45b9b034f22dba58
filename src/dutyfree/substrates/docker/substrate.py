"""The substrate ``docker``: opening an engine, and creating containers."""

from __future__ import annotations

import contextlib
import ipaddress
import time
import uuid
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, nullcontext, suppress
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

import anyio
import anyio.to_thread
import msgspec

from dutyfree import study_image as study
from dutyfree.contract import Availability, Limits, Recipe, Span, limited
from dutyfree.contract.errors import ActionError, CleanupError, CreateError, SubstrateError, Unavailable
from dutyfree.contract.substrate import refuse_second_entry
from dutyfree.engine.host.file_system import storage_fact
from dutyfree.engine.launcher.client import BINARY
from dutyfree.engine.layers import run_stage
from dutyfree.engine.sandbox.guest import with_variables
from dutyfree.engine.sandbox.init_sandbox import InitSandbox
from dutyfree.substrates.docker import guest, images
from dutyfree.substrates.docker.config import DockerConfig
from dutyfree.substrates.docker.containers import Container, Containers
from dutyfree.substrates.docker.engine import (
    REMEDY,
    Engine,
    EngineError,
    EngineLost,
    meet,
)
from dutyfree.substrates.docker.gc import OWNER, PROCESS, ROLE, listed, remove, remove_leftovers
from dutyfree.substrates.docker.ready import ReadyContainers
from dutyfree.substrates.docker.sandbox import WORKDIR, DockerSandbox
from dutyfree.substrates.local.owner import identity
from dutyfree.substrates.local.reaper import Reaper


class _Kind(NamedTuple):
    """What containers have in common that can stand for each other."""

    image: str
    limits: Limits


class Docker:
    """The provider of ``docker``: entering it opens the engine and gives a DockerSubstrate."""

    summary: ClassVar[str] = "containers of a Docker engine, over its API socket"
    Config: ClassVar[type[msgspec.Struct]] = DockerConfig

    def __init__(self, config: DockerConfig | None = None) -> None:
        self._config = config or DockerConfig()
        self._stack = AsyncExitStack()
        self._is_open = False

    async def __aenter__(self) -> DockerSubstrate:
        refuse_second_entry(self._is_open, "docker")
        async with AsyncExitStack() as stack:
            opened = await stack.enter_async_context(_opened(self._config))
            self._stack = stack.pop_all()
        self._is_open = True
        return opened

    async def __aexit__(self, *details: Any) -> bool | None:
        self._is_open = False
        return await self._stack.__aexit__(*details)

    @classmethod
    async def probe(cls, config: DockerConfig) -> Availability:
        if config.actions == "init" and not BINARY.exists():
            return Availability(False, f"{BINARY} is missing", "install a C compiler, and dutyfree again")
        try:
            async with config.engine() as engine:
                with anyio.fail_after(config.answer_seconds):
                    facts = await meet(engine)
                    held = await images.identify(engine, config.image)
        except Unavailable as error:
            return Availability(False, error.message, error.remedy)
        except (EngineError, EngineLost, TimeoutError) as error:
            return Availability(False, f"the Docker engine does not work: {error}", REMEDY)
        if held:
            state = f"image {config.image} is there"
        else:
            state = f"image {config.image} will be {'built' if config.image == study.REFERENCE else 'pulled'}"
        return Availability(True, f"Docker {facts.get('Version')} at {engine.path}; {state}")


class DockerSubstrate:
    """An open engine."""

    name = "docker"

    def __init__(
        self,
        engine: Engine,
        config: DockerConfig,
        *,
        version: dict[str, Any],
        gateway: str | None,
        process: str,
    ) -> None:
        self._engine = engine
        self._config = config
        self._version = version
        self._gateway = gateway
        self._labels = {"dutyfree": "1", OWNER: uuid.uuid4().hex, PROCESS: process}
        self._images = images.RecipeImages(
            engine,
            config.image,
            self._builder,
            "" if config.baked else self.owner,
            copied=config.storage == "memory",
        )
        self._containers = Containers(engine, config, self._labels)
        self._ready: ReadyContainers[_Kind] = ReadyContainers(config.ready, self._make)
        self._handed_out: set[str] = set()
        """Ids of the containers that were ready and are sandboxes now."""
        self._guessed: dict[str, _Kind] = {}
        """By image: containers that ``prepare`` made ready, and that nobody has asked for yet."""
        self._limits = Limits()
        """Those of the last request: ready containers are made for them."""

    @property
    def owner(self) -> str:
        """The label, ``name=value``, of everything that this substrate makes."""
        return f"{OWNER}={self._labels[OWNER]}"

    @property
    def host_address(self) -> str | None:
        return self._gateway

    async def prepare(self, recipe: Recipe | None = None) -> None:
        run_stage.refuse_services(recipe, "docker")
        image = await self._images.prepare(recipe or Recipe())
        if self._config.ready:
            kind = _Kind(image, self._limits)
            self._guessed[image] = kind
            await self._ready.fill(kind)

    async def settle(self) -> None:
        """Wait until all containers are ready. See ``abilities.Settling``."""
        await self._ready.settle()

    @contextlib.asynccontextmanager
    async def sandbox(
        self,
        recipe: Recipe | None = None,
        *,
        limits: Limits | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> AsyncIterator[InitSandbox | DockerSandbox]:
        run_stage.refuse_services(recipe, "docker")
        begun = time.perf_counter()
        recipe, limits = recipe or Recipe(), limited(limits, Limits())
        self._limits = limits
        image = await self._images.of(recipe)
        held = await self._images.config(image)
        kind = _Kind(image, limits)
        container = await self._container(kind, labels or {}, begun)
        async with self._removed(container):
            variables = recipe.variables(WORKDIR, images.path(held) if recipe.path else "")
            sandbox = self._sandbox(container, kind, held, variables)
            try:
                yield sandbox
            finally:
                if isinstance(sandbox, DockerSandbox):
                    sandbox.close()
                elif self._config.ready:
                    with anyio.CancelScope(shield=True):
                        await sandbox.end_processes()
                else:
                    sandbox.abandon()

    async def _container(self, kind: _Kind, labels: Mapping[str, str], begun: float) -> Container:
        """A ready container, or a new one. Only a new one can have labels. Raises CreateError."""
        # Prepared with other limits than those that are asked for: these containers would stay unused.
        if (guessed := self._guessed.pop(kind.image, kind)) != kind:
            self._ready.drop(guessed)
        ready = await self._ready.take(kind) if self._config.ready and not labels else None
        if ready is not None:
            ready.spans = (Span("ready", 0.0, time.perf_counter() - begun),)
            self._handed_out.add(ready.id)
            return ready
        return await self._make(kind, "sandbox", labels)

    @contextlib.asynccontextmanager
    async def _builder(self, image: str) -> AsyncIterator[DockerSandbox]:
        """A container to run a stage in, with network, as in an image build."""
        limits = Limits(network="on")
        container = await self._containers.make(image, limits, "stage", {}, with_init=False)
        async with self._removed(container):
            sandbox = DockerSandbox(self._engine, container.id, limits, {}, container.spans)
            try:
                yield sandbox
            finally:
                sandbox.close()

    async def _make(
        self, kind: _Kind, role: str = "ready", labels: Mapping[str, str] = MappingProxyType({})
    ) -> Container:
        """A new container for a sandbox. Raises CreateError."""
        container = await self._containers.make(
            kind.image, kind.limits, role, labels, with_init=self._config.actions == "init"
        )
        if self._config.storage == "memory":
            try:
                await self._fill(container, kind)
            except BaseException:
                with anyio.CancelScope(shield=True), suppress(CleanupError):
                    await container.remove()
                raise
        return container

    async def _fill(self, container: Container, kind: _Kind) -> None:
        """Copy the image's working directory into the empty file system in memory. Raises CreateError."""
        begun = time.perf_counter()
        sandbox = self._sandbox(container, kind, await self._images.config(kind.image), {})
        try:
            seen = await sandbox.exec(("cp", "-a", f"{images.COPY}/.", WORKDIR), cwd="/", user="0")
        except (SubstrateError, ActionError) as error:
            raise CreateError(f"the working directory could not be copied to memory: {error}") from error
        if not seen.ok:
            said = seen.stderr.decode(errors="replace").strip()
            raise CreateError(f"the working directory could not be copied to memory: {said}")
        last = container.spans[-1]
        container.spans += (Span("fill", last.start + last.seconds, time.perf_counter() - begun),)

    def _sandbox(
        self, container: Container, kind: _Kind, held: Mapping[str, Any], variables: Mapping[str, str]
    ) -> InitSandbox | DockerSandbox:
        """The container as a sandbox; ``held`` is the configuration of its image."""
        if container.guest is None:
            return DockerSandbox(self._engine, container.id, kind.limits, variables, container.spans)
        known = guest.defaults(held, container.id, WORKDIR, images.path(held))
        sandbox = container.guest.sandbox(with_variables(known, variables), kind.limits)
        sandbox.spans = container.spans
        return sandbox

    @contextlib.asynccontextmanager
    async def _removed(self, container: Container) -> AsyncIterator[None]:
        """Remove the container at the end. Raises CleanupError.

        In the background if it belongs to a pool and its processes have ended: then nothing is left of the
        sandbox but files, which nobody can reach.
        """
        succeeded = False
        try:
            yield
            succeeded = True
        finally:
            # An earlier error passes. A container that is left is removed when the substrate closes.
            self._handed_out.discard(container.id)
            if self._config.ready and container.guest is not None and not self._ready.is_busy:
                self._ready.discard(container)
            else:
                with anyio.CancelScope(shield=True), nullcontext() if succeeded else suppress(CleanupError):
                    await container.remove()

    async def close(self) -> None:
        """Remove the ready containers."""
        await self._ready.close()

    async def sandboxes(self) -> list[str]:
        """The ids of the sandboxes that exist now. Raises EngineError, EngineLost."""
        found = await listed(self._engine, "containers", self.owner)
        return [
            each["Id"][:12]
            for each in found
            if each["Labels"].get(ROLE) == "sandbox" or each["Id"] in self._handed_out
        ]

    async def _storage(self, info: dict[str, Any]) -> str:
        """Where the files of containers are: in memory, or on the file system of the engine's data."""
        driver, root = info.get("Driver", "unknown"), info.get("DockerRootDir", "")
        if self._config.storage == "memory":
            return "memory (tmpfs for /workspace and /tmp)"
        if not root or not await anyio.Path(root).is_dir():
            return f"disk ({driver} of an engine on another machine)"
        return await anyio.to_thread.run_sync(storage_fact, root, driver)

    async def facts(self) -> dict[str, str]:
        try:
            info = await self._engine.request("GET", "/info")
            held = await images.inspect(self._engine, await self._images.of(Recipe())) or {}
        except (EngineError, EngineLost) as error:
            raise CreateError(f"the Docker engine does not answer: {error}") from error
        runtime = self._config.runtime or info.get("DefaultRuntime", "")
        parts = {part["Name"]: part["Version"] for part in self._version.get("Components", ())}
        facts = {
            "engine": f"Docker {self._version.get('Version')}",
            "api": self._engine.prefix.removeprefix("/v"),
            "containerd": parts.get("containerd", ""),
            "runtime": f"{runtime} {parts.get(runtime, '')}".strip(),
            "storage driver": info.get("Driver", ""),
            "cgroups": f"v{info.get('CgroupVersion', '1')}, {info.get('CgroupDriver', '')}",
            "kernel": info.get("KernelVersion", ""),
            "init": "dutyfree" if self._config.actions == "init" else str(self._config.init).lower(),
            "actions": self._config.actions,
            "storage": await self._storage(info),
            "enforces": _enforces(info),
            "ready": str(self._config.ready),
            "baked": str(self._config.baked).lower(),
            "image": self._config.image,
            "image id": held.get("Id", ""),
            "image digest": ((held.get("Config") or {}).get("Labels") or {}).get(images.DIGEST_LABEL, "")
            or next(iter(held.get("RepoDigests") or ()), ""),
        }
        async with self.sandbox() as sandbox:
            for tool in ("python3", "git"):
                seen = await sandbox.exec(f"{tool} --version 2>&1")
                facts[tool.removesuffix("3")] = seen.stdout.decode().split()[-1] if seen.ok else "missing"
        return facts


class BakedDockerSubstrate(DockerSubstrate):
    """An open engine whose images have the set-up of workloads. See ``abilities.Warmed``."""

    warmth = "recipe"


@contextlib.asynccontextmanager
async def _opened(config: DockerConfig) -> AsyncIterator[DockerSubstrate]:
    async with config.engine() as engine:
        version = await meet(engine)
        try:
            await remove_leftovers(engine)
            gateway = await _gateway(engine, config.network)
        except (EngineError, EngineLost) as error:
            raise Unavailable(
                f"the Docker engine at {engine.path} does not work: {error}", remedy=REMEDY
            ) from error
        process = await anyio.to_thread.run_sync(identity) or ""
        kind = BakedDockerSubstrate if config.baked else DockerSubstrate
        substrate = kind(engine, config, version=version, gateway=gateway, process=process)
        reaper = await anyio.to_thread.run_sync(lambda: Reaper(docker=engine.path, label=substrate.owner))
        try:
            yield substrate
        finally:
            with anyio.CancelScope(shield=True):
                await _finish(engine, substrate, reaper)


async def _finish(engine: Engine, substrate: DockerSubstrate, reaper: Reaper) -> None:
    """Remove what is left. If that fails, the reaper goes on trying."""
    await substrate.close()
    try:
        for container in await listed(engine, "containers", substrate.owner):
            await remove(engine, container["Id"])
        made = await listed(engine, "images", substrate.owner)
        await images.remove(engine, [image["Id"] for image in made])
    except (EngineError, EngineLost, CleanupError):
        reaper.engage()
    else:
        await anyio.to_thread.run_sync(reaper.dismiss)


def _enforces(info: Mapping[str, Any]) -> str:
    """The limits that the engine enforces on this kernel."""
    fields = {"cpu": "CpuCfsQuota", "memory": "MemoryLimit", "pids": "PidsLimit"}
    return ", ".join(name for name, field in fields.items() if info.get(field)) or "none"


async def _gateway(engine: Engine, network: str) -> str | None:
    """This host's address on the network, as containers see it."""
    try:
        facts = await engine.request("GET", f"/networks/{network}", deadline=engine.answer_seconds)
    except EngineError:
        return None
    for part in (facts.get("IPAM") or {}).get("Config") or ():
        if gateway := part.get("Gateway"):
            return str(gateway)
        with suppress(KeyError, ValueError, StopIteration):
            return str(next(ipaddress.ip_network(part["Subnet"]).hosts()))
    return None


async def adopt_image(
    reference: str, name: str, tools: tuple[str, ...], *, host: str | None, progress: study.Progress
) -> str:
    """Pull ``reference``, check that it has the tools, and tag it ``name``. Returns its id.

    Raises Unavailable.
    """
    async with _opened(DockerConfig(host=host)) as substrate:
        try:
            return await images.adopt(substrate._engine, reference, name, tools, substrate._builder, progress)
        except (EngineError, EngineLost) as error:
            raise Unavailable(f"the Docker engine could not use {reference}: {error}") from error

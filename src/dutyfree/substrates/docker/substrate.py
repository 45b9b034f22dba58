"""The substrate ``docker``: opening an engine, and creating containers."""

from __future__ import annotations

import contextlib
import ipaddress
import math
import time
import uuid
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, nullcontext, suppress
from types import MappingProxyType
from typing import Any, ClassVar

import anyio
import anyio.lowlevel
import anyio.to_thread
import msgspec

from dutyfree import study_image as study
from dutyfree.contract import Availability, Limits, Recipe, Span, limited
from dutyfree.contract.errors import CleanupError, CreateError, Unavailable
from dutyfree.contract.substrate import refuse_second_entry
from dutyfree.engine.layers import run_stage
from dutyfree.substrates.docker import images
from dutyfree.substrates.docker.engine import (
    ANSWER_SECONDS,
    REMEDY,
    REMOVE_SECONDS,
    Engine,
    EngineError,
    EngineLost,
    meet,
    socket_path,
)
from dutyfree.substrates.docker.gc import OWNER, PROCESS, ROLE, listed, remove, remove_leftovers
from dutyfree.substrates.docker.processes import KEEPER
from dutyfree.substrates.docker.sandbox import WORKDIR, DockerSandbox
from dutyfree.substrates.local.owner import identity
from dutyfree.substrates.local.reaper import Reaper

CREATE_SECONDS = 120.0


class DockerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The options of ``docker``."""

    host: str | None = None
    """The engine's Unix socket; by default DOCKER_HOST, else /var/run/docker.sock."""
    image: str = study.REFERENCE
    """The image of a recipe without one; by default the study's image, which is built if it is missing."""
    network: str = "bridge"
    """The network of sandboxes whose network is on."""
    runtime: str | None = None
    """One of the engine's runtimes, such as runsc; None is its default."""
    init: bool = True
    """Whether Docker's init is PID 1. It reaps the processes that commands leave behind."""
    answer_seconds: float = ANSWER_SECONDS
    """How long the engine may take to answer a question."""
    remove_seconds: float = REMOVE_SECONDS
    """How long the engine may take to remove a container or an image."""

    def engine(self) -> Engine:
        """A client of the engine. Raises Unavailable if the address is not a Unix socket."""
        path = socket_path(self.host)
        return Engine(path, answer_seconds=self.answer_seconds, remove_seconds=self.remove_seconds)


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
        self._images = images.RecipeImages(engine, config.image, self._builder, self.owner)

    @property
    def owner(self) -> str:
        """The label, ``name=value``, of everything that this substrate makes."""
        return f"{OWNER}={self._labels[OWNER]}"

    @property
    def host_address(self) -> str | None:
        return self._gateway

    async def prepare(self, recipe: Recipe | None = None) -> None:
        run_stage.refuse_services(recipe, "docker")
        await self._images.prepare(recipe or Recipe())

    @contextlib.asynccontextmanager
    async def sandbox(
        self,
        recipe: Recipe | None = None,
        *,
        limits: Limits | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> AsyncIterator[DockerSandbox]:
        run_stage.refuse_services(recipe, "docker")
        recipe, limits = recipe or Recipe(), limited(limits, Limits())
        image = await self._images.of(recipe)
        variables = recipe.variables(WORKDIR, await self._images.path(image) if recipe.path else "")
        made = self._container(image, limits, labels or {}, "sandbox", variables)
        async with made as sandbox:
            yield sandbox

    def _builder(self, image: str) -> AbstractAsyncContextManager[DockerSandbox]:
        """A container to run a stage in, with network, as in an image build."""
        return self._container(image, Limits(network="on"), {}, "stage")

    @contextlib.asynccontextmanager
    async def _container(
        self,
        image: str,
        limits: Limits,
        labels: Mapping[str, str],
        role: str,
        variables: Mapping[str, str] = MappingProxyType({}),
    ) -> AsyncIterator[DockerSandbox]:
        clock = time.perf_counter
        zero = clock()
        body = self._body(image, limits, {**labels, **self._labels, ROLE: role})
        container = await self._create(body)
        succeeded = False
        try:
            created = clock()
            await self._start(container)
            spans = (Span("create", 0.0, created - zero), Span("start", created - zero, clock() - created))
            sandbox = DockerSandbox(self._engine, container, limits, variables, spans)
            try:
                yield sandbox
                succeeded = True
            finally:
                sandbox.close()
        finally:
            # An earlier error passes. A container that is left is removed when the substrate closes.
            with anyio.CancelScope(shield=True), nullcontext() if succeeded else suppress(CleanupError):
                await remove(self._engine, container)

    async def _create(self, body: dict[str, Any]) -> str:
        """Create a container. A cancellation waits for the engine's answer, then removes the container."""
        container = ""
        try:
            with anyio.CancelScope(shield=True), anyio.fail_after(CREATE_SECONDS):
                container = (await self._engine.request("POST", "/containers/create", json=body))["Id"]
            await anyio.lowlevel.checkpoint_if_cancelled()
        except EngineError as error:
            raise CreateError(f"the Docker engine could not create the container: {error}") from error
        except (EngineLost, TimeoutError) as error:
            raise CreateError(
                f"the Docker engine could not create the container: {error or 'no answer'}", remedy=REMEDY
            ) from error
        except BaseException:
            if container:
                with anyio.CancelScope(shield=True), suppress(CleanupError):
                    await remove(self._engine, container)
            raise
        return container

    async def _start(self, container: str) -> None:
        try:
            await self._engine.request("POST", f"/containers/{container}/start")
        except EngineError as error:
            raise CreateError(f"the Docker engine could not start the container: {error}") from error
        except EngineLost as error:
            raise CreateError(str(error), remedy=REMEDY) from error

    def _body(self, image: str, limits: Limits, labels: dict[str, str]) -> dict[str, Any]:
        if isinstance(limits.network, tuple):
            raise CreateError(
                "docker cannot limit the network to a list",
                remedy='use "on" or "off", or the substrate native',
            )
        host: dict[str, Any] = {
            "NetworkMode": self._config.network if limits.network == "on" else "none",
            "Init": self._config.init,
            "LogConfig": {"Type": "none"},
        }
        if self._config.runtime:
            host["Runtime"] = self._config.runtime
        if limits.cpus is not None:
            host["NanoCpus"] = math.ceil(limits.cpus * 1e9)
        if limits.memory is not None:
            host["Memory"] = host["MemorySwap"] = limits.memory
        if limits.pids is not None:
            host["PidsLimit"] = limits.pids
        if limits.disk is not None:
            # The engine refuses this if its storage driver cannot enforce it.
            host["StorageOpt"] = {"size": str(limits.disk)}
        return {
            "Image": image,
            "Entrypoint": KEEPER,
            "Cmd": [],
            "WorkingDir": WORKDIR,
            "Env": [f"HOME={WORKDIR}"],
            "Labels": labels,
            "Healthcheck": {"Test": ["NONE"]},
            "HostConfig": host,
        }

    async def sandboxes(self) -> list[str]:
        """The ids of the sandboxes that exist now. Raises EngineError, EngineLost."""
        found = await listed(self._engine, "containers", self.owner)
        return [each["Id"][:12] for each in found if each["Labels"].get(ROLE) == "sandbox"]

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
            "enforces": "cpu, memory, pids",
            "init": str(self._config.init).lower(),
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
        substrate = DockerSubstrate(engine, config, version=version, gateway=gateway, process=process)
        reaper = await anyio.to_thread.run_sync(lambda: Reaper(docker=engine.path, label=substrate.owner))
        try:
            yield substrate
        finally:
            with anyio.CancelScope(shield=True):
                await _finish(engine, substrate, reaper)


async def _finish(engine: Engine, substrate: DockerSubstrate, reaper: Reaper) -> None:
    """Remove what is left. If that fails, the reaper goes on trying."""
    try:
        for container in await listed(engine, "containers", substrate.owner):
            await remove(engine, container["Id"])
        made = await listed(engine, "images", substrate.owner)
        await images.remove(engine, [image["Id"] for image in made])
    except (EngineError, EngineLost, CleanupError):
        reaper.engage()
    else:
        await anyio.to_thread.run_sync(reaper.dismiss)


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

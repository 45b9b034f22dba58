"""Make, start and remove containers: with the engine's exec, or with our init as PID 1."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import anyio

from dutyfree.contract import Limits, Span
from dutyfree.contract.errors import CleanupError, CreateError
from dutyfree.engine.sandbox.guest import Guest
from dutyfree.substrates.docker import guest
from dutyfree.substrates.docker.config import DockerConfig
from dutyfree.substrates.docker.engine import REMEDY, Engine, EngineError, EngineLost
from dutyfree.substrates.docker.execution import KEEPER
from dutyfree.substrates.docker.gc import ROLE, remove
from dutyfree.substrates.docker.sandbox import WORKDIR
from dutyfree.substrates.local.lifecycle import uninterrupted

CREATE_SECONDS = 120.0
"""How long the engine may take to create a container, and then to start it."""
CHECK_SECONDS = 10.0
"""How long a ready container may take to show that it works."""

IN_MEMORY = {WORKDIR: "755", "/tmp": "1777"}  # noqa: S108 (in the container)
"""The directories that ``storage="memory"`` keeps in memory, and their modes."""


class Container:
    """One running container. It is used once, and then removed."""

    def __init__(self, engine: Engine, identity: str, opened: Guest | None, spans: tuple[Span, ...]) -> None:
        self.id = identity
        self.guest = opened
        self.spans = spans
        self._engine = engine

    async def works(self) -> bool:
        """Whether it still runs, and its init answers."""
        with anyio.move_on_after(CHECK_SECONDS), suppress(Exception):
            if self.guest is not None:
                return await self.guest.ping()
            facts = await self._engine.request("GET", f"/containers/{self.id}/json")
            return bool(facts["State"]["Running"])
        return False

    async def remove(self) -> None:
        """Raises CleanupError."""
        if self.guest is not None:
            self.guest.close()
        await remove(self._engine, self.id)


class Containers:
    """Makes the containers of one substrate."""

    def __init__(self, engine: Engine, options: DockerConfig, labels: Mapping[str, str]) -> None:
        """``labels`` mark all of them, so that they can be found and removed."""
        self._engine = engine
        self._options = options
        self._labels = labels
        self._is_mounted = True
        """Whether init is mounted from this host; else it is copied, because the engine sees other files."""

    async def make(
        self, image: str, limits: Limits, role: str, labels: Mapping[str, str], *, with_init: bool
    ) -> Container:
        """Create and start a container. Raises CreateError."""
        clock = time.perf_counter
        zero = clock()
        plain = self._body(image, limits, role, {**labels, **self._labels, ROLE: role})
        identity = await self._create(plain, with_init=with_init)
        try:
            created = clock()
            opened = await self._start(identity, with_init=with_init)
            started = clock()
            spans: tuple[Span, ...] = (
                Span("create", 0.0, created - zero),
                Span("start", created - zero, started - created),
            )
            if opened is not None:
                try:
                    await opened.wait_ready()
                except BaseException:
                    opened.close()
                    raise
                spans += (Span("init", started - zero, clock() - started),)
        except BaseException:
            with anyio.CancelScope(shield=True), suppress(CleanupError):
                await remove(self._engine, identity)
            raise
        return Container(self._engine, identity, opened, spans)

    async def _create(self, plain: dict[str, Any], *, with_init: bool) -> str:
        if not with_init:
            return await self._request(plain)
        if self._is_mounted:
            try:
                return await self._request(guest.body(plain, mounted=True))
            except CreateError as error:
                if not isinstance(error.__cause__, EngineError) or not guest.is_unseen(error.__cause__):
                    raise
                self._is_mounted = False
        identity = await self._request(guest.body(plain, mounted=False))
        try:
            await guest.copy_program(self._engine, identity)
        except BaseException as error:
            with anyio.CancelScope(shield=True), suppress(CleanupError):
                await remove(self._engine, identity)
            if isinstance(error, EngineError | EngineLost):
                raise CreateError(f"init could not be copied into the container: {error}") from error
            raise
        return identity

    async def _request(self, body: dict[str, Any]) -> str:
        """Create a container. A cancellation waits for the engine's answer, then removes the container."""

        async def ask() -> str:
            with anyio.fail_after(CREATE_SECONDS):
                return str((await self._engine.request("POST", "/containers/create", json=body))["Id"])

        async def discard(container: str) -> None:
            with suppress(CleanupError):
                await remove(self._engine, container)

        try:
            return await uninterrupted(ask(), discard)
        except EngineError as error:
            raise CreateError(f"the Docker engine could not create the container: {error}") from error
        except (EngineLost, TimeoutError) as error:
            raise CreateError(
                f"the Docker engine could not create the container: {error or 'no answer'}", remedy=REMEDY
            ) from error

    async def _start(self, container: str, *, with_init: bool) -> Guest | None:
        opened: Guest | None = None
        try:
            if with_init:
                opened = await guest.attached(self._engine, container)
            path = f"/containers/{container}/start"
            await self._engine.request("POST", path, deadline=CREATE_SECONDS)
        except BaseException as error:
            if opened is not None:
                opened.close()
            if isinstance(error, EngineError):
                raise CreateError(f"the Docker engine could not start the container: {error}") from error
            if isinstance(error, EngineLost):
                raise CreateError(str(error), remedy=REMEDY) from error
            raise
        return opened

    def _body(self, image: str, limits: Limits, role: str, labels: dict[str, str]) -> dict[str, Any]:
        if isinstance(limits.network, tuple):
            raise CreateError(
                "docker cannot limit the network to a list",
                remedy='use "on" or "off", or the substrate native',
            )
        options = self._options
        host: dict[str, Any] = {
            "NetworkMode": options.network if limits.network == "on" else "none",
            "Init": options.init,
            "LogConfig": {"Type": "none"},
        }
        if options.runtime:
            host["Runtime"] = options.runtime
        if options.storage == "memory" and role != "stage":
            # Not for a stage: it is committed to an image, which has only what is on disk.
            host["Tmpfs"] = {path: f"rw,exec,mode={mode}" for path, mode in IN_MEMORY.items()}
        if limits.disk is not None:
            # The engine refuses this if its storage driver cannot enforce it.
            host["StorageOpt"] = {"size": str(limits.disk)}
        if limits.cpus is not None:
            host["NanoCpus"] = math.ceil(limits.cpus * 1e9)
        if limits.memory is not None:
            host["Memory"] = host["MemorySwap"] = limits.memory
        if limits.pids is not None:
            host["PidsLimit"] = limits.pids
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

"""The substrate ``cloud``: opening a place of a provider, and creating sandboxes on fresh instances."""

from __future__ import annotations

import contextlib
import itertools
import secrets
import shutil
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from time import perf_counter
from types import TracebackType
from typing import ClassVar, Self

import anyio
import anyio.to_thread
import msgspec

from dutyfree.contract import Availability, Limits, Recipe, Span, limited
from dutyfree.contract.errors import CleanupError, CreateError, DutyfreeError, Unavailable
from dutyfree.contract.substrate import refuse_second_entry, require_open
from dutyfree.engine.host import sandbox_labels
from dutyfree.engine.layers import run_stage
from dutyfree.engine.sandbox.init_sandbox import InitSandbox
from dutyfree.substrates.cloud import api, leftovers
from dutyfree.substrates.cloud.api import ApiError, Instance, Order, Place
from dutyfree.substrates.cloud.config import CloudConfig
from dutyfree.substrates.cloud.instances import Instances
from dutyfree.substrates.cloud.user_data import KeyPair, cloud_config, make_key
from dutyfree.substrates.cloud.watcher import Orders, Watcher
from dutyfree.substrates.local.lifecycle import closing
from dutyfree.substrates.local.owner import identity
from dutyfree.substrates.local.reaper import remove_tree
from dutyfree.substrates.ssh.config import SshConfig
from dutyfree.substrates.ssh.connection import PROGRAM, missing
from dutyfree.substrates.ssh.execution import ExecSandbox
from dutyfree.substrates.ssh.substrate import Ssh


class Cloud:
    """The substrate ``cloud``."""

    summary: ClassVar[str] = "a fresh instance of a cloud for each sandbox, over ssh; it costs money"
    Config: ClassVar[type[msgspec.Struct]] = CloudConfig
    name = "cloud"
    host_address = None
    """The sandboxes are on other machines."""

    def __init__(self, config: CloudConfig) -> None:
        self._config = config
        self._place = Place(config.provider, config.region, config.endpoint)
        self._numbers = itertools.count(1)
        self._is_open = False
        self._ids: dict[str, str] = {}

    @classmethod
    async def probe(cls, config: CloudConfig) -> Availability:
        try:
            found = await cls(config)._connected()
            await anyio.to_thread.run_sync(lambda: found.find({api.OURS: "1"}))
        except Unavailable as error:
            return Availability(False, error.message, error.remedy)
        except ApiError as error:
            refused = error.restated(Unavailable, "the provider refused")
            return Availability(False, refused.message, refused.remedy)
        return Availability(True, f"{config.provider}, {config.size}; every sandbox costs money")

    async def _connected(self) -> api.Api:
        """Raises Unavailable."""
        found = await anyio.to_thread.run_sync(api.connected, self._place)
        if not self._config.image:
            raise Unavailable(
                "no image is named",
                remedy="name one with the option image=: docs/machines.md says how to find it",
            )
        for program in (PROGRAM, "ssh-keygen"):
            if await anyio.to_thread.run_sync(shutil.which, program) is None:
                raise missing()
        return found

    async def __aenter__(self) -> Self:
        refuse_second_entry(self._is_open, self.name)
        try:
            self._api = await self._connected()
        except Unavailable as error:
            raise Unavailable(f"cloud: {error.message}", remedy=error.remedy) from error
        self._run = secrets.token_hex(6)
        self._instances = Instances(self._api, self._run, self._config)
        await anyio.to_thread.run_sync(self._open)
        self._is_open = True
        return self

    def _open(self) -> None:
        """Raises Unavailable."""
        try:
            leftovers.sweep(self._api)
        except ApiError as error:
            raise error.restated(Unavailable, "cloud: the instances cannot be listed") from error
        self._owner = identity() or ""
        self._directory = leftovers.directory(self._run)
        self._note = leftovers.write_note(leftovers.Note(self._api.place, self._run, self._owner))
        self._watcher = Watcher(
            Orders(
                place=self._api.place,
                run=self._run,
                directory=str(self._directory),
                note=str(self._note),
                lifetime=self._config.lifetime,
                settle_seconds=self._config.settle_seconds,
            )
        )
        try:
            self._watcher.wait_ready()
            self._directory.mkdir(mode=0o700)
            given = self._config.identity
            self._key = None if given else make_key(self._directory / "key")
            self._price = self._price_per_hour()
        except BaseException:
            self._close()
            raise

    def _price_per_hour(self) -> tuple[float | None, str]:
        if self._config.price is not None:
            return self._config.price, "the option price"
        with contextlib.suppress(ApiError):
            if (found := self._api.price(self._config.size)) is not None:
                return found, "libcloud's list"
        return None, "not known"

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_open = False
        with anyio.CancelScope(shield=True):
            for name in self._watcher.open:
                with contextlib.suppress(DutyfreeError):
                    await self._end(name)
            left = self._watcher.open
            await anyio.to_thread.run_sync(self._close)
        if left and error is None:
            raise CleanupError(
                f"{len(left)} instances may still run, such as {left[0]}; a process goes on to end them",
                remedy=f"look for the tag {api.RUN}={self._run} at the provider",
            )

    def _close(self) -> None:
        self._watcher.dismiss()
        with contextlib.suppress(OSError):
            remove_tree(str(self._directory))

    # --- Sandboxes ------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def sandbox(
        self,
        recipe: Recipe | None = None,
        *,
        limits: Limits | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> AsyncIterator[InitSandbox | ExecSandbox]:
        require_open(self._is_open)
        sandbox_labels.check(labels)
        recipe, limits = recipe or Recipe(), limited(limits, Limits())
        run_stage.refuse(self.name, recipe, limits, network=("on",))
        begin, body_failed = perf_counter(), False
        async with self._machine(labels or {}) as (name, machine, spans):
            try:
                async with machine.sandbox(recipe, limits=limits) as sandbox:
                    inside = perf_counter() - begin - sum(span.seconds for span in sandbox.spans)
                    names = {"create": "init", "ready": "ready"}
                    sandbox.spans = (
                        *spans,
                        *(Span(names[one.name], inside + one.start, one.seconds) for one in sandbox.spans),
                    )
                    self._ids[name] = sandbox.id
                    try:
                        yield sandbox
                    except BaseException:
                        body_failed = True
                        raise
            except CleanupError:
                if body_failed:  # else the instance ends now, with all that could not be removed
                    raise

    @asynccontextmanager
    async def _machine(self, labels: Mapping[str, str]) -> AsyncIterator[tuple[str, Ssh, tuple[Span, ...]]]:
        """A fresh instance that ssh has reached. Raises CreateError, Exhausted, CleanupError."""
        begin = perf_counter()
        name = f"dutyfree-{self._run}-{next(self._numbers)}"
        host_key = await self._host_key(name)
        try:
            await anyio.to_thread.run_sync(self._watcher.begin, name)
        except BrokenPipeError as error:
            raise CreateError(
                "the process that ends the instances of a killed program is gone",
                remedy="open the substrate again",
            ) from error
        async with closing(_Ending(self, name)):
            try:
                requested = await self._instances.create(self._order(name, labels, host_key))
                created = perf_counter() - begin
                running = await self._instances.until_running(name)
            except ApiError as error:
                raise error.restated(CreateError, "cloud: no instance was created") from error
            started = perf_counter() - begin
            machine = Ssh(self._ssh(running, name, host_key), patience=self._config.boot_seconds)
            async with _reached(machine, requested.id):
                reached = perf_counter() - begin
                yield (
                    name,
                    machine,
                    (
                        Span("create", 0.0, created),
                        Span("start", created, started - created),
                        Span("ssh", started, reached - started),
                    ),
                )

    async def _host_key(self, name: str) -> KeyPair | None:
        """Raises CreateError."""
        if self._config.host_key != "user-data":
            return None
        try:
            made = await anyio.to_thread.run_sync(make_key, self._directory / name)
        except Unavailable as error:
            raise CreateError(error.message, remedy=error.remedy) from error
        kind, key, *_ = made.public.split()
        await anyio.Path(self._known_hosts(name)).write_text(f"{name} {kind} {key}\n")
        return made

    def _known_hosts(self, name: str) -> Path:
        return self._directory / f"{name}.known"

    def _order(self, name: str, labels: Mapping[str, str], host_key: KeyPair | None) -> Order:
        config = self._config
        tags = {
            api.OURS: "1",
            api.NAME: name,
            api.RUN: self._run,
            api.OWNER: self._owner,
            api.DEADLINE: str(int(time.time()) + config.lifetime),
            **{f"{api.LABEL}{label}": value for label, value in labels.items()},
        }
        public = self._key.public if self._key else ""
        return Order(
            name=name,
            image=config.image,
            size=config.size,
            user_data=cloud_config(config.user, public, host_key, config.lifetime),
            tags=tags,
            subnet=config.subnet,
            security_groups=config.security_groups,
            public=config.address == "public",
            arguments=config.arguments,
        )

    def _ssh(self, instance: Instance, name: str, host_key: KeyPair | None) -> SshConfig:
        config = self._config
        options = (
            f"HostKeyAlias={name}",
            f"UserKnownHostsFile={self._known_hosts(name)}",
            "GlobalKnownHostsFile=/dev/null",
            f"StrictHostKeyChecking={'yes' if host_key else 'accept-new'}",
            "IdentitiesOnly=yes",
            *config.ssh_options,
        )
        return SshConfig(
            host=f"{config.user}@{self._instances.address(instance)}",
            port=config.port,
            identity=config.identity or str(self._key.path if self._key else ""),
            jump=config.jump,
            config=config.ssh_config,
            options=options,
            actions=config.actions,
        )

    async def _end(self, name: str) -> None:
        """End an instance, and tell the watcher if it has certainly ended. Raises CleanupError."""
        try:
            if await self._instances.end(name):
                await anyio.to_thread.run_sync(self._watcher.end, name)
                self._ids.pop(name, None)
        except (ApiError, TimeoutError) as error:
            said = str(error) or f"not within {self._config.end_seconds:g} s"
            raise CleanupError(
                f"the instance {name} was not ended: {said}",
                remedy=f"a process goes on when the substrate closes; look for the tag {api.NAME}={name}",
            ) from error

    async def prepare(self, recipe: Recipe | None = None) -> None:
        """Check the recipe: each sandbox runs its stages."""
        require_open(self._is_open)
        run_stage.refuse(self.name, recipe)

    async def sandboxes(self) -> list[str]:
        """The ids of the sandboxes of this opening whose instance exists. Raises CreateError."""
        try:
            found = await self._instances.listed()
        except ApiError as error:
            raise error.restated(CreateError, "cloud: the instances cannot be listed") from error
        return [self._ids.get(one.name, one.name) for one in found if one.state != "ended"]

    async def facts(self) -> dict[str, str]:
        config, (price, source) = self._config, self._price
        facts = {
            "provider": config.provider,
            "region": self._api.place.region,
            "endpoint": config.endpoint or "that of the provider",
            "image": config.image,
            "size": config.size,
            "price_per_hour": "not known" if price is None else f"{price:g}",
            "price_source": source,
            "host_key": config.host_key,
            "lifetime": str(config.lifetime),
        }
        async with self._machine({}) as (_, machine, _):
            return {**await machine.facts(), **facts, "isolation": "a virtual machine"}


class _Ending:
    """Ends an instance: see ``closing``."""

    def __init__(self, cloud: Cloud, name: str) -> None:
        self._cloud = cloud
        self._name = name

    async def close(self) -> None:
        await self._cloud._end(self._name)


@asynccontextmanager
async def _reached(machine: Ssh, instance: str) -> AsyncIterator[None]:
    """Open a machine. Raises CreateError if it cannot be."""
    async with contextlib.AsyncExitStack() as stack:
        try:
            await stack.enter_async_context(machine)
        except Unavailable as error:
            raise CreateError(
                f"the instance {instance} runs, and ssh does not reach it: {error.message}",
                remedy=f"{error.remedy}; does the security group let ssh in, and has the image cloud-init?",
            ) from error
        yield

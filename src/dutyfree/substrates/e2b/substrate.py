"""The substrate ``e2b``: creates sandboxes, keeps them alive, and finds those that dead programs left."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import importlib.util
import os
import secrets
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from time import perf_counter
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self

import anyio
import anyio.to_thread
import msgspec

from dutyfree.contract import Availability, Limits, Recipe, Span, limited
from dutyfree.contract.arguments import check_count
from dutyfree.contract.errors import CreateError, DutyfreeError, ReadyError, Unavailable
from dutyfree.contract.recipe import checked
from dutyfree.contract.substrate import refuse_second_entry, require_open
from dutyfree.engine.host import sandbox_labels
from dutyfree.engine.launcher import network_policy
from dutyfree.engine.layers import run_stage
from dutyfree.substrates import registry
from dutyfree.substrates.hosted.own_server import OwnServer
from dutyfree.substrates.local.lifecycle import closing, require
from dutyfree.substrates.local.owner import identity, is_dead

if TYPE_CHECKING:
    from dutyfree.substrates.e2b.sandbox import E2BSandbox

KEY_VARIABLE = "E2B_API_KEY"
OURS, OWNER, PROCESS = "dutyfree", "dutyfree-owner", "dutyfree-process"
"""Metadata of our sandboxes: that they are ours, of which substrate, and of which process."""


class E2BConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The options of the substrate ``e2b``."""

    template: str = "base"
    """The template of sandboxes whose recipe has no image."""
    api_key: str = ""
    """By default that of E2B_API_KEY."""
    api_url: str = ""
    """The URL of the API. By default that of E2B_API_URL, or E2B's own."""
    sandbox_url: str = ""
    """The URL of the sandboxes. By default that of E2B_SANDBOX_URL, or E2B's own."""
    user: str | None = None
    """The user of commands. By default that of the template."""
    lease: Annotated[int, msgspec.Meta(ge=10, le=86400)] = 300
    """Seconds after which E2B ends the sandboxes of a program that is gone."""
    serve: bool = False
    """Start a dutyfree server on the loopback, and use it instead of E2B: for studies and tests."""

    @property
    def parameters(self) -> dict[str, Any]:
        """The arguments of the SDK."""
        given = {"api_key": self.api_key, "api_url": self.api_url, "sandbox_url": self.sandbox_url}
        return {name: value for name, value in given.items() if value}


class E2B:
    """Sandboxes of E2B."""

    summary: ClassVar[str] = "sandboxes of E2B, or of a server that speaks its wire, through its own SDK"
    Config: ClassVar[type[msgspec.Struct]] = E2BConfig
    name = "e2b"

    def __init__(self, config: E2BConfig) -> None:
        self._config = config
        self._is_open = False
        self._server = OwnServer()
        self._identity = secrets.token_hex(8)
        self._live: dict[str, E2BSandbox] = {}
        self._snapshots: list[str] = []
        self._templates: set[str] = set()

    @classmethod
    async def probe(cls, config: E2BConfig) -> Availability:
        if not await _installed():
            return Availability(
                False,
                "the package e2b is not installed",
                "install it: pip install -e '/path/to/dutyfree[e2b]'",
            )
        if config.serve:
            return await registry.probe("native")
        if not (config.api_key or os.environ.get(KEY_VARIABLE)):
            return Availability(False, "there is no API key", f"set {KEY_VARIABLE}, or use serve=true")
        from e2b import AsyncSandbox

        from dutyfree.substrates.e2b.errors import FOREIGN

        try:
            await AsyncSandbox.list(limit=1, **config.parameters).next_items()
        except FOREIGN as error:
            return Availability(
                False, f"E2B does not answer: {error}", f"check {KEY_VARIABLE} and E2B_API_URL"
            )
        return Availability(True, config.api_url or os.environ.get("E2B_API_URL") or "E2B")

    async def __aenter__(self) -> Self:
        refuse_second_entry(self._is_open, self.name)
        require(await self.probe(self._config), self.name)
        if self._config.serve:
            url = await self._server.start()
            self._config = msgspec.structs.replace(
                self._config, api_key="e2b_any", api_url=url, sandbox_url=url, serve=False
            )
        self._process = await anyio.to_thread.run_sync(lambda: identity() or "")
        self._keeping = asyncio.create_task(self._keep_alive())
        self._is_open = True
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        from e2b import AsyncSandbox

        from dutyfree.substrates.e2b.errors import FOREIGN

        self._is_open = False
        with anyio.CancelScope(shield=True):
            self._keeping.cancel()
            await asyncio.wait([self._keeping])
            for sandbox in list(self._live.values()):
                with contextlib.suppress(DutyfreeError):
                    await sandbox.close()
            for snapshot in self._snapshots:
                with contextlib.suppress(*FOREIGN):
                    await AsyncSandbox.delete_snapshot(snapshot, **self._config.parameters)
            await self._server.end()

    async def _keep_alive(self) -> None:
        while True:
            await asyncio.sleep(self._config.lease / 3)
            await asyncio.gather(*(sandbox.extend() for sandbox in list(self._live.values())))

    @property
    def host_address(self) -> str | None:
        """This host, if the sandboxes are on it."""
        url = self._config.api_url or os.environ.get("E2B_API_URL", "")
        return network_policy.HOST if url.startswith(("http://127.", "http://localhost")) else None

    @property
    def user(self) -> str | None:
        return self._config.user

    @property
    def lease(self) -> int:
        return self._config.lease

    # --- Sandboxes --------------------------------------------------------------------------------------

    @asynccontextmanager
    async def sandbox(
        self,
        recipe: Recipe | None = None,
        *,
        limits: Limits | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> AsyncIterator[E2BSandbox]:
        require_open(self._is_open)
        recipe = checked(recipe or Recipe())
        found = limited(limits, Limits())
        sandbox_labels.check(labels)
        begin = perf_counter()
        async with self._held(await self._created(recipe, found, labels or {}), found) as sandbox:
            created = perf_counter() - begin
            try:
                path = await sandbox.look()
            except DutyfreeError as error:
                raise ReadyError(f"E2B made a sandbox that runs nothing: {error.message}") from error
            ready = perf_counter() - begin
            await run_stage.apply_all(sandbox, recipe)
            sandbox.variables = recipe.variables(sandbox.workdir, path)
            sandbox.spans = (Span("create", 0.0, created), Span("ready", created, ready - created))
            yield sandbox

    @asynccontextmanager
    async def _held(self, box: Any, limits: Limits) -> AsyncIterator[E2BSandbox]:
        from dutyfree.substrates.e2b.sandbox import E2BSandbox

        sandbox = E2BSandbox(self, box, limits)
        self._live[sandbox.id] = sandbox
        try:
            async with closing(sandbox):
                yield sandbox
        finally:
            self._live.pop(sandbox.id, None)

    async def _created(self, recipe: Recipe, limits: Limits, labels: Mapping[str, str]) -> Any:
        """Raises CreateError, Exhausted."""
        from e2b import AsyncSandbox

        from dutyfree.substrates.e2b.errors import mapped
        from dutyfree.substrates.e2b.sandbox import egress

        run_stage.refuse_services(recipe, self.name)
        _refuse(limits)
        with mapped(CreateError, "E2B did not create a sandbox"):
            template = await self._template(recipe.image, limits)
            network = egress(limits.network)
            # Shielded: a sandbox whose creation was cancelled half-way would live until its lease ends.
            making = asyncio.create_task(
                AsyncSandbox.create(
                    template,
                    timeout=self._config.lease,
                    metadata={**labels, OURS: "1", OWNER: self._identity, PROCESS: self._process},
                    allow_internet_access=network.get("allow_internet_access"),
                    network=None if "allow_out" not in network else network,
                    **self._config.parameters,
                )
            )
            try:
                return await asyncio.shield(making)
            except asyncio.CancelledError:
                with anyio.CancelScope(shield=True):
                    await asyncio.wait([making])
                    if not making.cancelled() and making.exception() is None:
                        await making.result().kill()
                raise

    async def _template(self, image: str | None, limits: Limits) -> str:
        """The template for an image with these limits, which is built if it does not exist."""
        from e2b import AsyncTemplate

        from dutyfree.substrates.e2b.sandbox import SNAPSHOT_SCHEME

        if image is not None and image.startswith(SNAPSHOT_SCHEME):
            return image.removeprefix(SNAPSHOT_SCHEME)
        if image is None and limits.cpus is None and limits.memory is None:
            return self._config.template
        parts = (image, self._config.template, limits.cpus, limits.memory)
        name = f"dutyfree-{hashlib.sha256(repr(parts).encode()).hexdigest()[:24]}"
        if name in self._templates:
            return name
        if not await AsyncTemplate.exists(f"{name}:default", **self._config.parameters):

            def definition() -> Any:
                base = AsyncTemplate()
                return base.from_image(image) if image else base.from_template(self._config.template)

            await AsyncTemplate.build(
                await anyio.to_thread.run_sync(definition),  # it reads the caller's source
                name,
                cpu_count=None if limits.cpus is None else int(limits.cpus),
                memory_mb=None if limits.memory is None else limits.memory >> 20,
                **self._config.parameters,
            )
        self._templates.add(name)
        return name

    @asynccontextmanager
    async def forked(self, parent: E2BSandbox, count: int) -> AsyncIterator[Sequence[E2BSandbox]]:
        """Copies of a sandbox, all or none. Raises CreateError."""
        from dutyfree.substrates.e2b.errors import mapped

        check_count(count, 1)
        async with AsyncExitStack() as stack:
            children = []
            with mapped(CreateError, "E2B did not fork the sandbox"):
                made = await parent.box.fork(count=count, timeout=self._config.lease)
            for box in made:
                if not isinstance(box, Exception):
                    child = await stack.enter_async_context(self._held(box, parent.limits))
                    child.follow(parent)
                    children.append(child)
            if failed := [one for one in made if isinstance(one, Exception)]:
                raise CreateError(f"E2B made {len(children)} of {count} forks: {failed[0]}")
            yield tuple(children)

    def keep_snapshot(self, snapshot: str) -> None:
        """Remove a snapshot when the substrate closes."""
        self._snapshots.append(snapshot)

    async def prepare(self, recipe: Recipe | None = None) -> None:
        """Build the template of the recipe's image. Stages run in each sandbox."""
        require_open(self._is_open)
        from dutyfree.substrates.e2b.errors import mapped

        with mapped(CreateError, "E2B did not build the template"):
            await self._template(checked(recipe or Recipe()).image, Limits())

    async def sandboxes(self) -> Sequence[str]:
        """The ids of the sandboxes of this substrate that E2B has."""
        found = await listed({OWNER: self._identity}, self._config.parameters)
        return [one.sandbox_id for one in found]

    async def facts(self) -> dict[str, str]:
        from importlib.metadata import version

        facts = {
            "sdk": await anyio.to_thread.run_sync(version, "e2b"),
            "template": self._config.template,
            "url": self._config.api_url or os.environ.get("E2B_API_URL", "") or "that of the SDK",
        }
        async with self.sandbox() as sandbox:
            return facts | await run_stage.tools(sandbox)


async def _installed() -> bool:
    """Whether the SDK is there, without loading it."""
    return await anyio.to_thread.run_sync(importlib.util.find_spec, "e2b") is not None


def _refuse(limits: Limits) -> None:
    """Raises CreateError for limits that E2B does not have."""
    refused = [name for name in ("pids", "disk") if getattr(limits, name) is not None]
    if limits.cpus is not None and limits.cpus != int(limits.cpus):
        refused.append("cpus to a fraction")
    if refused:
        raise CreateError(f"e2b cannot limit {', '.join(refused)}", remedy="leave it out")


async def listed(metadata: Mapping[str, str], parameters: Mapping[str, Any]) -> list[Any]:
    """All sandboxes with this metadata, running or paused. Raises SubstrateError."""
    from e2b import AsyncSandbox, SandboxQuery

    from dutyfree.substrates.e2b.errors import mapped

    found = []
    with mapped(CreateError, "E2B does not list its sandboxes"):
        pages = AsyncSandbox.list(SandboxQuery(metadata=dict(metadata)), **parameters)
        while pages.has_next:
            found += await pages.next_items()
    return found


async def leftovers(parameters: Mapping[str, Any] | None = None) -> list[str]:
    """The ids of sandboxes whose program is certainly dead. Raises SubstrateError, Unavailable.

    Those of other machines are skipped: their lease ends them.
    """
    if not (parameters or os.environ.get(KEY_VARIABLE)) or not await _installed():
        raise Unavailable("e2b is not set up here")
    found = await listed({OURS: "1"}, parameters or {})
    processes = [(one.sandbox_id, (one.metadata or {}).get(PROCESS, "")) for one in found]
    return await anyio.to_thread.run_sync(
        lambda: [name for name, owner in processes if is_dead(owner, after_reboot=False)]
    )


async def remove(sandbox: str, parameters: Mapping[str, Any] | None = None) -> None:
    """End a leftover. Raises SubstrateError."""
    from e2b import AsyncSandbox

    from dutyfree.contract.errors import CleanupError
    from dutyfree.substrates.e2b.errors import mapped

    with mapped(CleanupError, f"the sandbox {sandbox} of E2B could not be ended"):
        await AsyncSandbox.kill(sandbox, **(parameters or {}))

"""The substrate ``daytona``: creates sandboxes, keeps them alive, and finds those that dead programs left.

It has never been run against Daytona: its tests use the SDK's own models and a local shell. Run
``python -m dutyfree.conformance daytona`` with a key of yours before you rely on it.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import secrets
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from time import perf_counter
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

import anyio
import anyio.to_thread
import msgspec

from dutyfree.contract import Availability, Limits, Recipe, Span, limited
from dutyfree.contract.errors import CleanupError, CreateError, DutyfreeError, ReadyError, Unavailable
from dutyfree.contract.recipe import checked
from dutyfree.contract.substrate import refuse_second_entry, require_open
from dutyfree.engine.host import sandbox_labels
from dutyfree.engine.layers import run_stage
from dutyfree.substrates.local.lifecycle import closing, require
from dutyfree.substrates.local.owner import identity, is_dead

if TYPE_CHECKING:
    from dutyfree.substrates.daytona.sandbox import DaytonaSandbox

KEY_VARIABLE = "DAYTONA_API_KEY"
OURS, OWNER, PROCESS = "dutyfree", "dutyfree-owner", "dutyfree-process"
"""Labels of our sandboxes: that they are ours, of which substrate, and of which process."""
CREATION = "dutyfree-creation"
"""The label that is different for each creation, to find what a failed one left."""


class DaytonaConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The options of the substrate ``daytona``."""

    snapshot: str = ""
    """The snapshot of sandboxes whose recipe has no image. By default that of Daytona."""
    api_key: str = ""
    """By default that of DAYTONA_API_KEY."""
    api_url: str = ""
    """The URL of the API. By default that of DAYTONA_API_URL, or Daytona's own."""
    target: str = ""
    """The region. By default that of DAYTONA_TARGET, or of the account."""
    user: str = ""
    """The user of commands. By default that of the image or snapshot."""
    lease: Annotated[int, msgspec.Meta(ge=60, le=86400)] = 300
    """Seconds without activity after which Daytona deletes a sandbox, rounded up to minutes."""
    create_timeout: Annotated[int, msgspec.Meta(ge=1)] = 600
    """Seconds that a creation may take, with the build of its image."""
    commands: Literal["session", "exec"] = "session"
    """Run commands in sessions, or by the call ``exec``."""


class Daytona:
    """Sandboxes of Daytona. Never run against Daytona: see the module."""

    summary: ClassVar[str] = "sandboxes of Daytona, through its own SDK; never run against Daytona yet"
    Config: ClassVar[type[msgspec.Struct]] = DaytonaConfig
    name = "daytona"

    client: Any
    """The SDK's own client, while the substrate is open."""

    def __init__(self, config: DaytonaConfig) -> None:
        self._config = config
        self._is_open = False
        self._identity = secrets.token_hex(8)
        self._live: dict[str, DaytonaSandbox] = {}

    @classmethod
    async def probe(cls, config: DaytonaConfig) -> Availability:
        if not await _installed():
            remedy = "install it: pip install -e '/path/to/dutyfree[daytona]'"
            return Availability(False, "the package daytona is not installed", remedy)
        if not (config.api_key or os.environ.get(KEY_VARIABLE)):
            return Availability(False, "there is no API key", f"set {KEY_VARIABLE}")
        from daytona import ListSandboxesQuery

        from dutyfree.substrates.daytona.errors import FOREIGN

        try:
            async with opened(config) as client:
                async for _ in client.list(ListSandboxesQuery(limit=1), request_timeout=30):
                    break
        except FOREIGN as error:
            return Availability(
                False, f"Daytona does not answer: {error}", f"check {KEY_VARIABLE} and DAYTONA_API_URL"
            )
        return Availability(True, _url(config) or "Daytona")

    async def __aenter__(self) -> Self:
        refuse_second_entry(self._is_open, self.name)
        require(await self.probe(self._config), self.name)
        self._process = await anyio.to_thread.run_sync(lambda: identity() or "")
        self._clients = contextlib.AsyncExitStack()
        self.client = await self._clients.enter_async_context(opened(self._config))
        self._keeping = asyncio.create_task(self._keep_alive())
        self._is_open = True
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_open = False
        with anyio.CancelScope(shield=True):
            self._keeping.cancel()
            await asyncio.wait([self._keeping])
            for sandbox in list(self._live.values()):
                with contextlib.suppress(DutyfreeError):
                    await sandbox.close()
            await self._clients.aclose()

    async def _keep_alive(self) -> None:
        while True:
            await asyncio.sleep(self._config.lease / 3)
            await asyncio.gather(*(sandbox.extend() for sandbox in list(self._live.values())))

    @property
    def host_address(self) -> str | None:
        """None: the sandboxes are on other machines."""
        return None

    @property
    def user(self) -> str:
        return self._config.user

    @property
    def lease(self) -> int:
        return self._config.lease

    @property
    def plain(self) -> bool:
        """Whether commands run by ``exec`` instead of a session."""
        return self._config.commands == "exec"

    # --- Sandboxes --------------------------------------------------------------------------------------

    @asynccontextmanager
    async def sandbox(
        self,
        recipe: Recipe | None = None,
        *,
        limits: Limits | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> AsyncIterator[DaytonaSandbox]:
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
                raise ReadyError(f"Daytona made a sandbox that runs nothing: {error.message}") from error
            ready = perf_counter() - begin
            await run_stage.apply_all(sandbox, recipe)
            sandbox.variables = recipe.variables(sandbox.workdir, path)
            sandbox.spans = (Span("create", 0.0, created), Span("ready", created, ready - created))
            yield sandbox

    @asynccontextmanager
    async def _held(self, box: Any, limits: Limits) -> AsyncIterator[DaytonaSandbox]:
        from dutyfree.substrates.daytona.sandbox import DaytonaSandbox

        sandbox = DaytonaSandbox(self, box, limits)
        self._live[sandbox.id] = sandbox
        try:
            async with closing(sandbox):
                yield sandbox
        finally:
            self._live.pop(sandbox.id, None)

    async def _created(self, recipe: Recipe, limits: Limits, labels: Mapping[str, str]) -> Any:
        """Raises CreateError, Exhausted."""
        from dutyfree.substrates.daytona.errors import mapped
        from dutyfree.substrates.daytona.request import create_params

        run_stage.refuse_services(recipe, self.name)
        mark = secrets.token_hex(8)
        params = create_params(
            recipe.image,
            limits,
            {**labels, OURS: "1", OWNER: self._identity, PROCESS: self._process, CREATION: mark},
            snapshot=self._config.snapshot,
            user=self._config.user,
            lease=self._config.lease,
        )
        # A task: a creation that is cancelled half-way would leave a sandbox until its lease ends.
        making = asyncio.create_task(self.client.create(params, timeout=self._config.create_timeout))
        with mapped(CreateError, "Daytona did not create a sandbox"):
            try:
                return await asyncio.shield(making)
            except BaseException:
                with anyio.CancelScope(shield=True):
                    await asyncio.wait([making])
                    await self._remove_unfinished(mark)
                raise

    async def _remove_unfinished(self, mark: str) -> None:
        """Delete what a failed creation left, such as a sandbox whose image did not build."""
        from dutyfree.substrates.daytona.errors import FOREIGN
        from dutyfree.substrates.daytona.sandbox import delete

        with contextlib.suppress(CleanupError, CreateError, *FOREIGN):
            for box in await listed(self.client, {CREATION: mark}):
                await delete(self.client, box)

    async def prepare(self, recipe: Recipe | None = None) -> None:
        """Check the recipe. Daytona builds an image with the first sandbox of it, and keeps what it built."""
        require_open(self._is_open)
        checked(recipe or Recipe())

    async def sandboxes(self) -> Sequence[str]:
        """The ids of the sandboxes of this substrate that Daytona has."""
        return [box.id for box in await listed(self.client, {OWNER: self._identity})]

    async def facts(self) -> dict[str, str]:
        from importlib.metadata import version

        facts = {
            "sdk": await anyio.to_thread.run_sync(version, "daytona"),
            "commands": self._config.commands,
            "snapshot": self._config.snapshot or "that of Daytona",
            "target": self._config.target or os.environ.get("DAYTONA_TARGET", "") or "that of the account",
            "url": _url(self._config) or "that of the SDK",
        }
        async with self.sandbox() as sandbox:
            box = sandbox.box
            facts |= {"cpus": str(box.cpu), "memory_gib": str(box.memory), "disk_gib": str(box.disk)}
            return facts | await run_stage.tools(sandbox)


def _url(config: DaytonaConfig) -> str:
    return config.api_url or os.environ.get("DAYTONA_API_URL", "")


async def _installed() -> bool:
    """Whether the SDK is there, without loading it."""
    return await anyio.to_thread.run_sync(importlib.util.find_spec, "daytona") is not None


@asynccontextmanager
async def opened(config: DaytonaConfig) -> AsyncIterator[Any]:
    """A client of the SDK."""
    from daytona import AsyncDaytona
    from daytona import DaytonaConfig as SdkConfig

    given = {"api_key": config.api_key, "api_url": _url(config), "target": config.target}
    # No limit of connections: each running command holds one.
    settings = SdkConfig(
        connection_pool_maxsize=None, **{name: value for name, value in given.items() if value}
    )
    client = await anyio.to_thread.run_sync(AsyncDaytona, settings)  # it reads files
    try:
        yield client
    finally:
        await client.close()


async def listed(client: Any, labels: Mapping[str, str]) -> list[Any]:
    """All sandboxes with these labels, in any state but destroyed. Raises SubstrateError."""
    from daytona import ListSandboxesQuery, SandboxState

    from dutyfree.substrates.daytona.errors import mapped

    with mapped(CreateError, "Daytona does not list its sandboxes"):
        found = [box async for box in client.list(ListSandboxesQuery(labels=dict(labels)))]
    # Checked again, because what is not ours must not be deleted.
    return [
        box
        for box in found
        if box.state != SandboxState.DESTROYED
        and all((box.labels or {}).get(name) == value for name, value in labels.items())
    ]


async def remove_leftovers(dry_run: bool) -> list[tuple[str, str]]:
    """Delete the sandboxes whose program is certainly dead: their ids, each with what failed, or "".

    Those of other machines are skipped: their lease ends them. Raises SubstrateError, Unavailable.
    """
    if not os.environ.get(KEY_VARIABLE) or not await _installed():
        raise Unavailable("daytona is not set up here")
    from dutyfree.substrates.daytona.errors import mapped
    from dutyfree.substrates.daytona.sandbox import delete

    gone = []
    with mapped(CleanupError, "Daytona does not answer"):
        async with opened(DaytonaConfig()) as client:
            boxes = {box.id: box for box in await listed(client, {OURS: "1"})}
            owners = {name: (box.labels or {}).get(PROCESS, "") for name, box in boxes.items()}
            dead = await anyio.to_thread.run_sync(
                lambda: [name for name, of in owners.items() if is_dead(of, after_reboot=False)]
            )
            for name in dead:
                failure = ""
                try:
                    if not dry_run:
                        await delete(client, boxes[name])
                except CleanupError as error:
                    failure = error.message
                gone.append((name, failure))
    return gone

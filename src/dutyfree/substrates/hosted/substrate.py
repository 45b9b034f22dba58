"""The substrate ``hosted``: opens the connection to a server, and keeps the leases of its sandboxes alive."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from types import TracebackType
from typing import Annotated, ClassVar, Self

import anyio
import anyio.to_thread
import msgspec

from dutyfree.contract import Availability, Limits, Recipe, limited
from dutyfree.contract.arguments import check_count
from dutyfree.contract.errors import CreateError, DutyfreeError, UsageError
from dutyfree.contract.recipe import checked
from dutyfree.contract.substrate import refuse_second_entry, require_open
from dutyfree.engine.host import sandbox_labels
from dutyfree.engine.launcher import network_policy
from dutyfree.substrates import registry
from dutyfree.substrates.hosted.connection import Connection, PendingCall, ServerAddress
from dutyfree.substrates.hosted.delay import delayed
from dutyfree.substrates.hosted.own_server import OwnServer
from dutyfree.substrates.hosted.sandbox import HostedSandbox, NetworkedHostedSandbox, send_tree
from dutyfree.substrates.hosted.tree_digests import TreeDigests
from dutyfree.substrates.local.lifecycle import require
from dutyfree.wire import calls
from dutyfree.wire.calls import SandboxInfo
from dutyfree.wire.recipes import WireRecipe, to_wire

URL_VARIABLE, TOKEN_VARIABLE = "DUTYFREE_URL", "DUTYFREE_TOKEN"


class HostedConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The options of the substrate ``hosted``."""

    serve: bool = False
    """Start a server on the loopback for this substrate, which ends with it: for studies and tests."""
    url: str = ""
    """http://HOST:PORT, https://HOST:PORT or unix:PATH. By default that of DUTYFREE_URL."""
    token: str = ""
    """The token of the caller. By default that of DUTYFREE_TOKEN."""
    certificates: str | None = None
    """A file of certificates to trust, instead of those of this machine."""
    lease: Annotated[float, msgspec.Meta(ge=3, le=86400)] = 60.0
    """Seconds after which the server ends the sandboxes of a client that is gone."""
    round_trip: Annotated[float, msgspec.Meta(ge=0, le=10)] = 0.0
    """FOR MEASURING ONLY: seconds of an emulated distance to the server, which must not use TLS."""
    connect_timeout: Annotated[float, msgspec.Meta(gt=0)] = 10.0
    """Seconds that the server has to answer a new connection."""
    reconnect: Annotated[float, msgspec.Meta(ge=0, le=3600)] = 30.0
    """Seconds after a lost connection in which calls wait for a new server. The sandboxes' leases go on."""

    @property
    def address(self) -> ServerAddress:
        """Raises UsageError."""
        url = self.url or os.environ.get(URL_VARIABLE, "")
        if not url:
            raise UsageError(
                "hosted needs the address of a server",
                remedy=f"give url=…, or set {URL_VARIABLE}; start a server with: dutyfree serve",
            )
        return ServerAddress(url)

    def connection(self) -> Connection:
        """Raises UsageError."""
        token = self.token or os.environ.get(TOKEN_VARIABLE, "")
        certificates = None if self.certificates is None else Path(self.certificates)
        return Connection(self.address, token or None, certificates, self.connect_timeout, self.reconnect)


class Hosted:
    """Sandboxes of a dutyfree server."""

    summary: ClassVar[str] = "sandboxes of a dutyfree server, on this or another machine"
    Config: ClassVar[type[msgspec.Struct]] = HostedConfig
    name = "hosted"

    def __init__(self, config: HostedConfig) -> None:
        self._config = config
        self._is_open = False
        self._server = OwnServer()
        self._distance = AsyncExitStack()
        self._live: dict[str, HostedSandbox] = {}
        self._sent: set[str] = set()
        self._digests = TreeDigests()

    @classmethod
    async def probe(cls, config: HostedConfig) -> Availability:
        if config.serve:
            return await registry.probe("native")
        try:
            connection = config.connection()
            try:
                await connection.open()
            finally:
                await connection.close()
        except DutyfreeError as error:
            return Availability(False, error.message, error.remedy)
        return Availability(True, config.address.url)

    @property
    def url(self) -> str:
        """The address of the server. Raises UsageError if there is none yet."""
        return self._config.address.url

    @property
    def host_address(self) -> str | None:
        """This host, if the server is on it."""
        return network_policy.HOST if self._config.address.is_local else None

    async def __aenter__(self) -> Self:
        refuse_second_entry(self._is_open, self.name)
        require(await self.probe(self._config), self.name)
        if self._config.serve:
            url = await self._server.start()
            self._config = msgspec.structs.replace(self._config, url=url, serve=False)
        try:
            if self._config.round_trip:
                await self._go_away()
            self._connection = self._config.connection()
            await self._connection.open()
        except BaseException:
            await self._distance.aclose()
            await self._server.end()
            raise
        self._keeping = asyncio.create_task(self._keep_alive())
        self._is_open = True
        return self

    async def _go_away(self) -> None:
        """Reach the server over an emulated distance. Raises UsageError."""
        address = self._config.address
        host, _, port = address.netloc.rpartition(":")
        if address.tls or not port.isdigit():
            raise UsageError("a distance can only be emulated to an address http://HOST:PORT")
        relay = delayed(host.strip("[]"), int(port), self._config.round_trip)
        near, port_here = await self._distance.enter_async_context(relay)
        self._config = msgspec.structs.replace(self._config, url=f"http://{near}:{port_here}")

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
            await self._connection.close()
            await self._distance.aclose()
            await self._server.end()

    @property
    def _open_connection(self) -> Connection:
        require_open(self._is_open)
        return self._connection

    async def _keep_alive(self) -> None:
        """Extend the leases of all sandboxes, again and again."""
        while True:
            await asyncio.sleep(self._config.lease / 3)
            if self._live:
                wanted = calls.KeepAlive(tuple(self._live), self._config.lease)
                with contextlib.suppress(DutyfreeError):  # the next turn tries again
                    await self._connection.call("keep_alive", "", wanted)

    # --- Sandboxes --------------------------------------------------------------------------------------

    @asynccontextmanager
    async def sandbox(
        self,
        recipe: Recipe | None = None,
        *,
        limits: Limits | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> AsyncIterator[HostedSandbox]:
        """A sandbox in the recipe's state. Raises UsageError, PoolError, StageError and CreateError."""
        infos = await self._create(recipe or Recipe(), limits, labels, None)
        async with self._adopted(infos) as (sandbox,):
            yield sandbox

    @asynccontextmanager
    async def group(
        self,
        recipe: Recipe,
        count: int,
        *,
        limits: Limits | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> AsyncIterator[Sequence[HostedSandbox]]:
        """``count`` sandboxes in the same state, or none. Raises the errors of ``sandbox``."""
        infos = await self._create(recipe, limits, labels, check_count(count, 1))
        async with self._adopted(infos) as sandboxes:
            yield sandboxes

    async def _create(
        self, recipe: Recipe, limits: Limits | None, labels: Mapping[str, str] | None, count: int | None
    ) -> tuple[SandboxInfo, ...]:
        connection = self._open_connection
        sandbox_labels.check(labels)
        wanted = calls.Create(
            secrets.token_hex(16),
            await self._sent_recipe(recipe),
            None if limits is None else limited(limits, Limits()),
            dict(labels or {}),
            self._config.lease,
            count,
        )
        return await self._infos(await connection.begin("create", "", wanted))

    async def _infos(self, creating: PendingCall) -> tuple[SandboxInfo, ...]:
        """Wait for new sandboxes. If the caller is cancelled, those that were made all the same are ended."""
        try:
            infos: tuple[SandboxInfo, ...] = await creating.finish()
        except asyncio.CancelledError:
            if creating.done.done() and creating.done.exception() is None:
                with anyio.CancelScope(shield=True), contextlib.suppress(DutyfreeError):
                    for info in await creating.finish():
                        await self._connection.call("release", info.id)
            raise
        return infos

    @asynccontextmanager
    async def _adopted(self, infos: tuple[SandboxInfo, ...]) -> AsyncIterator[Sequence[HostedSandbox]]:
        """Sandboxes that the server has made for us; the end of the context ends them."""
        sandboxes = []
        for info in infos:
            kind = NetworkedHostedSandbox if info.can_set_network else HostedSandbox
            sandbox = kind(self._connection, info, self._forked, self._config.lease)
            sandboxes.append(sandbox)
            self._live[info.id] = sandbox
        try:
            yield sandboxes
        except BaseException:
            with anyio.CancelScope(shield=True), contextlib.suppress(DutyfreeError):
                await self._end(sandboxes)
            raise
        await self._end(sandboxes)

    @asynccontextmanager
    async def _forked(self, forking: PendingCall) -> AsyncIterator[Sequence[HostedSandbox]]:
        async with self._adopted(await self._infos(forking)) as children:
            yield children

    async def _end(self, sandboxes: Sequence[HostedSandbox]) -> None:
        async with AsyncExitStack() as stack:  # each of them, whatever the others raise
            for sandbox in sandboxes:
                self._live.pop(sandbox.id, None)
                stack.push_async_callback(sandbox.close)

    async def sandboxes(self) -> Sequence[str]:
        """The ids of all sandboxes that this client's tenant has on the server."""
        found: tuple[str, ...] = await self._open_connection.call("sandboxes")
        return found

    # --- Recipes ----------------------------------------------------------------------------------------

    async def prepare(self, recipe: Recipe | None = None) -> None:
        """Prepare the recipe on the server. Raises CreateError."""
        connection = self._open_connection
        await connection.call("prepare", "", await self._sent_recipe(recipe or Recipe()))

    async def prefetch(self, recipes: Iterable[Recipe], count: int = 1) -> None:
        """Prepare ``count`` sandboxes of each recipe, for requests that will come soon."""
        connection = self._open_connection
        sent = tuple([await self._sent_recipe(recipe) for recipe in recipes])
        await connection.call("prefetch", "", calls.Prefetch(sent, count))

    def forget(self, recipe: Recipe) -> None:
        """Forget a snapshot soon."""
        image = checked(recipe).image
        task = asyncio.ensure_future(self._open_connection.call("forget", "", WireRecipe(image)))
        task.add_done_callback(lambda done: done.cancelled() or done.exception())

    async def _sent_recipe(self, recipe: Recipe) -> WireRecipe:
        """The recipe for the wire, after the server has got its files. Raises RecipeError, CreateError."""
        recipe = checked(recipe)
        try:
            wire, files = await anyio.to_thread.run_sync(to_wire, recipe, self._digests.digest)
        except OSError as error:
            raise CreateError(f"a file of the recipe cannot be read: {error}") from error
        unknown = tuple(digest for digest in files if digest not in self._sent)
        if unknown:
            missing = await self._open_connection.call("missing", "", calls.Files(unknown))
            for digest in missing:
                call = await self._open_connection.begin("put_files", "", calls.Files((digest,)))
                await send_tree(call, files[digest])
            self._sent.update(unknown)
        return wire

    async def facts(self) -> dict[str, str]:
        """What the server says about its engine, and where it is."""
        found: dict[str, str] = await self._open_connection.call("facts")
        distance = (
            f", {self._config.round_trip * 1e3:g} ms away (emulated)" if self._config.round_trip else ""
        )
        return {**found, "server": f"{self._config.address.url}{distance}"}

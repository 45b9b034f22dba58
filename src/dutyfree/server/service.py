"""The service of one node: the native engine, the tenants, and the sandboxes that they hold."""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import msgspec

from dutyfree import paths
from dutyfree.contract import NetworkPolicy, Recipe
from dutyfree.contract.errors import RecipeError, Restarting
from dutyfree.engine.exchange.distribution import Distribution
from dutyfree.engine.layers.kept_state import KeptSnapshot
from dutyfree.engine.layers.memory_layers import SNAPSHOT_SCHEME
from dutyfree.engine.store.store import Store
from dutyfree.server import named_snapshots, tenant_rules
from dutyfree.server.admission import Admission
from dutyfree.server.e2b.template_builds import Builds
from dutyfree.server.e2b.template_store import TemplateStore
from dutyfree.server.events import Events
from dutyfree.server.files import TenantFiles
from dutyfree.server.layer_access import LayerAccess
from dutyfree.server.metrics import Metrics
from dutyfree.server.observed import CallObserver
from dutyfree.server.overload import Overload
from dutyfree.server.quotas import Quotas
from dutyfree.server.readiness import Readiness
from dutyfree.server.records import SandboxRecords
from dutyfree.server.sandboxes import REMEMBERED, Sandboxes
from dutyfree.server.tokens import Tokens
from dutyfree.server.turns import Turns
from dutyfree.substrates import registry
from dutyfree.substrates.native import Native, NativeConfig
from dutyfree.wire.recipes import WireRecipe, from_wire, to_wire

DATABASE = "server.sqlite"
"""The file of tokens, and of what each tenant may see."""


class Service:
    """What a server does, apart from HTTP. Made by ``Service.open``."""

    def __init__(
        self,
        native: Native,
        tokens: Tokens,
        templates: TemplateStore,
        state: Path,
        records: SandboxRecords | None = None,
    ) -> None:
        self.native = native
        self.tokens = tokens
        self._records = records
        self.sandboxes = Sandboxes(records)
        self.overload = Overload()
        self.turns = Turns(self.overload)
        self.metrics = Metrics(self.sandboxes, self.overload)
        self.events = Events(self.sandboxes, lambda: native.pool)
        self.admission = Admission(tokens.limits)
        self.calls = CallObserver(self.metrics)
        self.quotas = Quotas()
        self.readiness = Readiness(native, state)
        self.files = TenantFiles(state / "files")
        self.templates = Builds(templates, native, self.recipe)
        self.draining = False
        """Whether no further calls are taken, because another server is about to go on."""
        self._facts: dict[str, str] | None = None
        self._finding_facts = anyio.Lock()
        self.distribution = Distribution(Store())
        self.layer_access = LayerAccess(state / DATABASE, self.distribution.store)
        self._snapshots: dict[str, str] = {}
        """The tenant that owns each snapshot, by the image of its recipe."""

    @staticmethod
    def engine(state: Path, options: dict[str, Any], *, keep: bool = False) -> Native:
        """The engine with these options, not open yet. Raises OptionError."""
        _, config = registry.configure("native", options)
        assert isinstance(config, NativeConfig)
        if "stage_network" not in options:  # also without tokens: the first one may come at any time
            network = tenant_rules.without_host(config.walls, networked=os.geteuid() == 0)
            config = msgspec.structs.replace(config, stage_network=network)
        return Native(config, keeper=state / "launcher.sock" if keep else None)

    @staticmethod
    @asynccontextmanager
    async def open(state: Path, options: dict[str, Any], *, keep: bool = False) -> AsyncIterator[Service]:
        """Open the engine with these options; ``state`` is the directory of tokens and files.

        ``keep``: the next server with the same state goes on with the sandboxes, if this process is killed,
        or the context ends with an error. Its normal end, and Ctrl-C, end them. Raises OptionError,
        Unavailable.
        """
        state.mkdir(parents=True, exist_ok=True, mode=0o700)  # noqa: ASYNC240 (before it serves)
        with contextlib.ExitStack() as stack:
            tokens = stack.enter_context(Tokens(state / DATABASE))
            native = Service.engine(state, options, keep=keep)
            records = None
            if keep:
                records = stack.enter_context(SandboxRecords(state / "sandboxes.sqlite", REMEMBERED))
            async with native:
                templates = stack.enter_context(TemplateStore(state / "templates.sqlite"))
                service = Service(native, tokens, templates, state, records)
                try:
                    service.files.sweep()
                    await service.sandboxes.restore(
                        native.node, service.admission, await service.restore_snapshots()
                    )
                    templates.keep_snapshots(service._snapshots)
                    async with service.overload.watching():
                        yield service
                except Exception:
                    # A port in use, or a wrong certificate, must not cost the sandboxes of a former server.
                    if keep:
                        await service.sandboxes.leave()
                        native.node.launcher.leave()
                    raise
                finally:
                    service.distribution.close()
                    await service.templates.close()
                    if not native.node.launcher.left:
                        await service.sandboxes.close()

    @property
    def networked(self) -> bool:
        """Whether sandboxes have networks of their own."""
        return self.native.node.factory.networked

    @property
    def open_network(self) -> NetworkPolicy:
        """The network of sandboxes whose client leaves it open."""
        return tenant_rules.without_host(self.native.node.isolation, networked=self.networked)

    async def facts(self) -> dict[str, str]:
        """Facts about the engine. To find them takes a sandbox, so they are looked up once."""
        async with self._finding_facts:
            if self._facts is None:
                self._facts = await self.native.facts()
        return self._facts

    def check_draining(self) -> None:
        """Raises Restarting if no further calls are taken."""
        if self.draining:
            raise Restarting("the server is being replaced by another one", remedy="connect again")

    async def drain(self, seconds: float) -> None:
        """Take no further calls, and wait for those that run, at most so long."""
        self.draining = self.readiness.draining = True
        with anyio.move_on_after(seconds):
            await self.metrics.idle()

    async def recipe(self, tenant: str, wanted: WireRecipe) -> Recipe:
        """The recipe that a tenant asks for. Raises RecipeError for what the tenant may not use."""
        image = wanted.image
        if image is not None and image.startswith(SNAPSHOT_SCHEME):
            if self._snapshots.get(image) != tenant:
                image = await named_snapshots.image_of(self.native, tenant, image)
                wanted = msgspec.structs.replace(wanted, image=image)
        elif image is not None:
            options = self.native.node.options
            known = (*options.insecure, *options.mirrors)
            tenant_rules.check_image(tenant, image, known_registries=known)
        if missing := await self.files.missing(tenant, wanted.digests):
            raise RecipeError(f"the server does not have the files {missing[0]}", remedy="send them first")
        recipe = from_wire(wanted, lambda digest: self.files.path(tenant, digest))
        if image is None or not image.startswith(SNAPSHOT_SCHEME):
            node = self.native.node
            prefixes = (await node.recipes.keys.of(recipe))[1:] if recipe.stages else ()
            await self.layer_access.note(tenant, image or node.options.image, prefixes)
        return recipe

    async def restore_snapshots(self) -> list[KeptSnapshot]:
        """Go on with the snapshots of a former server, if its launcher still has them."""
        adopted = []
        if self._records is not None:
            for tenant, kept in await anyio.to_thread.run_sync(self._records.load_snapshots):
                if self.native.node.launcher.is_former:
                    self.native.node.snapshots.adopt(kept)
                    self._snapshots[kept.image] = tenant
                    await self._records.save_snapshot(tenant, kept)
                    adopted.append(kept)
        return adopted

    async def own_snapshot(self, tenant: str, recipe: Recipe) -> WireRecipe:
        """Let the tenant use a snapshot."""
        assert recipe.image is not None
        self._snapshots[recipe.image] = tenant
        if self._records is not None:
            await self._records.save_snapshot(tenant, self.native.node.snapshots.kept(recipe.image))
        return to_wire(recipe)[0]

    async def forget_snapshot(self, tenant: str, wanted: WireRecipe) -> None:
        """Raises RecipeError if the tenant has no such snapshot."""
        if wanted.image is None:
            raise RecipeError("there is no such snapshot")
        if self._snapshots.get(wanted.image) != tenant:
            await named_snapshots.remove(self.native, tenant, wanted.image)
            return
        self.native.forget(Recipe(wanted.image))
        del self._snapshots[wanted.image]
        if self._records is not None:
            self._records.forget_snapshot(wanted.image)


def default_state() -> Path:
    """The directory of tokens and received files, unless the configuration names another one."""
    return paths.state() / "server"

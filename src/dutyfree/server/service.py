"""The service of one node: the native engine, the tenants, and the sandboxes that they hold."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import dutyfree
from dutyfree import paths
from dutyfree.contract import Recipe
from dutyfree.contract.errors import RecipeError
from dutyfree.engine.layers.memory_layers import SNAPSHOT_SCHEME
from dutyfree.server import tenant_rules
from dutyfree.server.admission import Admission
from dutyfree.server.files import TenantFiles
from dutyfree.server.metrics import Metrics
from dutyfree.server.observed import CallObserver
from dutyfree.server.quotas import Quotas
from dutyfree.server.readiness import Readiness
from dutyfree.server.sandboxes import Sandboxes
from dutyfree.server.tokens import Tokens
from dutyfree.substrates.native import Native
from dutyfree.wire.recipes import WireRecipe, from_wire, to_wire


class Service:
    """What a server does, apart from HTTP. Made by ``Service.open``."""

    def __init__(self, native: Native, tokens: Tokens, state: Path) -> None:
        self.native = native
        self.tokens = tokens
        self.sandboxes = Sandboxes()
        self.metrics = Metrics(self.sandboxes)
        self.admission = Admission(tokens.limits)
        self.calls = CallObserver(self.metrics)
        self.quotas = Quotas()
        self.readiness = Readiness(native, state)
        self.files = TenantFiles(state / "files")
        self._snapshots: dict[str, str] = {}
        """The tenant that owns each snapshot, by the image of its recipe."""

    @staticmethod
    @asynccontextmanager
    async def open(state: Path, options: dict[str, Any]) -> AsyncIterator[Service]:
        """Open the engine with these options; ``state`` is the directory of tokens and files.

        Raises OptionError, Unavailable.
        """
        state.mkdir(parents=True, exist_ok=True, mode=0o700)  # noqa: ASYNC240 (before it serves)
        with Tokens(state / "server.sqlite") as tokens:
            if tokens.exist():  # stages are commands of tenants, too
                options = {"stage_network": tenant_rules.stage_network(), **options}
            async with dutyfree.open("native", **options) as native:
                service = Service(native, tokens, state)
                try:
                    yield service
                finally:
                    await service.sandboxes.close()

    @property
    def networked(self) -> bool:
        """Whether sandboxes have networks of their own."""
        return self.native.node.factory.networked

    async def recipe(self, tenant: str, wanted: WireRecipe) -> Recipe:
        """The recipe that a tenant asks for. Raises RecipeError for what the tenant may not use."""
        image = wanted.image
        if image is not None and image.startswith(SNAPSHOT_SCHEME):
            if self._snapshots.get(image) != tenant:
                raise RecipeError(f"there is no snapshot {image[:80]!r}")
        elif image is not None:
            options = self.native.node.options
            known = (*options.insecure, *options.mirrors)
            tenant_rules.check_image(tenant, image, known_registries=known)
        if missing := await self.files.missing(tenant, wanted.digests):
            raise RecipeError(f"the server does not have the files {missing[0]}", remedy="send them first")
        return from_wire(wanted, lambda digest: self.files.path(tenant, digest))

    def own_snapshot(self, tenant: str, recipe: Recipe) -> WireRecipe:
        """Let the tenant use a snapshot."""
        assert recipe.image is not None
        self._snapshots[recipe.image] = tenant
        return to_wire(recipe)[0]

    def forget_snapshot(self, tenant: str, wanted: WireRecipe) -> None:
        """Raises RecipeError if the tenant has no such snapshot."""
        if wanted.image is None or self._snapshots.get(wanted.image) != tenant:
            raise RecipeError("there is no such snapshot")
        self.native.forget(Recipe(wanted.image))
        del self._snapshots[wanted.image]


def default_state() -> Path:
    """The directory of tokens and received files, unless the configuration names another one."""
    return paths.state() / "server"

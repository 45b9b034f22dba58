"""The images of pods: the study's, and those of recipes on it, which are pushed to a registry."""

from __future__ import annotations

import logging
import os
from collections import defaultdict
from collections.abc import Awaitable, Callable
from functools import partial

import anyio
import anyio.to_thread
from msgspec import structs

from dutyfree import study_image as study
from dutyfree.contract import Recipe
from dutyfree.contract.errors import CreateError, Unavailable
from dutyfree.engine.node import NativeConfig, Node
from dutyfree.engine.store.store import Store
from dutyfree.substrates.docker import export
from dutyfree.substrates.kubernetes import registry
from dutyfree.substrates.kubernetes.api import Api
from dutyfree.substrates.kubernetes.config import KubernetesConfig

_log = logging.getLogger(__name__)


class Images:
    """Knows which image a recipe's pods have, and what is left to do in each pod.

    The stages of a recipe on the study's image become an image, as its users would build one, if the native
    engine runs on this machine. Otherwise, on other images, and with secrets, which must not reach a
    registry, they run in each pod.
    """

    def __init__(self, api: Api, config: KubernetesConfig) -> None:
        self._api = api
        self._config = config
        self._looking = anyio.Lock()
        self._host: str | None = None
        """The registry; "" if there is none."""
        self._base: study.StudyImage | None = None
        self._node: Node | None = None
        self._lacks: str | None = None
        """Why the native engine does not build stages here; "" if it does; None if nobody has looked."""
        self._locks: defaultdict[str, anyio.Lock] = defaultdict(anyio.Lock)
        self._pushed: dict[str, str] = {}
        """References of pushed images, by the key of their recipe; "" is the study's."""

    async def builds(self) -> str:
        """Where the stages of recipes on the study's image run. Raises CreateError."""
        if not await self._registry():
            return "stages in each pod"
        await self._engine()
        return f"stages in each pod: {self._lacks}" if self._lacks else "images of the registry"

    def has_init(self, image: str) -> bool:
        """Whether the image has our init."""
        return image in self._pushed.values()

    async def of(self, recipe: Recipe) -> tuple[str, Recipe]:
        """The reference of the image, as the cluster pulls it, and the rest of the recipe.

        Raises CreateError, StageError.
        """
        wanted = recipe.image or self._config.image
        if wanted != study.REFERENCE or not await self._registry():
            return wanted, recipe
        base = await self._once("", partial(self._push, ()))
        if not recipe.stages or any(stage.secrets for stage in recipe.stages):
            return base, recipe
        if (node := await self._engine()) is None:
            return base, recipe
        key = (await node.recipes.keys.of(recipe))[-1]
        return await self._once(key, partial(self._built, node, recipe)), structs.replace(recipe, stages=())

    async def _registry(self) -> str:
        async with self._looking:
            if self._host is None:
                host = self._config.registry or await registry.announced(self._api)
                if host:
                    try:
                        self._base = await study.build(choose=False)
                    except Unavailable as error:
                        raise CreateError(error.message, remedy=error.remedy) from error
                self._host = host
            return self._host

    async def _engine(self) -> Node | None:
        """The engine that builds stages; None if it cannot keep what they wrote."""
        async with self._looking:
            if self._lacks is None:
                self._lacks = await self._open()
                if self._lacks:
                    _log.warning("stages run in each pod: %s", self._lacks)
            return self._node

    async def _open(self) -> str:
        """Open the engine. Returns why it cannot build stages, or ""."""
        assert self._base is not None
        if os.geteuid() != 0:
            return "building an image needs root"
        try:
            node = await Node.open(NativeConfig(image=str(self._base.tar), ready=0), export.bring)
        except Unavailable as error:
            return error.message
        if node.builder.store is None:
            await node.close()
            return "the native engine keeps no layers on disk here"
        self._node = node
        return ""

    async def _once(self, key: str, make: Callable[[], Awaitable[str]]) -> str:
        """The image of a key, made by the first who wants it. One image does not wait for another."""
        if key not in self._pushed:
            async with self._locks[key]:
                if key not in self._pushed:
                    self._pushed[key] = await make()
        return self._pushed[key]

    async def _built(self, node: Node, recipe: Recipe) -> str:
        """Build the stages of a recipe, and push the image."""
        state = await node.recipes.on_disk(structs.replace(recipe, image=None))
        if state.origin.trees != state.trees:
            raise CreateError("the layers of the recipe cannot be written to disk", remedy="see the log")
        return await self._push(state.origin.keys)

    async def _push(self, keys: tuple[str, ...]) -> str:
        assert self._host
        assert self._base is not None
        return await anyio.to_thread.run_sync(registry.push, self._host, self._base, Store(), keys)

    async def close(self) -> None:
        if self._node is not None:
            await self._node.close()

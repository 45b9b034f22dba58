"""The images of pods: the study's, and those of recipes on it, which are pushed to a registry."""

from __future__ import annotations

import os

import anyio
import anyio.to_thread
import msgspec

from dutyfree import study_image as study
from dutyfree.contract import Recipe
from dutyfree.contract.errors import CreateError, Unavailable
from dutyfree.engine.launcher import requirements
from dutyfree.engine.launcher.client import BINARY
from dutyfree.engine.node import NativeConfig, Node
from dutyfree.engine.store.store import Store
from dutyfree.substrates.docker import export
from dutyfree.substrates.kubernetes import registry
from dutyfree.substrates.kubernetes.api import Api
from dutyfree.substrates.kubernetes.config import KubernetesConfig


class Images:
    """Knows which image a recipe's pods have, and what is left to do in each pod.

    The stages of a recipe on the study's image become an image, as its users would build one, if the native
    engine runs on this machine. Otherwise, on other images, and with secrets, which must not reach a
    registry, they run in each pod.
    """

    def __init__(self, api: Api, config: KubernetesConfig) -> None:
        self._api = api
        self._config = config
        self._lock = anyio.Lock()
        self._host: str | None = None
        """The registry; "" if there is none."""
        self._base: study.StudyImage | None = None
        self._node: Node | None = None
        self._has_engine = False
        self._pushed: dict[str, str] = {}
        """References of pushed images, by the key of their recipe; "" is the study's."""

    @property
    def builds(self) -> str:
        """Where the stages of recipes on the study's image run."""
        return "images of the registry" if self._host and self._has_engine else "stages in each pod"

    def has_init(self, image: str) -> bool:
        """Whether the image has our init."""
        return image in self._pushed.values()

    async def of(self, recipe: Recipe) -> tuple[str, Recipe]:
        """The reference of the image, as the cluster pulls it, and the rest of the recipe.

        Raises CreateError, StageError.
        """
        wanted = recipe.image or self._config.image
        if wanted != study.REFERENCE:
            return wanted, recipe
        async with self._lock:
            if self._host is None:
                await self._look()
            if not self._host:
                return wanted, recipe
            if "" not in self._pushed:
                self._pushed[""] = await self._push(())
            if not self._has_engine or not recipe.stages or any(stage.secrets for stage in recipe.stages):
                return self._pushed[""], recipe
            return await self._built(recipe), msgspec.structs.replace(recipe, stages=())

    async def _look(self) -> None:
        host = self._config.registry or await registry.announced(self._api)
        if host:
            try:
                self._base = await study.build(choose=False)
            except Unavailable as error:
                raise CreateError(error.message, remedy=error.remedy) from error
            found = await anyio.to_thread.run_sync(requirements.check, BINARY)
            self._has_engine = os.geteuid() == 0 and found.available
        self._host = host

    async def _built(self, recipe: Recipe) -> str:
        """The image of a recipe's stages."""
        if self._node is None:
            assert self._base is not None
            self._node = await Node.open(NativeConfig(image=str(self._base.tar), ready=0), export.bring)
        recipes = self._node.recipes
        key = (await recipes.keys.of(recipe))[-1]
        if key not in self._pushed:
            state = await recipes.on_disk(msgspec.structs.replace(recipe, image=None))
            if state.origin.trees != state.trees:
                raise CreateError("the layers of the recipe cannot be written to disk", remedy="see the log")
            self._pushed[key] = await self._push(state.origin.keys)
        return self._pushed[key]

    async def _push(self, keys: tuple[str, ...]) -> str:
        assert self._host
        assert self._base is not None
        return await anyio.to_thread.run_sync(registry.push, self._host, self._base, Store(), keys)

    async def close(self) -> None:
        if self._node is not None:
            await self._node.close()

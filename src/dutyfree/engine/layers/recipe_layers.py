"""From a recipe to the layers that sandboxes start from: open its image, build its missing stages."""

from __future__ import annotations

from dutyfree.contract import Recipe
from dutyfree.contract.errors import CreateError
from dutyfree.engine.layers.build import FilesChanged, LayerBuilder
from dutyfree.engine.layers.build_request import BuildTrace
from dutyfree.engine.layers.keys import RecipeKeys
from dutyfree.engine.layers.open_image import OpenImages
from dutyfree.engine.layers.start_state import StartState
from dutyfree.engine.layers.urgency import Urgency


class RecipeLayers:
    """The layers of all recipes that one node has used."""

    def __init__(self, images: OpenImages, builder: LayerBuilder, default_image: str) -> None:
        self.keys = RecipeKeys()
        self.images = images
        self.builder = builder
        self._default_image = default_image

    async def state(
        self, recipe: Recipe, *, urgency: Urgency | None = None, trace: BuildTrace | None = None
    ) -> StartState:
        """The state in which the recipe's sandboxes start. Each prefix is built once, by the first request.

        Raises StageError and CreateError.
        """
        urgency, trace = urgency or Urgency(background=False), trace or BuildTrace()
        image = recipe.image or self._default_image
        trace.image = self.images.is_open(image)
        if not recipe.stages:
            return await self.images.open(recipe.image)
        known = self.keys.known(recipe)
        if known is not None and (state := self.builder.prefixes.get(known[-1])) is not None:
            trace.found = trace.number = len(recipe.stages)
            return state
        below = await self.images.open(recipe.image)
        keys = await self.keys.of(recipe)
        identity = self.images.identity(image)
        try:
            return await self.builder.state(recipe, keys, below, identity, urgency, trace)
        except FilesChanged as error:
            self.keys.forget(error.key)
            raise

    async def on_disk(self, recipe: Recipe) -> StartState:
        """The same, after all its layers were written to the store. Some have no place there.

        Raises StageError, and CreateError, also without root: then there are no layers on disk.
        """
        if self.builder.store is None:
            raise CreateError("only root with full isolation keeps layers on disk", remedy="run as root")
        state = await self.state(recipe)
        if recipe.stages and state.trees != state.origin.trees:
            keys = await self.keys.of(recipe)
            await self.builder.wait_until_stored(keys[-1])
            state = await self.state(recipe)
        return state

    def seconds(self, recipe: Recipe) -> list[float]:
        """Seconds that the image and then each stage took when they were last made; 0 if that is unknown."""
        opening = self.images.seconds.get(recipe.image or self._default_image, 0.0)
        return [opening, *(self.builder.seconds.get(key, 0.0) for key in self._stage_keys(recipe))]

    def sizes(self, recipe: Recipe) -> list[int]:
        """Bytes of the layer of each stage, after a 0 for the image."""
        return [0, *(self.builder.sizes.get(key, 0) for key in self._stage_keys(recipe))]

    def forget(self, key: str) -> None:
        """Drop the layer of this prefix from memory."""
        self.builder.prefixes.forget(key)

    def _stage_keys(self, recipe: Recipe) -> tuple[str, ...]:
        return (self.keys.known(recipe) or ())[1:]

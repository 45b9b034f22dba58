"""Recipes as the scheduler knows them: their keys are worked out once, beside the event loop."""

from __future__ import annotations

from collections import OrderedDict

import anyio.to_thread

from dutyfree.contract import Recipe
from dutyfree.engine.scheduling.values import Chain
from dutyfree.errors import CreateError


class Chains:
    """Those of the recipes that were asked for last. A recipe's files are read when it is first used."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._known: OrderedDict[int, Chain] = OrderedDict()

    async def of(self, recipe: Recipe) -> Chain:
        """Raises CreateError if one of its files cannot be read."""
        known = self._known.get(id(recipe))
        if known is None:
            try:
                reads = any(stage.files for stage in recipe.stages)
                known = await anyio.to_thread.run_sync(Chain.of, recipe) if reads else Chain.of(recipe)
            except OSError as failed:
                raise CreateError(f"the recipe names {failed.filename}: {failed.strerror}") from failed
            self._known[id(recipe)] = known  # which keeps the recipe, so that its id stays its own
            if len(self._known) > self._most:
                self._known.popitem(last=False)
        return known

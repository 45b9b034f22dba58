"""Recipes as the scheduler knows them: worked out once."""

from __future__ import annotations

from dutyfree.contract import Recipe
from dutyfree.contract.recipe import checked
from dutyfree.engine.layers.keys import RecipeCache, RecipeKeys
from dutyfree.engine.pool.scheduler.values import Chain


class ChainCache:
    """Those of the recipes that were asked for last."""

    def __init__(self, keys: RecipeKeys, most: int) -> None:
        self._keys = keys
        self._known: RecipeCache[tuple[tuple[str, ...] | None, Chain]] = RecipeCache(most)
        """With the keys, where files may make them others."""

    async def of(self, recipe: Recipe) -> Chain:
        """Raises CreateError if one of its files cannot be read, and RecipeError for what is no recipe."""
        known = self._known.get(checked(recipe))
        if known is not None and known[0] is None:
            return known[1]
        keys = await self._keys.of(recipe)
        if known is None or known[0] is not keys:
            chain = Chain.of(self._keys.fixed(recipe, keys), keys)
            known = self._known.put(recipe, (keys if recipe.reads_files else None, chain))
        return known[1]

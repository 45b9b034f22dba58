"""Content keys of recipes, and a cache of values by recipe."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeAlias, TypeVar

import anyio.to_thread
import msgspec

from dutyfree.contract import Recipe
from dutyfree.contract.errors import CreateError

CACHED_RECIPES = 20_000
RECENT_OBJECTS = 256

Identity: TypeAlias = Recipe | int

T = TypeVar("T")


def identity(recipe: Recipe) -> Identity:
    """Equal recipes have the same identity. One that copies files in is identified by its object.

    By the time that someone makes an equal recipe, its files may have changed.
    """
    return id(recipe) if recipe.reads_files else recipe


class RecipeCache(Generic[T]):
    """A value for each of the most recently used recipes."""

    def __init__(self, most: int = CACHED_RECIPES) -> None:
        self._most = most
        self._known: OrderedDict[Identity, tuple[Recipe, T]] = OrderedDict()
        self._recent: dict[int, tuple[Recipe, T]] = {}
        """By the id of the object: the hash of a recipe takes microseconds. Holds the object, so that no
        other gets its id."""

    def get(self, recipe: Recipe) -> T | None:
        if (recent := self._recent.get(id(recipe))) is not None:
            return recent[1]
        known = self._known.get(name := identity(recipe))
        if known is None:
            return None
        self._known.move_to_end(name)
        if len(self._recent) >= RECENT_OBJECTS:
            self._recent.clear()
        self._recent[id(recipe)] = recipe, known[1]
        return known[1]

    def put(self, recipe: Recipe, value: T) -> T:
        self._recent.pop(id(recipe), None)
        self._known[identity(recipe)] = recipe, value
        if len(self._known) > self._most:
            self._known.popitem(last=False)
        return value

    def drop(self, is_stale: Callable[[T], bool]) -> None:
        """Remove all values for which ``is_stale`` is true."""
        self._recent.clear()
        for name in [name for name, (_, value) in self._known.items() if is_stale(value)]:
            del self._known[name]


class RecipeKeys:
    """Content keys of recipes. The files that a recipe copies in are read once, on its first use."""

    def __init__(self) -> None:
        self._keys: RecipeCache[tuple[str, ...]] = RecipeCache()
        self._fixed: RecipeCache[tuple[str, ...]] = RecipeCache()
        self._cuts: RecipeCache[dict[int, Recipe]] = RecipeCache()

    def known(self, recipe: Recipe) -> tuple[str, ...] | None:
        """The keys of all its prefixes, the image first; None if files must be read for them."""
        if recipe.reads_files:
            return self._fixed.get(recipe) or self._keys.get(recipe)
        return self._keys.get(recipe) or self._keys.put(recipe, recipe.keys())

    async def of(self, recipe: Recipe) -> tuple[str, ...]:
        """The keys of all its prefixes. Raises CreateError if a file cannot be read."""
        known = self.known(recipe)
        if known is None:
            try:
                read = await anyio.to_thread.run_sync(recipe.keys)
            except OSError as error:
                raise CreateError(f"the recipe names {error.filename}: {error.strerror}") from error
            known = self.known(recipe) or self._keys.put(recipe, read)  # another task may have been faster
        return known

    def fixed(self, recipe: Recipe, keys: tuple[str, ...]) -> Recipe:
        """A copy of the recipe that keeps these keys, even if its files change."""
        if not recipe.reads_files:
            return recipe
        same = msgspec.structs.replace(recipe)
        self._fixed.put(same, keys)
        return same

    def forget(self, key: str) -> None:
        """The files of this prefix have changed: read those of each recipe with it again on the next use."""
        self._keys.drop(lambda keys: key in keys)

    def cut(self, recipe: Recipe, depth: int) -> Recipe:
        """The recipe of a sandbox at this depth (1 is the image alone).

        It has the recipe's variables only if a service runs with them; commands get them when the sandbox is
        handed out. A cut of a fixed recipe keeps its keys.
        """
        if depth > len(recipe.stages) and (recipe.services or not (recipe.env or recipe.path)):
            return recipe
        cuts = self._cuts.get(recipe)
        if cuts is None:
            cuts = self._cuts.put(recipe, {})
        if depth not in cuts:
            cuts[depth] = Recipe(recipe.image, recipe.stages[: depth - 1])
        if recipe.reads_files and (keys := self._fixed.get(recipe)) is not None:
            self._fixed.put(cuts[depth], keys[:depth])
        return cuts[depth]

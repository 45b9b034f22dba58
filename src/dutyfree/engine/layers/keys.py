"""Which recipes are the same to an open substrate and its pool, and the content keys of each."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeAlias, TypeVar

import anyio.to_thread
import msgspec

from dutyfree.contract import Recipe
from dutyfree.contract.errors import CreateError

KNOWN = 20_000
"""Of so many recipes is remembered what was worked out."""
LATELY = 256
"""So many of them are also known by their objects."""

Identity: TypeAlias = Recipe | int

T = TypeVar("T")


def identity(recipe: Recipe) -> Identity:
    """Those that say the same are one; but one that copies files in is only what its own object is.

    Its files may be others by the time that somebody writes the same again.
    """
    return id(recipe) if recipe.reads_files else recipe


class RecipeCache(Generic[T]):
    """Something of each of the recipes that were used last."""

    def __init__(self, most: int = KNOWN) -> None:
        self._most = most
        self._known: OrderedDict[Identity, tuple[Recipe, T]] = OrderedDict()
        self._lately: dict[int, tuple[Recipe, T]] = {}
        """By objects, which they keep, so that their ids stay their own: a hash takes some microseconds."""

    def get(self, recipe: Recipe) -> T | None:
        if (lately := self._lately.get(id(recipe))) is not None:
            return lately[1]
        known = self._known.get(name := identity(recipe))
        if known is None:
            return None
        self._known.move_to_end(name)
        if len(self._lately) >= LATELY:
            self._lately.clear()
        self._lately[id(recipe)] = recipe, known[1]
        return known[1]

    def put(self, recipe: Recipe, value: T) -> T:
        self._lately.pop(id(recipe), None)
        self._known[identity(recipe)] = recipe, value
        if len(self._known) > self._most:
            self._known.popitem(last=False)
        return value

    def drop(self, is_stale: Callable[[T], bool]) -> None:
        self._lately.clear()
        for name in [name for name, (_, value) in self._known.items() if is_stale(value)]:
            del self._known[name]


class RecipeKeys:
    """Content keys of recipes; the files that one copies in are read once, when it is first wanted."""

    def __init__(self) -> None:
        self._keys: RecipeCache[tuple[str, ...]] = RecipeCache()
        self._fixed: RecipeCache[tuple[str, ...]] = RecipeCache()
        self._cuts: RecipeCache[dict[int, Recipe]] = RecipeCache()

    def known(self, recipe: Recipe) -> tuple[str, ...] | None:
        """Those of all its prefixes, from the image alone on, if nothing has to be read for them."""
        if recipe.reads_files:
            return self._fixed.get(recipe) or self._keys.get(recipe)
        return self._keys.get(recipe) or self._keys.put(recipe, recipe.keys())

    async def of(self, recipe: Recipe) -> tuple[str, ...]:
        """The same for every recipe. Raises CreateError if a file cannot be read."""
        known = self.known(recipe)
        if known is None:
            try:
                read = await anyio.to_thread.run_sync(recipe.keys)
            except OSError as error:
                raise CreateError(f"the recipe names {error.filename}: {error.strerror}") from error
            known = self.known(recipe) or self._keys.put(recipe, read)  # another may have been quicker
        return known

    def fixed(self, recipe: Recipe, keys: tuple[str, ...]) -> Recipe:
        """One that says the same, and means these keys, whatever becomes of the files."""
        if not recipe.reads_files:
            return recipe
        same = msgspec.structs.replace(recipe)
        self._fixed.put(same, keys)
        return same

    def forget(self, key: str) -> None:
        """The files of this prefix are others now: who asks again for a recipe that begins so means those."""
        self._keys.drop(lambda keys: key in keys)

    def cut(self, recipe: Recipe, depth: int) -> Recipe:
        """What a sandbox at this depth is of; variables only where a service runs with them.

        Those of commands are given to it when it is handed out. Of a fixed recipe, it has the keys.
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

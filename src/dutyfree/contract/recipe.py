"""Recipes: the state in which a sandbox starts, and the content keys of its prefixes (docs/recipes.md)."""

from __future__ import annotations

import os
import posixpath
from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

import msgspec

from dutyfree.contract.errors import RecipeError
from dutyfree.contract.services import Service
from dutyfree.contract.stage import Stage, as_tuple

IsolationLevel: TypeAlias = Literal["full", "none"]
"""Whether sandboxes are isolated from the host and from each other."""


class Recipe(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The state in which a sandbox starts: an image, then stages, then services; and environment variables.

    Every prefix has a content key, which includes the contents of files at the time of the computation.
    Equality and hash compare files by their paths.

    Raises RecipeError for fields of a wrong type, for two services with one name, and for variables that no
    process can have.
    """

    image: str | None = None
    """None means the substrate's default: the host for bare and native, the study's image for Docker."""
    stages: tuple[Stage, ...] = ()
    services: tuple[Service, ...] = ()
    """They start one after the other, after the last stage."""
    env: Mapping[str, str] = {}
    """Variables of every command and service. They override the image's, and those of a call override them.

    Stages do not get them, so recipes that differ only in variables share all layers.
    """
    path: tuple[str, ...] = ()
    """Directories to put before PATH; relative ones start at the working directory."""
    isolation: Literal["full"] | None = None
    """``full``: its code is not trusted, so a substrate that does not isolate raises CreateError.

    It is in no content key. Recipes that differ only in this share all layers.
    """

    def __post_init__(self) -> None:
        if not isinstance(self.image, str | None):
            raise RecipeError(f"image must be a string, not {self.image!r}", remedy="write image=str(…)")
        msgspec.structs.force_setattr(self, "stages", as_tuple("stages", self.stages, Stage))
        msgspec.structs.force_setattr(self, "services", as_tuple("services", self.services, Service))
        names = [service.name for service in self.services]
        if len(names) > len(set(names)):
            raise RecipeError(f"two services have the same name: {', '.join(sorted(names))}")
        msgspec.structs.force_setattr(self, "env", _variables(self.env))
        msgspec.structs.force_setattr(self, "path", _directories(self.path))
        if self.isolation not in (None, "full"):
            raise RecipeError(
                f'isolation must be "full" or None, not {self.isolation!r}',
                remedy="a recipe can only ask for isolation; to go without, open the substrate without it",
            )

    def __hash__(self) -> int:
        variables = frozenset(self.env.items())
        return hash((self.image, self.stages, self.services, variables, self.path, self.isolation))

    @property
    def reads_files(self) -> bool:
        """Whether its content keys depend on files of this machine."""
        return any(stage.files for stage in self.stages)

    def variables(self, workdir: str, path: str) -> dict[str, str]:
        """The variables to add to the image's environment, in which PATH is ``path``."""
        if not self.path:
            return dict(self.env)
        first = [posixpath.normpath(posixpath.join(workdir, directory)) for directory in self.path]
        rest = self.env.get("PATH", path)
        return {**self.env, "PATH": ":".join([*first, rest] if rest else first)}

    def key(self, length: int | None = None) -> str:
        """The content key of the first ``length`` stages; by default of the whole recipe."""
        if length is not None:
            return Recipe(self.image, self.stages[:length]).keys()[-1]
        return self.served_key(self.keys()[-1])

    def keys(self) -> tuple[str, ...]:
        """The content keys of all prefixes, from the image alone to all stages. Reads each file once."""
        import hashlib

        found = [hashlib.sha256(repr(self.image).encode()).hexdigest()[:32]]
        for stage in self.stages:
            found.append(stage.key(found[-1]))
        return tuple(found)

    def served_key(self, prefix: str) -> str:
        """The content key of the whole recipe, from the key of all its stages."""
        import hashlib

        if not (self.services or self.env or self.path):
            return prefix
        services = [service.identity() for service in self.services]
        parts = (prefix, services, sorted(self.env.items()), self.path)
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


def checked(recipe: object) -> Recipe:
    """Validate an untyped argument. Raises RecipeError."""
    if isinstance(recipe, Recipe):
        return recipe
    remedy = f"write Recipe({recipe!r})" if isinstance(recipe, str) else "write Recipe(…)"
    raise RecipeError(f"{recipe!r} is not a recipe", remedy=remedy)


def _variables(env: Any) -> dict[str, str]:
    """Check and copy environment variables. Raises RecipeError."""
    if not isinstance(env, Mapping):
        raise RecipeError(
            f"env must be a table of names and values, not {env!r}", remedy='write env={"NAME": "value"}'
        )
    for name, value in env.items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise RecipeError(f"the variable {name!r} must be a string, not {value!r}")
        if not name or "=" in name or not _encodable(name):
            raise RecipeError(f"{name!r} is not a valid name of a variable")
        if not _encodable(value):
            raise RecipeError(f"the variable {name} has a value that no process can have: {value!r}")
    return dict(env)


def _directories(path: Any) -> tuple[str, ...]:
    """Raises RecipeError."""
    found = as_tuple("path", path, str)
    for directory in found:
        if not directory or ":" in directory or not _encodable(directory):
            raise RecipeError(f"{directory!r} is not a valid directory of PATH", remedy="give one at a time")
    return found


def _encodable(text: str) -> bool:
    """Whether a process can get this text as an argument or a variable."""
    try:
        return b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:
        return False

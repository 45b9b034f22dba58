"""Recipes on the wire. The files of a stage travel apart from it: the recipe names them by their digest.

So nothing that a client sends is a path of the server's host, and files that the server has are not sent
again.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal

import msgspec

from dutyfree.contract import Recipe, Stage
from dutyfree.contract.errors import RecipeError
from dutyfree.contract.services import Service
from dutyfree.contract.stage import StageKind, tree_digest

DIGEST = re.compile(r"[0-9a-f]{64}")


class WireStage(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """A stage; ``files`` has a digest for each path in the sandbox."""

    kind: StageKind
    commands: tuple[str | tuple[str, ...], ...] = ()
    files: dict[str, str] = {}


class WireRecipe(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """A recipe without files of its own."""

    image: str | None = None
    stages: tuple[WireStage, ...] = ()
    services: tuple[Service, ...] = ()
    env: Mapping[str, str] = {}
    path: tuple[str, ...] = ()
    isolation: Literal["full"] | None = None

    @property
    def digests(self) -> tuple[str, ...]:
        """The digests of all files."""
        return tuple(digest for stage in self.stages for digest in stage.files.values())


def to_wire(
    recipe: Recipe, digest_of: Callable[[Path], bytes] = tree_digest
) -> tuple[WireRecipe, dict[str, Path]]:
    """A recipe for the wire, and its files by digest. Reads the files. Raises OSError, RecipeError."""
    files: dict[str, Path] = {}
    stages = []
    for stage in recipe.stages:
        if stage.secrets:
            raise RecipeError(
                f"the recipe uses secrets ({', '.join(stage.secrets)}), which a server does not take",
                remedy="build it with the substrate native, or leave the secrets out",
            )
        named = {}
        for name, source in stage.files.items():
            real = Path(source).resolve(strict=True)
            digest = digest_of(real).hex()
            named[name] = digest
            files[digest] = real
        stages.append(WireStage(stage.kind, stage.commands, named))
    wire = WireRecipe(recipe.image, tuple(stages), recipe.services, recipe.env, recipe.path, recipe.isolation)
    return wire, files


def from_wire(found: WireRecipe, locate: Callable[[str], Path]) -> Recipe:
    """The recipe; ``locate`` has the path of the files with a digest. Raises RecipeError."""
    stages = tuple(
        Stage(stage.kind, stage.commands, {name: locate(digest) for name, digest in stage.files.items()})
        for stage in found.stages
    )
    return Recipe(found.image, stages, found.services, found.env, found.path, found.isolation)

"""The state that a sandbox is handed out in, and the content keys of it and its parts (docs/recipes.md)."""

from __future__ import annotations

import os
import posixpath
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

import msgspec

from dutyfree.contract.errors import RecipeError
from dutyfree.contract.services import Service

StageKind: TypeAlias = Literal["repository", "dependencies", "files", "setup"]


class Stage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One step towards the wanted state: host files copied in, then commands run, which must succeed.

    Lists are taken for tuples, and paths as strings too: the key is the same. Raises RecipeError.
    """

    kind: StageKind
    commands: tuple[str | tuple[str, ...], ...] = ()
    files: Mapping[str, Path] = {}
    """Path in the sandbox (relative to the working directory) → file or directory on this host.

    Of a link, what it leads to is copied, and counts; those within a directory stay links.
    """
    secrets: tuple[str, ...] = ()
    """Variables of the caller's environment that the commands get; their values enter no key and no layer."""

    def __post_init__(self) -> None:
        if self.kind not in get_args(StageKind):
            raise RecipeError(
                f"{self.kind!r} is no kind of stage", remedy=f"known are: {', '.join(get_args(StageKind))}"
            )
        commands = tuple(
            one if isinstance(one, str) else _several("a command", one, str)
            for one in _several("commands", self.commands)
        )
        msgspec.structs.force_setattr(self, "commands", commands)
        msgspec.structs.force_setattr(self, "files", {name: Path(at) for name, at in self.files.items()})
        msgspec.structs.force_setattr(self, "secrets", _several("secrets", self.secrets, str))

    def __hash__(self) -> int:
        return hash((self.kind, self.commands, frozenset(self.files.items()), self.secrets))

    def key(self, upon: str) -> str:
        """The content key of the prefix that ends with this stage, upon the one of that key.

        Reads the stage's files. Raises OSError.
        """
        import hashlib  # it takes longer to load than all of this module

        said = (upon, self.kind, self.commands, sorted(self.files), sorted(self.secrets))
        digest = hashlib.sha256(repr(said).encode())
        for _, source in sorted(self.files.items()):
            digest.update(tree_digest(Path(os.path.realpath(source))))
        return digest.hexdigest()[:32]


class Recipe(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The state a sandbox must be in: an image, then stages upon it, then services that run; and variables.

    Every prefix has a content key, in which files count by what is in them when it is worked out. Recipes
    that say the same are equal and have the same hash, in which files count by their paths.

    Raises RecipeError for an image that is no string, for what are no stages, for services of the same name,
    and for what cannot be an environment.
    """

    image: str | None = None
    """None is the substrate's own default: the host for bare, the study's image for Docker."""
    stages: tuple[Stage, ...] = ()
    services: tuple[Service, ...] = ()
    """Started one after the other when the files of all stages are there."""
    env: Mapping[str, str] = {}
    """Variables of every command and service, as they stand here: over the image's, under those of a call.

    Stages do not get them, so recipes that differ in nothing else have the same layers.
    """
    path: tuple[str, ...] = ()
    """Directories that come before those of PATH; relative ones start at the working directory."""

    def __post_init__(self) -> None:
        if not isinstance(self.image, str | None):
            raise RecipeError(f"image must be a string, not {self.image!r}", remedy="write image=str(…)")
        msgspec.structs.force_setattr(self, "stages", _several("stages", self.stages, Stage))
        msgspec.structs.force_setattr(self, "services", _several("services", self.services, Service))
        names = [service.name for service in self.services]
        if len(names) > len(set(names)):
            raise RecipeError(f"services need names of their own: {', '.join(sorted(names))}")
        msgspec.structs.force_setattr(self, "env", _variables(self.env))
        msgspec.structs.force_setattr(self, "path", _directories(self.path))

    def __hash__(self) -> int:
        return hash((self.image, self.stages, self.services, frozenset(self.env.items()), self.path))

    @property
    def reads_files(self) -> bool:
        """Whether its keys depend on files of this machine."""
        return any(stage.files for stage in self.stages)

    def variables(self, workdir: str, path: str) -> dict[str, str]:
        """What commands get over the image's environment, in which PATH is ``path``."""
        if not self.path:
            return dict(self.env)
        first = [posixpath.normpath(posixpath.join(workdir, directory)) for directory in self.path]
        rest = self.env.get("PATH", path)
        return {**self.env, "PATH": ":".join([*first, rest] if rest else first)}

    def key(self, length: int | None = None) -> str:
        """The content key of the first ``length`` stages; by default of all, of services and variables."""
        if length is not None:
            return Recipe(self.image, self.stages[:length]).keys()[-1]
        return self.served_key(self.keys()[-1])

    def keys(self) -> tuple[str, ...]:
        """The content keys of all prefixes, from the image alone to all stages; each file is read once."""
        import hashlib

        found = [hashlib.sha256(repr(self.image).encode()).hexdigest()[:32]]
        for stage in self.stages:
            found.append(stage.key(found[-1]))
        return tuple(found)

    def served_key(self, prefix: str) -> str:
        """The key of the whole, of that of all its stages."""
        import hashlib

        if not (self.services or self.env or self.path):
            return prefix
        services = [service.identity() for service in self.services]
        said = (prefix, services, sorted(self.env.items()), self.path)
        return hashlib.sha256(repr(said).encode()).hexdigest()[:32]


def checked(recipe: object) -> Recipe:
    """It, from a program without types. Raises RecipeError for what is none."""
    if isinstance(recipe, Recipe):
        return recipe
    remedy = f"write Recipe({recipe!r})" if isinstance(recipe, str) else "write Recipe(…)"
    raise RecipeError(f"{recipe!r} is no recipe", remedy=remedy)


def _several(name: str, values: Any, of: type = object) -> tuple[Any, ...]:
    """The values as a tuple. Raises RecipeError for a single one."""
    if isinstance(values, tuple | list) and all(isinstance(value, of) for value in values):
        return tuple(values)
    wanted = "strings" if of in (object, str) else f"{of.__name__} values"
    raise RecipeError(f"{name} must be several {wanted}, not {values!r}", remedy=f"write {name}=(…,)")


def _variables(env: Any) -> dict[str, str]:
    """A copy. Raises RecipeError."""
    if not isinstance(env, Mapping):
        raise RecipeError(f"env must be names and values, not {env!r}", remedy='write env={"NAME": "value"}')
    for name, value in env.items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise RecipeError(f"the variable {name!r} must be a text, not {value!r}")
        if not name or "=" in name or not _can_be_told(name):
            raise RecipeError(f"{name!r} can be no variable's name")
        if not _can_be_told(value):
            raise RecipeError(f"the variable {name} cannot be {value!r}")
    return dict(env)


def _directories(path: Any) -> tuple[str, ...]:
    """Raises RecipeError."""
    found = _several("path", path, str)
    for directory in found:
        if not directory or ":" in directory or not _can_be_told(directory):
            raise RecipeError(f"{directory!r} can be no directory of PATH", remedy="give one at a time")
    return found


def _can_be_told(text: str) -> bool:
    """Whether a program can be given it."""
    try:
        return b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:
        return False


def tree_digest(root: Path) -> bytes:
    """A digest of names, modes and contents under ``root``, independent of times and owners.

    Pipes, sockets and devices are left out, as whoever copies the tree leaves them out.
    """
    import hashlib
    import stat

    digest = hashlib.sha256()
    paths = [root, *sorted(root.rglob("*"))] if root.is_dir() and not root.is_symlink() else [root]
    for path in paths:
        name = "" if path == root else str(path.relative_to(root))
        if path.is_symlink():
            digest.update(f"l{name}\0{os.readlink(path)}\0".encode(errors="surrogateescape"))
        elif path.is_dir():
            digest.update(f"d{name}\0{path.stat().st_mode:o}\0".encode(errors="surrogateescape"))
        elif stat.S_ISREG((found := path.stat()).st_mode):
            digest.update(f"f{name}\0{found.st_mode:o}\0{found.st_size}\0".encode(errors="surrogateescape"))
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.digest()

"""Stages: the steps of a recipe, their kinds and their content keys."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

import msgspec

from dutyfree.contract.errors import RecipeError

StageKind: TypeAlias = Literal["repository", "dependencies", "files", "setup"]


class Stage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One step of a recipe: it copies files in, then runs commands, which must succeed.

    Lists are accepted for tuples, and strings for paths; the content key is the same. Raises RecipeError.
    """

    kind: StageKind
    commands: tuple[str | tuple[str, ...], ...] = ()
    files: Mapping[str, Path] = {}
    """Path in the sandbox (relative to the working directory) → file or directory on this host.

    If the source is a link, its target is copied and counts in the key. Links inside a directory stay links.
    """
    secrets: tuple[str, ...] = ()
    """Variables of the caller's environment for the commands. Their values are in no key and no layer."""

    def __post_init__(self) -> None:
        if self.kind not in get_args(StageKind):
            raise RecipeError(
                f"there is no kind of stage {self.kind!r}",
                remedy=f"the kinds are: {', '.join(get_args(StageKind))}",
            )
        commands = tuple(
            one if isinstance(one, str) else as_tuple("a command", one, str)
            for one in as_tuple("commands", self.commands)
        )
        msgspec.structs.force_setattr(self, "commands", commands)
        msgspec.structs.force_setattr(self, "files", {name: Path(at) for name, at in self.files.items()})
        msgspec.structs.force_setattr(self, "secrets", as_tuple("secrets", self.secrets, str))

    def __hash__(self) -> int:
        return hash((self.kind, self.commands, frozenset(self.files.items()), self.secrets))

    def key(self, below: str) -> str:
        """The content key of the prefix that ends here; ``below`` is the key of the prefix before this stage.

        Reads the stage's files. Raises OSError.
        """
        import hashlib  # it takes longer to load than this module

        parts = (below, self.kind, self.commands, sorted(self.files), sorted(self.secrets))
        digest = hashlib.sha256(repr(parts).encode())
        for _, source in sorted(self.files.items()):
            digest.update(tree_digest(Path(os.path.realpath(source))))
        return digest.hexdigest()[:32]


def as_tuple(name: str, values: Any, of: type = object) -> tuple[Any, ...]:
    """Convert a list to a tuple. Raises RecipeError for anything else than a list or a tuple."""
    if isinstance(values, tuple | list) and all(isinstance(value, of) for value in values):
        return tuple(values)
    wanted = "strings" if of in (object, str) else f"{of.__name__} values"
    raise RecipeError(f"{name} must be a list of {wanted}, not {values!r}", remedy=f"write {name}=(…,)")


def tree_digest(root: Path) -> bytes:
    """A digest of the names, modes and contents below ``root``, independent of times and owners.

    It leaves out pipes, sockets and devices, which are not copied either.
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

"""Recipes from TOML files, and from tables in other people's configurations (docs/recipes.md)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TypeAlias, get_args

import msgspec

from dutyfree import validation
from dutyfree.contract import Recipe, Stage
from dutyfree.contract.errors import RecipeError, UsageError
from dutyfree.contract.services import Service
from dutyfree.recipes import stages


class _Repository(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="repository"
):
    source: str
    commit: str | None = None
    branch: str | None = None
    path: str = stages.REPOSITORY
    token: str | None = None
    strip: int = 0

    def stage(self, root: Path) -> Stage:
        source = self.source if stages.URL.match(self.source) else root / self.source
        return stages.repository(
            source,
            commit=self.commit,
            branch=self.branch,
            path=self.path,
            token=self.token,
            strip=self.strip,
        )


class _Checkout(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="checkout"):
    commit: str
    path: str = stages.REPOSITORY
    token: str | None = None
    only_past: bool = False

    def stage(self, root: Path) -> Stage:
        del root
        return stages.checkout(self.commit, path=self.path, token=self.token, only_past=self.only_past)


class _Pip(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="pip"):
    packages: tuple[str, ...] = ()
    requirements: str | None = None
    options: tuple[str, ...] = ()
    python: str = "python3"
    secrets: tuple[str, ...] = ()

    def stage(self, root: Path) -> Stage:
        file = None if self.requirements is None else root / self.requirements
        return stages.pip(
            *self.packages, requirements=file, options=self.options, python=self.python, secrets=self.secrets
        )


class _Npm(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="npm"):
    directory: str = stages.REPOSITORY
    lock: str | None = None
    secrets: tuple[str, ...] = ()

    def stage(self, root: Path) -> Stage:
        return stages.npm(
            self.directory, lock=None if self.lock is None else root / self.lock, secrets=self.secrets
        )


class _Apt(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="apt"):
    packages: tuple[str, ...]

    def stage(self, root: Path) -> Stage:
        del root
        return stages.apt(*self.packages)


class _Dependencies(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="dependencies"
):
    commands: tuple[str, ...]
    locks: dict[str, str] = {}
    secrets: tuple[str, ...] = ()

    def stage(self, root: Path) -> Stage:
        locks = {name: root / path for name, path in self.locks.items()}
        return stages.command(*self.commands, locks=locks, secrets=self.secrets)


class _Files(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="files"):
    files: dict[str, str]

    def stage(self, root: Path) -> Stage:
        return Stage("files", files={name: root / path for name, path in self.files.items()})


class _Setup(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="setup"):
    commands: tuple[str, ...]
    secrets: tuple[str, ...] = ()

    def stage(self, root: Path) -> Stage:
        del root
        return Stage("setup", commands=self.commands, secrets=self.secrets)


_Described: TypeAlias = _Repository | _Checkout | _Pip | _Npm | _Apt | _Dependencies | _Files | _Setup
_KINDS: dict[object, type[_Described]] = {kind.__struct_config__.tag: kind for kind in get_args(_Described)}


class _Python(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    modules: tuple[str, ...]
    name: str = "python"
    python: str = "python3"
    cwd: str | None = None
    env: dict[str, str] = {}
    seconds: float = 60.0

    def service(self) -> Service:
        return stages.python(
            *self.modules,
            name=self.name,
            python=self.python,
            cwd=self.cwd,
            env=self.env,
            seconds=self.seconds,
        )


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    image: str | None = None
    stages: tuple[dict[str, object], ...] = ()
    services: tuple[Service, ...] = ()
    python: tuple[_Python, ...] = ()
    env: dict[str, str] = {}
    path: tuple[str, ...] = ()


def load(path: str | Path) -> Recipe:
    """Read a recipe from a TOML file; paths in it are relative to its directory. Raises UsageError."""
    path = Path(path)
    try:
        table = msgspec.toml.decode(path.read_bytes())
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is not TOML: {error}", remedy=_DOCS) from error
    return recipe(table, path.parent, str(path))


def recipe(table: object, root: Path, name: str) -> Recipe:
    """What a file says, as tables and lists; paths in it start at ``root``. Raises UsageError."""
    try:
        described = msgspec.convert(table, _File)
    except msgspec.ValidationError as error:
        mistake = validation.explain(error, table, _File)
        raise UsageError(f"{name}: {mistake.message}", remedy=mistake.remedy or _DOCS) from error
    built = []
    for number, one in enumerate(described.stages, 1):
        try:
            built.append(_stage(one, root))
        except UsageError as error:
            place = f"stage {number} of {len(described.stages)}"
            raise UsageError(f"{name}: {place}: {error.message}", remedy=error.remedy) from error
    services = (*described.services, *(one.service() for one in described.python))
    try:
        return Recipe(described.image, tuple(built), services, described.env, described.path)
    except RecipeError as error:
        raise UsageError(f"{name}: {error.message}", remedy=error.remedy) from error


_DOCS = "docs/recipes.md describes recipes"


def _stage(table: dict[str, object], root: Path) -> Stage:
    """One of a file's stages. Raises UsageError."""
    kind = table.get("kind")
    known = _KINDS.get(kind) if isinstance(kind, str) else None
    if known is None:
        kinds = [str(one) for one in _KINDS]
        listed = f"the kinds are: {', '.join(kinds)}"
        if kind is None:
            raise UsageError("the key 'kind' is missing", remedy=listed)
        remedy = f"{validation.suggestion(kind, kinds)} {listed}".strip() if isinstance(kind, str) else listed
        raise UsageError(f"there is no kind of stage {kind!r}", remedy=remedy)
    try:
        stage = msgspec.convert(table, known).stage(root)
    except msgspec.ValidationError as error:
        mistake = validation.explain(error, table, known)
        raise UsageError(f"{kind}: {mistake.message}", remedy=mistake.remedy or _DOCS) from error
    for source in stage.files.values():
        if not os.path.lexists(source):
            raise UsageError(f"there is no {source}")
    return stage

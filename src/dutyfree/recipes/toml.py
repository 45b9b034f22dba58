"""Recipes from TOML files, and from tables in other configuration files (docs/recipes.md).

The keys of a stage are the parameters of the function in ``stages`` that makes it.
"""

from __future__ import annotations

import inspect
import os
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec

from dutyfree import validation
from dutyfree.contract import Recipe, Stage
from dutyfree.contract.errors import RecipeError, UsageError
from dutyfree.contract.services import Service
from dutyfree.recipes import stages

T = TypeVar("T")

_DOCS = "docs/recipes.md describes recipes"


class _Table(Generic[T]):
    """A table of a file that gives the arguments of a function.

    Its keys are the function's parameters. ``*names`` is a list; ``optional`` says that it may be missing.
    Paths are strings, relative to the directory of the file.
    """

    def __init__(self, function: Callable[..., T], kind: str | None = None, optional: bool = False) -> None:
        self._function = function
        self._kind = kind
        self._several = ""
        hints = get_type_hints(function)
        fields: list[Any] = []
        for name, parameter in inspect.signature(function).parameters.items():
            hint, default = _toml_type(hints[name]), parameter.default
            if parameter.kind is parameter.VAR_POSITIONAL:
                self._several = name
                hint, default = tuple[hint, ...], () if optional else parameter.empty  # type: ignore[valid-type]
            fields.append((name, hint) if default is parameter.empty else (name, hint, default))
        self._paths = [name for name, hint in hints.items() if _has_path(hint)]
        fields.sort(key=len)  # the required ones first, as in any signature
        self._keys = msgspec.defstruct(
            function.__name__,
            fields,
            frozen=True,
            forbid_unknown_fields=True,
            tag_field=kind and "kind",
            tag=kind,
        )

    def call(self, table: Mapping[str, object], root: Path) -> T:
        """Call the function. Raises UsageError."""
        try:
            values = msgspec.structs.asdict(msgspec.convert(table, self._keys))
        except msgspec.ValidationError as error:
            mistake = validation.explain(error, table, self._keys)
            prefix = f"{self._kind}: " if self._kind else ""
            raise UsageError(prefix + mistake.message, remedy=mistake.remedy or _DOCS) from error
        for name in self._paths:
            values[name] = _resolved(values[name], root)
        return self._function(*values.pop(self._several, ()), **values)


def _toml_type(hint: Any) -> Any:
    """The type of a TOML value for a parameter of this type."""
    origin, args = get_origin(hint), get_args(hint)
    if hint is Path:
        return str
    if origin in (Union, types.UnionType):
        return Union[tuple(_toml_type(one) for one in args)]  # noqa: UP007 (of a tuple)
    if origin is Sequence:
        return tuple[_toml_type(args[0]), ...]  # type: ignore[misc]
    if origin is Mapping:
        return dict[str, _toml_type(args[1])]  # type: ignore[misc]
    return hint


def _has_path(hint: Any) -> bool:
    return hint is Path or any(_has_path(one) for one in get_args(hint))


def _resolved(value: Any, root: Path) -> Any:
    if isinstance(value, dict):
        return {name: root / path for name, path in value.items()}
    return root / value if isinstance(value, str) and not stages.URL.match(value) else value


def _files(files: Mapping[str, str | Path]) -> Stage:
    return Stage("files", files={name: Path(path) for name, path in files.items()})


def _setup(*commands: str, secrets: Sequence[str] = ()) -> Stage:
    return Stage("setup", commands=commands, secrets=tuple(secrets))


_STAGES = {
    "repository": _Table(stages.repository, "repository"),
    "checkout": _Table(stages.checkout, "checkout"),
    "pip": _Table(stages.pip, "pip", optional=True),
    "npm": _Table(stages.npm, "npm"),
    "apt": _Table(stages.apt, "apt"),
    "dependencies": _Table(stages.command, "dependencies"),
    "files": _Table(_files, "files"),
    "setup": _Table(_setup, "setup"),
}
_PYTHON = _Table(stages.python)


class RecipeFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The keys of a recipe file. ``_Table`` checks the tables of stages and interpreters."""

    image: str | None = None
    stages: tuple[dict[str, object], ...] = ()
    services: tuple[Service, ...] = ()
    python: tuple[dict[str, object], ...] = ()
    env: dict[str, str] = {}
    path: tuple[str, ...] = ()
    isolation: Literal["full"] | None = None


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
    """Build a recipe from tables and lists; paths in them are relative to ``root``. Raises UsageError.

    ``name`` is what errors call the source of the tables.
    """
    try:
        file = msgspec.convert(table, RecipeFile)
    except msgspec.ValidationError as error:
        mistake = validation.explain(error, table, RecipeFile)
        raise UsageError(f"{name}: {mistake.message}", remedy=mistake.remedy or _DOCS) from error
    built = _each(f"{name}: stage", file.stages, lambda one: _stage(one, root))
    interpreters = _each(f"{name}: python", file.python, lambda one: _PYTHON.call(one, root))
    try:
        return Recipe(file.image, built, (*file.services, *interpreters), file.env, file.path, file.isolation)
    except RecipeError as error:
        raise UsageError(f"{name}: {error.message}", remedy=error.remedy) from error


def _each(
    what: str, tables: Sequence[Mapping[str, object]], make: Callable[[Mapping[str, object]], T]
) -> tuple[T, ...]:
    """Convert each table. Raises UsageError that says which table is wrong."""
    made = []
    for number, table in enumerate(tables, 1):
        try:
            made.append(make(table))
        except UsageError as error:
            message = f"{what} {number} of {len(tables)}: {error.message}"
            raise UsageError(message, remedy=error.remedy) from error
    return tuple(made)


def _stage(table: Mapping[str, object], root: Path) -> Stage:
    """Raises UsageError."""
    kind = table.get("kind")
    known = _STAGES.get(kind) if isinstance(kind, str) else None
    if known is None:
        listed = f"the kinds are: {', '.join(_STAGES)}"
        if kind is None:
            raise UsageError("the key 'kind' is missing", remedy=listed)
        meant = validation.suggestion(kind, _STAGES) if isinstance(kind, str) else ""
        raise UsageError(f"there is no kind of stage {kind!r}", remedy=f"{meant} {listed}".strip())
    stage = known.call(table, root)
    for source in stage.files.values():
        if not os.path.lexists(source):
            raise UsageError(f"there is no {source}")
    return stage

"""The registry of substrates: names to lazy import paths.

Third parties add theirs with an entry point in the group ``dutyfree.substrates``, whose value names a
class as ``contract.Provider`` describes.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any, cast

import msgspec

from dutyfree.contract import Availability, Provider, Substrate
from dutyfree.errors import OptionError

GROUP = "dutyfree.substrates"

BUILT_IN = {
    "bare": "dutyfree.substrates.bare:Bare",
    "native": "dutyfree.substrates.native:Native",
    "native-cold": "dutyfree.substrates.warmth:Cold",
    "native-base": "dutyfree.substrates.warmth:BaseWarm",
    "native-image": "dutyfree.substrates.warmth:ImageWarm",
    "native-repository": "dutyfree.substrates.warmth:RepositoryWarm",
    "native-dependencies": "dutyfree.substrates.warmth:DependencyWarm",
    "native-warm": "dutyfree.substrates.warmth:Warm",
    "docker": "dutyfree.substrates.docker:Docker",
    "scripted": "dutyfree.substrates.scripted:Scripted",
}


def names() -> tuple[str, ...]:
    """Every known substrate, ours first."""
    return (*BUILT_IN, *sorted(set(_entry_points()) - set(BUILT_IN)))


def provider(name: str) -> Provider:
    """The class behind a name. Raises OptionError for an unknown one."""
    path = BUILT_IN.get(name) or _entry_points().get(name)
    if path is None:
        raise OptionError(f"unknown substrate {name!r}", remedy=f"known are: {', '.join(names())}")
    module, _, attribute = path.partition(":")
    try:
        return cast("Provider", getattr(importlib.import_module(module), attribute))
    except (ImportError, AttributeError) as error:
        raise OptionError(f"substrate {name!r} cannot be loaded from {path}: {error}") from error


def configure(name: str, options: dict[str, Any]) -> tuple[Provider, msgspec.Struct]:
    """The provider and its checked configuration. Raises OptionError."""
    found = provider(name)
    known = found.Config.__struct_fields__
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise OptionError(
            f"substrate {name!r} has no option {unknown[0]!r}",
            remedy=f"its options are: {', '.join(known)}" if known else "it takes no options",
        )
    try:
        return found, msgspec.convert(_over_defaults(found.Config, options), found.Config)
    except msgspec.ValidationError as error:
        raise OptionError(f"substrate {name!r}: {error}", remedy=_remedy(found.Config, str(error))) from error


def _over_defaults(config: type[msgspec.Struct], options: dict[str, Any]) -> dict[str, Any]:
    """The options, where a table says only in what it differs from the default of its option."""
    over = dict(options)
    for field in msgspec.structs.fields(config):
        given = options.get(field.name)
        usual = field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
        if isinstance(given, Mapping) and isinstance(usual, msgspec.Struct):
            over[field.name] = {**msgspec.structs.asdict(usual), **given}
    return over


def _remedy(config: type[msgspec.Struct], complaint: str) -> str:
    """What may stand where msgspec found something else: it names the place, such as ``$.budget.memory``."""
    option = complaint.partition("`$.")[2].strip("`").partition(".")[0].partition("[")[0]
    wanted = {field.name: field.type for field in msgspec.inspect.type_info(config).fields}.get(option)  # type: ignore[attr-defined]
    kinds = wanted.types if isinstance(wanted, msgspec.inspect.UnionType) else (wanted,)
    for kind in kinds:
        if isinstance(kind, msgspec.inspect.StructType):
            return f"{option} has: {', '.join(field.name for field in kind.fields)}"
        if isinstance(kind, msgspec.inspect.VarTupleType | msgspec.inspect.ListType):
            return f'{option} is a list, such as ["a", "b"]'
    return ""


def open(name: str, **options: Any) -> AbstractAsyncContextManager[Substrate]:  # noqa: A001
    """Open a substrate by name; the context gives the Substrate.

    Raises OptionError at once for an unknown name or option, and Unavailable on entering when the
    substrate cannot be used on this machine.
    """
    found, config = configure(name, options)
    return found(config)


async def probe(name: str, **options: Any) -> Availability:
    """Whether the substrate could be opened here, and if not, why and how to enable it. Raises nothing."""
    try:
        found, config = configure(name, options)
    except OptionError as error:
        return Availability(False, error.message, error.remedy)
    return await found.probe(config)


def _entry_points() -> dict[str, str]:
    from importlib.metadata import entry_points

    return {point.name: point.value for point in entry_points(group=GROUP)}

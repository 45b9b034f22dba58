"""The registry of substrates: it maps names to import paths, and imports a substrate when it is used.

Others add their substrates by an entry point in the group ``dutyfree.substrates``. Its value names a class as
``contract.Provider`` describes.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast, overload

import msgspec

from dutyfree.contract import Availability, Provider, Substrate, sized
from dutyfree.contract.errors import OptionError, Unavailable

if TYPE_CHECKING:
    from dutyfree.substrates.bare import Bare
    from dutyfree.substrates.cloud import Cloud
    from dutyfree.substrates.daytona import Daytona
    from dutyfree.substrates.docker.substrate import DockerSubstrate
    from dutyfree.substrates.e2b import E2B
    from dutyfree.substrates.hosted import Hosted
    from dutyfree.substrates.kubernetes.substrate import KubernetesSubstrate
    from dutyfree.substrates.native import Native
    from dutyfree.substrates.oci import Oci
    from dutyfree.substrates.scripted import Scripted
    from dutyfree.substrates.ssh import Ssh
    from dutyfree.substrates.vm.substrate import VmSubstrate

NativeName: TypeAlias = Literal[
    "native",
    "native-cold",
    "native-base",
    "native-image",
    "native-repository",
    "native-dependencies",
    "native-warm",
]

GROUP = "dutyfree.substrates"

BUILT_IN = {
    "bare": "dutyfree.substrates.bare:Bare",
    "native": "dutyfree.substrates.native:Native",
    "native-cold": "dutyfree.substrates.native_warmth:Cold",
    "native-base": "dutyfree.substrates.native_warmth:BaseWarm",
    "native-image": "dutyfree.substrates.native_warmth:ImageWarm",
    "native-repository": "dutyfree.substrates.native_warmth:RepositoryWarm",
    "native-dependencies": "dutyfree.substrates.native_warmth:DependencyWarm",
    "native-warm": "dutyfree.substrates.native_warmth:RecipeWarm",
    "docker": "dutyfree.substrates.docker:Docker",
    "oci": "dutyfree.substrates.oci:Oci",
    "vm": "dutyfree.substrates.vm:Vm",
    "kubernetes": "dutyfree.substrates.kubernetes:Kubernetes",
    "ssh": "dutyfree.substrates.ssh:Ssh",
    "cloud": "dutyfree.substrates.cloud:Cloud",
    "hosted": "dutyfree.substrates.hosted:Hosted",
    "e2b": "dutyfree.substrates.e2b:E2B",
    "daytona": "dutyfree.substrates.daytona:Daytona",
    "scripted": "dutyfree.substrates.scripted:Scripted",
}
ANYWHERE = ("scripted",)
"""The built-in substrates that do not need Linux."""


def names() -> tuple[str, ...]:
    """All known substrates, the built-in ones first."""
    return (*BUILT_IN, *sorted(set(_entry_points()) - set(BUILT_IN)))


def provider(name: str) -> Provider:
    """The class of a name, or of an import path such as ``module:Class``. Raises OptionError."""
    if not isinstance(name, str):
        raise OptionError(
            f"the name of a substrate must be a str, not {name!r}", remedy=f"known are: {', '.join(names())}"
        )
    path = BUILT_IN.get(name) or _entry_points().get(name) or (name if ":" in name.strip(":") else None)
    if path is None:
        from dutyfree.validation import suggestion  # only for an error

        known = names()
        remedy = f"{suggestion(name, known)} known are: {', '.join(known)}".strip()
        raise OptionError(f"unknown substrate {name!r}", remedy=remedy)
    module, _, attribute = path.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, TypeError) as error:  # TypeError: a relative path
        missing = path == name and isinstance(error, ImportError)
        raise OptionError(
            f"substrate {name!r} cannot be loaded from {path}: {error}",
            remedy="is its directory in PYTHONPATH?" if missing else "",
        ) from error
    if not hasattr(found, "Config"):
        raise OptionError(
            f"{path} is not a substrate: it has no Config", remedy="docs/substrates.md shows a whole one"
        )
    return cast("Provider", found)


def configure(name: str, options: dict[str, Any]) -> tuple[Provider, msgspec.Struct]:
    """The provider of a name and its configuration, from options. Raises OptionError."""
    found = provider(name)
    known = found.Config.__struct_fields__
    unknown = sorted(set(options) - set(known))
    if unknown:
        from dutyfree.validation import suggestion  # only for an error

        listed = f"its options are: {', '.join(known)}" if known else "it takes no options"
        raise OptionError(
            f"substrate {name!r} has no option {unknown[0]!r}",
            remedy=f"{suggestion(unknown[0], known)} {listed}".strip(),
        )
    table = _over_defaults(found.Config, options)
    try:
        return found, msgspec.convert(table, found.Config)
    except msgspec.ValidationError as error:
        from dutyfree import validation  # only for an error

        mistake = validation.explain(error, table, found.Config)
        raise OptionError(f"substrate {name!r}: {mistake.message}", remedy=mistake.remedy) from error


def _over_defaults(config: type[msgspec.Struct], options: dict[str, Any]) -> dict[str, Any]:
    """The options, with tables merged into the defaults: a table needs only the keys that differ."""
    over = dict(options)
    for field in msgspec.structs.fields(config):
        given = options.get(field.name)
        usual = field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
        if isinstance(given, Mapping) and isinstance(usual, msgspec.Struct):
            over[field.name] = {**msgspec.structs.asdict(usual), **sized(given)}
    return over


@overload
def open(name: NativeName, **options: Any) -> AbstractAsyncContextManager[Native]: ...
@overload
def open(name: Literal["docker"], **options: Any) -> AbstractAsyncContextManager[DockerSubstrate]: ...
@overload
def open(name: Literal["oci"], **options: Any) -> AbstractAsyncContextManager[Oci]: ...
@overload
def open(name: Literal["vm"], **options: Any) -> AbstractAsyncContextManager[VmSubstrate]: ...
@overload
def open(name: Literal["kubernetes"], **options: Any) -> AbstractAsyncContextManager[KubernetesSubstrate]: ...
@overload
def open(name: Literal["ssh"], **options: Any) -> AbstractAsyncContextManager[Ssh]: ...
@overload
def open(name: Literal["cloud"], **options: Any) -> AbstractAsyncContextManager[Cloud]: ...
@overload
def open(name: Literal["hosted"], **options: Any) -> AbstractAsyncContextManager[Hosted]: ...
@overload
def open(name: Literal["e2b"], **options: Any) -> AbstractAsyncContextManager[E2B]: ...
@overload
def open(name: Literal["daytona"], **options: Any) -> AbstractAsyncContextManager[Daytona]: ...
@overload
def open(name: Literal["bare"], **options: Any) -> AbstractAsyncContextManager[Bare]: ...
@overload
def open(name: Literal["scripted"], **options: Any) -> AbstractAsyncContextManager[Scripted]: ...
@overload
def open(name: str, **options: Any) -> AbstractAsyncContextManager[Substrate]: ...


def open(name: str, **options: Any) -> AbstractAsyncContextManager[Substrate]:
    """Open a substrate by name; the context gives the Substrate.

    The call raises OptionError for an unknown name or option, and Unavailable if a built-in substrate needs
    Linux. Entering raises Unavailable if the substrate does not work on this machine.
    """
    _check_platform(name)
    found, config = configure(name, options)
    return found(config)


def _check_platform(name: str) -> None:
    """Raises Unavailable for a built-in substrate that needs Linux, on another platform."""
    if sys.platform != "linux" and name in BUILT_IN and name not in ANYWHERE:
        raise Unavailable(
            f"the substrate {name!r} needs Linux, and this is {sys.platform}",
            remedy="run it on a Linux machine, in a virtual machine or in a container",
        )


async def probe(name: str, **options: Any) -> Availability:
    """Check whether a substrate would open here; if not, why, and how to enable it. Raises nothing."""
    try:
        _check_platform(name)
        found, config = configure(name, options)
    except (OptionError, Unavailable) as error:
        return Availability(False, error.message, error.remedy)
    return await found.probe(config)


def _entry_points() -> dict[str, str]:
    from importlib.metadata import entry_points

    return {point.name: point.value for point in entry_points(group=GROUP)}

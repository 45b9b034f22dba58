"""How commands run in a sandbox when the caller says nothing else: environment, user, directory."""

from __future__ import annotations

import os
import posixpath
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from dutyfree.contract import Recipe

WORKDIR = "/workspace"

ENVIRONMENT = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME": WORKDIR,
    "LANG": "C.UTF-8",
}


class CommandDefaults(NamedTuple):
    """Defaults of an image or a recipe. The environment is packed once, not for each command."""

    environment: Mapping[str, str]
    packed: bytes
    """The environment in the form that init reads."""
    user: str
    """"" is root with the privileges that root has in a container."""
    directory: str
    """"" is WORKDIR, the directory in which init runs."""
    program: tuple[str, ...]
    """The entry point and command of the image."""

    def with_recipe(self, recipe: Recipe) -> CommandDefaults:
        """Add the recipe's environment variables."""
        variables = recipe.variables(self.directory or WORKDIR, self.environment.get("PATH", ""))
        if not variables:
            return self
        return command_defaults({**self.environment, **variables}, self.user, self.directory, self.program)


def command_defaults(
    env: Mapping[str, str] = MappingProxyType({}),
    user: str = "",
    workdir: str = "",
    program: tuple[str, ...] = (),
) -> CommandDefaults:
    merged = {**ENVIRONMENT, **env}
    packed = b"".join(os.fsencode(f"{name}={value}") + b"\0" for name, value in merged.items())
    directory = posixpath.normpath(posixpath.join("/", workdir)) if workdir else ""
    return CommandDefaults(merged, packed, user, "" if directory == WORKDIR else directory, program)

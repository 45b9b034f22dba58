"""Read the login for a registry from where ``docker login`` stores it."""

from __future__ import annotations

import base64
import binascii
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from dutyfree.contract.errors import CreateError

HELPER_SECONDS = 30.0
_HUB_KEY = "https://index.docker.io/v1/"


class Login(NamedTuple):
    """A user's name and secret at a registry."""

    name: str
    secret: str
    token: bool = False
    """Whether the secret is a refresh token and not a password."""


def find(registry: str) -> Login | None:
    """The login for a registry, or None for anonymous access. Raises CreateError.

    Looks where Docker does: the credential helper of this registry, then the default helper, then the file.
    """
    # Not Path.home(): it raises for a user without a home directory.
    path = Path(os.environ.get("DOCKER_CONFIG") or os.path.expanduser("~/.docker")) / "config.json"  # noqa: PTH111
    try:
        config = msgspec.json.decode(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError) as error:
        raise CreateError(
            f"{path} cannot be read: {error}", remedy="write it again with `docker login`"
        ) from error
    if not isinstance(config, dict):
        return None
    keys = [_HUB_KEY, "docker.io"] if registry == "docker.io" else [registry, f"https://{registry}"]
    for key in keys:
        helper = _section(config, "credHelpers").get(key) or config.get("credsStore")
        found = _from_helper(str(helper), key) if helper else None
        found = found or _from_file(_section(config, "auths").get(key))
        if found:
            return found
    return None


def _section(config: dict[str, Any], name: str) -> dict[str, Any]:
    found = config.get(name)
    return found if isinstance(found, dict) else {}


def _from_file(entry: Any) -> Login | None:
    if not isinstance(entry, dict):
        return None
    if token := entry.get("identitytoken"):
        return Login("<token>", str(token), token=True)
    if entry.get("username"):
        return Login(str(entry["username"]), str(entry.get("password", "")))
    try:
        name, colon, secret = base64.b64decode(str(entry.get("auth", ""))).decode().partition(":")
    except (binascii.Error, UnicodeDecodeError):
        return None
    return Login(name, secret.rstrip("\0")) if colon else None


def _from_helper(helper: str, key: str) -> Login | None:
    program = shutil.which(f"docker-credential-{helper}")
    if program is None:
        raise CreateError(
            f"the credential helper docker-credential-{helper} is not installed",
            remedy="install it, or remove it from ~/.docker/config.json",
        )
    try:
        ended = subprocess.run(
            [program, "get"], input=key.encode(), capture_output=True, timeout=HELPER_SECONDS, check=False
        )
        # A helper also fails if it has no login for the registry: then access is anonymous.
        found = msgspec.json.decode(ended.stdout) if ended.returncode == 0 else {}
    except (OSError, subprocess.TimeoutExpired, msgspec.DecodeError) as error:
        raise CreateError(f"the credential helper {program} failed: {error}") from error
    if not isinstance(found, dict) or not found.get("Secret"):
        return None
    name = str(found.get("Username", ""))
    return Login(name, str(found["Secret"]), token=name == "<token>")

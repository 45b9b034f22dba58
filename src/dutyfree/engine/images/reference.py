"""Parse image references in Docker's format."""

from __future__ import annotations

import re
from typing import NamedTuple

from dutyfree.contract.errors import CreateError

HUB = "docker.io"
"""The registry of references without one."""

_PART = re.compile(r"[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*")
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_HOST = re.compile(r"(?:[A-Za-z0-9](?:[A-Za-z0-9.-]*[A-Za-z0-9])?|\[[0-9a-fA-F:]+\])(?::[0-9]{1,5})?")


class Reference(NamedTuple):
    """``registry/repository:tag`` or ``registry/repository@digest``."""

    registry: str
    repository: str
    tag: str
    digest: str = ""
    """The manifest's digest. If it is empty, the tag decides."""

    @property
    def tag_or_digest(self) -> str:
        """The tag or digest to request from the registry."""
        return self.digest or self.tag

    @property
    def origin(self) -> str:
        """The host that serves the registry."""
        return "registry-1.docker.io" if self.registry == HUB else self.registry

    def __str__(self) -> str:
        name = f"{self.registry}/{self.repository}"
        if self.digest:
            return f"{name}@{self.digest}"
        return f"{name}:{self.tag}"


def parse(text: str) -> Reference:
    """Parse and complete a reference: ``debian:12`` → ``docker.io/library/debian:12``. Raises CreateError."""
    name, at, digest = text.partition("@")
    if at and not DIGEST.fullmatch(digest):
        raise _bad(text, "its digest is not sha256: and 64 hexadecimal digits")
    first, slash, rest = name.partition("/")
    if slash and ("." in first or ":" in first or first == "localhost" or first != first.lower()):
        registry, path = first, rest
    else:
        registry, path = HUB, name
    if registry in ("index.docker.io", "registry-1.docker.io"):
        registry = HUB
    path, colon, tag = path.partition(":")
    if colon and not _TAG.fullmatch(tag):
        raise _bad(text, f"{tag!r} is not a tag")
    if not _HOST.fullmatch(registry):
        raise _bad(text, f"{registry!r} is not a host name")
    if registry == HUB and "/" not in path:
        path = f"library/{path}"
    if len(path) > 255 or not all(_PART.fullmatch(part) for part in path.split("/")):
        raise _bad(text, "a repository may have lower-case letters, digits and . _ - /")
    return Reference(registry, path, "" if digest and not tag else tag or "latest", digest)


def _bad(text: str, reason: str) -> CreateError:
    return CreateError(
        f"{text!r} is not an image reference: {reason}",
        remedy="name one as Docker does (debian:12, ghcr.io/team/name:tag, host:5000/name@sha256:…), "
        "or the absolute path of a root file system or a tar",
    )

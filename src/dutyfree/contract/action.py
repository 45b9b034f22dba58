"""Actions as data, and their results. Trajectories consist of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, TypeAlias

import msgspec

from dutyfree.contract.observation import Observation

Command: TypeAlias = str | Sequence[str]
"""A string runs in ``/bin/sh -c``; a sequence is an argument vector and runs without a shell."""


class Entry(msgspec.Struct, frozen=True):
    """One name in a directory."""

    name: str
    kind: Literal["file", "directory", "link", "other"]
    size: int
    mode: int


class Exec(msgspec.Struct, frozen=True, tag="exec", omit_defaults=True):
    """Run a command: the arguments of ``Sandbox.exec``."""

    command: str | tuple[str, ...]
    cwd: str | None = None
    env: Mapping[str, str] | None = None
    stdin: bytes | None = None
    timeout: float | None = None
    user: str | None = None


class Read(msgspec.Struct, frozen=True, tag="read"):
    """Read a file."""

    path: str


class Write(msgspec.Struct, frozen=True, tag="write"):
    """Write a file."""

    path: str
    data: bytes
    mode: int = 0o644


class Edit(msgspec.Struct, frozen=True, tag="edit"):
    """Replace ``old``, which must occur exactly once in the file, by ``new``."""

    path: str
    old: bytes
    new: bytes


class List(msgspec.Struct, frozen=True, tag="list"):
    """List a directory."""

    path: str


class Search(msgspec.Struct, frozen=True, tag="search", omit_defaults=True):
    """Search for lines that contain ``text`` below ``path``; without ``text``, for names of files."""

    path: str = "."
    text: str | None = None
    regex: bool = False
    """Whether ``text`` is a POSIX extended regular expression."""
    ignore_case: bool = False
    names: tuple[str, ...] = ()
    """Search only files whose name matches one of these patterns; with a slash, the path below ``path``."""
    skip: tuple[str, ...] = (".git",)
    """Names or patterns of directories to leave out."""
    binary: bool = False
    """Search files with NUL bytes too."""
    limit: int = 1000
    """The largest number of matches."""
    width: int = 500
    """The largest number of bytes of a matching line."""
    timeout: float | None = 60.0


class Match(msgspec.Struct, frozen=True):
    """One matching line, or one matching name (``line`` is 0). ``read`` takes the path as it is."""

    path: str
    line: int = 0
    text: bytes = b""
    cut: bool = False


class Found(msgspec.Struct, frozen=True):
    """The result of a search."""

    matches: tuple[Match, ...]
    """Sorted by path, then by line."""
    truncated: bool = False
    """Whether there were more matches than the limit."""
    unseen: int = 0
    """How many files were not searched: binary, too large, or not readable."""


Action: TypeAlias = Exec | Read | Write | Edit | List | Search
"""One request of the agent, as data."""

Result: TypeAlias = Observation | bytes | tuple[Entry, ...] | Found | None
"""The result of Exec, Read, List and Search, in this order; None for Write and Edit."""

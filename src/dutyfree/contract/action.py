"""Actions as data, and their results: trajectories are made of these."""

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
    command: str | tuple[str, ...]
    cwd: str | None = None
    env: Mapping[str, str] | None = None
    stdin: bytes | None = None
    timeout: float | None = None
    user: str | None = None


class Read(msgspec.Struct, frozen=True, tag="read"):
    path: str


class Write(msgspec.Struct, frozen=True, tag="write"):
    path: str
    data: bytes
    mode: int = 0o644


class Edit(msgspec.Struct, frozen=True, tag="edit"):
    """Replace ``old``, which must stand in the file exactly once, by ``new``."""

    path: str
    old: bytes
    new: bytes


class List(msgspec.Struct, frozen=True, tag="list"):
    path: str


class Search(msgspec.Struct, frozen=True, tag="search", omit_defaults=True):
    """Look for lines that hold ``text``, or without it for names, under ``path``."""

    path: str = "."
    text: str | None = None
    regex: bool = False
    """``text`` is an extended regular expression of POSIX."""
    ignore_case: bool = False
    names: tuple[str, ...] = ()
    """Only files whose name, or whose path below ``path`` where a pattern has a slash, fits one of these."""
    skip: tuple[str, ...] = (".git",)
    """Names of directories that are not entered; patterns too."""
    binary: bool = False
    """Look also into files that hold NUL bytes."""
    limit: int = 1000
    """At most so many matches."""
    width: int = 500
    """At most so many bytes of a line."""
    timeout: float | None = 60.0


class Match(msgspec.Struct, frozen=True):
    """One line that fits, or one name (``line`` 0). The path can be given to ``read`` as it is."""

    path: str
    line: int = 0
    text: bytes = b""
    cut: bool = False


class Found(msgspec.Struct, frozen=True):
    matches: tuple[Match, ...]
    """By path, then by line."""
    truncated: bool = False
    """There were more than the limit."""
    unseen: int = 0
    """Files that were not looked into: binary, too large, or closed to us."""


Action: TypeAlias = Exec | Read | Write | Edit | List | Search
"""What an agent asks, as data: trajectories are made of these."""

Result: TypeAlias = Observation | bytes | tuple[Entry, ...] | Found | None
"""What an action brings: of Exec, Read, List, Search; None of Write and Edit."""

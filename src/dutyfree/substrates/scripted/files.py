"""A file system in memory: what a scripted sandbox reads and writes."""

from __future__ import annotations

import errno
import os
import posixpath
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Literal, NamedTuple, TypeAlias

from dutyfree.contract import Entry
from dutyfree.contract.arguments import encoded_path
from dutyfree.contract.entries import Links
from dutyfree.contract.errors import file_error

WORKDIR = "/work"
NAME_MAX = 255


Kind: TypeAlias = Literal["created", "modified", "deleted"]


class Node(NamedTuple):
    kind: Literal["file", "directory", "link"]
    mode: int = 0o755
    data: bytes = b""
    """A file's content, a link's target."""


class Files:
    """A file system in a dictionary: absolute path → node. Raises what the real one would."""

    def __init__(self, nodes: Mapping[str, Node] = MappingProxyType({})) -> None:
        self.nodes = {"/": Node("directory"), WORKDIR: Node("directory"), **nodes}
        self.on_change: list[Callable[[Kind, str, bool], None]] = []
        """Told what happened to which path, and whether it is a directory."""

    def read(self, path: str) -> bytes:
        _, node = self._find(path)
        if node.kind == "directory":
            raise file_error(errno.EISDIR, path)
        return node.data

    def mode(self, path: str) -> int:
        return self._find(path)[1].mode

    def write(self, path: str, node: Node) -> None:
        """Put a node in place, making its parents; a directory joins one that is there."""
        at = self._resolve(path, follow=node.kind == "file")
        there = self.nodes.get(at)
        if there is not None and there.kind == "directory" and node.kind != "directory":
            raise file_error(errno.EISDIR, path)
        parent = posixpath.dirname(at)
        missing = []
        while parent not in self.nodes:
            missing.append(parent)
            self.nodes[parent] = Node("directory")
            parent = posixpath.dirname(parent)
        self.nodes[at] = node
        for made in reversed(missing):
            self._tell("created", made, True)
        self._tell("modified" if there is not None else "created", at, node.kind == "directory")

    def list(self, path: str) -> tuple[Entry, ...]:
        prefix = posixpath.join(self.directory(path), "")
        names = sorted(at for at in self.nodes if at.startswith(prefix) and "/" not in at[len(prefix) :])
        return tuple(
            Entry(at[len(prefix) :], node.kind, len(node.data), node.mode)
            for at, node in ((at, self.nodes[at]) for at in names if at != prefix)
        )

    def remove(self, path: str) -> None:
        at, node = self._find(path, follow=False)
        self.nodes = {
            other: node
            for other, node in self.nodes.items()
            if other != at and not other.startswith(f"{at}/")
        }
        self._tell("deleted", at, node.kind == "directory")

    def _tell(self, kind: Kind, at: str, directory: bool) -> None:
        for told in self.on_change:
            told(kind, at, directory)

    def tree(self, path: str) -> Sequence[tuple[str, Node]]:
        """The nodes at and below ``path``, by relative name, parents first."""
        at, node = self._find(path, follow=False)
        below = sorted(other for other in self.nodes if other.startswith(f"{at}/"))
        return [("", node), *((other[len(at) + 1 :], self.nodes[other]) for other in below)]

    def directory(self, path: str) -> str:
        """Where it really is. Raises FileNotFoundError or NotADirectoryError."""
        at, node = self._find(path)
        if node.kind != "directory":
            raise file_error(errno.ENOTDIR, path)
        return at

    def _find(self, path: str, *, follow: bool = True) -> tuple[str, Node]:
        at = self._resolve(path, follow=follow)
        if at not in self.nodes:
            raise file_error(errno.ENOENT, path)
        return at, self.nodes[at]

    def _resolve(self, path: str, *, follow: bool) -> str:
        encoded_path(path)
        at, links = "/", 0
        ahead = posixpath.join(WORKDIR, path).split("/")[::-1]
        while ahead:
            part = ahead.pop()
            node = self.nodes.get(at)
            if part in ("", "."):
                continue
            if node is not None and node.kind == "file":
                raise file_error(errno.ENOTDIR, path)
            if len(os.fsencode(part)) > NAME_MAX:
                raise file_error(errno.ENAMETOOLONG, path)
            at = posixpath.dirname(at) if part == ".." else posixpath.join(at, part)
            node = self.nodes.get(at)
            if node is not None and node.kind == "link" and (ahead or follow):
                if (links := links + 1) > 40:
                    raise file_error(errno.ELOOP, path)
                at = posixpath.dirname(at)
                target = os.fsdecode(node.data)
                at = "/" if target.startswith("/") else at
                ahead += target.split("/")[::-1]
        return at


def load(source: Path) -> list[tuple[str, Node]]:
    """A local tree as nodes by relative name, parents first."""
    paths = [source, *sorted(source.rglob("*"))] if source.is_dir() and not source.is_symlink() else [source]
    return [("" if path == source else str(path.relative_to(source)), _node(path)) for path in paths]


def _node(path: Path) -> Node:
    mode = path.lstat().st_mode & 0o7777
    if path.is_symlink():
        return Node("link", 0o777, os.fsencode(path.readlink()))
    return Node("directory", mode) if path.is_dir() else Node("file", mode, path.read_bytes())


def store(nodes: Sequence[tuple[str, Node]], target: Path, links: Links) -> None:
    for relative, node in nodes:
        path = target / relative if relative else target
        if path.is_symlink():
            path.unlink()  # replaced, never followed
        if node.kind == "directory":
            path.mkdir(exist_ok=True)
        elif node.kind == "link":
            if links.admit(relative, os.fsdecode(node.data)):
                path.symlink_to(os.fsdecode(node.data))
        else:
            path.write_bytes(node.data)
        if node.kind != "link":
            path.chmod(node.mode & 0o1777)

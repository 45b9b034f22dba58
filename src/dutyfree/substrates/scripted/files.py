"""A file system in memory, with search and watch: what a scripted sandbox reads and writes."""

from __future__ import annotations

import errno
import fnmatch
import os
import posixpath
import re
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Literal, NamedTuple, TypeAlias

import anyio

from dutyfree.contract import Entry, Found, Match, Search
from dutyfree.contract.abilities import Change
from dutyfree.contract.arguments import encoded, encoded_path
from dutyfree.contract.entries import Links
from dutyfree.contract.errors import RequestError, file_error

WORKDIR = "/work"
NAME_MAX = 255
QUEUE = 1024
"""How many changes wait for a reader before further ones are lost."""

ChangeKind: TypeAlias = Literal["created", "modified", "deleted"]


class MemoryNode(NamedTuple):
    """A file, a directory or a link."""

    kind: Literal["file", "directory", "link"]
    mode: int = 0o755
    data: bytes = b""
    """A file's content, a link's target."""


class MemoryFiles:
    """A file system in a dictionary: absolute path → node. It raises the errors of a real one."""

    def __init__(self, nodes: Mapping[str, MemoryNode] = MappingProxyType({})) -> None:
        self.nodes = {"/": MemoryNode("directory"), WORKDIR: MemoryNode("directory"), **nodes}
        self.on_change: list[Callable[[ChangeKind, str, bool], None]] = []
        """Called with the kind of change, the path, and whether the path is a directory."""

    def read(self, path: str) -> bytes:
        _, node = self._find(path)
        if node.kind == "directory":
            raise file_error(errno.EISDIR, path)
        return node.data

    def mode(self, path: str) -> int:
        return self._find(path)[1].mode

    def write(self, path: str, node: MemoryNode) -> None:
        """Put a node at ``path`` and make its parents. A directory merges with an existing one."""
        at = self._resolve(path, follow=node.kind == "file")
        there = self.nodes.get(at)
        if there is not None and there.kind == "directory" and node.kind != "directory":
            raise file_error(errno.EISDIR, path)
        parent = posixpath.dirname(at)
        missing = []
        while parent not in self.nodes:
            missing.append(parent)
            self.nodes[parent] = MemoryNode("directory")
            parent = posixpath.dirname(parent)
        self.nodes[at] = node
        for made in reversed(missing):
            self._notify("created", made, True)
        self._notify("modified" if there is not None else "created", at, node.kind == "directory")

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
        self._notify("deleted", at, node.kind == "directory")

    def _notify(self, kind: ChangeKind, at: str, directory: bool) -> None:
        for callback in self.on_change:
            callback(kind, at, directory)

    def tree(self, path: str) -> Sequence[tuple[str, MemoryNode]]:
        """The nodes at and below ``path`` by relative name, parents first."""
        at, node = self._find(path, follow=False)
        below = sorted(other for other in self.nodes if other.startswith(f"{at}/"))
        return [("", node), *((other[len(at) + 1 :], self.nodes[other]) for other in below)]

    def search(self, request: Search) -> Found:
        """Raises RequestError for a bad expression, and ActionError for the path."""
        expression = None if request.text is None else _expression(request, request.text)
        path, width = request.path, request.width
        matches, unseen = [], 0
        for name, node in self.tree(path):
            if not _selected(name, request) or (not name and expression is None):
                continue
            full = name if path in ("", ".") else posixpath.join(path, name) if name else path
            if expression is None:
                matches.append(Match(full))
            elif node.kind == "file" and b"\0" in node.data and not request.binary:
                unseen += 1
            elif node.kind == "file":
                matches += [
                    Match(full, number, line[:width], len(line) > width)
                    for number, line in enumerate(node.data.split(b"\n"), 1)
                    if (line or number == 1) and expression.search(line)
                ]
        return Found(tuple(matches[: request.limit]), len(matches) > request.limit, unseen)

    @contextmanager
    def watch(self, path: str, *, recursive: bool) -> Iterator[AsyncIterator[Change]]:
        """The changes below a directory from now on. Raises ActionError."""
        prefix = posixpath.join(self.directory(path), "")
        waiting: deque[Change] = deque()
        arrived = anyio.Event()

        def add(kind: ChangeKind, changed: str, directory: bool) -> None:
            name = changed[len(prefix) :]
            if not f"{changed}/".startswith(prefix) or (not recursive and "/" in name):
                return
            if len(waiting) == QUEUE:
                waiting.append(Change("lost"))
            elif len(waiting) < QUEUE:
                waiting.append(Change(kind, name, directory))
            arrived.set()

        async def changes() -> AsyncIterator[Change]:
            nonlocal arrived
            while True:
                while waiting:
                    change = waiting.popleft()
                    yield change
                    if change.path == "" and change.kind == "deleted":
                        return
                arrived = anyio.Event()
                await arrived.wait()

        self.on_change.append(add)
        try:
            yield changes()
        finally:
            self.on_change.remove(add)

    def directory(self, path: str) -> str:
        """The real path of a directory. Raises FileNotFoundError or NotADirectoryError."""
        at, node = self._find(path)
        if node.kind != "directory":
            raise file_error(errno.ENOTDIR, path)
        return at

    def _find(self, path: str, *, follow: bool = True) -> tuple[str, MemoryNode]:
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


def _expression(request: Search, text: str) -> re.Pattern[bytes]:
    """Raises RequestError."""
    words = encoded(text, "a search")
    try:
        return re.compile(
            words if request.regex else re.escape(words), re.IGNORECASE if request.ignore_case else 0
        )
    except re.error as error:
        raise RequestError(f"not a regular expression: {text!r}: {error}", kind="pattern") from error


def _selected(name: str, request: Search) -> bool:
    """Whether the search's ``names`` and ``skip`` admit a path below the searched one."""
    *parents, last = name.split("/")
    if any(fnmatch.fnmatch(part, pattern) for part in parents for pattern in request.skip):
        return False
    names = request.names
    return not names or any(fnmatch.fnmatch(name if "/" in one else last, one) for one in names)


def load(source: Path) -> list[tuple[str, MemoryNode]]:
    """Read a local tree as nodes by relative name, parents first."""
    paths = [source, *sorted(source.rglob("*"))] if source.is_dir() and not source.is_symlink() else [source]
    return [("" if path == source else str(path.relative_to(source)), _node(path)) for path in paths]


def _node(path: Path) -> MemoryNode:
    mode = path.lstat().st_mode & 0o7777
    if path.is_symlink():
        return MemoryNode("link", 0o777, os.fsencode(path.readlink()))
    return MemoryNode("directory", mode) if path.is_dir() else MemoryNode("file", mode, path.read_bytes())


def store(nodes: Sequence[tuple[str, MemoryNode]], target: Path, links: Links) -> None:
    """Write nodes to ``target``. A link there is replaced, never followed."""
    for relative, node in nodes:
        path = target / relative if relative else target
        if path.is_symlink():
            path.unlink()
        if node.kind == "directory":
            path.mkdir(exist_ok=True)
        elif node.kind == "link":
            if links.admit(relative, os.fsdecode(node.data)):
                path.symlink_to(os.fsdecode(node.data))
        else:
            path.write_bytes(node.data)
        if node.kind != "link":
            path.chmod(node.mode & 0o1777)

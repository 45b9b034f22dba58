"""Searches and watches on the wire: what is asked, and what init's records say."""

from __future__ import annotations

import asyncio
import os
import posixpath
from typing import Final

from dutyfree.contract import Found, Match, Search
from dutyfree.contract.abilities import Change
from dutyfree.contract.arguments import check_search, encoded
from dutyfree.contract.errors import CollectError, RequestError
from dutyfree.engine.launcher import protocol
from dutyfree.engine.sandbox.observation import PART

DIRECTORIES = 4096
"""At most so many directories are watched at once."""

_KINDS: Final = (
    (0x002, "modified"),
    (0x004, "attributes"),
    (0x008, "closed"),
    (0x040, "moved_from"),
    (0x080, "moved_to"),
    (0x100, "created"),
    (0x200, "deleted"),
    (0x400, "deleted"),
    (0x800, "moved_from"),
    (0x4000, "lost"),
)
_DIRECTORY = 0x40000000


def payload(asked: Search, located: bytes) -> bytes:
    """``located`` is the directory, as init takes it. Raises RequestError, UsageError."""
    check_search(asked)
    words = [encoded(word, "a search") for word in (asked.text or "", *asked.names, *asked.skip)]
    flags = (
        (protocol.Search.REGEX if asked.regex else 0)
        | (protocol.Search.NOCASE if asked.ignore_case else 0)
        | (protocol.Search.BINARY if asked.binary else 0)
    )
    head = protocol.SEARCH.pack(
        0 if asked.timeout is None else max(1, int(min(protocol.FOREVER, asked.timeout) * 1e9)),
        flags,
        min(asked.limit, 0xFFFFFFFF),
        min(asked.width, 1 << 20),
        len(asked.names),
        len(asked.skip),
        0,
    )
    payload = head + located + b"".join(word + b"\0" for word in words)
    if len(payload) > protocol.FRAME_MAX:
        raise RequestError("the search has more bytes than can be handed over at once", kind="pattern")
    return payload


async def found(asked: Search, data: bytes) -> Found:
    """In parts: others have their turn between them. Raises CollectError if the records make no sense."""
    matches: list[Match] = []
    at, size = 0, protocol.MATCH.size
    while at + size <= len(data):
        if len(matches) % PART == PART - 1:
            await asyncio.sleep(0)
        line, path_size, text_size, flags = protocol.MATCH.unpack_from(data, at)
        at += size
        if flags & protocol.Match.LAST:
            return Found(tuple(matches), bool(flags & protocol.Match.TRUNCATED), line)
        path, text = data[at : at + path_size], data[at + path_size : at + path_size + text_size]
        at += path_size + text_size
        name = os.fsdecode(path)
        if asked.path not in ("", "."):
            name = posixpath.join(asked.path, name) if name else asked.path
        matches.append(Match(name, line, text, bool(flags & protocol.Match.CUT)))
    raise CollectError("the sandbox sent a search's result that has no end")


class Changes:
    """Records of a watch, which may come in any pieces."""

    def __init__(self) -> None:
        self._pending = bytearray()

    def add(self, data: bytes) -> tuple[list[Change], bool]:
        """The changes that are whole now, and whether the watch has begun among them."""
        self._pending += data
        changes, begun, at = [], False, 0
        while at + protocol.CHANGE.size <= len(self._pending):
            kind, size = protocol.CHANGE.unpack_from(self._pending, at)
            if size > 1 << 14:
                raise CollectError("the sandbox sent a change that cannot be")
            end = at + protocol.CHANGE.size + size
            if end > len(self._pending):
                break
            path = os.fsdecode(bytes(self._pending[at + protocol.CHANGE.size : end]))
            at = end
            if kind == 0:
                begun = True
            for bit, name in _KINDS:
                if kind & bit:
                    changes.append(Change(name, path, bool(kind & _DIRECTORY)))  # type: ignore[arg-type]
        del self._pending[:at]
        return changes, begun

"""Searches of files: the request to init, and the matches that it sends."""

from __future__ import annotations

import asyncio
import errno
import os
import posixpath

from dutyfree.contract import Found, Match, Search
from dutyfree.contract.arguments import check_search, encoded
from dutyfree.contract.errors import ActionTimeout, CollectError, RequestError
from dutyfree.engine.launcher import protocol
from dutyfree.engine.sandbox.observation import PART, REASON_MAX, check
from dutyfree.engine.sandbox.pending import PendingOperation


def encode(wanted: Search, located: bytes) -> bytes:
    """The payload of a SEARCH frame; ``located`` is the directory as init takes it.

    Raises RequestError, UsageError.
    """
    check_search(wanted)
    words = [encoded(word, "a search") for word in (wanted.text or "", *wanted.names, *wanted.skip)]
    flags = (
        (protocol.SearchFlag.REGEX if wanted.regex else 0)
        | (protocol.SearchFlag.NOCASE if wanted.ignore_case else 0)
        | (protocol.SearchFlag.BINARY if wanted.binary else 0)
    )
    head = protocol.SEARCH.pack(
        0 if wanted.timeout is None else max(1, int(min(protocol.FOREVER, wanted.timeout) * 1e9)),
        flags,
        min(wanted.limit, 0xFFFFFFFF),
        min(wanted.width, 1 << 20),
        len(wanted.names),
        len(wanted.skip),
        0,
    )
    payload = head + located + b"".join(word + b"\0" for word in words)
    if len(payload) > protocol.FRAME_MAX:
        raise RequestError(
            f"the search takes {len(payload)} bytes, and at most {protocol.FRAME_MAX} can be sent",
            kind="pattern",
        )
    return payload


async def result(wanted: Search, answer: PendingOperation) -> Found:
    """Raises ActionError, and CollectError for records that make no sense."""
    error = answer.done.result()
    said = b"".join(answer.data)
    if error == protocol.ERROR_PATTERN:
        reason = said[:REASON_MAX].decode(errors="replace")
        raise RequestError(f"not a regular expression: {wanted.text!r}: {reason}", kind="pattern")
    if error == errno.ETIMEDOUT:
        raise ActionTimeout(f"the search took more than {wanted.timeout:g} s")
    check(error, wanted.path)
    return await decode(wanted, said)


async def decode(wanted: Search, data: bytes) -> Found:
    """The matches. Other tasks of the event loop run in between. Raises CollectError."""
    matches: list[Match] = []
    at, size = 0, protocol.MATCH.size
    while at + size <= len(data):
        if len(matches) % PART == PART - 1:
            await asyncio.sleep(0)
        line, path_size, text_size, flags = protocol.MATCH.unpack_from(data, at)
        at += size
        if flags & protocol.MatchFlag.LAST:
            return Found(tuple(matches), bool(flags & protocol.MatchFlag.TRUNCATED), line)
        path, text = data[at : at + path_size], data[at + path_size : at + path_size + text_size]
        at += path_size + text_size
        name = os.fsdecode(path)
        if wanted.path not in ("", "."):
            name = posixpath.join(wanted.path, name) if name else wanted.path
        matches.append(Match(name, line, text, bool(flags & protocol.MatchFlag.CUT)))
    raise CollectError("the sandbox sent a search result without an end")

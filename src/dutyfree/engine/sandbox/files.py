"""Files of one sandbox: read, write, list, remove, copy, edit, search, watch."""

from __future__ import annotations

import errno
import os
import posixpath
import struct
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from dutyfree.contract import Entry, Found, Search
from dutyfree.contract.abilities import Change
from dutyfree.contract.arguments import check_bytes, check_mode, encoded_path
from dutyfree.contract.entries import Links
from dutyfree.contract.errors import EditError, file_error
from dutyfree.contract.perform import check_edit
from dutyfree.engine.launcher import protocol
from dutyfree.engine.launcher.protocol import Frame
from dutyfree.engine.sandbox import contents, search, watch
from dutyfree.engine.sandbox.lifecycle import Lifecycle
from dutyfree.engine.sandbox.observation import REASON_MAX, check, entries
from dutyfree.engine.sandbox.pending import PendingOperation, ReadBudget
from dutyfree.engine.sandbox.request import Request

_PATH_MAX = 1 << 16  # more than the kernel accepts


class SandboxFiles:
    """File operations; relative paths start from ``directory``, or where that is empty from init's own."""

    def __init__(self, lifecycle: Lifecycle, directory: str) -> None:
        self._lifecycle = lifecycle
        self._directory = os.fsencode(directory)

    def encode_path(self, path: str) -> bytes:
        """The path as init takes it. Raises ArgumentError, RequestError, FileError."""
        encoded = encoded_path(path)
        if self._directory:
            encoded = posixpath.join(self._directory, encoded)
        if len(encoded) > _PATH_MAX:
            raise file_error(errno.ENAMETOOLONG, f"{path[:100]}…")
        return (encoded or b".") + b"\0"

    async def read(self, path: str, largest: int = contents.LARGEST) -> bytes:
        channel = self._lifecycle.channel()
        answer = await channel.ask(Frame.READ, self.encode_path(path), budget=ReadBudget(largest))
        if answer.descriptor is None and not answer.done.result() and len(answer.data) == 1:
            return answer.data[0]
        return await read_result(answer, path, largest)

    def begin_read(self, path: str, largest: int = contents.LARGEST) -> Request[bytes]:
        """Send the request to read a file. Raises ActionError, UsageError, DispatchError."""
        channel = self._lifecycle.channel()
        identity, answer = channel.request(Frame.READ, self.encode_path(path), ReadBudget(largest))

        def content() -> bytes | Coroutine[Any, Any, bytes]:
            if answer.descriptor is None and not answer.done.result() and len(answer.data) == 1:
                return answer.data[0]
            return read_result(answer, path, largest)

        return Request(channel, identity, answer, content)

    def begin_write(self, path: str, data: bytes, mode: int) -> Request[None] | None:
        """Send the request to write a file; None if the content is too large for one frame.

        Raises ActionError, UsageError, DispatchError.
        """
        payload = encode_inline(self.encode_path, path, data, mode)
        if payload is None:
            return None
        channel = self._lifecycle.channel()
        identity, answer = channel.request(Frame.WRITE, payload)
        return Request(channel, identity, answer, lambda: check(answer.done.result(), path))

    async def write(self, path: str, data: bytes, mode: int) -> None:
        channel = self._lifecycle.channel()
        answer = await channel.ask(Frame.WRITE, *await encode_write(self.encode_path, path, data, mode))
        check(answer.done.result(), path)

    async def list(self, path: str) -> tuple[Entry, ...]:
        answer = await self._lifecycle.channel().ask(Frame.LIST, self.encode_path(path))
        check(answer.done.result(), path)
        return await entries(b"".join(answer.data))

    async def remove(self, path: str) -> None:
        answer = await self._lifecycle.channel().ask(Frame.REMOVE, self.encode_path(path))
        check(answer.done.result(), path)

    async def upload(self, source: Path, path: str) -> None:
        await contents.upload(self._lifecycle.channel(), source, self.encode_path(path), path)

    async def download(self, path: str, target: Path, *, outside_links: bool) -> tuple[str, ...]:
        links = Links(path, outside=outside_links)
        await contents.download(self._lifecycle.channel(), self.encode_path(path), path, target, links)
        return tuple(links.left_out)

    async def unpack(self, path: str, descriptor: int) -> None:
        await contents.unpack(self._lifecycle.channel(), self.encode_path(path), path, descriptor)

    async def pack(self, path: str, descriptor: int) -> None:
        await contents.pack(self._lifecycle.channel(), self.encode_path(path), path, descriptor)

    async def edit(self, path: str, old: bytes, new: bytes) -> None:
        channel = self._lifecycle.channel()
        check_edited(await channel.ask(Frame.EDIT, encode_edit(self.encode_path(path), old, new)), path)

    async def search(self, wanted: Search) -> Found:
        channel = self._lifecycle.channel()
        payload = search.encode(wanted, self.encode_path(wanted.path))
        answer = await channel.ask(Frame.SEARCH, payload, timeout=wanted.timeout)
        return await search.result(wanted, answer)

    @asynccontextmanager
    async def watch(self, path: str, *, recursive: bool) -> AsyncIterator[AsyncIterator[Change]]:
        channel = self._lifecycle.channel()
        async with watch.watch(channel, self.encode_path(path), path, recursive=recursive) as changes:
            yield changes


async def read_result(answer: PendingOperation, path: str, largest: int = contents.LARGEST) -> bytes:
    """Raises ActionError."""
    check(answer.done.result(), path)
    if answer.descriptor is None:
        return b"".join(answer.data)
    descriptor, answer.descriptor = answer.descriptor, None
    return await contents.read_whole(descriptor, path, largest)


async def encode_write(
    encode_path: Callable[[str], bytes], path: str, data: bytes, mode: int
) -> tuple[bytes, int | None]:
    """The payload, and a descriptor with the content if that is large.

    Raises UsageError, FileError, DispatchError.
    """
    payload = encode_inline(encode_path, path, data, mode)
    if payload is not None:
        return payload, None
    return protocol.WRITE.pack(mode) + encode_path(path), await contents.memory_file(data)


def encode_inline(encode_path: Callable[[str], bytes], path: str, data: bytes, mode: int) -> bytes | None:
    """The payload with the content in it; None if that is too large. Raises UsageError, FileError."""
    check_mode(mode)
    check_bytes(data)
    if len(data) > protocol.INLINE_MAX:
        return None
    return protocol.WRITE.pack(mode) + encode_path(path) + data


def encode_edit(located: bytes, old: bytes, new: bytes) -> bytes:
    """Raises RequestError, FileError, ArgumentError."""
    check_edit(old, new)
    if len(old) + len(new) + len(located) + protocol.EDIT.size > protocol.FRAME_MAX:
        raise file_error(errno.EFBIG, os.fsdecode(located[:-1]))
    return protocol.EDIT.pack(len(old), len(new)) + located + old + new


def check_edited(answer: PendingOperation, path: str) -> None:
    """Raises EditError, FileError."""
    error = answer.done.result()
    said = b"".join(answer.data)[:REASON_MAX]
    if error == protocol.ERROR_NOT_ONCE and len(said) >= protocol.NUMBER.size:
        count, *lines = struct.unpack(f"={len(said) // 4}I", said[: len(said) // 4 * 4])
        raise EditError(path, count, tuple(lines))
    check(error, path)

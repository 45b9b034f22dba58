"""File contents between us and a sandbox, as descriptors beside the frames: single files, and whole trees.

No descriptor leaks if the caller is cancelled.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import os
import stat
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import anyio
import anyio.to_thread

from dutyfree.contract.entries import KINDS, Links, local_special
from dutyfree.contract.errors import CollectError, FileError, file_error
from dutyfree.engine.launcher.protocol import READ_MAX, Frame
from dutyfree.engine.sandbox import observation, tree_stream
from dutyfree.engine.sandbox.channel import Channel
from dutyfree.engine.sandbox.pipes import create_pipe, no_descriptor

LARGEST = READ_MAX
"""Bytes of the largest file that ``read`` returns; a sparse file in a sandbox can claim any size."""

INLINE_COPY = 1 << 20
"""Bytes that are copied in the event loop; more are copied in a thread."""

_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE


# --- Single files -----------------------------------------------------------------------------------


async def memory_file(data: bytes) -> int:
    """A sealed memory file with this content, at position 0. Raises DispatchError."""
    if len(data) <= INLINE_COPY:
        return _memory_file(data)
    making = asyncio.get_running_loop().run_in_executor(None, _memory_file, data)
    try:
        return await asyncio.shield(making)
    except asyncio.CancelledError:
        making.add_done_callback(_close)
        raise


async def read_whole(descriptor: int, path: str, largest: int = LARGEST) -> bytes:
    """The content of a file up to its present size, even if a process in the sandbox keeps writing to it.

    Closes the descriptor. Raises FileError, ExecError.
    """
    return await asyncio.shield(
        asyncio.get_running_loop().run_in_executor(None, _read_whole, descriptor, path, largest)
    )


def _memory_file(data: bytes) -> int:
    rest = memoryview(data)
    try:
        descriptor = os.memfd_create("stdin", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as error:
        raise no_descriptor(error) from error
    try:
        os.set_blocking(descriptor, False)
        while rest:
            rest = rest[os.write(descriptor, rest) :]
        os.lseek(descriptor, 0, os.SEEK_SET)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
    except OSError as error:
        os.close(descriptor)
        raise no_descriptor(error) from error
    return descriptor


def _close(made: asyncio.Future[int]) -> None:
    if not made.cancelled() and not made.exception():
        os.close(made.result())


def _read_whole(descriptor: int, path: str, largest: int) -> bytes:
    try:
        about = os.fstat(descriptor)
        if not stat.S_ISREG(about.st_mode):
            raise CollectError(f"the sandbox sent something else than the file {path}")
        if about.st_size > largest:
            raise file_error(errno.EFBIG, path)
        parts: list[bytes] = []
        left = about.st_size
        # Large reads: each goes directly into its bytes object, without the interpreter lock.
        while left > 0 and (part := os.read(descriptor, left)):
            parts.append(part)
            left -= len(part)
        return b"".join(parts)
    except OSError as error:
        if isinstance(error, FileError):
            raise
        raise file_error(error.errno or errno.EIO, path) from error
    finally:
        os.close(descriptor)


# --- Trees ------------------------------------------------------------------------------------------


async def upload(channel: Channel, source: Path, located: bytes, path: str) -> None:
    """Copy a file or tree of this machine to ``path``; ``located`` is that path as init takes it."""
    found = await anyio.to_thread.run_sync(source.lstat)  # raises FileNotFoundError
    if stat.S_IFMT(found.st_mode) not in KINDS:
        raise local_special(source)
    theirs, ours = create_pipe()
    packing = _in_thread(partial(_pack, source, ours))
    answer = await channel.ask(Frame.UNPACK, located, theirs)
    error = await packing
    _raise(answer.done.result(), error, path)


async def download(channel: Channel, located: bytes, path: str, target: Path, links: Links) -> None:
    """Copy a file or tree of the sandbox to ``target``. If that fails, remove what it created there."""
    existed = await anyio.to_thread.run_sync(os.path.lexists, target)
    ours, theirs = create_pipe()
    unpacking = _in_thread(partial(_unpack, ours, target, links))
    try:
        answer = await channel.ask(Frame.PACK, located, theirs)
        error = await asyncio.shield(unpacking)
        if isinstance(error, FileError) and error.kind == "too_large":
            raise error
        _raise(answer.done.result(), error, path)
    except BaseException:
        # Init has closed its end by now, or soon will: then the thread ends.
        with anyio.CancelScope(shield=True):
            await asyncio.wait([unpacking], timeout=2 * channel.answer_timeout)
            if not existed:
                await anyio.to_thread.run_sync(tree_stream.discard, target)
        raise


async def unpack(channel: Channel, located: bytes, path: str, descriptor: int) -> None:
    """Create the tree of a tree stream at ``path``. Closes the descriptor. Raises ActionError."""
    answer = await channel.ask(Frame.UNPACK, located, descriptor)
    observation.check(answer.done.result(), path)


async def pack(channel: Channel, located: bytes, path: str, descriptor: int) -> None:
    """Write the file or tree at ``path`` as a tree stream. Closes the descriptor. Raises ActionError."""
    answer = await channel.ask(Frame.PACK, located, descriptor)
    observation.check(answer.done.result(), path)


def _raise(number: int, error: Exception | None, path: str) -> None:
    """Raise init's error or ours. EPIPE from init means that we closed the pipe: then ours is the cause."""
    if number != errno.EPIPE:
        observation.check(number, path)
    if error is not None:
        raise error
    observation.check(number, path)


def _pack(source: Path, pipe: int) -> Exception | None:
    try:
        tree_stream.pack(source, pipe)
    except (OSError, ValueError) as error:
        return error
    return None


def _unpack(pipe: int, target: Path, links: Links) -> Exception | None:
    try:
        tree_stream.unpack(pipe, target, links)
    except Exception as error:  # noqa: BLE001 (the caller raises it)
        return error
    return None


def _in_thread(function: Callable[[], Exception | None]) -> asyncio.Future[Exception | None]:
    """Run it in a thread of its own; a cancelled caller does not have to wait for the thread."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Exception | None] = loop.create_future()

    def finish(result: Exception | None) -> None:
        if not done.done():
            done.set_result(result)

    def run() -> None:
        result = function()
        with contextlib.suppress(RuntimeError):  # the loop may be closed
            loop.call_soon_threadsafe(finish, result)

    threading.Thread(target=run, name="dutyfree-tree", daemon=True).start()
    return done

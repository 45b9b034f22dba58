"""Files and trees in and out of a sandbox: through a pipe, packed and unpacked in a thread of ours."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import stat
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import anyio
import anyio.to_thread

from dutyfree.contract.entries import KINDS, Links, local_special
from dutyfree.contract.errors import FileError
from dutyfree.engine.launcher.protocol import Frame
from dutyfree.engine.sandbox import contents, observation, tree_stream
from dutyfree.engine.sandbox.channel import Channel


async def upload(channel: Channel, source: Path, located: bytes, path: str) -> None:
    """``located`` is the path as init takes it."""
    found = await anyio.to_thread.run_sync(source.lstat)  # raises FileNotFoundError
    if stat.S_IFMT(found.st_mode) not in KINDS:
        raise local_special(source)
    theirs, ours = contents.pipe()
    packing = _in_thread(partial(_pack, source, ours))
    answer = await channel.ask(Frame.UNPACK, located, theirs)
    error = await packing
    _raise(answer.done.result(), error, path)


async def download(channel: Channel, located: bytes, path: str, target: Path, links: Links) -> None:
    existed = await anyio.to_thread.run_sync(os.path.lexists, target)
    ours, theirs = contents.pipe()
    unpacking = _in_thread(partial(_unpack, ours, target, links))
    try:
        answer = await channel.ask(Frame.PACK, located, theirs)
        error = await asyncio.shield(unpacking)
        if isinstance(error, FileError) and error.kind == "too_large":
            raise error
        _raise(answer.done.result(), error, path)
    except BaseException:
        # The other end is closed by now, or soon: the thread ends, and what it made can go.
        with anyio.CancelScope(shield=True):
            await asyncio.wait([unpacking], timeout=2 * channel.answer_timeout)
            if not existed:
                await anyio.to_thread.run_sync(tree_stream.discard, target)
        raise


def _raise(number: int, error: Exception | None, path: str) -> None:
    """Raise init's error or ours. EPIPE of init says that we closed the pipe: then ours is the reason."""
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
    except Exception as error:  # noqa: BLE001 (told to whoever waits)
        return error
    return None


def _in_thread(function: Callable[[], Exception | None]) -> asyncio.Future[Exception | None]:
    """Run beside the event loop in a thread of its own, which a cancelled caller need not wait for."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Exception | None] = loop.create_future()

    def finish(result: Exception | None) -> None:
        if not done.done():
            done.set_result(result)

    def run() -> None:
        result = function()
        with contextlib.suppress(RuntimeError):  # the loop may be gone
            loop.call_soon_threadsafe(finish, result)

    threading.Thread(target=run, name="dutyfree-tree", daemon=True).start()
    return done

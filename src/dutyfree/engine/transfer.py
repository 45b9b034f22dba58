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

from dutyfree.engine import observing, trees
from dutyfree.engine.channel import Channel
from dutyfree.engine.protocol import Frame
from dutyfree.engine.waiting import PATIENCE
from dutyfree.substrates.kinds import KINDS, special


async def upload(channel: Channel, source: Path, located: bytes, path: str) -> None:
    """``located`` is the path as init takes it."""
    found = await anyio.to_thread.run_sync(source.lstat)  # raises FileNotFoundError
    if stat.S_IFMT(found.st_mode) not in KINDS:
        raise special(str(source))
    theirs, ours = os.pipe()
    packing = _in_thread(partial(_pack, source, ours))
    answer = await channel.ask(Frame.UNPACK, located, theirs)
    error = await packing
    # Init's word counts more: a pipe that broke is only its consequence.
    observing.check(answer.done.result(), path)
    if error is not None:
        raise error


async def download(channel: Channel, located: bytes, path: str, target: Path) -> None:
    existed = await anyio.to_thread.run_sync(os.path.lexists, target)
    ours, theirs = os.pipe()
    unpacking = _in_thread(partial(_unpack, ours, target))
    try:
        answer = await channel.ask(Frame.PACK, located, theirs)
        error = await asyncio.shield(unpacking)
        if isinstance(error, OSError) and error.errno == errno.EFBIG:
            raise error
        # Init's word counts more: a tree that ends too early is only its consequence.
        observing.check(answer.done.result(), path)
        if error is not None:
            raise error
    except BaseException:
        # The other end is closed by now, or soon: the thread ends, and what it made can go.
        with anyio.CancelScope(shield=True):
            await asyncio.wait([unpacking], timeout=2 * PATIENCE)
            if not existed:
                await anyio.to_thread.run_sync(trees.discard, target)
        raise


def _pack(source: Path, pipe: int) -> Exception | None:
    try:
        trees.pack(source, pipe)
    except (OSError, ValueError) as error:
        return error
    return None


def _unpack(pipe: int, target: Path) -> Exception | None:
    try:
        trees.unpack(pipe, target)
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

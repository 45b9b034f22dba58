"""Contents that travel as descriptors beside the frames. None is lost when its caller is cancelled."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os

LARGEST = 1 << 30
"""No larger file is read whole: a few bytes can claim to be any size. Download it instead."""

SOON = 1 << 20
"""So many bytes are copied at once; more of them beside the event loop."""

_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE


async def memory_file(data: bytes) -> int:
    """A file in memory, sealed, to be read from its beginning. Raises OSError."""
    if len(data) <= SOON:
        return _memory_file(data)
    making = asyncio.get_running_loop().run_in_executor(None, _memory_file, data)
    try:
        return await asyncio.shield(making)
    except asyncio.CancelledError:
        making.add_done_callback(_close)
        raise


async def read_whole(descriptor: int, path: str) -> bytes:
    """The file as long as it is now: whoever goes on writing to it is not waited for.

    The descriptor is closed. Raises OSError.
    """
    return await asyncio.shield(
        asyncio.get_running_loop().run_in_executor(None, _read_whole, descriptor, path)
    )


def _memory_file(data: bytes) -> int:
    rest = memoryview(data)
    descriptor = os.memfd_create("stdin", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.set_blocking(descriptor, False)
        while rest:
            rest = rest[os.write(descriptor, rest) :]
        os.lseek(descriptor, 0, os.SEEK_SET)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _close(made: asyncio.Future[int]) -> None:
    if not made.cancelled() and not made.exception():
        os.close(made.result())


def _read_whole(descriptor: int, path: str) -> bytes:
    with open(descriptor, "rb", buffering=0) as file:
        size = os.fstat(descriptor).st_size
        if size > LARGEST:
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), path)
        data = bytearray()
        while len(data) < size and (part := file.read(min(size - len(data), 1 << 24))):
            data += part
        return bytes(data)

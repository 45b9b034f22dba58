"""Contents that travel as descriptors beside the frames. None is lost when its caller is cancelled."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import stat

from dutyfree.contract.errors import CollectError, DispatchError, FileError, file_error
from dutyfree.engine.host import capacity

LARGEST = 1 << 30
"""No larger file is read whole: a few bytes can claim to be any size. Download it instead."""

SOON = 1 << 20
"""So many bytes are copied at once; more of them beside the event loop."""

_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE


async def memory_file(data: bytes) -> int:
    """A file in memory, sealed, to be read from its beginning. Raises DispatchError."""
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

    The descriptor is closed. Raises FileError, ExecError.
    """
    return await asyncio.shield(
        asyncio.get_running_loop().run_in_executor(None, _read_whole, descriptor, path)
    )


def _memory_file(data: bytes) -> int:
    rest = memoryview(data)
    try:
        descriptor = os.memfd_create("stdin", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as error:
        raise _own(error) from error
    try:
        os.set_blocking(descriptor, False)
        while rest:
            rest = rest[os.write(descriptor, rest) :]
        os.lseek(descriptor, 0, os.SEEK_SET)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
    except OSError as error:
        os.close(descriptor)
        raise _own(error) from error
    return descriptor


def pipe() -> tuple[int, int]:
    """One of ours, of which the sandbox gets an end. Raises DispatchError."""
    try:
        return os.pipe()
    except OSError as error:
        raise _own(error) from error


def _own(error: OSError) -> DispatchError:
    return DispatchError(
        f"this process cannot hand data over: {error.strerror}", remedy=capacity.RAISE_OPEN_FILES
    )


def _close(made: asyncio.Future[int]) -> None:
    if not made.cancelled() and not made.exception():
        os.close(made.result())


def _read_whole(descriptor: int, path: str) -> bytes:
    try:
        about = os.fstat(descriptor)
        if not stat.S_ISREG(about.st_mode):
            raise CollectError(f"the sandbox sent something else than the file {path}")
        if about.st_size > LARGEST:
            raise file_error(errno.EFBIG, path)
        parts: list[bytes] = []
        left = about.st_size
        # As large as can be: each is read into its own bytes while other threads run, and copied by none.
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

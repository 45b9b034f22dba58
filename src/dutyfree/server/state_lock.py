"""One server for each state directory: a lock, and how the next server takes over."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
from collections.abc import Iterator
from pathlib import Path

from dutyfree.contract.errors import Unavailable


@contextlib.contextmanager
def locked(state: Path, *, replace: bool = False) -> Iterator[None]:
    """Hold the lock of a state directory. Blocks. Raises Unavailable if another server has it.

    With ``replace``, tell that server to hand over its sandboxes, and wait until it has ended.
    """
    state.mkdir(parents=True, exist_ok=True, mode=0o700)
    descriptor = os.open(state / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        _take(descriptor, state, replace)
        os.truncate(descriptor, 0)
        os.pwrite(descriptor, str(os.getpid()).encode(), 0)
        yield
    finally:
        os.close(descriptor)


def _take(descriptor: int, state: Path, replace: bool) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return
    except BlockingIOError:
        holder = os.pread(descriptor, 20, 0).decode(errors="replace")
    if not replace:
        raise Unavailable(
            f"a server with the state {state} runs already: process {holder}",
            remedy="go on with its sandboxes: --replace; or give another directory: --state DIRECTORY",
        )
    with contextlib.suppress(ProcessLookupError):
        if holder.isdigit():
            os.kill(int(holder), signal.SIGTERM)
    fcntl.flock(descriptor, fcntl.LOCK_EX)

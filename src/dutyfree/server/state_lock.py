"""One server for each state directory: a lock, and how the next server takes over."""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import time
from collections.abc import Iterator
from pathlib import Path

from dutyfree.contract.errors import Unavailable

UNKNOWN_SECONDS = 10.0
"""For how long a lock may be held without the name of a process that holds it."""
_PAUSE = 0.05


@contextlib.contextmanager
def locked(state: Path, *, replace: bool = False, unknown_seconds: float = UNKNOWN_SECONDS) -> Iterator[None]:
    """Hold the lock of a state directory. Blocks. Raises Unavailable if another server has it.

    With ``replace``, tell that server to hand over its sandboxes, and wait until it has ended. No other
    process gets a signal, whatever the lock file says.
    """
    state.mkdir(parents=True, exist_ok=True, mode=0o700)
    descriptor = os.open(state / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        _take(descriptor, state, replace, unknown_seconds)
        os.truncate(descriptor, 0)
        os.pwrite(descriptor, str(os.getpid()).encode(), 0)
        yield
    finally:
        os.close(descriptor)


def holder(state: Path) -> int | None:
    """The process that holds the lock, if it is one that this process can see."""
    try:
        descriptor = os.open(state / "lock", os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        named = os.pread(descriptor, 20, 0).decode(errors="replace")
        return int(named) if named.isdigit() and _holds(int(named), descriptor) else None
    finally:
        os.close(descriptor)


def _take(descriptor: int, state: Path, replace: bool, unknown_seconds: float) -> None:
    until = time.monotonic() + unknown_seconds
    while not _try(descriptor):
        holder = os.pread(descriptor, 20, 0).decode(errors="replace")
        if not replace:
            raise Unavailable(
                f"a server with the state {state} runs already: process {holder}",
                remedy="go on with its sandboxes: --replace; or give another directory: --state DIRECTORY",
            )
        if holder.isdigit() and stop_holder(int(holder), descriptor):
            until = time.monotonic() + unknown_seconds
        elif time.monotonic() > until:
            raise Unavailable(
                f"the server with the state {state} is not a process that this one can see",
                remedy="it may run in another container: stop it there, and start this server again",
            )
        else:
            time.sleep(_PAUSE)  # it has just begun, or has just ended


def _try(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def stop_holder(pid: int, lock: int) -> bool:
    """Send SIGTERM to a process if it holds this lock, and wait for its end. Says whether it did.

    The number of a process may belong to another one by now. A pidfd always means the same process: if the
    number was given away before it was opened, that process does not have the lock; and if afterwards, the
    signal goes nowhere.
    """
    try:
        process = os.pidfd_open(pid)
    except (OSError, OverflowError):
        return False
    try:
        if not _holds(pid, lock):
            return False
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(process, signal.SIGTERM)
        select.select([process], [], [])  # readable at its end
    finally:
        os.close(process)
    return True


def _holds(pid: int, lock: int) -> bool:
    """Whether the process holds the lock of this open file, as the kernel says."""
    wanted = os.fstat(lock)
    with contextlib.suppress(OSError):
        for opened in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                described = Path(f"/proc/{pid}/fdinfo/{opened.name}")
                if os.path.samestat(opened.stat(), wanted) and "FLOCK" in described.read_text():
                    return True
    return False

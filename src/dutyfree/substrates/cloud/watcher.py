"""The watcher: a process that ends the instances of an owner that did not end them itself.

The owner tells it the name of each instance before the request, and again after its end. However the owner
ends, also by SIGKILL, the pipe closes: then the watcher ends the instances that are left, for as long as they
could live. It ignores SIGINT, SIGTERM and SIGHUP and has a session of its own. Its credentials are those of
its environment, which is the owner's.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[3])]

import msgspec

from dutyfree.contract.errors import Unavailable
from dutyfree.substrates.cloud.api import RUN, Api, ApiError, Place, connected
from dutyfree.substrates.local.reaper import remove_tree

READY = b"ready\n"
BEGIN, END = "begin", "end"
LONGEST_PAUSE = 60.0
GRACE_SECONDS = 600.0


class Orders(msgspec.Struct, frozen=True):
    """What a watcher is for."""

    place: Place
    run: str
    directory: str
    """With the keys of the owner; it is removed."""
    note: str
    """The file that names this run; it is removed after the last instance."""
    lifetime: int
    settle_seconds: float


class Watcher:
    """The owner's handle of its watcher."""

    def __init__(self, orders: Orders) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self._open = set[str]()
        self._tell(msgspec.json.encode(orders).decode())

    def wait_ready(self) -> None:
        """Wait until it can work. Blocks. Raises Unavailable."""
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        if self._process.stdout.readline() == READY:
            return
        said = self._process.stderr.read().decode(errors="replace").strip().splitlines()
        raise Unavailable(f"the process that ends the instances of a killed program failed: {said[-1:]}")

    def _tell(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line.encode() + b"\n")
        self._process.stdin.flush()

    def begin(self, name: str) -> None:
        """From now on an instance of this name may exist. Blocks. Raises BrokenPipeError."""
        self._tell(f"{BEGIN} {name}")
        self._open.add(name)

    def end(self, name: str) -> None:
        """No instance of this name exists any more. Blocks."""
        self._open.discard(name)
        with contextlib.suppress(BrokenPipeError):
            self._tell(f"{END} {name}")

    @property
    def open(self) -> tuple[str, ...]:
        """The names that have begun and not ended."""
        return tuple(sorted(self._open))

    def dismiss(self) -> None:
        """The owner is finished: the watcher ends the open instances, and then itself. Blocks if none is."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        if self._open:
            self._process.returncode = 0  # do not wait for it
        else:
            self._process.wait()
        self._process.stdout.close()
        self._process.stderr.close()


def end_all(
    api: Api,
    run: str,
    names: Iterable[str],
    seconds: float,
    settle_seconds: float,
    first_pause: float = 1.0,
) -> bool:
    """End the instances of a run, until ``names`` have ended. False if they have not after ``seconds``.

    A name that is not listed for ``settle_seconds`` has no instance.
    """
    until, settled, pause = time.monotonic() + seconds, float("inf"), first_pause
    missing = set(names)
    while time.monotonic() < until:
        try:
            found = api.find({RUN: run})
            settled = min(settled, time.monotonic() + settle_seconds)
            living = [one for one in found if one.state != "ended"]
            missing -= {one.name for one in found if one.state == "ended"}
            if not living and (not missing or time.monotonic() > settled):
                return True
            for one in living:
                api.end(one.id)
            pause = first_pause
        except ApiError:
            pause = min(2 * pause, LONGEST_PAUSE)
        time.sleep(pause)
    return False


def _main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    orders = msgspec.json.decode(sys.stdin.buffer.readline(), type=Orders)
    api = connected(orders.place)
    sys.stdout.buffer.write(READY)
    sys.stdout.buffer.flush()
    names: set[str] = set()
    for line in sys.stdin:
        word, _, name = line.strip().partition(" ")
        (names.add if word == BEGIN else names.discard)(name)
    with contextlib.suppress(OSError):
        remove_tree(orders.directory)
    patience = orders.lifetime + GRACE_SECONDS
    if not names or end_all(api, orders.run, names, patience, orders.settle_seconds):
        Path(orders.note).unlink(missing_ok=True)


if __name__ == "__main__":
    _main()

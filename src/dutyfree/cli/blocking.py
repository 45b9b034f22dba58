"""Running what blocks under a terminal, without the cost of an event loop: signals halt it."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from typing import TypeVar

from dutyfree.engine.store.cancel import Halt, Stopped

T = TypeVar("T")


def run(function: Callable[[Halt], T]) -> T:
    """Run to the end. SIGINT, SIGTERM and SIGHUP halt it: it cleans up, and KeyboardInterrupt is raised."""
    halt = Halt()
    result: list[T] = []
    errors: list[BaseException] = []

    def work() -> None:
        try:
            result.append(function(halt))
        except BaseException as error:  # noqa: BLE001 (raised again below)
            errors.append(error)

    # Not in this thread: a signal must not come while it holds the lock that halting takes.
    thread = threading.Thread(target=work, name="dutyfree-work")
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, lambda *_: halt.set()) for number in numbers}
    try:
        thread.start()
        thread.join()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    for error in errors:
        if isinstance(error, Stopped):
            raise KeyboardInterrupt from error
        raise error
    return result[0]

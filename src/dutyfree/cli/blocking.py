"""Running what blocks under a terminal, without the cost of an event loop: signals cancel it."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from typing import TypeVar

from dutyfree.engine.store.cancel import Cancelled, CancelToken

T = TypeVar("T")


def run(function: Callable[[CancelToken], T]) -> T:
    """Run to the end. SIGINT, SIGTERM and SIGHUP cancel it: it cleans up, and KeyboardInterrupt is raised."""
    cancel = CancelToken()
    result: list[T] = []
    errors: list[BaseException] = []

    def work() -> None:
        try:
            result.append(function(cancel))
        except BaseException as error:  # noqa: BLE001 (raised again below)
            errors.append(error)

    # Not in this thread: a signal must not come while it holds the lock that halting takes.
    thread = threading.Thread(target=work, name="dutyfree-work")
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, lambda *_: cancel.set()) for number in numbers}
    try:
        thread.start()
        thread.join()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    for error in errors:
        if isinstance(error, Cancelled):
            raise KeyboardInterrupt from error
        raise error
    return result[0]

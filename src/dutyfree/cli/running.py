"""Running the library's coroutines under a terminal: one loop, and signals that cancel."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


def run(start: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run to the end. SIGTERM, SIGHUP and SIGQUIT end it as Ctrl-C does: cancelled, and cleaned up.

    Raises KeyboardInterrupt for each of them.
    """

    async def main() -> T:
        task = asyncio.current_task()
        assert task is not None
        stopped = False

        def stop() -> None:
            nonlocal stopped
            stopped = True
            task.cancel()

        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
            loop.add_signal_handler(number, stop)
        try:
            return await start()
        except asyncio.CancelledError:
            if stopped:
                raise KeyboardInterrupt from None
            raise

    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(main())


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory

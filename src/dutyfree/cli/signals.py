"""Signals: what Ctrl-C does while modules load, and how a running command is cancelled and cleans up."""

from __future__ import annotations

import signal
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import asyncio

    from dutyfree.engine.store.cancel import CancelToken

T = TypeVar("T")


def interruptible() -> AbstractContextManager[None]:
    """Let Ctrl-C raise KeyboardInterrupt inside this context."""
    return _replace_handler(signal.SIG_DFL, signal.default_int_handler)


def loading() -> AbstractContextManager[None]:
    """Let Ctrl-C end the process silently inside this context, where a command imports large modules.

    KeyboardInterrupt during an import shows a traceback from a foreign module, and some C extensions crash.
    Use it only before the command has started anything that needs cleanup.
    """
    return _replace_handler(signal.default_int_handler, signal.SIG_DFL)


@contextmanager
def _replace_handler(
    expected: object, handler: signal.Handlers | Callable[[int, FrameType | None], Any]
) -> Iterator[None]:
    before = signal.getsignal(signal.SIGINT)
    if before is expected:  # otherwise SIGINT is ignored, or another program's handler is in place
        signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def run_async(start: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run a coroutine in a new event loop. SIGTERM, SIGHUP and SIGQUIT cancel it as Ctrl-C does.

    Raises KeyboardInterrupt after each of these signals.
    """
    import asyncio

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
        return None  # this is no CPython
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


def run_blocking(function: Callable[[CancelToken], T]) -> T:
    """Run a blocking function without an event loop. SIGINT, SIGTERM and SIGHUP cancel it.

    Raises KeyboardInterrupt after the function has cleaned up.
    """
    import threading

    from dutyfree.engine.store.cancel import Cancelled, CancelToken

    cancel = CancelToken()
    result: list[T] = []
    errors: list[BaseException] = []

    def work() -> None:
        try:
            result.append(function(cancel))
        except BaseException as error:  # noqa: BLE001 (raised again below)
            errors.append(error)

    # In a thread of its own: this thread's signal handler takes the lock inside CancelToken.
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

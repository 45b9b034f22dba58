"""What Ctrl-C does: while modules are loaded it ends the process without a word, in a command it raises.

Loading is not for raising: what is seen is a traceback of somebody else's module, and some that are
written in C crash.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import FrameType
from typing import Any


def interruptible() -> AbstractContextManager[None]:
    """In here Ctrl-C raises KeyboardInterrupt."""
    return _instead(signal.SIG_DFL, signal.default_int_handler)


def loading() -> AbstractContextManager[None]:
    """Within a command, for modules that take their time. Nothing may have begun that must be ended."""
    return _instead(signal.default_int_handler, signal.SIG_DFL)


@contextmanager
def _instead(
    usual: object, handler: signal.Handlers | Callable[[int, FrameType | None], Any]
) -> Iterator[None]:
    before = signal.getsignal(signal.SIGINT)
    if before is usual:  # else it is ignored, or somebody else's
        signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)

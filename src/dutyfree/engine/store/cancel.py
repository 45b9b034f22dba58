"""Cancel blocking work in threads."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Protocol, TypeVar, runtime_checkable

import anyio
import anyio.to_thread

POLL_SECONDS = 0.05
"""How often a thread that waits for something else checks whether it was cancelled."""

T = TypeVar("T")


class Cancelled(Exception):  # noqa: N818 (not a failure)
    """The caller cancelled the work."""


class CancelToken:
    """An event that cancels the work it is passed to, and all its child tokens."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self._children: list[CancelToken] = []
        self._actions: dict[object, Callable[[], None]] = {}

    @contextlib.contextmanager
    def on_set(self, action: Callable[[], None]) -> Iterator[None]:
        """While the context lasts, run the action when the token is set; now, if it is set already.

        It runs in the thread that sets the token, so it must not block or raise.
        """
        name = object()
        self._actions[name] = action
        if self._event.is_set():
            action()
        try:
            yield
        finally:
            del self._actions[name]

    def child(self) -> CancelToken:
        """A token that is set with this one, and can also be set alone."""
        child = CancelToken()
        self._children.append(child)
        if self._event.is_set():
            child.set()
        return child

    def set(self) -> None:
        self._event.set()
        for action in list(self._actions.values()):
            action()
        for child in self._children:
            child.set()

    def is_set(self) -> bool:
        return self._event.is_set()

    def check(self) -> None:
        """Raise Cancelled if the token is set."""
        if self._event.is_set():
            raise Cancelled

    def wait(self, seconds: float) -> None:
        """Sleep. Raises Cancelled as soon as the token is set."""
        if self._event.wait(seconds):
            raise Cancelled


@runtime_checkable
class _Closable(Protocol):
    def close(self) -> None: ...


async def run_in_thread(function: Callable[[], T], cancel: CancelToken) -> T:
    """Run a blocking function in a thread of its own.

    If the task is cancelled, sets the token, waits for the thread, and closes the result that it may still
    return. The thread does not count against anyio's shared limit: the function may wait for others in there.
    """
    limiter = anyio.CapacityLimiter(1)
    running = asyncio.ensure_future(anyio.to_thread.run_sync(function, limiter=limiter))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        cancel.set()
        with anyio.CancelScope(shield=True), contextlib.suppress(Exception):
            late = await running
            if isinstance(late, _Closable):
                await anyio.to_thread.run_sync(late.close)
        raise

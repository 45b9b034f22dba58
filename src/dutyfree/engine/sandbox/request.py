"""A request to init whose sender does not wait in a task, but is called when the answer is there.

A task costs two turns of the event loop for each call. ``dutyfree serve`` saves them for the calls that are
one frame to init and one back.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

from dutyfree.engine.sandbox.channel import Channel
from dutyfree.engine.sandbox.pending import Pending, PendingOperation

T = TypeVar("T")


class Request(Generic[T]):
    """One request that was sent. Set ``on_answer`` before the event loop runs again."""

    __slots__ = ("_channel", "_identity", "_pending", "_result")

    def __init__(
        self,
        channel: Channel,
        identity: int,
        pending: Pending,
        result: Callable[[], T | Coroutine[Any, Any, T]],
    ) -> None:
        self._channel = channel
        self._identity = identity
        self._pending = pending
        self._result = result

    def on_answer(self, callback: Callable[[], None]) -> None:
        """Call it when the request has ended. It may be called twice."""
        self._pending.on_answer = callback
        self._pending.future.add_done_callback(lambda _: callback())  # if the sandbox fails

    def forget_callback(self) -> None:
        """It has ended. Without this, the callback and the request would keep each other alive."""
        self._pending.on_answer = None

    def look(self) -> None:
        """Take what has come from the sandbox, without waiting for the event loop."""
        self._channel.look()

    def result(self) -> T | Coroutine[Any, Any, T]:
        """What it returned, or a coroutine if there is more to do. Raises the error of the request."""
        return self._result()

    def cancel(self) -> bool:
        """Stop it in the sandbox. Whether an answer will come soon; a frozen sandbox answers later."""
        return self._channel.kill(self._identity) and not self._channel.frozen

    def drop(self) -> None:
        """Do without the answer. Whatever came with it is closed."""
        pending = self._pending
        if pending.future.done():
            if isinstance(pending, PendingOperation) and pending.descriptor is not None:
                os.close(pending.descriptor)
                pending.descriptor = None
        else:
            pending.on_answer = None
            pending.future.cancel()

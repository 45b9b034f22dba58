"""Turns of the event loop: for about how long the messages of clients are handled in one.

Clients may send thousands of calls at once. To begin them all in one turn can take a second, in which no
answer of a sandbox is passed on, and nobody notices that the calls are too many. So what does not fit into a
turn waits for the next. Not if calls are refused: that is quick, and the sooner a client knows, the better.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from time import perf_counter
from typing import Protocol

from dutyfree.server.overload import Overload

BUDGET = 0.02
"""Seconds of a turn for messages that waited for it."""
BUDGET_REFUSING = 0.1
"""The same while calls are refused."""

MOST = 1024
"""Messages of a client that may wait. If there are more, they are small, and the first is handled at once."""


class Source(Protocol):
    """Where messages come from."""

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


class Turns:
    """Decides which messages are handled in this turn of the event loop."""

    def __init__(self, overload: Overload) -> None:
        self.overload = overload
        self._waiting: deque[Inbox] = deque()
        """The inboxes that have messages. Each is there once."""

    @property
    def is_over(self) -> bool:
        """Whether no further message should be handled now."""
        return bool(self._waiting) or (self.overload.loop_is_late and not self.overload.refusing)

    def add(self, inbox: Inbox) -> None:
        """An inbox has messages now."""
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self._go_on)
        self._waiting.append(inbox)

    def _go_on(self) -> None:
        """Handle messages that wait, one of each inbox in turn."""
        until = perf_counter() + (BUDGET_REFUSING if self.overload.refusing else BUDGET)
        try:
            for inbox in self._in_turn():
                inbox.handle_one()
                if perf_counter() >= until:
                    break
        finally:
            if self._waiting:
                asyncio.get_running_loop().call_soon(self._go_on)

    def _in_turn(self) -> Iterator[Inbox]:
        """The inboxes, each once for each of its messages."""
        while self._waiting:
            inbox = self._waiting.popleft()
            if inbox.has_more:
                self._waiting.append(inbox)
            yield inbox


class Inbox:
    """The messages of one client, in their order. They go to a function, with when they came."""

    def __init__(self, turns: Turns, source: Source, handle: Callable[[bytes, float], None]) -> None:
        self._turns = turns
        self._source = source
        self._handle = handle
        self._messages: deque[tuple[bytes, float]] = deque()
        """Each with when it came. While there are any, no more are read."""

    @property
    def has_more(self) -> bool:
        """Whether there are messages behind the first."""
        return len(self._messages) > 1

    def add(self, message: bytes) -> None:
        """A message has come."""
        now = perf_counter()
        if not self._turns.is_over:
            self._handle(message, now)
            return
        if len(self._messages) == MOST:
            self.handle_one()
        self._messages.append((message, now))
        self._turns.overload.waits(1)
        if len(self._messages) == 1:
            self._source.pause_reading()
            self._turns.add(self)

    def handle_one(self) -> None:
        """Handle the first message."""
        message, since = self._messages.popleft()
        self._turns.overload.waits(-1)
        if not self._messages:
            self._source.resume_reading()
        self._handle(message, since)

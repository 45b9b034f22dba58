"""What is asked of a sandbox and not answered yet; and how long an answer may take."""

from __future__ import annotations

import asyncio
import errno
import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TypeVar

from dutyfree.contract.errors import MACHINERY, ActionError, DispatchError, file_error
from dutyfree.engine.launcher.timeouts import DEFAULT_TIMEOUTS

LENIENCE = 6
"""So many times as long if init says other things meanwhile: then it is slow, but at work."""

_LAST = 1.0  # second of it


class Refused(DispatchError):  # noqa: N818 (names the answer)
    """Init did not take a command, for a reason that has nothing to do with what runs in the sandbox."""

    def __init__(self, number: int) -> None:
        super().__init__(f"the command could not be handed over: {os.strerror(number)}")
        self.number = number


class Unstarted(ActionError):  # noqa: N818 (names the answer)
    """Init could not take a command, because of what runs in the sandbox."""

    def __init__(self, number: int) -> None:
        cause = file_error(number, "")
        assert isinstance(cause, ActionError)
        super().__init__(f"the command cannot be started: {cause.message}", kind=cause.kind)
        self.number = number


def refused(number: int) -> Refused | Unstarted:
    return Refused(number) if number in MACHINERY or number == errno.ESRCH else Unstarted(number)


class Running:
    """A command under way, as its frames tell."""

    __slots__ = ("doubts", "ended", "on_output", "on_started", "overdue", "owed", "room", "stderr", "stdout")

    def __init__(self, loop: asyncio.AbstractEventLoop, room: int) -> None:
        self.room = room
        """So many bytes init may still say about it."""
        self.owed = 0
        """Credit that it shall have when it listens."""
        self.stdout: list[bytes] = []
        self.stderr: list[bytes] = []
        self.ended: asyncio.Future[tuple[int, ...]] = loop.create_future()
        self.on_output: Callable[[int, bytes], None] | None = None
        self.on_started: Callable[[int], None] | None = None
        self.overdue: asyncio.TimerHandle | None = None
        self.doubts = 0


class Answer:
    """A file operation under way."""

    __slots__ = ("data", "descriptor", "done", "doubts", "on_output", "overdue", "owed", "room", "with_file")

    def __init__(self, loop: asyncio.AbstractEventLoop, room: int, with_file: bool = False) -> None:
        """``with_file`` if a descriptor may come with it."""
        self.room = room
        self.owed = 0
        self.with_file = with_file
        self.data: list[bytes] = []
        self.descriptor: int | None = None
        self.done: asyncio.Future[int] = loop.create_future()
        self.on_output: Callable[[bytes], None] | None = None
        self.overdue: asyncio.TimerHandle | None = None
        self.doubts = 0


W = TypeVar("W", Running, Answer)


class Unanswered(ABC):
    """What was asked and is not answered yet, by its number. If an answer takes too long, all is given up."""

    def __init__(self, answer_timeout: float = DEFAULT_TIMEOUTS.answer) -> None:
        self.answer_timeout = answer_timeout
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[int, Running | Answer] = {}
        self._held: dict[Running | Answer, float] | None = None
        self._heard = 0.0  # when init last said something

    @abstractmethod
    def _give_up(self) -> None: ...

    @property
    def held(self) -> bool:
        return self._held is not None

    def expect(self, waiting: Running | Answer, seconds: float) -> None:
        """It must be done after so many seconds; if init is silent then, the sandbox is given up."""
        if self._held is not None:
            left = seconds + self.answer_timeout - _LAST
            self._held[waiting] = min(left, self._held.get(waiting, left))
            return
        when = self._loop.time() + seconds + self.answer_timeout - _LAST
        if waiting.overdue is not None:
            if waiting.overdue.when() <= when:
                return
            waiting.overdue.cancel()
        waiting.overdue = self._loop.call_at(when, self._doubt, waiting)

    def _doubt(self, waiting: Running | Answer) -> None:
        # It may be us who did not listen: what has come in the meantime is heard first.
        waiting.overdue = self._loop.call_later(_LAST, self._judge, waiting)

    def _judge(self, waiting: Running | Answer) -> None:
        waiting.doubts += 1
        left = self._heard + self.answer_timeout - self._loop.time()
        if left > 0 and waiting.doubts < LENIENCE:
            waiting.overdue = self._loop.call_later(max(0.0, left - _LAST), self._doubt, waiting)
        else:
            self._give_up()

    def hold(self) -> None:
        """Init is about to be frozen: that it does not answer is no fault of it, until ``release``."""
        self._held = {}
        now = self._loop.time()
        for waiting in self._waiting.values():
            if waiting.overdue is not None:
                self._held[waiting] = max(0.0, waiting.overdue.when() - now)
                waiting.overdue.cancel()
                waiting.overdue = None

    def release(self) -> None:
        held, self._held = self._held or {}, None
        now = self._loop.time()
        for waiting in self._waiting.values():
            if waiting in held:
                waiting.overdue = self._loop.call_at(now + held[waiting], self._doubt, waiting)

    def _forget(self, identity: int) -> None:
        waiting = self._waiting.pop(identity, None)
        if waiting is not None and waiting.overdue is not None:
            waiting.overdue.cancel()

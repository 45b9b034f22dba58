"""Requests to init that have no answer yet, and how long an answer may take."""

from __future__ import annotations

import asyncio
import errno
import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

from dutyfree.contract.errors import MACHINERY, ActionError, DispatchError, file_error
from dutyfree.engine.launcher.timeouts import DEFAULT_TIMEOUTS

LENIENCE = 6
"""How many times ``answer_timeout`` an answer may be late while init sends other frames: it works slowly."""

_FINAL_WAIT = 1.0  # the last seconds of the timeout, in which we read what has arrived


class CommandRejected(DispatchError):  # noqa: N818 (names the answer)
    """Init did not take a command, and processes in the sandbox are not the cause."""

    def __init__(self, number: int) -> None:
        super().__init__(f"the sandbox did not take the command: {os.strerror(number)}")
        self.number = number


class CommandNotStarted(ActionError):  # noqa: N818 (names the answer)
    """Init could not start a command because of what runs in the sandbox."""

    def __init__(self, number: int) -> None:
        cause = file_error(number, "")
        assert isinstance(cause, ActionError)
        super().__init__(f"the command cannot be started: {cause.message}", kind=cause.kind)
        self.number = number


def rejection(number: int) -> CommandRejected | CommandNotStarted:
    """The error for a command that init answered with an errno instead of an exit."""
    is_ours = number in MACHINERY or number == errno.ESRCH
    return CommandRejected(number) if is_ours else CommandNotStarted(number)


class PendingCommand:
    """A command that has not ended, and its output so far."""

    __slots__ = (
        "doubts",
        "ended",
        "on_answer",
        "on_output",
        "on_started",
        "overdue",
        "owed",
        "room",
        "stderr",
        "stdout",
    )

    def __init__(self, loop: asyncio.AbstractEventLoop, room: int) -> None:
        self.room = room
        """Bytes that init may still send for it."""
        self.owed = 0
        """Credit that we have not sent yet, because init does not read."""
        self.stdout: list[bytes] = []
        self.stderr: list[bytes] = []
        self.ended: asyncio.Future[tuple[int, ...]] = loop.create_future()
        """The fields of its EXIT frame."""
        self.on_output: Callable[[int, bytes], None] | None = None
        """Gets the output, by stream (1 or 2), instead of ``stdout`` and ``stderr``."""
        self.on_started: Callable[[int], None] | None = None
        """Gets the descriptor of its terminal."""
        self.on_answer: Callable[[], None] | None = None
        """Called at once when init has answered: the callbacks of a future come a turn of the loop later."""
        self.overdue: asyncio.TimerHandle | None = None
        self.doubts = 0

    @property
    def future(self) -> asyncio.Future[Any]:
        return self.ended


class ReadBudget:
    """How many more bytes of files the owner takes. The reads of a batch share one."""

    __slots__ = ("left",)

    def __init__(self, left: int) -> None:
        self.left = left


class PendingOperation:
    """A file operation, or another request that is not a command, without an answer yet."""

    __slots__ = (
        "budget",
        "data",
        "descriptor",
        "done",
        "doubts",
        "on_answer",
        "on_output",
        "overdue",
        "owed",
        "room",
        "too_large",
        "with_file",
    )

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        room: int,
        with_file: bool = False,
        budget: ReadBudget | None = None,
    ) -> None:
        self.room = room
        """Bytes that init may still send for it."""
        self.owed = 0
        """Credit that we have not sent yet, because init does not read."""
        self.with_file = with_file
        """Whether the answer may have a descriptor."""
        self.budget = budget
        """What bounds ``data``, besides ``room``."""
        self.too_large = False
        """Whether there was more data than the budget allows. Then none is kept."""
        self.data: list[bytes] = []
        self.descriptor: int | None = None
        self.done: asyncio.Future[int] = loop.create_future()
        """The errno of the operation; 0 if it worked."""
        self.on_output: Callable[[bytes], None] | None = None
        """Gets the data, instead of ``data``."""
        self.on_answer: Callable[[], None] | None = None
        """As that of a command."""
        self.overdue: asyncio.TimerHandle | None = None
        self.doubts = 0

    @property
    def future(self) -> asyncio.Future[Any]:
        return self.done

    def add(self, data: bytes) -> None:
        """Keep a part of the answer, as far as the budget allows."""
        if self.too_large:
            return
        if self.budget is not None:
            if len(data) > self.budget.left:
                self.budget.left += sum(map(len, self.data))
                self.data.clear()
                self.too_large = True
                return
            self.budget.left -= len(data)
        self.data.append(data)


P = TypeVar("P", PendingCommand, PendingOperation)

Pending: TypeAlias = PendingCommand | PendingOperation


class PendingRequests(ABC):
    """All requests to one init without an answer, by number. If an answer is too late, init is given up."""

    def __init__(self, answer_timeout: float = DEFAULT_TIMEOUTS.answer) -> None:
        self.answer_timeout = answer_timeout
        """Seconds that an answer may be late, after the timeout of its action or after a kill."""
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[int, Pending] = {}
        self._frozen: dict[Pending, float] | None = None
        self._last_heard = 0.0  # when init last sent something

    @abstractmethod
    def _give_up(self) -> None: ...

    @property
    def frozen(self) -> bool:
        """Whether deadlines are frozen, because the sandbox is."""
        return self._frozen is not None

    def expect(self, waiting: Pending, seconds: float) -> None:
        """Expect the answer within ``seconds``, plus ``answer_timeout``. An earlier deadline stays."""
        if self._frozen is not None:
            left = seconds + self.answer_timeout - _FINAL_WAIT
            self._frozen[waiting] = min(left, self._frozen.get(waiting, left))
            return
        when = self._loop.time() + seconds + self.answer_timeout - _FINAL_WAIT
        if waiting.overdue is not None:
            if waiting.overdue.when() <= when:
                return
            waiting.overdue.cancel()
        waiting.overdue = self._loop.call_at(when, self._doubt, waiting)

    def _doubt(self, waiting: Pending) -> None:
        # Perhaps we did not read: first handle what has arrived in the meantime.
        waiting.overdue = self._loop.call_later(_FINAL_WAIT, self._judge, waiting)

    def _judge(self, waiting: Pending) -> None:
        waiting.doubts += 1
        left = self._last_heard + self.answer_timeout - self._loop.time()
        if left > 0 and waiting.doubts < LENIENCE:
            waiting.overdue = self._loop.call_later(max(0.0, left - _FINAL_WAIT), self._doubt, waiting)
        else:
            self._give_up()

    def freeze_deadlines(self) -> None:
        """Stop all deadlines, because init is about to be frozen and cannot answer."""
        self._frozen = {}
        now = self._loop.time()
        for waiting in self._waiting.values():
            if waiting.overdue is not None:
                self._frozen[waiting] = max(0.0, waiting.overdue.when() - now)
                waiting.overdue.cancel()
                waiting.overdue = None

    def thaw_deadlines(self) -> None:
        frozen, self._frozen = self._frozen or {}, None
        now = self._loop.time()
        for waiting in self._waiting.values():
            if waiting in frozen:
                waiting.overdue = self._loop.call_at(now + frozen[waiting], self._doubt, waiting)

    def _forget(self, identity: int) -> None:
        waiting = self._waiting.pop(identity, None)
        if waiting is not None and waiting.overdue is not None:
            waiting.overdue.cancel()

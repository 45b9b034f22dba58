"""What a person sees while a study runs: a bar with the time left; a few lines where there is no terminal."""

from __future__ import annotations

import logging
from time import monotonic
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)

from dutyfree.printable import printable, printable_line
from dutyfree.study.records import Trial

QUIET_SECONDS = 30.0
"""Between two lines where there is no terminal."""


class Watcher:
    """A ``study.runner.Progress`` on a console; a context, since a bar must be taken down."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._said = monotonic()
        self._details = _Details(self)
        if console.is_terminal:
            self._bar = Progress(
                SpinnerColumn(),
                TextColumn("{task.description}", markup=False),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TextColumn("{task.fields[left]}"),
                console=console,
            )

    def __enter__(self) -> Self:
        self._details.attach()
        if self._bar:
            self._bar.start()
            self._task = self._bar.add_task("preparing", total=None, left="")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._details.detach()
        if self._bar:
            self._bar.stop()

    def detail(self, text: str) -> None:
        """What long work is at just now; only worth seeing while it lasts."""
        if self._bar and self._task is not None:
            self._bar.update(self._task, description=printable_line(text)[:60])

    def note(self, text: str) -> None:
        self._console.print(printable(text), highlight=False, markup=False, soft_wrap=True)

    def begin(self, done: int, total: int) -> None:
        if self._bar and self._task is not None:
            self._bar.update(self._task, description="measuring", completed=done, total=total)
        else:
            self.note(f"{total - done} trials to run, {done} on record")

    def ended(self, ended: Trial, done: int, total: int, seconds_left: float | None) -> None:
        left = "" if seconds_left is None else f"{_duration(seconds_left)} left"
        if ended.failure is not None:
            failure = ended.failure
            self.note(f"{ended.id} failed: {failure.kind}, at {failure.phase}: {failure.cause}")
        if self._bar and self._task is not None:
            self._bar.update(
                self._task,
                description=f"{ended.workload} on {ended.substrate}",
                completed=done,
                total=total,
                left=left,
            )
        elif monotonic() - self._said > QUIET_SECONDS:
            self._said = monotonic()
            self.note(f"{done} of {total} trials, {left}")


class _Details(logging.Handler):
    """Shows what the library logs, such as the steps of building an image."""

    def __init__(self, watcher: Watcher) -> None:
        super().__init__(logging.INFO)
        self._watcher = watcher
        self._logger = logging.getLogger("dutyfree")

    def attach(self) -> None:
        self._logger.addHandler(self)
        self._logger.setLevel(logging.INFO)

    def detach(self) -> None:
        self._logger.removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self._watcher.detail(record.getMessage())


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"

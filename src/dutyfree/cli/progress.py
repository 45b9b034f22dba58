"""What a person sees while a study runs: a bar with the time left; a few lines where there is no terminal."""

from __future__ import annotations

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
        if console.is_terminal:
            self._bar = Progress(
                SpinnerColumn(),
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TextColumn("{task.fields[left]}"),
                console=console,
            )

    def __enter__(self) -> Self:
        if self._bar:
            self._bar.start()
            self._task = self._bar.add_task("preparing", total=None, left="")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar:
            self._bar.stop()

    def note(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False)

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


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"

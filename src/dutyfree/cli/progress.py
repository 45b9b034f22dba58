"""Progress of long work on standard error: a study's trials, an image's layers, a recipe's stages."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator
from time import monotonic
from types import TracebackType
from typing import TYPE_CHECKING, Self

from dutyfree.cli import console
from dutyfree.printable import printable, printable_line

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from dutyfree.engine.images.install import LayerProgress
    from dutyfree.study.records import Trial

# --- A study -------------------------------------------------------------------------------------------

QUIET_SECONDS = 30.0
"""Time between two lines if there is no terminal."""


class StudyProgress:
    """A ``study.runner.Progress``: a bar with the time left; without a terminal, a line now and then.

    It is a context manager, because the bar must be removed at the end.
    """

    def __init__(self) -> None:
        from rich.console import Console

        self._console = Console(stderr=True)
        self._bar = _trial_bar(self._console) if self._console.is_terminal else None
        self._task: TaskID | None = None
        self._printed = monotonic()
        self._log = _LogHandler(self)

    def __enter__(self) -> Self:
        self._log.attach()
        if self._bar:
            self._bar.start()
            self._task = self._bar.add_task("preparing", total=None, left="")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._log.detach()
        if self._bar:
            self._bar.stop()

    def detail(self, text: str) -> None:
        """Show the current step beside the bar; show nothing without a terminal."""
        if self._bar and self._task is not None:
            self._bar.update(self._task, description=printable_line(text)[:60], refresh=True)

    def note(self, text: str) -> None:
        """Print a line that stays."""
        self._console.print(printable(text), highlight=False, markup=False, soft_wrap=True)

    def begin(self, done: int, total: int, warmups: int) -> None:
        if self._bar and self._task is not None:
            self._bar.update(self._task, description="measuring", completed=done, total=total)
        else:
            before = f" after {warmups} warm-up{'s' if warmups > 1 else ''}" if warmups else ""
            self.note(f"{total - done} trials to run{before}, {done} already recorded")

    def ended(self, ended: Trial, done: int, total: int, seconds_left: float | None) -> None:
        left = "" if seconds_left is None else f"{_duration(seconds_left)} left"
        if ended.failure is not None:
            failure = ended.failure
            self.note(f"{ended.id} failed: {failure.kind}, phase {failure.phase}: {failure.cause}")
        if self._bar and self._task is not None:
            self._bar.update(
                self._task,
                description=f"{'warm-up: ' if ended.warmup else ''}{ended.workload} on {ended.substrate}",
                completed=done,
                total=total,
                left=left,
            )
        elif monotonic() - self._printed > QUIET_SECONDS:
            self._printed = monotonic()
            kind = "warm-ups" if ended.warmup else "trials"
            self.note(", ".join(filter(None, [f"{done} of {total} {kind}", left])))


def _trial_bar(on: object) -> Progress:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        SpinnerColumn,
        TextColumn,
        TimeElapsedColumn,
    )

    assert isinstance(on, Console)
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[left]}"),
        console=on,
    )


class _LogHandler(logging.Handler):
    """Shows what the library logs, such as the steps of building an image."""

    def __init__(self, progress: StudyProgress) -> None:
        super().__init__(logging.INFO)
        self._progress = progress
        self._logger = logging.getLogger("dutyfree")

    def attach(self) -> None:
        self._logger.addHandler(self)
        self._logger.setLevel(logging.INFO)

    def detach(self) -> None:
        self._logger.removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self._progress.detail(record.getMessage())


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"


# --- Layers --------------------------------------------------------------------------------------------


class LayerBars:
    """A bar for each layer that is downloaded; nothing without a terminal. ``show`` is thread-safe."""

    def __init__(self, quiet: bool) -> None:
        self._progress = None if quiet or not sys.stderr.isatty() else _layer_bars()
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> Self:
        if self._progress:
            self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._progress:
            self._progress.stop()

    def show(self, event: LayerProgress) -> None:
        if self._progress is None:
            return
        task = self._tasks.get(event.layer)
        if task is None:
            label = event.layer.partition(":")[2][:12]
            task = self._tasks[event.layer] = self._progress.add_task("", total=None, layer=label)
        self._progress.update(task, description=event.phase, completed=event.done, total=event.total or None)


def _layer_bars() -> Progress:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    return Progress(
        TextColumn("{task.fields[layer]} {task.description:<11}", markup=False),
        BarColumn(bar_width=30),
        DownloadColumn(),
        TransferSpeedColumn(),
        console=Console(stderr=True),
        transient=True,
    )


# --- Stages --------------------------------------------------------------------------------------------

_STAGES = logging.getLogger("dutyfree.engine.layers.run_stage")


class _StageHandler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        console.say(record.getMessage())


@contextlib.contextmanager
def stage_log() -> Iterator[None]:
    """Print each command of a recipe's stages on standard error when it starts."""
    handler, level = _StageHandler(logging.INFO), _STAGES.level
    _STAGES.addHandler(handler)
    _STAGES.setLevel(logging.INFO)
    try:
        yield
    finally:
        _STAGES.setLevel(level)
        _STAGES.removeHandler(handler)
